// SPDX-License-Identifier: Apache-2.0
//
// Embeddings of texts by a language model: the mean of the last hidden states (after the final norm, before the head)
// over the tokens of a text, and the log-probability of these tokens. Many texts of different lengths pass the model
// together, each padded to a common length; tokens after its end do not affect a text, so that the result is that of
// the text alone, within the rounding of products of another shape (fp32: relative 1e-5).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/language/diversity/pool_rows.hpp"
#include "language_model/step/staging.hpp"
#include "language_model/step/transformer.hpp"

namespace weft::polychromic {

/// Tokens from `first` on are pooled; those before are their context (a prompt). Without tokens to pool: empty.
struct EmbeddedText {
  std::span<const std::uint32_t> ids;
  std::int64_t first = 0;
};

/// Settings of a Transformer for an Embedder: forward passes of about `rows` rows, at least one sequence; texts are
/// padded to `length`, or to `length` halved some times, not below 16.
language_model::TransformerSettings embedding_settings(language_model::TransformerSettings settings, std::int64_t rows);

class Embedder {
 public:
  struct Buffers {
    Buffers(const language_model::TransformerSettings&, model::StepArena&);
    kernels::Array<kernels::PooledRows> pooled, host_pooled;  ///< of a forward pass
  };

  /// The settings of the transformer, whose rows the staging memory takes. References must outlive the object.
  /// Transformer and staging memory are used in `embed` only. together: most texts of a forward pass; 0: as many as
  /// fit. vocabulary: log-probabilities are those among the ids below it; 0: all of the model.
  Embedder(const language_model::TransformerSettings& settings, language_model::Transformer&, language_model::Staging&,
           const kernels::Execution&, model::StepArena&, std::int64_t together = 0, std::int64_t vocabulary = 0);

  /// Embeds the texts. out: [texts, C], where the kernels run: the mean over the pooled tokens, zeros for an empty
  /// text; without data: not formed. A text that is longer than settings.length is cut into pieces that the model sees
  /// one by one. log_probabilities: empty, or [texts]: mean log-probability of the pooled tokens, in nats per token,
  /// each given the tokens before it; the first token of a piece has none before it and is left out; 0 if no token is
  /// left. Waits for the results. Throws Error(numeric) if a log-probability is not finite.
  void embed(std::span<const EmbeddedText>, kernels::Matrix<float> out, std::span<double> log_probabilities = {});

 private:
  /// Tokens [begin, end) of a text, of which those from `first` on are pooled.
  struct Piece {
    std::size_t text = 0;
    std::int64_t begin = 0, end = 0, first = 0;

    std::int64_t size() const { return end - begin; }
  };
  std::int64_t padded(std::int64_t size) const;
  void run(std::span<const EmbeddedText>, std::span<const Piece>, std::int64_t length, kernels::Matrix<float> out,
           std::span<double> sums);
  void pool(std::span<const EmbeddedText>, std::span<const Piece>, const language_model::Tokens&,
            kernels::Matrix<float> out);

  const language_model::TransformerSettings settings_;
  language_model::Transformer& transformer_;
  language_model::Staging& staging_;
  const kernels::Execution execution_;
  const Buffers buffers_;
  const std::int64_t together_, vocabulary_;
};

}  // namespace weft::polychromic
