// SPDX-License-Identifier: Apache-2.0
//
// metrics.jsonl: one JSON object per line and logged step, ascending, written line by line. A resumed run continues
// after the step from which it resumed, so that the file is the same as without the interruption.
//
// No result depends on this file: a damaged line or a full disk can lose lines, but does not end the run.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "base/file.hpp"
#include "storage/json_file.hpp"

namespace weft::run {

class MetricsWriter {
 public:
  /// Keeps the valid lines up to and including `resumed_step` (-1: a new run, none) and appends. Invalid lines are
  /// removed; those between valid lines are counted in a warning. Throws Error(io).
  MetricsWriter(const std::filesystem::path& path, std::int64_t resumed_step);
  /// Writes what is still in memory; logs a warning if lines are lost.
  ~MetricsWriter();
  MetricsWriter(const MetricsWriter&) = delete;

  /// `record` has an integer "step". While the file cannot be written, lines stay in memory up to kMostUnwritten
  /// bytes, and each call tries again; the first failure is logged.
  void write(const Json& record);

  static constexpr std::size_t kMostUnwritten = std::size_t{4} << 20;

 private:
  /// The reason (errno) why not all of `unwritten_` is in the file; 0 if it is.
  int flush();

  std::filesystem::path path_;
  Descriptor file_;
  std::string unwritten_;  // whole lines, except for the part of the first one that is in the file
  std::int64_t lost_ = 0;  // lines for which there was no room
  bool failing_ = false;
};

}  // namespace weft::run
