// SPDX-License-Identifier: Apache-2.0
//
// The parameters of a language model in memory, as the layers of its forward pass see them.
#pragma once

#include <cstddef>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "base/json.hpp"
#include "kernels/gemm/gemm.hpp"
#include "kernels/language/norm/norm.hpp"
#include "kernels/language/rope/query_key.hpp"
#include "language_model/architecture.hpp"

namespace weft::language_model {

inline constexpr std::size_t kNoParameter = std::numeric_limits<std::size_t>::max();

/// y = x Wᵀ + b. W may be several parameters with adjacent outputs.
struct Linear {
  std::size_t weight = kNoParameter;  ///< number of the (first) parameter in Parameters
  std::size_t bias = kNoParameter;
  std::size_t count = 1;                         ///< parameters of the product
  std::size_t index = 0;                         ///< in Model::linears
  std::size_t adapter = kNoParameter;            ///< in Model::adapters
  kernels::AnyMatrix matrix;                     ///< as stored: [outputs, inputs]
  bool transposed = false;                       ///< stored as [inputs, outputs]
  kernels::Array<const float> bias_values = {};  ///< [outputs], or empty

  std::int64_t outputs() const { return transposed ? matrix.columns : matrix.rows; }
  std::int64_t inputs() const { return transposed ? matrix.rows : matrix.columns; }
  kernels::Form form() const { return transposed ? kernels::Form::transposed : kernels::Form::plain; }
};

/// The low-rank adapters of a product (adapters.hpp). Its parameters have one each, or some of them.
struct Adapter {
  Linear a;  ///< of all parts, one below the other: [parts * rank, inputs]
  struct Part {
    Linear b;
    std::int64_t first_output = 0;  ///< of the product
  };
  std::vector<Part> parts = {};
};

struct NormLayer {
  std::size_t weight = kNoParameter, bias = kNoParameter;
  kernels::NormWeights values;
};

/// One transformer block. Norms that the model does not have are empty.
struct Block {
  std::size_t first = kNoParameter;  ///< number of its first parameter; those of the next block follow
  std::optional<NormLayer> attention_norm, attention_post_norm;
  Linear projection;  ///< query | key | value
  Linear attention_output;
  std::size_t query_norm = kNoParameter, key_norm = kNoParameter, temperature = kNoParameter;
  kernels::QueryKey query_key;  ///< without positions
  std::optional<NormLayer> mlp_norm, mlp_post_norm;
  Linear up;  ///< gate | up, or up
  Linear down;
};

class Model {
 public:
  /// Allocates the model; the caller initialises the parameters or loads a checkpoint.
  Model(const Architecture&, kernels::StatePolicy, const parallel::GridShape&, std::int64_t rank,
        const kernels::Execution&, training::Moments);

  void initialise(std::uint64_t seed) { parameters_.initialise(seed); }

  const Architecture& architecture() const { return architecture_; }  ///< of the whole model, on any grid
  const training::Parameters& parameters() const { return parameters_; }
  const kernels::Execution& execution() const { return execution_; }

  std::size_t token_table() const { return tokens_; }        ///< number of the parameter
  std::size_t position_table() const { return positions_; }  ///< kNoParameter: rotary positions
  kernels::AnyMatrix token_embedding() const { return matrix(tokens_); }
  /// Learned positions; a matrix without data if the model has none.
  kernels::AnyMatrix position_embedding() const {
    return positions_ == kNoParameter ? kernels::AnyMatrix{} : matrix(positions_);
  }
  std::span<const Block> blocks() const { return blocks_; }
  const NormLayer& final_norm() const { return final_norm_; }
  const Linear& head() const { return head_; }
  /// Adapters of all products; empty without adapters.
  std::span<const Adapter> adapters() const { return adapters_; }
  /// All products: those of the blocks in the order of the forward pass, then the head, then those of adapters.
  std::vector<const Linear*> linears() const;

 private:
  kernels::AnyMatrix matrix(std::size_t parameter) const;
  std::size_t find(const std::string& name) const;  // kNoParameter if there is none
  kernels::Array<const float> values(std::size_t parameter) const;
  std::optional<NormLayer> norm(const std::string& name) const;
  Linear linear(const std::string& prefix, std::initializer_list<const char*> names) const;
  Block block(std::int64_t layer) const;
  Adapter adapter(const Linear&) const;

  const Architecture architecture_, part_;
  const kernels::Execution execution_;
  training::Parameters parameters_;
  device::Buffer<float> rotary_;
  std::size_t tokens_, positions_;
  std::vector<Block> blocks_;
  NormLayer final_norm_;
  Linear head_;
  std::vector<Adapter> adapters_;
};

/// Elements of the table of rotary positions.
std::int64_t rotary_elements(const Architecture&);

/// Architecture of the model in a checkpoint, from its input and its manifest. Throws a collective Error(io) if they
/// are not those of a language model.
Architecture stored_architecture(const Configuration&, const checkpoint::Manifest&);
/// Manifest::extra of a checkpoint of this model: its longest text, which no tensor shows if positions are rotary.
Json manifest_extra(const Architecture&);

}  // namespace weft::language_model
