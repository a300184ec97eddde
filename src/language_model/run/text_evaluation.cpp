// SPDX-License-Identifier: Apache-2.0
#include "language_model/run/text_evaluation.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <utility>

#include "base/error.hpp"
#include "base/format.hpp"
#include "base/progress.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "run/pass.hpp"

namespace weft::language_model {
namespace {

/// Number of values in one exchange, which takes memory for the values of all ranks.
constexpr std::size_t kShared = std::size_t{1} << 16;

/// The sums of the losses of each sequence after a forward pass, in the order of its rows.
void add_losses(const Tokens& tokens, Transformer& transformer, kernels::Array<float> losses, std::span<double> sums,
                const kernels::Execution& execution) {
  transformer.losses(tokens, losses);
  std::vector<float> host(static_cast<std::size_t>(tokens.rows()));
  device::copy(execution, host.data(), losses.data, tokens.rows() * 4, device::Direction::to_host);
  kernels::fence(execution);
  for (std::size_t row = 0; row < host.size(); ++row)
    sums[row / static_cast<std::size_t>(tokens.length)] += static_cast<double>(host[row]);
}

}  // namespace

double EvaluationResult::perplexity() const { return std::exp(loss); }

Json to_json(const EvaluationResult& result) {
  Json json = {{"loss", result.loss}, {"perplexity", result.perplexity()}, {"tokens", result.tokens}};
  json["bits_per_byte"] = std::isnan(result.bits_per_byte) ? Json() : Json(result.bits_per_byte);
  return json;
}

std::string to_text(const EvaluationResult& result) {
  const std::string bits =
      std::isnan(result.bits_per_byte) ? "" : fmt::format(", {:.4f} bits per byte", result.bits_per_byte);
  return fmt::format("loss {:.4f} nats per token, perplexity {:.4g}{}, {} tokens", result.loss, result.perplexity(),
                     bits, format::grouped(result.tokens));
}

void share(std::span<double> values, const parallel::Communicator* ranks) {
  if (ranks == nullptr || ranks->size() == 1) return;
  for (; !values.empty(); values = values.subspan(std::min(kShared, values.size()))) {
    note_progress();
    ranks->sum(values.first(std::min(kShared, values.size())));
  }
}

EvaluationResult evaluate(const dataset::Segments& segments, std::int64_t length, std::int64_t rows,
                          Transformer& transformer, Staging& staging, const kernels::Execution& execution,
                          const parallel::Communicator* ranks, const std::function<void(const Tokens&)>& forward,
                          std::vector<double>* sums) {
  const dataset::TokenSet& set = segments.set();
  if (set.size() < 2)
    throw collective_error(ExitCode::data, "{}: {} token{} (a prediction needs two); give a longer text", set.name(),
                           set.size(), set.size() == 1 ? "" : "s");
  const std::int64_t windows = segments.count(length), together = std::max<std::int64_t>(1, rows / length);
  std::vector<double> losses(static_cast<std::size_t>(windows));
  EvaluationResult result;
  transformer.complete_weights();
  run::Pass pass("evaluation", windows, "windows");
  for (std::int64_t first = 0; first < windows; first += together) {
    if (!is_own_batch(first / together, ranks)) continue;
    dataset::TokenBatch batch = staging.next(std::min(together, windows - first), length);
    segments.fill(first, batch);
    staging.send(batch);
    const Tokens tokens = staging.tokens(0, batch.sequences, length);
    forward ? forward(tokens) : transformer.forward(tokens, nullptr);
    add_losses(tokens, transformer, staging.losses(), std::span(losses).subspan(static_cast<std::size_t>(first)),
               execution);
    result.tokens += batch.counted;
    pass.done(first + batch.sequences);
  }
  // Every rank takes part in as many passes.
  const std::int64_t batches = (windows + together - 1) / together;
  if (ranks != nullptr && batches % ranks->size() != 0 && ranks->rank() >= batches % ranks->size())
    transformer.forward_without_tokens();
  share(losses, ranks);
  if (ranks != nullptr) ranks->sum({&result.tokens, 1});
  if (result.tokens == 0)
    throw collective_error(
        ExitCode::data,
        "{}: none of its tokens counts in the loss (data.loss_on = \"completion\"); give completions, "
        "or data.loss_on = \"all\"",
        set.name());
  double sum = 0;
  for (const double loss : losses) sum += loss;
  result.loss = sum / static_cast<double>(std::max<std::int64_t>(1, result.tokens));
  if (!std::isfinite(result.loss))
    throw collective_error(ExitCode::numeric,
                           "{}: the loss is not finite (the model has parameters that are not, or too large)",
                           set.name());
  if (sums != nullptr) *sums = std::move(losses);
  // Rows of documents do not have all of the text.
  result.bits_per_byte = set.text_bytes() > 0 && segments.documents() == nullptr
                             ? sum / std::numbers::ln2 / static_cast<double>(set.text_bytes())
                             : std::numeric_limits<double>::quiet_NaN();
  return result;
}

}  // namespace weft::language_model
