// SPDX-License-Identifier: Apache-2.0
//
// Answers as sequences of training: prompt and answer one after the other, with a weight for each token of the answer.
// The gradient is that of
//
//   L = - sum_t w_t log p(token t | tokens before)        p = softmax(logits / temperature)
//
// so w_t > 0 makes a token more probable. Tokens of the prompt have no weight. The distribution is the one from which
// answers are drawn (kernels/language/sample/). With top_p it is p renormalised over the most probable tokens K_t,
// which each forward pass finds by the rule of the sampler and which contain the drawn token in any case:
//
//   log p_K(y) = log p(y) - log sum over v in K_t of p(v)
//
// K_t changes in steps, so that its gradient with respect to the weights is 0. Nothing is dropped ([lora] dropout,
// ...): answers are drawn without.
#pragma once

#include <algorithm>
#include <functional>
#include <span>
#include <vector>

#include "language_model/step/transformer.hpp"

namespace weft::polychromic {

struct PolicyRow {
  std::span<const std::uint32_t> prompt, answer;  ///< at least one token each
  std::vector<float> weights;                     ///< [tokens of the answer]: w_t
};

class PolicyBatch {
 public:
  struct Settings {
    std::int64_t sequences = 0;   ///< most rows
    std::int64_t length = 0;      ///< of the longest prompt and answer
    std::int64_t micro_rows = 0;  ///< tokens of a micro-batch, at least `length`
    std::int64_t vocabulary = 0;  ///< ids that can be drawn: those below it; 0: all of the model
    double temperature = 1, top_p = 1;
  };

  struct Buffers {
    Buffers(const Settings&, model::StepArena&);
    struct Rows {
      kernels::Array<std::uint32_t> ids;
      kernels::Array<std::int32_t> targets, positions;
      kernels::Array<float> weights;
    };
    Rows device, host;
    kernels::Array<float> losses, host_losses;
    kernels::Array<float> one;  ///< [1]: the weights have their final scale
  };

  PolicyBatch(const Settings&, const kernels::Execution&, model::StepArena&);

  /// Waits for earlier work, and copies the rows to where the kernels run. Throws Error(internal) if they do not fit.
  void fill(std::span<const PolicyRow>);
  /// Number of micro-batches of the rows that `fill` received.
  std::int64_t passes() const { return (sequences_ + together() - 1) / together(); }
  /// Adds the gradients of these rows, in `passes` micro-batches or more: the last ones are without rows. between: see
  /// Trainer::Objective.
  void add_gradients(
      language_model::Transformer&, const kernels::AdamStep*, model::GradientSink&, std::int64_t passes,
      const std::function<void()>& between = [] {}) const;
  /// Runs forward passes only. The transformer takes micro_rows rows; its weights are prepared.
  void score(language_model::Transformer&) const;
  /// Logarithms of the probabilities of the tokens of the answers, by row: of the forward passes of the last
  /// `add_gradients` or `score`. Waits.
  std::vector<std::vector<float>> log_probabilities() const;

 private:
  std::int64_t together() const { return std::max<std::int64_t>(1, settings_.micro_rows / length_); }
  language_model::Tokens tokens(std::int64_t first, std::int64_t sequences) const;

  const Settings settings_;
  const kernels::Execution execution_;
  const Buffers buffers_;
  std::int64_t sequences_ = 0, length_ = 1;                   // of the rows of `fill`
  std::vector<std::pair<std::size_t, std::size_t>> answers_;  // first position and tokens of each answer
};

}  // namespace weft::polychromic
