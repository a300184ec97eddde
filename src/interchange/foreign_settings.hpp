// SPDX-License-Identifier: Apache-2.0
//
// The configuration of a model in a file of another program. An ignored key could change what the model computes, so
// each key is either read, with its type, or named as one without effect. Any other key is an error.
#pragma once

#include <filesystem>
#include <initializer_list>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>

#include "base/json.hpp"

namespace weft::interchange {

class ForeignSettings {
 public:
  /// Reads a JSON object. Throws Error(data) that begins with `path`.
  explicit ForeignSettings(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }

  /// True if the key is present and not null. A key that is null counts as absent everywhere.
  bool has(const char* key);
  /// Returns the value of a key, or `otherwise` if it is absent. Throws Error(data) that names the key if it has
  /// another type.
  std::string text(const char* key, const std::string& otherwise = "");
  bool flag(const char* key, bool otherwise = false);
  /// Returns a positive integer of at most 2^28; the first form throws Error(data) if the key is absent.
  std::int64_t count(const char* key);
  std::optional<std::int64_t> optional_count(const char* key);
  /// Returns the value of a key, null if it is absent.
  const SortedJson& value(const char* key);

  /// Names keys that do not change what the stored weights compute.
  void without_effect(std::span<const char* const> keys) { known_.insert(keys.begin(), keys.end()); }
  /// Throws Error(data) if the key is present and another number than `expected`, which the tensors have.
  void require_equal(const char* key, std::int64_t expected);
  /// Throws Error(usage): "PATH: WHAT; Weft cannot read this model".
  [[noreturn]] void refuse(std::string_view what) const;
  /// Throws Error(usage) that names the first key that was neither read nor named.
  void finish() const;

 private:
  std::filesystem::path path_;
  SortedJson root_;
  std::set<std::string, std::less<>> known_;
};

/// Reads a YAML file: returns the scalars and list items of nested block mappings, by dotted path ("model.is_folded",
/// "transcoders.0"), unquoted. Other content is ignored. Throws Error(data) that begins with `path` if it is longer
/// than a megabyte.
std::map<std::string, std::string> yaml_scalars(const std::filesystem::path& path);

/// Throws Error(usage) that names the first key of `scalars` that is not in `known`.
void require_known(const std::filesystem::path& path, const std::map<std::string, std::string>& scalars,
                   std::initializer_list<std::string_view> known);

/// Reads the JSON object in a small file. Throws Error(data) that begins with `path`.
SortedJson json_object(const std::filesystem::path& path);

}  // namespace weft::interchange
