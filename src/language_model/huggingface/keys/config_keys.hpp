// SPDX-License-Identifier: Apache-2.0
//
// The members of config.json of the transformers library, or of an object in it. Each is applied, or has a value with
// which it changes nothing, or is an error that names it.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "base/json.hpp"

namespace weft::language_model {

/// Limits as in an input: kernels compute in fp32.
struct NumberRange {
  double least, most;
};
inline constexpr NumberRange kEpsilons{1.2e-38, 1}, kCaps{1e-3, 3e38}, kBases{1 + 1e-9, 3e38}, kFactors{1, 1e6},
    kFrequencies{1e-30, 1e6}, kScalars{1e-12, 1e12}, kShares{1e-6, 1};

class ConfigKeys {
 public:
  /// path: of the file, with the place in it. `object` must outlive this one.
  ConfigKeys(const SortedJson& object, std::string path) : object_(object), path_(std::move(path)) {}

  template <class... Args>
  Error damaged(fmt::format_string<Args...> format, Args&&... args) const {
    return error(ExitCode::data, "{}: {}", path_, fmt::format(format, std::forward<Args>(args)...));
  }
  /// Error for a feature that Weft does not have.
  template <class... Args>
  Error lacking(fmt::format_string<Args...> format, Args&&... args) const {
    return error(ExitCode::usage, "{}: {}; this model cannot be read", path_,
                 fmt::format(format, std::forward<Args>(args)...));
  }
  const std::string& path() const { return path_; }

  /// True also where the value is null.
  bool has(const char* key) const { return object_.contains(key); }
  /// Value of a member; nullptr if the member is missing or null.
  const SortedJson* find(const char* key);
  std::int64_t integer(const char* key, std::int64_t most, std::int64_t least = 1);
  std::int64_t integer_or(const char* key, std::int64_t absent, std::int64_t most, std::int64_t least = 1) {
    return find(key) == nullptr ? absent : integer(key, most, least);
  }
  double number(const char* key, NumberRange);
  double number_or(const char* key, double absent, NumberRange);
  bool flag(const char* key, bool absent);
  std::string text_or(const char* key, const char* absent);
  void require(const char* key, bool needed);
  void require_absent(const char* key);
  void know(std::span<const char* const> keys) { known_.insert(keys.begin(), keys.end()); }
  /// Throws if the object has a member that was neither read nor known.
  void refuse_unknown() const;

 private:
  const SortedJson& object_;
  const std::string path_;
  std::set<std::string> known_;
};

}  // namespace weft::language_model
