// SPDX-License-Identifier: Apache-2.0
#include "polychromic/embedder.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "base/progress.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/language/head/cross_entropy.hpp"

namespace weft::polychromic {

using namespace language_model;
namespace {

constexpr std::int64_t kShortest = 16;

std::int64_t shortest(const TransformerSettings& settings) {
  return settings.shortest > 0 ? settings.shortest : settings.length;
}

/// Number of tokens with a probability in a piece: its first token has none before it.
std::int64_t scored(std::int64_t begin, std::int64_t end, std::int64_t first) {
  return std::max<std::int64_t>(0, end - std::max(begin + 1, first));
}

}  // namespace

TransformerSettings embedding_settings(TransformerSettings settings, std::int64_t rows) {
  settings.gradients = false;
  settings.shortest = settings.length;
  while (settings.shortest % 2 == 0 && settings.shortest / 2 >= kShortest) settings.shortest /= 2;
  settings.rows = std::max<std::int64_t>(1, rows / settings.length) * settings.length;
  return settings;
}

Embedder::Buffers::Buffers(const TransformerSettings& settings, model::StepArena& arena) {
  arena.purpose("embeddings");
  const std::int64_t most = settings.rows / shortest(settings);
  pooled = arena.take<kernels::PooledRows>(most);
  host_pooled = arena.take_host<kernels::PooledRows>(most);
}

Embedder::Embedder(const TransformerSettings& settings, Transformer& transformer, Staging& staging,
                   const kernels::Execution& execution, model::StepArena& arena, std::int64_t together,
                   std::int64_t vocabulary)
    : settings_(settings),
      transformer_(transformer),
      staging_(staging),
      execution_(execution),
      buffers_(settings, arena),
      together_(together == 0 ? settings.rows : together),
      vocabulary_(vocabulary) {
  if (settings.rows < settings.length)
    throw error(ExitCode::internal, "an embedder of {} rows for texts of {} tokens", settings.rows, settings.length);
}

std::int64_t Embedder::padded(std::int64_t size) const {
  std::int64_t length = shortest(settings_);
  while (length < size) length *= 2;
  return std::min(length, settings_.length);
}

void Embedder::embed(std::span<const EmbeddedText> texts, kernels::Matrix<float> out,
                     std::span<double> log_probabilities) {
  const bool fits =
      out.rows == std::ssize(texts) && out.columns == settings_.architecture.model.d_model && out.stride == out.columns;
  if ((out.data != nullptr && !fits) || (!log_probabilities.empty() && log_probabilities.size() != texts.size()))
    throw error(ExitCode::internal, "embeddings of {} texts do not fit a matrix of {} x {}", texts.size(), out.rows,
                out.columns);
  if (out.data != nullptr) device::zero(execution_, out.data, out.rows * out.columns * 4);
  std::fill(log_probabilities.begin(), log_probabilities.end(), 0.0);
  transformer_.prepare_weights();
  // Piece k of every text, for each k: no two pieces of a forward pass add to the same row.
  for (std::int64_t start = 0;; start += settings_.length) {
    std::vector<Piece> pieces;
    bool longer = false;
    for (std::size_t i = 0; i < texts.size(); ++i) {
      const std::int64_t size = std::ssize(texts[i].ids), end = std::min(size, start + settings_.length);
      if (std::max(start, texts[i].first) < end) pieces.push_back({i, start, end, std::max(start, texts[i].first)});
      longer |= end < size && texts[i].first < size;
    }
    std::stable_sort(pieces.begin(), pieces.end(),
                     [&](const Piece& a, const Piece& b) { return padded(a.size()) < padded(b.size()); });
    for (auto begin = pieces.begin(); begin != pieces.end();) {
      note_progress();
      const std::int64_t length = padded(begin->size());
      auto end = begin;
      while (end != pieces.end() && end - begin < together_ && padded(end->size()) == length &&
             (end - begin + 1) * length <= settings_.rows)
        ++end;
      run(texts, {begin, end}, length, out, log_probabilities);
      begin = end;
    }
    if (!longer) break;
  }
  for (std::size_t i = 0; i < log_probabilities.size(); ++i) {
    const std::int64_t size = std::ssize(texts[i].ids);
    std::int64_t tokens = 0;
    for (std::int64_t start = 0; start < size; start += settings_.length)
      tokens += scored(start, std::min(size, start + settings_.length), texts[i].first);
    if (tokens > 0) log_probabilities[i] /= static_cast<double>(tokens);
    if (!std::isfinite(log_probabilities[i]))
      throw error(ExitCode::numeric,
                  "the log-probability of text {} is not finite (the model has parameters that are not, or too large)",
                  i + 1);
  }
}

/// Runs one forward pass. sums: empty, or by text: log-probabilities are added.
void Embedder::run(std::span<const EmbeddedText> texts, std::span<const Piece> pieces, std::int64_t length,
                   kernels::Matrix<float> out, std::span<double> sums) {
  dataset::TokenBatch batch = staging_.next(std::ssize(pieces), length);
  std::fill(batch.targets.begin(), batch.targets.end(), kernels::kIgnored);
  std::fill(batch.first_key.begin(), batch.first_key.end(), 0);
  for (std::int64_t row = 0; row < batch.rows(); ++row) {
    const auto at = static_cast<std::size_t>(row);
    const Piece& piece = pieces[static_cast<std::size_t>(row / length)];
    const std::int64_t position = row % length, token = piece.begin + position;
    const std::span<const std::uint32_t> ids = texts[piece.text].ids;
    batch.positions[at] = static_cast<std::int32_t>(position);
    batch.ids[at] = token < piece.end ? ids[static_cast<std::size_t>(token)] : 0;
    if (token + 1 < piece.end && token + 1 >= piece.first)
      batch.targets[at] = static_cast<std::int32_t>(ids[static_cast<std::size_t>(token + 1)]);
  }
  staging_.send(batch);
  Tokens tokens = staging_.tokens(0, batch.sequences, length);
  tokens.vocabulary = vocabulary_;
  transformer_.forward(tokens, nullptr);

  if (out.data != nullptr) pool(texts, pieces, tokens, out);
  if (!sums.empty()) {
    transformer_.losses(tokens, staging_.losses());
    std::vector<float> losses(static_cast<std::size_t>(tokens.rows()));
    device::copy(execution_, losses.data(), staging_.losses().data, tokens.rows() * 4, device::Direction::to_host);
    kernels::fence(execution_);
    for (std::size_t row = 0; row < losses.size(); ++row)
      sums[pieces[row / static_cast<std::size_t>(length)].text] -= static_cast<double>(losses[row]);
  }
  kernels::fence(execution_);  // host memory is filled again
}

/// Adds the means of the hidden states of a forward pass to rows of `out`.
void Embedder::pool(std::span<const EmbeddedText> texts, std::span<const Piece> pieces, const Tokens& tokens,
                    kernels::Matrix<float> out) {
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    const EmbeddedText& text = texts[piece.text];
    const std::int64_t row = static_cast<std::int64_t>(i) * tokens.length - piece.begin;
    buffers_.host_pooled[static_cast<std::int64_t>(i)] = {
        row + piece.first, row + piece.end, static_cast<std::int64_t>(piece.text),
        static_cast<float>(1.0 / static_cast<double>(std::ssize(text.ids) - text.first))};
  }
  const kernels::Array<kernels::PooledRows> pooled{buffers_.pooled.data, std::ssize(pieces)};
  device::copy(execution_, pooled.data, buffers_.host_pooled.data,
               pooled.size * static_cast<std::int64_t>(sizeof(kernels::PooledRows)), device::Direction::to_device);
  kernels::pool_rows(execution_, transformer_.hidden_states(tokens), {pooled.data, pooled.size}, out);
}

}  // namespace weft::polychromic
