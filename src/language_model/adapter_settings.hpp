// SPDX-License-Identifier: Apache-2.0
//
// Table [lora]: low-rank adapters of the linear layers (Hu et al. 2021, arXiv 2106.09685).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "input/schema.hpp"

namespace weft::language_model {

struct ModelSettings;

/// y = x Wᵀ + alpha / rank (drop(x) Aᵀ) Bᵀ with W frozen, A [rank, inputs] and B [outputs, rank] trained.
struct LoraSettings {
  std::int64_t rank = 0;  ///< 0: no adapters, all parameters are trained
  double alpha = 16;
  std::vector<std::string> targets = {};  ///< linear layers of a block: query, key, value, output, gate, up, down
  double dropout = 0;                     ///< of the inputs of A, in training
  std::string initial = {};               ///< directory of PEFT with the first values; "": those of adapters.hpp

  float scale() const { return static_cast<float>(alpha / static_cast<double>(rank)); }
  bool adapts(const std::string& target) const;
};

/// A linear layer of a block that may have an adapter.
struct LoraTarget {
  std::string name;       ///< in the input: "query"
  std::string parameter;  ///< in the block: "attention/query"
  std::int64_t outputs = 0, inputs = 0;
};
/// Targets of adapters in a model, in the order of its parameters.
std::vector<LoraTarget> lora_targets(const ModelSettings&);

/// Keys of [lora] with their conditions. `model` must outlive the schema; its keys were added before.
void add_keys(input::Schema&, LoraSettings&, const ModelSettings& model);

}  // namespace weft::language_model
