// SPDX-License-Identifier: Apache-2.0
//
// The decoder of a step: forward from sparse activations a to reconstructions y^, and the backward pass. All kinds
// (transcoder.decoder) are products over sparse lists (kernels/transcoder/decode/decode.hpp) with something before or
// after them; each kind is a class in a file of its own:
//
//   strips.hpp           a row per feature with all of its targets (cross_layer), or with one (per_layer)
//   tied_strips.hpp      a row per feature, the same for all of its targets
//   tied_by_target.hpp   a row per feature and target layer, the same for all source layers
//
// A decoder works on the features of this rank; its backward pass on those that the rank updates, over the tokens of
// the whole batch.
#pragma once

#include <cstdint>

#include "device/stream.hpp"
#include "kernels/transcoder/decode/decode.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"
#include "model/step_arena.hpp"
#include "transcoder/parameters/model.hpp"
#include "transcoder/settings/transcoder_settings.hpp"

namespace weft::transcoder {

/// The entries of a batch, by token and by feature.
struct Lists {
  kernels::SparseActivations activations;
  kernels::FeatureHits hits;
};

class SparseDecoder {
 public:
  /// Sizes on the largest rank, which determine memory.
  struct Sizes {
    const Configuration& configuration;
    const Shape& shape;
    const parallel::GridShape& grid;
  };
  struct ForwardSizes {
    std::int64_t max_tokens;  ///< tokens of the largest batch, over all ranks
    std::int64_t group;       ///< tokens of a feature group
  };
  struct BackwardSizes {
    std::int64_t n_tokens;  ///< tokens of the lists of the backward pass
    std::int64_t entries;   ///< entries of these lists
  };

  virtual ~SparseDecoder() = default;

  /// Sets model and execution. Called once, after construction with an arena that allocates. The model must outlive the
  /// decoder.
  void attach(const Model& model, const kernels::Execution& execution) {
    model_ = &model;
    execution_ = execution;
  }

  // Forward ----------------------------------------------------------------------------------------------------------

  /// Takes the lists of a group of tokens, which must stay until `form` is done with them.
  virtual void begin(const kernels::SparseActivations& lists) { lists_ = lists; }
  /// Overwrites partial [tokens.size(), layers.size() * d] with the contribution of the lists to these layers.
  virtual void form(parallel::Range tokens, parallel::Range layers, kernels::AnyMatrix partial) const;

  // Backward ---------------------------------------------------------------------------------------------------------

  /// Takes the memory of the backward pass; without it only the functions above may be called.
  virtual void take_backward(const Sizes&, const BackwardSizes&, model::StepArena&);
  /// Converts gradient_rows [tokens, L * d] in place to the factors of the decoder's rows, and forms the lists that
  /// `written` returns. Called once per step, before any parameter is updated. `read`: event after which the
  /// communication stream of this rank has read the unconverted rows.
  virtual void prepare(const Lists&, kernels::AnyMatrix /*gradient_rows*/, device::Event& /*read*/) {}

  /// The lists whose values are multiplied with the gradient rows, after `prepare`: `all`, or lists by target.
  virtual Lists written(const Lists& all) const { return all; }

  struct BackwardStep {
    const kernels::AdamStep* step;        ///< null: squared norms only
    kernels::Array<float> gradient;       ///< gradient of the activations, by position; overwritten
    kernels::Array<double> squared_norm;  ///< squared norms of gradients of decoder rows [L * owned]; empty: not formed
    const kernels::LateRows& late;
    kernels::Array<const float> row_factors;   ///< `factors` of kernels::decode_backward_update
    kernels::Array<float> new_norms;           ///< `new_norms` of kernels::decode_backward_update
    const kernels::RowNoise* noise = nullptr;  ///< noise on the gradients of a private step; null: none
  };
  /// Forms da = <W_dec, g> and dW_dec = a g, and with a step updates W_dec.
  virtual void backward(const Lists&, kernels::AnyMatrix rows, const BackwardStep&);
  /// Processes the parameters other than the rows. With squared_norm [L * owned] adds the squares of the gradients that
  /// belong to a feature (of the clipped gradients with a step), and with a step updates all of these parameters.
  virtual void update_rest(const kernels::AdamStep*, kernels::Array<double>) {}

  // Norms of features, by key [L * features] -------------------------------------------------------------------------

  /// Converts norms of rows to norms of a feature's vectors over all its targets, in place: tied rows count once.
  virtual void to_feature_norms(kernels::Array<float>) const {}
  /// Converts factors of features to factors of rows, in place.
  virtual void to_row_factors(kernels::Array<float>) const {}

 protected:
  explicit SparseDecoder(const Shape& shape) : shape_(shape) {}
  const Model& model() const { return *model_; }
  std::int64_t owned() const { return model_->owned().size(); }

  const Shape shape_;
  kernels::Execution execution_;
  kernels::SparseActivations lists_;

 private:
  kernels::Array<std::byte> workspace_;  // of `backward`
  const Model* model_ = nullptr;
};

}  // namespace weft::transcoder
