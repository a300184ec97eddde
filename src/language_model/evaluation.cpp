// SPDX-License-Identifier: Apache-2.0
#include "language_model/evaluation.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "base/error.hpp"
#include "base/progress.hpp"
#include "kernels/language/head/cross_entropy.hpp"
#include "kernels/random.hpp"
#include "kernels/runtime.hpp"
#include "report/format.hpp"

namespace weft::language_model {
namespace {

/// The sum of the losses of a batch, in the order of its rows.
double sum_of_losses(const Tokens& tokens, Transformer& transformer, kernels::Array<float> losses,
                     const kernels::Execution& execution) {
  transformer.forward(tokens, nullptr);
  transformer.losses(tokens, losses);
  std::vector<float> host(static_cast<std::size_t>(tokens.rows()));
  device::copy(execution, host.data(), losses.data, tokens.rows() * 4, device::Direction::to_host);
  kernels::fence(execution);
  double sum = 0;
  for (const float loss : host) sum += static_cast<double>(loss);
  return sum;
}

std::size_t draw(const std::vector<float>& logits, double temperature, double uniform) {
  const auto largest = std::max_element(logits.begin(), logits.end());
  if (temperature == 0) return static_cast<std::size_t>(largest - logits.begin());
  std::vector<double> sums;
  double total = 0;
  for (const float logit : logits)
    sums.push_back(total += std::exp(static_cast<double>(logit - *largest) / temperature));
  const auto drawn = std::upper_bound(sums.begin(), sums.end(), uniform * total);
  return static_cast<std::size_t>(std::min(drawn, sums.end() - 1) - sums.begin());
}

}  // namespace

double EvaluationResult::perplexity() const { return std::exp(loss); }

report::Json to_json(const EvaluationResult& result) {
  report::Json json = {{"loss", result.loss}, {"perplexity", result.perplexity()}, {"tokens", result.tokens}};
  json["bits_per_byte"] = std::isnan(result.bits_per_byte) ? report::Json() : report::Json(result.bits_per_byte);
  return json;
}

std::string to_text(const EvaluationResult& result) {
  const std::string bits =
      std::isnan(result.bits_per_byte) ? "" : fmt::format(", {:.4f} bits per byte", result.bits_per_byte);
  return fmt::format("loss {:.4f} nats per token, perplexity {:.4g}{}, {} tokens", result.loss, result.perplexity(),
                     bits, report::grouped(result.tokens));
}

EvaluationResult evaluate(const dataset::TokenSet& set, std::int64_t length, std::int64_t rows,
                          Transformer& transformer, Staging& staging, const kernels::Execution& execution) {
  if (set.size() < 2)
    throw collective_error(ExitCode::data, "{}: {} token{} (a prediction needs two); give a longer text", set.name(),
                           set.size(), set.size() == 1 ? "" : "s");
  const std::int64_t windows = dataset::evaluation_windows(set, length),
                     together = std::max<std::int64_t>(1, rows / length);
  EvaluationResult result;
  double sum = 0;
  for (std::int64_t first = 0; first < windows; first += together) {
    note_progress();
    dataset::TokenBatch batch = staging.next(std::min(together, windows - first), length);
    dataset::fill_windows(set, first, batch);
    staging.send(batch);
    sum += sum_of_losses(staging.tokens(0, batch.sequences, length), transformer, staging.losses(), execution);
    result.tokens += batch.counted;
  }
  result.loss = sum / static_cast<double>(std::max<std::int64_t>(1, result.tokens));
  if (!std::isfinite(result.loss))
    throw error(ExitCode::numeric, "{}: the loss is not finite (the model has parameters that are not, or too large)",
                set.name());
  result.bits_per_byte = set.text_bytes() > 0 ? sum / std::numbers::ln2 / static_cast<double>(set.text_bytes())
                                              : std::numeric_limits<double>::quiet_NaN();
  return result;
}

std::vector<std::uint32_t> sample(const Sampling& sampling, std::vector<std::uint32_t> text, Transformer& transformer,
                                  Staging& staging) {
  const std::size_t prompt = text.size();
  for (std::int64_t i = 0; i < sampling.tokens; ++i) {
    note_progress();
    const auto length = std::min<std::int64_t>(static_cast<std::int64_t>(text.size()), sampling.length);
    dataset::TokenBatch batch = staging.next(1, length);
    std::copy(text.end() - length, text.end(), batch.ids.begin());
    std::fill(batch.targets.begin(), batch.targets.end(), kernels::kIgnored);
    std::fill(batch.first_key.begin(), batch.first_key.end(), 0);
    for (std::int64_t row = 0; row < length; ++row)
      batch.positions[static_cast<std::size_t>(row)] = static_cast<std::int32_t>(row);
    staging.send(batch);
    transformer.forward(staging.tokens(0, 1, length), nullptr);
    const kernels::Random4 random = kernels::philox(sampling.seed, kernels::Purpose::sampling, sampling.step,
                                                    static_cast<std::uint64_t>(text.size()));
    text.push_back(static_cast<std::uint32_t>(draw(transformer.logits(length - 1), sampling.temperature,
                                                   kernels::uniform_double(random.word[0], random.word[1]))));
  }
  return {text.begin() + static_cast<std::ptrdiff_t>(prompt), text.end()};
}

}  // namespace weft::language_model
