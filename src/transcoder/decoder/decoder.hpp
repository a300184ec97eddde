// SPDX-License-Identifier: Apache-2.0
//
// The decoder of a step: from sparse activations a to reconstructions y^, and back. All kinds (transcoder.decoder) are
// products over sparse lists (kernels/transcoder/decode/decode.hpp) with something before or after them; each kind is a
// class in a file of its own:
//
//   strips.hpp           a row per feature with all of its targets (cross_layer), or with one (per_layer)
//   tied_strips.hpp      a row per feature, the same for all of its targets
//   tied_by_target.hpp   a row per feature and layer, which all earlier layers write with, too
//   low_rank.hpp         a row of factors per feature, and a dense second factor per target
//
// A decoder works on the features of this rank; its backward pass on those that the rank updates, over the tokens of
// the whole batch.
#pragma once

#include <cstdint>

#include "device/stream.hpp"
#include "kernels/transcoder/decode/decode.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"
#include "parallel/device_communicator.hpp"
#include "training/step_arena.hpp"
#include "transcoder/parameters/model.hpp"
#include "transcoder/settings/settings.hpp"

namespace weft::transcoder {

/// The entries of a batch, by token and by feature.
struct Lists {
  kernels::SparseActivations activations;
  kernels::FeatureHits hits;
};

class SparseDecoder {
 public:
  /// What memory depends on, on the largest rank.
  struct Sizes {
    const Configuration& configuration;
    const Shape& shape;
    const parallel::GridShape& grid;
  };
  struct ForwardSizes {
    std::int64_t max_tokens;  ///< of a batch, over all ranks
    std::int64_t group;       ///< tokens of a feature group
    std::int64_t chunk;       ///< of them, decoded at a time
  };
  struct BackwardSizes {
    std::int64_t n_tokens;  ///< of the lists of the backward pass
    std::int64_t entries;   ///< of these lists
  };

  virtual ~SparseDecoder() = default;

  /// Called once, after construction with an arena that allocates. The model must outlive the decoder.
  void attach(const Model& model, const kernels::Execution& execution) {
    model_ = &model;
    execution_ = execution;
  }

  // Forward ----------------------------------------------------------------------------------------------------------

  /// Takes the lists of a group of tokens, which must stay until `form` is done with them.
  virtual void begin(const kernels::SparseActivations& lists) { lists_ = lists; }
  /// Overwrites partial [tokens.size(), layers.size() * d] with what the lists contribute to these layers.
  virtual void form(parallel::Range tokens, parallel::Range layers, kernels::AnyMatrix partial) const;

  // Backward ---------------------------------------------------------------------------------------------------------

  /// Memory of the backward pass; without it only the functions above may be called.
  virtual void take_backward(const Sizes&, const BackwardSizes&, training::StepArena&);
  /// Bytes of the largest message of n_ranks to one another in `prepare`, and rows of its `whole`.
  static std::int64_t largest_message(const Shape&, std::int64_t n_ranks);
  static std::int64_t whole_rows(const Shape&);

  struct Prepared {
    kernels::AnyMatrix rows;  ///< what rows of the decoder are multiplied with: layer s from column decoder_begin(s) on
    kernels::Matrix<float> whole;  ///< gradients that every rank has whole [whole_rows, d]; no rows: none
  };
  /// Once per step, before any parameter is updated: brings gradient_rows [tokens, L * d] into the form that the
  /// decoder's rows are multiplied with, in place or not. `read`: when others have read the rows as they are. world: of
  /// all ranks. Collective.
  virtual Prepared prepare(const Lists& lists, kernels::AnyMatrix gradient_rows, device::Event& read,
                           parallel::DeviceCommunicator& world);

  struct BackwardStep {
    const kernels::AdamStep* step;        ///< null: squared norms only
    kernels::Array<float> gradient;       ///< of the activations, by position; overwritten
    kernels::Array<double> squared_norm;  ///< of decoder rows [L * owned]; empty: not formed
    const kernels::LateRows& late;
    kernels::Array<const float> row_factors;  ///< as of kernels::decode_backward_update
    kernels::Array<float> new_norms;          ///< likewise
  };
  /// da = <W_dec, g>, dW_dec = a g, and with a step its update.
  virtual void backward(const Lists&, kernels::AnyMatrix rows, const BackwardStep&);
  /// Parameters besides the rows: with squared_norm [L * owned] adds the squares of those that belong to a feature (of
  /// the clipped gradients with a step), and with a step updates all of them.
  virtual void update_rest(const kernels::AdamStep*, kernels::Array<double>) {}

  // Norms of features, all by key [L * features] ---------------------------------------------------------------------

  /// From the norms of rows to those of a feature's vectors over all its targets, in place: tied rows count once.
  virtual void to_feature_norms(kernels::Array<float>) const {}
  /// From factors of features to factors of rows, in place.
  virtual void to_row_factors(kernels::Array<float>) const {}

 protected:
  explicit SparseDecoder(const Shape& shape) : shape_(shape) {}
  const Model& model() const { return *model_; }
  std::int64_t owned() const { return model_->owned().size(); }
  /// Takes the workspace of products over lists of at most `entries`, of decoder rows of `columns` per target.
  void take_workspace(const Sizes&, std::int64_t entries, std::int64_t columns, training::StepArena&);

  const Shape shape_;
  kernels::Execution execution_;
  kernels::SparseActivations lists_;
  kernels::Array<std::byte> workspace_;

 private:
  const Model* model_ = nullptr;
};

}  // namespace weft::transcoder
