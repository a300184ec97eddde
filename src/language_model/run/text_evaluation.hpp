// SPDX-License-Identifier: Apache-2.0
//
// How well a language model predicts a text.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "dataset/tokens/batches.hpp"
#include "language_model/step/staging.hpp"
#include "language_model/step/transformer.hpp"
#include "parallel/communicator.hpp"
#include "storage/json_file.hpp"

namespace weft::language_model {

struct EvaluationResult {
  double loss = 0;           ///< mean over all predictions, nats per token
  std::int64_t tokens = 0;   ///< predictions
  double bits_per_byte = 0;  ///< over the bytes of the whole text; NaN: their number is not known

  double perplexity() const;  ///< exp(loss)
};
Json to_json(const EvaluationResult&);
/// Text for the log: "loss 1.7843, perplexity 5.96, 2.574 bits per byte, 371,234 tokens"
std::string to_text(const EvaluationResult&);

/// Batch number i of an evaluation belongs to rank i % size: true if to this one. null: one rank.
inline bool is_own_batch(std::int64_t batch, const parallel::Communicator* ranks) {
  return ranks == nullptr || batch % ranks->size() == ranks->rank();
}
/// Each value has been formed by one rank and is 0 on the others: all ranks get all of them, bit for bit. Collective.
void share(std::span<double> values, const parallel::Communicator* ranks);

/// All segments, of at most `length` + 1 tokens: in those of the stream every token but the first is predicted once.
/// `rows`: most rows that the staging memory and the Transformer take. `ranks`: they have the same part of the model
/// each and divide the batches; null: this one alone. Losses are added in the order of rows, then of segments: with the
/// same `rows` the result has the same bits on any number of ranks; with others products may round differently.
/// forward: in place of Transformer::forward. sums: receives the sum of the losses of each segment. Collective. Throws
/// a collective Error(data) if there is nothing to predict, Error(numeric) if the loss is not finite.
EvaluationResult evaluate(const dataset::Segments&, std::int64_t length, std::int64_t rows, Transformer&, Staging&,
                          const kernels::Execution&, const parallel::Communicator* ranks = nullptr,
                          const std::function<void(const Tokens&)>& forward = {}, std::vector<double>* sums = nullptr);

}  // namespace weft::language_model
