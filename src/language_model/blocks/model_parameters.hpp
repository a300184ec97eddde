// SPDX-License-Identifier: Apache-2.0
//
// The parameters of a language model, as a list of specs, and figures that follow from them.
//
//   embedding   x = E[token] (+ P[position])
//   block i     x += output(attention(query(n), key(n), value(n)))    n = norm(x)
//               x += down(activation(up(n)))                          n = norm(x);  gated: activation(gate(n), up(n))
//   head        logits = W norm(x)                                    tied: W = E
//
// Names: embedding/tokens, embedding/positions, block_0/attention_norm/weight, block_0/attention/query/weight, …,
// block_0/mlp/down/bias, …, final_norm/weight, head/weight.
#pragma once

#include <string>
#include <vector>

#include "language_model/blocks/parameter_list.hpp"

namespace weft::language_model {

/// The parameters of a model, or of a rank's part of it, with those of adapters, and the products of its blocks.
ParameterList declared_parameters(const Architecture&);

std::vector<model::ParameterSpec> parameter_specs(const Architecture&);

/// True if a parameter belongs to a part of the model: "embedding", "attention", "mlp", "norms", "biases", "head" or a
/// block, "block_3".
bool is_of_part(const std::string& parameter, const std::string& part);
/// True if language_model.train has a part of the parameter, and there are no adapters to be trained in its place.
bool is_trained(const Architecture&, const std::string& parameter);
/// True if the matrix of the head is trained, which is that of the embedding if they are tied.
inline bool trains_head(const Architecture& a) {
  return is_trained(a, a.model.tied ? "embedding/tokens" : "head/weight");
}
/// Why the parts of ModelSettings::train are not those of the model; "": they are.
std::string train_problem(const ModelSettings&);

/// A linear layer of a block that may have an adapter.
struct LoraTarget {
  std::string name;       ///< in the input: "query"
  std::string parameter;  ///< in the block: "attention/query"
  std::int64_t outputs = 0, inputs = 0;
};
/// Targets of adapters in a model, in the order of its parameters.
std::vector<LoraTarget> lora_targets(const ModelSettings&);

/// Why the products of the blocks cannot have ModelSettings::biases; "": they can.
std::string biases_problem(const ModelSettings&);

/// Number of parameters, with those of adapters.
std::int64_t parameters_of(const Architecture&);

/// The sizes of a model in words: "12 layers, d_model 768, 12 heads of 64, …, 124,439,808 parameters".
std::string sizes_text(const Architecture&);

/// Floating-point operations per token of forward and backward pass in sequences of `length`: 6 for each parameter, 4
/// for a frozen one, of products that multiply some of the tokens (Product::share) that part of it; and 6 layers *
/// length * query_width for causal attention, which counts only scores that are used.
double flops_per_token(const Architecture&, std::int64_t length);

}  // namespace weft::language_model
