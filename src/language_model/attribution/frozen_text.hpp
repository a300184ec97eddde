// SPDX-License-Identifier: Apache-2.0
//
// What the forward pass over one text freezes: attention patterns, norm denominators, inputs and outputs of MLPs. With
// them fixed the model is linear in its embeddings and in the outputs of its MLPs (Ameisen et al. 2025).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "device/memory.hpp"
#include "language_model/step/transformer.hpp"
#include "model/step_arena.hpp"

namespace weft::language_model {

/// Why this model cannot be frozen, with the remedy; "" if it can.
std::string freezing_obstacle(const Architecture&);

/// Settings of a Transformer for texts of up to `tokens` tokens that keeps what is frozen, in fp32.
TransformerSettings freezing_settings(const Configuration&, const Architecture&, std::int64_t tokens);

class FrozenText {
 public:
  struct Buffers {
    Buffers(const ModelSettings&, std::int64_t tokens, model::StepArena&);
    kernels::Matrix<float> inputs, outputs;       ///< [tokens, L * C]
    std::vector<kernels::Array<float>> patterns;  ///< by block, [H * tokens * tokens]
    kernels::Array<float> log_sum;                ///< [H * tokens]
    kernels::Array<std::byte> workspace;
  };

  /// References must outlive the object. The transformer is that of freezing_settings.
  FrozenText(const ModelSettings&, std::int64_t tokens, Transformer&, const kernels::Execution&, model::StepArena&);

  /// Runs the model on one sequence. What the members below return is valid until the next call.
  void freeze(const Tokens&);

  const ModelSettings& model() const { return model_; }
  std::int64_t tokens() const { return tokens_; }
  /// Inputs of MLPs after their norm, and outputs before one: [tokens, L * C].
  kernels::AnyMatrix mlp_inputs() const { return rows(buffers_.inputs); }
  kernels::AnyMatrix mlp_outputs() const { return rows(buffers_.outputs); }
  /// Probabilities of a head, [tokens (queries), tokens (keys)].
  kernels::AnyMatrix pattern(std::int64_t block, std::int64_t head) const;

  /// A norm with the inverses of its denominators, [tokens]; without weights: there is none.
  struct Norm {
    kernels::NormWeights weights;
    kernels::Array<const float> inverse;
    bool exists() const { return inverse.data != nullptr; }
  };
  struct Sublayer {
    Norm input, output;
  };
  Sublayer attention(std::int64_t block) const { return sublayer(2 * block); }
  Sublayer mlp(std::int64_t block) const { return sublayer(2 * block + 1); }
  Norm final_norm() const;

 private:
  kernels::AnyMatrix rows(const kernels::Matrix<float>& all) const {
    return {all.data, kernels::Scalar::fp32, tokens_, all.columns, all.stride};
  }
  Sublayer sublayer(std::int64_t number) const;
  void form_patterns(std::int64_t block, kernels::AnyMatrix packed);

  const ModelSettings model_;
  Transformer& transformer_;
  const kernels::Execution execution_;
  const Buffers buffers_;
  std::int64_t tokens_ = 0;
};

}  // namespace weft::language_model
