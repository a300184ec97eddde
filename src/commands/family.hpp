// SPDX-License-Identifier: Apache-2.0
//
// A model family is an object: what commands that take any model need of it. Its own commands are in its folder.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/json.hpp"
#include "bench/benchmark.hpp"
#include "checkpoint/manifest.hpp"
#include "commands/command.hpp"

namespace weft::commands {

struct Family {
  std::string_view table;  ///< the table of an input that belongs to the family
  std::string_view model;  ///< "a transcoder"
  std::string_view title;  ///< its heading in the reference of keys
  Keys (*keys)();          ///< every key of its inputs
  std::unique_ptr<bench::BenchmarkModel> (*benchmark)();
  /// A line about a checkpoint of the family, "" for those of others. Throws a collective Error(io) unless it has every
  /// tensor that its model has.
  std::string (*describe)(const std::filesystem::path&, const checkpoint::Manifest&);
  /// The contents of a directory of another program with models of the family, as text and with --json; none for other
  /// paths. For one rank.
  std::optional<std::pair<std::string, Json>> (*inspect_directory)(const std::filesystem::path&);
};

/// All families in the order of the documentation.
std::span<const Family* const> families();

}  // namespace weft::commands
