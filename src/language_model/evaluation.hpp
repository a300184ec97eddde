// SPDX-License-Identifier: Apache-2.0
//
// How well a language model predicts a text, and text that it writes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dataset/tokens/token_set.hpp"
#include "language_model/staging.hpp"
#include "language_model/transformer.hpp"
#include "report/json.hpp"

namespace weft::language_model {

struct EvaluationResult {
  double loss = 0;           ///< mean over all predictions, nats per token
  std::int64_t tokens = 0;   ///< predictions
  double bits_per_byte = 0;  ///< over the bytes of the whole text; NaN: their number is not known

  double perplexity() const;  ///< exp(loss)
};
report::Json to_json(const EvaluationResult&);
/// "loss 1.7843, perplexity 5.96, 2.574 bits per byte, 371,234 tokens"
std::string to_text(const EvaluationResult&);

/// The whole set in windows of `length` + 1 tokens with stride `length`: every token but the first is predicted once.
/// The result does not depend on the number of rows of a batch. `rows`: most rows that the staging memory and the
/// Transformer take. Throws a collective Error(data) if there is nothing to predict, Error(numeric) if the loss is not
/// finite.
EvaluationResult evaluate(const dataset::TokenSet&, std::int64_t length, std::int64_t rows, Transformer&, Staging&,
                          const kernels::Execution&);

struct Sampling {
  std::int64_t tokens = 0;  ///< to be written
  double temperature = 1;   ///< 0: always the most probable token
  std::int64_t length = 0;  ///< longest context
  std::uint64_t seed = 0;
  std::uint64_t step = 0;  ///< with the seed, the key of the random numbers
};

/// Continues `prompt`, which has at least one token. Each token is drawn from softmax(logits / temperature) by
/// inversion with a number that depends on (seed, step, position) alone. Computes the whole context again for each
/// token. Returns the tokens written.
std::vector<std::uint32_t> sample(const Sampling&, std::vector<std::uint32_t> prompt, Transformer&, Staging&);

}  // namespace weft::language_model
