// SPDX-License-Identifier: Apache-2.0
//
// The parameters of a language model, as a list of specs, and figures that follow from its sizes.
//
//   embedding   x = E[token] (+ P[position])
//   block i     x += output(attention(query(n), key(n), value(n)))    n = norm(x)
//               x += down(activation(up(n)))                          n = norm(x);  gated: activation(gate(n), up(n))
//   head        logits = W norm(x)                                    tied: W = E
//
// Names: embedding/tokens, embedding/positions, block_0/attention_norm/weight, block_0/attention/query/weight, …,
// block_0/mlp/down/bias, …, final_norm/weight, head/weight.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "language_model/settings.hpp"
#include "training/parameters.hpp"

namespace weft::language_model {

/// A model's sizes and options, with those that come from the data.
struct Architecture {
  ModelSettings model;
  std::int64_t vocabulary = 0;
  std::int64_t positions = 0;  ///< longest sequence that is computed: rows of the table of rotary positions
  LoraSettings lora = {};      ///< adapters of the model's linear layers (adapters.hpp)
  std::int64_t context = 0;    ///< longest text of the model, where that is more (longest_text)
  /// Position of a part of a model (part_of): number of ranks, rank, first token of its vocabulary, first query head.
  std::int64_t tensor_ranks = 1, tensor_rank = 0, first_token = 0, first_head = 0;

  /// Tokens of the longest text: rows of the table of learned positions, longest context in files of other programs. A
  /// model that is trained on shorter sequences keeps it.
  std::int64_t longest_text() const { return std::max(positions, context); }
  std::int64_t query_width() const { return model.heads * model.head_size(); }
  std::int64_t key_width() const { return model.kv_heads * model.head_size(); }
  std::int64_t projection_width() const { return query_width() + 2 * key_width(); }
  /// Columns before the activation of the MLP.
  std::int64_t hidden_width() const { return model.d_mlp * (kernels::is_gated(model.mlp) ? 2 : 1); }
};

/// Prefix of the names of a block's parameters: "block_3/".
std::string block_name(std::int64_t layer);

/// Matrices are [outputs, inputs]. Over the axis "tensor", query, key, value, gate and up are cut by outputs, the
/// attention's output and down by inputs, embedding and head by the vocabulary (Shoeybi et al. 2019); heads that share
/// a head of keys stay together. Weights are normal with deviation 0.02, those that write to the residual stream
/// divided by sqrt(2 layers) (Radford et al. 2019); biases 0, norms 1.
std::vector<training::ParameterSpec> parameter_specs(const Architecture&);

/// The part of the model on rank `rank` of `n_ranks` of the tensor axis: whole heads of keys with their heads of
/// queries, a part of the width of the MLP and of the vocabulary. Sizes of its products and buffers; the residual
/// stream is whole.
Architecture part_of(const Architecture&, std::int64_t n_ranks, std::int64_t rank);
/// The part of the model on a rank of a grid; the whole model if the grid has no tensor axis.
Architecture part_of(const Architecture&, const parallel::GridShape&, std::int64_t rank);
/// Why the model cannot be divided over so many ranks of the tensor axis; "" if it can. vocabulary 0: not known yet.
std::string obstacle_to_division(const Architecture&, std::int64_t n_ranks);
/// Why a run cannot divide the model over the tensor axis: its sizes, or keys that exclude parallel.tensor; "" if it
/// can.
std::string obstacle_to_tensor_axis(const Configuration&, const Architecture&);

/// Number of parameters, with those of adapters.
std::int64_t parameters_of(const Architecture&);

/// Floating-point operations per token of forward and backward pass in sequences of `length`: 6 for each parameter, 4
/// for a frozen one, and 6 layers * length * query_width for causal attention, which counts only scores that are used.
double flops_per_token(const Architecture&, std::int64_t length);

}  // namespace weft::language_model
