// SPDX-License-Identifier: Apache-2.0
//
// The parameters of a model in memory, as its products and norms read them: found by the names of the parameters.
#pragma once

#include <cstddef>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/gemm/gemm.hpp"
#include "kernels/language/norm/norm.hpp"
#include "language_model/blocks/parameter_list.hpp"

namespace weft::language_model {

inline constexpr std::size_t kNoParameter = std::numeric_limits<std::size_t>::max();

struct NormLayer {
  std::size_t weight = kNoParameter, bias = kNoParameter;
  kernels::NormWeights values;
};

/// y = x Wᵀ + b. W may be several parameters with adjacent outputs.
struct Linear {
  std::size_t weight = kNoParameter;  ///< number of the (first) parameter in Parameters
  std::size_t bias = kNoParameter;
  std::size_t count = 1;                         ///< parameters of the product
  std::size_t index = 0;                         ///< in Layers::linears
  std::size_t adapter = kNoParameter;            ///< in Layers::adapters
  kernels::AnyMatrix matrix;                     ///< as stored: [outputs, inputs]; without data if packed
  kernels::ParameterRows packed = {};            ///< its codes; without packing: none
  bool transposed = false;                       ///< stored as [inputs, outputs]
  kernels::Array<const float> bias_values = {};  ///< [outputs], or empty
  std::optional<NormLayer> norm = {};            ///< whose rows the first product of a sublayer reads, if it has one

  bool is_packed() const { return packed.packing != kernels::Packing::none; }
  std::int64_t outputs() const { return transposed ? matrix.columns : matrix.rows; }
  std::int64_t inputs() const { return transposed ? matrix.rows : matrix.columns; }
  kernels::Form form() const { return transposed ? kernels::Form::transposed : kernels::Form::plain; }
};

/// The low-rank adapters of a product (step/adapters.hpp). Its parameters have one each, or some of them.
struct Adapter {
  Linear a;  ///< of all parts, one below the other: [parts * rank, inputs]
  struct Part {
    Linear b;
    std::int64_t first_output = 0;  ///< of the product
  };
  std::vector<Part> parts = {};
};

class Layers {
 public:
  /// `parameters` must outlive the object. products: those of the blocks. rotary: tables of rotary positions, or empty.
  Layers(const model::Parameters& parameters, std::span<const Product> products, const ModelSettings&,
         const kernels::Execution&, kernels::Array<const float> rotary);

  const model::Parameters& parameters() const { return parameters_; }
  /// The rotary table of a block; empty if its queries and keys are not rotated.
  kernels::Array<const float> rotary(std::int64_t block) const;
  std::size_t token_table() const { return tokens_; }        ///< number of the parameter
  std::size_t position_table() const { return positions_; }  ///< kNoParameter: rotary positions
  kernels::AnyMatrix token_embedding() const { return matrix(tokens_); }
  /// Learned positions; a matrix without data if the model has none.
  kernels::AnyMatrix position_embedding() const {
    return positions_ == kNoParameter ? kernels::AnyMatrix{} : matrix(positions_);
  }
  const Linear& head() const { return linears_[n_products_]; }
  /// All products: those of the blocks in the order of the forward pass, then the head, then those of adapters.
  std::span<const Linear> linears() const { return linears_; }
  /// Products of the blocks; the head has this Linear::index.
  std::size_t n_block_products() const { return n_products_; }
  /// Adapters of all products; empty without adapters.
  std::span<const Adapter> adapters() const { return adapters_; }

  /// The product of a block whose (first) matrix has this name, without "/weight".
  const Linear& product(const std::string& name) const;
  /// Empty if the model does not have this norm.
  std::optional<NormLayer> norm(const std::string& name) const;
  /// Number of a parameter; kNoParameter if there is none.
  std::size_t find(const std::string& name) const;
  /// Number of the first parameter whose name begins so.
  std::size_t first_of(const std::string& prefix) const;
  /// Values of a vector; empty for kNoParameter.
  kernels::Array<const float> values(std::size_t parameter) const;

 private:
  kernels::AnyMatrix matrix(std::size_t parameter) const;
  Linear linear(const std::string& name, std::size_t count) const;
  Adapter adapter(const Linear&) const;

  const model::Parameters& parameters_;
  const ModelSettings model_;
  const kernels::Array<const float> rotary_;
  std::size_t tokens_, positions_, n_products_;
  std::vector<Linear> linears_;
  std::vector<Adapter> adapters_;
};

}  // namespace weft::language_model
