// SPDX-License-Identifier: Apache-2.0
//
// Tied by target: all features of one index write the same vector to layer t, whatever their source layer, with an
// offset and a scale of their own if the shape has them (transcoder.decoder_affine).
//
//   forward    the product per layer over lists by target (kernels/transcoder/decode/by_target.hpp)
//   backward   the same lists by feature; the gradients of a feature's entries are brought back to its source
#pragma once

#include "transcoder/decoder/decoder.hpp"

namespace weft::transcoder {

class TiedByTarget final : public SparseDecoder {
 public:
  TiedByTarget(const Sizes&, const ForwardSizes&, model::StepArena&);

  void begin(const kernels::SparseActivations&) override;
  void take_backward(const Sizes&, const BackwardSizes&, model::StepArena&) override;
  void prepare(const Lists&, kernels::AnyMatrix gradient_rows, device::Event& read) override;
  Lists written(const Lists& all) const override;
  void backward(const Lists&, kernels::AnyMatrix rows, const BackwardStep&) override;
  void update_rest(const kernels::AdamStep*, kernels::Array<double> squared_norm) override;
  void to_feature_norms(kernels::Array<float>) const override;
  void to_row_factors(kernels::Array<float>) const override;

 private:
  /// Memory of lists by target.
  struct TargetLists {
    TargetLists() = default;
    /// Takes memory for lists of n_tokens, n_layers and at most `entries`. Throws a collective Error(usage) for 2^32
    /// entries or more.
    TargetLists(std::int64_t n_tokens, std::int64_t n_layers, std::int64_t entries, model::StepArena&);

    kernels::Array<std::int64_t> begin, row_offsets;
    kernels::Array<std::uint32_t> key;
    kernels::Array<float> value;

    /// Returns the memory of the lists by target of `of`.
    kernels::SparseActivations lists(const kernels::SparseActivations& of) const {
      return {of.n_tokens, of.n_layers, of.n_features, row_offsets, key, value};
    }
  };
  kernels::PairAffine affine_gradient() const;

  TargetLists forward_, backward_;
  kernels::Array<std::int64_t> hit_offsets_;
  kernels::Array<std::uint32_t> hit_token_, hit_position_;
  kernels::Array<float> delta_;                             // by position in the lists
  kernels::Array<float> offset_gradient_, scale_gradient_;  // by pair, [owned] each; with offsets and scales
};

}  // namespace weft::transcoder
