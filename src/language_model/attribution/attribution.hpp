// SPDX-License-Identifier: Apache-2.0
//
// The nodes of a text's graph and their direct effects. With G the gradient of a target with respect to the outputs of
// MLPs and E that with respect to the embeddings (frozen_backward.hpp), the effect on the target
//
//   of feature f at layer s and token p   sum over layers t >= s of  G[t, p] . (a_f w_f^{s -> t})
//   of the error of layer t at token p    G[t, p] . (output of the MLP - reconstruction)
//   of token p                            E[p] . (scaled embedding of the token, without its position)
//
// A target is a feature, dx = what it reads, or a logit, dx = its row of the head less the mean of all rows. As in
// circuit-tracer, the first token of a text has neither features nor errors.
#pragma once

#include <cstdint>
#include <vector>

#include "language_model/attribution/frozen_backward.hpp"
#include "language_model/attribution/graph.hpp"
#include "parallel/communicator.hpp"

namespace weft::language_model {

struct AttributionSettings {
  std::int64_t max_logits = 10;
  double logit_probability = 0.95;
  std::int64_t max_nodes = 0;  ///< features of the graph; 0: all that are active
};

/// The fewest tokens that hold the probability, at most so many, descending.
std::vector<Graph::Logit> salient_logits(const std::vector<float>& logits, const AttributionSettings&);

/// Rows of the matrix of effects that are formed together, for texts of up to `tokens` tokens.
std::int64_t targets_together(const ModelSettings&, std::int64_t tokens);

class Attribution {
 public:
  struct Buffers {
    /// weight: the type in which products read the matrices of the model.
    Buffers(const ModelSettings&, std::int64_t vocabulary, kernels::Scalar weight, std::int64_t tokens,
            std::int64_t sources, std::int64_t targets, model::StepArena&);
    kernels::Matrix<float> gradients;       ///< dx, [targets, C]
    kernels::Matrix<float> effects;         ///< [targets, sources]
    kernels::Matrix<float> embeddings;      ///< [tokens, C]
    kernels::Matrix<float> mean;            ///< [1, C] of the rows of the head
    kernels::Array<float> ones;             ///< [vocabulary]
    kernels::Array<float> products;         ///< of several tokens, [tokens * targets, features]
    kernels::Array<std::int32_t> token_of;  ///< of the features
    kernels::Array<std::byte> workspace;
  };

  /// errors: [tokens, L * C], where the kernels run. sources: those of the text. References must outlive the object.
  Attribution(FrozenBackward&, const Model&, const ActiveFeatures&, kernels::AnyMatrix errors,
              const std::vector<std::uint32_t>& ids, std::int64_t targets, const kernels::Execution&,
              model::StepArena&);

  /// The graph, the same on all ranks, which divide the rows; its bits do not depend on their number. Collective.
  /// Throws a collective Error(numeric) if an effect is not finite.
  Graph graph(const std::vector<Graph::Logit>&, const AttributionSettings&, const parallel::Communicator& ranks);

  /// Host memory of the matrix while it is formed.
  static std::int64_t matrix_bytes(std::int64_t active, std::int64_t layers, std::int64_t tokens,
                                   const AttributionSettings&);

 private:
  struct Batch {
    std::int64_t block = 0;
    std::vector<std::int64_t> tokens;
    std::vector<std::int64_t> features;  ///< numbers in the list, or
    std::vector<std::uint32_t> logits;
  };
  std::vector<Batch> batches_of(std::vector<std::int64_t> features) const;
  void form(const Batch&, float* rows);
  void form_effects(std::int64_t layer, std::int64_t begin, std::int64_t end, std::int64_t block,
                    kernels::AnyMatrix effects);
  void form_all(const std::vector<Batch>&, const parallel::Communicator&, float* rows);
  void place_gradients(const Batch&);
  std::vector<std::int64_t> next_features(std::int64_t missing, std::vector<TargetRow> formed,
                                          const std::vector<TargetRow>& logits) const;
  std::int64_t sources() const;

  FrozenBackward& backward_;
  const Model& model_;
  const ActiveFeatures& features_;
  const kernels::AnyMatrix errors_;
  const std::vector<std::uint32_t> ids_;
  const std::int64_t together_;
  const kernels::Execution execution_;
  /// By layer and token: number of the first feature; and of all.
  std::vector<std::int64_t> first_;
  const Buffers buffers_;
};

}  // namespace weft::language_model
