// SPDX-License-Identifier: Apache-2.0
//
// adapter_config.json of PEFT of Hugging Face. Every key is applied, or has the value with which it changes nothing, or
// is an error that names it.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.hpp"

namespace weft::language_model {

/// The name of the file in a directory of PEFT.
constexpr const char* kAdapterConfig = "adapter_config.json";

class PeftConfig {
 public:
  /// Throws Error(data) unless the file is such a configuration, Error(usage) naming the key that Weft lacks.
  explicit PeftConfig(const std::filesystem::path& file);

  const std::string& path() const { return path_; }
  /// Rank of the adapter of a linear layer, and the factor of its product: lora_alpha / r or, with use_rslora,
  /// lora_alpha / sqrt(r). `layer` is a full name, "model.layers.0.self_attn.q_proj".
  double rank(std::string_view layer) const { return number_for(layer, "rank_pattern", "r"); }
  double scale(std::string_view layer) const;
  /// True if target_modules is a list that names the layer and no key leaves layers out: then it has an adapter.
  bool requires_adapter(std::string_view layer) const;
  /// The key that leaves layers out, "layers_to_transform = [0, 2]"; "" if none does.
  const std::string& exclusion() const { return exclusion_; }

 private:
  double number_for(std::string_view layer, const char* pattern, const char* key) const;
  void check_keys() const;
  void check_initial() const;

  const std::string path_;
  Json config_;
  bool rank_stabilised_ = false;  // use_rslora
  std::string exclusion_;
  std::vector<std::string> targets_;  // of a list
};

}  // namespace weft::language_model
