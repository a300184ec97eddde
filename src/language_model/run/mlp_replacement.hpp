// SPDX-License-Identifier: Apache-2.0
//
// The loss of a language model with the outputs of its MLPs replaced by a reconstruction from their inputs, compared
// with the loss of the whole model and with that of models without MLPs.
//
//   all layers together   the forward pass runs with the replaced outputs: the reconstruction of layer l is formed from
//                         the inputs of layers <= l as they then are (Ameisen et al. 2025, "replacement model")
//   one layer alone       all other MLPs are the model's own, so that inputs up to this layer are those of the model
//   with error terms      all layers together, each with the difference that the reconstruction leaves on the model's
//                         own inputs: the loss of the model, but for rounding
//   zero, mean            the outputs replaced by 0, or by their mean, in the same places
//
// Loss recovered: (loss ablated - loss replaced) / (loss ablated - loss of the model).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "dataset/tokens/token_set.hpp"
#include "language_model/step/staging.hpp"
#include "language_model/step/transformer.hpp"
#include "storage/json_file.hpp"

namespace weft::language_model {

struct Reconstruction {
  /// Function that forms outputs [rows, layers * C] fp32 from inputs of the same shape, in the type of the model's
  /// activations. Outputs of layer l do not depend on inputs of layers > l. On the execution's stream.
  std::function<void(const kernels::AnyMatrix& inputs, const kernels::Matrix<float>& outputs)> form;
  kernels::Array<const float> mean;  ///< [layers * C] of the outputs, where the kernels run
};

/// Mean losses in nats per token with the outputs of some MLPs replaced.
struct ReplacedLosses {
  double replaced = 0, zero = 0, mean = 0;

  double recovered_from_zero(double original) const { return (zero - replaced) / (zero - original); }
  double recovered_from_mean(double original) const { return (mean - replaced) / (mean - original); }
};

struct ReplacementResult {
  double original = 0;
  double with_errors = 0;
  ReplacedLosses together;
  std::vector<ReplacedLosses> alone;  ///< by layer
  std::int64_t tokens = 0;            ///< predictions
};

Json to_json(const ReplacementResult&);
/// A table, a line per layer and one for all.
std::string to_table(const ReplacementResult&);

/// Measures on the whole set, in text segments and over ranks as in `evaluate`. type: of the model's activations; the
/// reconstruction gets min(rows, the rest) rows at a time. Runs 3 * layers + 5 forward passes. Collective. Throws, on
/// all ranks, Error(numeric) if a loss is not finite, or if the loss with error terms is not that of the model. Leaves
/// no tap.
ReplacementResult evaluate_replaced(const dataset::Segments&, std::int64_t length, std::int64_t rows,
                                    const ModelSettings&, kernels::Scalar type, const Reconstruction&, Transformer&,
                                    Staging&, const kernels::Execution&, const parallel::Communicator* ranks = nullptr);

}  // namespace weft::language_model
