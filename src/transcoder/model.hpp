// SPDX-License-Identifier: Apache-2.0
//
// The parameters of a cross-layer transcoder on one rank, with their Adam moments and dead-feature clocks.
//
// Invariants. This rank holds the contiguous block grid.part(parallel::kFeatureAxis, F) of the features of every layer.
// Weights of that block are whole on every rank of the data axis; moments are cut once more, over the data axis: this
// rank updates the rows `owned` of each matrix. With one rank on the data axis the owned rows are all rows. Encoder
// biases are cut likewise, and clocks are those of the owned features; the decoder bias is whole.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "checkpoint/registry.hpp"
#include "device/memory.hpp"
#include "kernels/optimize/parameters.hpp"
#include "parallel/grid.hpp"

namespace weft::transcoder {

/// Sizes of the whole transcoder, over all ranks.
struct Shape {
  std::int64_t n_layers = 0;
  std::int64_t d_model = 0;
  std::int64_t n_features = 0;  ///< per layer

  std::int64_t width() const { return n_layers * d_model; }
  /// Columns of a decoder row of source layer s: its targets s..L-1 one after the other.
  std::int64_t decoder_columns(std::int64_t source) const { return (n_layers - source) * d_model; }
  /// Encoder and decoder weights and all biases.
  std::int64_t parameters() const {
    return n_features * d_model * (n_layers + n_layers * (n_layers + 1) / 2) + n_layers * n_features + width();
  }
};

/// Bytes of the weights, and of both moments with their scales, of one matrix in its policy's storage.
std::int64_t weight_bytes(kernels::StatePolicy, std::int64_t rows, std::int64_t columns);
std::int64_t moment_bytes(kernels::StatePolicy, std::int64_t rows, std::int64_t columns, std::int64_t segment);

enum class Moments { none, held };

class Model {
 public:
  Model(const Shape&, kernels::StatePolicy, const parallel::Grid&, const kernels::Execution&, Moments);

  /// Encoder uniform in +-1/sqrt(F), decoder in +-1/sqrt(L d), biases, moments and clocks zero. The same values on any
  /// grid.
  void initialise(std::uint64_t seed);

  /// Names every tensor for checkpoints: encoder_{s}/weight, .../weight.first_moment, decoder_bias, ...
  void add_to(checkpoint::Registry&, int world_rank) const;

  const Shape& shape() const { return shape_; }
  parallel::Range features() const { return features_; }
  std::int64_t n_local() const { return features_.size(); }

  /// By layer; all rows of this rank's block. Moments are there when the data axis has one rank.
  std::span<const kernels::ParameterRows> encoder() const { return encoder_.all; }
  std::span<const kernels::ParameterRows> decoder() const { return decoder_.all; }
  /// By layer; the rows that this rank updates, with their moments. Row 0 is local row `owned().begin`.
  std::span<const kernels::ParameterRows> owned_encoder() const { return encoder_.owned; }
  std::span<const kernels::ParameterRows> owned_decoder() const { return decoder_.owned; }
  parallel::Range owned() const { return owned_; }

  /// By layer, likewise: [F_local], and the owned part.
  std::span<const kernels::ParameterVector> encoder_bias() const { return encoder_bias_; }
  std::span<const kernels::ParameterVector> owned_encoder_bias() const { return owned_encoder_bias_; }
  kernels::AnyMatrix encoder_biases() const;                               ///< of all layers, [L, F_local] fp32
  kernels::ParameterVector decoder_bias() const;                           ///< [L * d]
  kernels::Array<std::int64_t> clocks() const { return clocks_.array(); }  ///< [L * owned] tokens since fired

  /// Bytes of parameters and moments on this rank.
  std::int64_t state_bytes() const { return state_bytes_; }

 private:
  /// The encoders, or the decoders, of all layers.
  struct Matrices {
    std::vector<kernels::ParameterRows> all, owned;
    std::vector<device::Buffer<std::byte>> memory;
  };
  void allocate(Matrices&, std::int64_t columns, std::uint64_t element_base);
  /// Hand-written kernels keep fp32 weights as two 16-bit planes (ParameterRows::weight_rest).
  bool split_weights() const {
    return policy_ == kernels::StatePolicy::fp32 && execution_.backend == kernels::Backend::cuda;
  }
  void add_split_weights_to(checkpoint::Registry&, const std::string& name, const kernels::ParameterRows& all,
                            parallel::Range written) const;
  void add_matrix_to(checkpoint::Registry&, const std::string& name, const Matrices&, std::size_t layer) const;

  Shape shape_;
  kernels::StatePolicy policy_;
  kernels::Execution execution_;
  Moments moments_;
  parallel::Range features_;
  parallel::Range owned_;  // local rows
  Matrices encoder_, decoder_;
  device::Buffer<float> bias_[3], decoder_bias_[3];  // weight, first and second moment
  std::vector<kernels::ParameterVector> encoder_bias_, owned_encoder_bias_;
  device::Buffer<std::int64_t> clocks_;
  device::Buffer<float> joined_;  // a piece of split weights, on its way to or from a checkpoint
  std::int64_t state_bytes_ = 0;
};

}  // namespace weft::transcoder
