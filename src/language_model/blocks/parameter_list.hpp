// SPDX-License-Identifier: Apache-2.0
//
// The list of a model's parameters while its parts declare them, with the products that read them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "language_model/blocks/architecture.hpp"
#include "model/parameters.hpp"

namespace weft::language_model {

/// Ends of the names of a matrix with an adapter, and of the matrices A and B of the adapter.
inline constexpr std::string_view kAdapterTarget = "/weight", kAdapterA = "/lora_a", kAdapterB = "/lora_b";
/// True for a matrix of an adapter.
bool is_adapter(const model::ParameterSpec&);

/// Outputs of a product that one matrix forms; on the tensor axis `unit` of them stay together.
struct Outputs {
  std::string name;  ///< "query"
  std::int64_t width = 0, unit = 1;
};

/// A product y = x Wᵀ + b of a sublayer. Its matrices have one input, and outputs that are adjacent in memory.
struct Product {
  std::string prefix;  ///< of the names of its parameters: "block_3/attention/"
  std::vector<Outputs> parts;
  std::int64_t inputs = 0;
  bool writes_residual = false;  ///< its outputs are added to the residual stream: the last product of a sublayer
  double share = 1;              ///< part of the tokens that it multiplies, on average

  /// Prefix of the names of the block's parameters: "block_3/".
  std::string block() const { return prefix.substr(0, prefix.find('/') + 1); }
  std::string sublayer() const { return prefix.substr(0, prefix.size() - 1); }  ///< "block_3/attention"
  std::int64_t outputs() const;
  /// Number of weights.
  std::int64_t elements() const { return outputs() * inputs; }
  /// Number of weights that a token multiplies, on average.
  double multiplied() const { return share * static_cast<double>(elements()); }
};

/// Matrices are [outputs, inputs]. Over the axis "tensor", products are cut by outputs, those that write to the
/// residual stream by inputs, embedding and head by the vocabulary (Shoeybi et al. 2019). Weights are normal with
/// deviation 0.02, those that write to the residual stream divided by sqrt(2 layers) (Radford et al. 2019); biases 0,
/// norms 1.
class ParameterList {
 public:
  explicit ParameterList(const ModelSettings& model) : model_(model) {}

  /// Adds a matrix [ids, d_model]; whole: every rank of the tensor axis has all of it.
  void table(std::string name, std::int64_t ids, bool whole = false);
  /// Rows of the last matrix in memory: products over the vocabulary are fast on a GPU if there is a multiple of this.
  void pad_rows(std::int64_t multiple) { specs.back().row_multiple = multiple; }
  void vector(std::string name, std::int64_t size, double value, model::Cut cut = {}, std::string group = {});
  /// Adds a vector whose gradient is a sum over the heads; a rank of the tensor axis has some of the heads.
  void shared_by_heads(std::string name, std::int64_t size);
  /// Adds a vector with a number for each output of a product.
  void by_outputs(std::string name, const Outputs&);
  void norm(const std::string& name);
  /// Adds a product whose input is that of the sublayer: matrices in one group, then their biases in another.
  void product(const std::string& prefix, std::vector<Outputs> parts, double share = 1);
  /// Adds a product that writes to the residual stream; `unit` of its inputs stay together. Its bias is added once, on
  /// whole rows.
  void output(const std::string& prefix, const std::string& name, std::int64_t inputs, std::int64_t unit,
              double share = 1);
  /// Adds words on the sizes of a sublayer to those of the model, "d_mlp 3072"; the same words only once.
  void describe(const std::string& words);

  /// Numbers the units: what is before the blocks, each block, what is after them.
  void number_units();

  /// Freezes all parameters, which are numbered, and adds their adapters, those of a block after its parameters: first
  /// all A, then all B (step/adapters.hpp). Random numbers of the others stay the same.
  void add_adapters(const LoraSettings&);

  std::vector<model::ParameterSpec> specs;
  std::vector<Product> products;   ///< of the blocks, in the order of the forward pass
  std::vector<std::string> sizes;  ///< of the sublayers, in words

 private:
  void matrix(std::string name, std::int64_t rows, std::int64_t columns, model::Cut, std::string group,
              double deviation);

  const ModelSettings model_;
};

}  // namespace weft::language_model
