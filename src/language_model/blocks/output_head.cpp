// SPDX-License-Identifier: Apache-2.0
#include "language_model/blocks/output_head.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "kernels/convert/convert_rows.hpp"
#include "kernels/language/sample/sample.hpp"

namespace weft::language_model {

using kernels::AnyMatrix;

namespace {

constexpr std::int64_t kLogitBytes = std::int64_t{256} << 20;

}  // namespace

std::int64_t head_chunk(const TransformerSettings& settings) {
  if (settings.joined_examples) return settings.rows;
  if (settings.examples) {
    TransformerSettings without = settings;
    without.examples = false;
    return std::max(settings.length, head_chunk(without) / settings.length * settings.length);
  }
  if (settings.memory.head_chunk > 0) return std::min(settings.memory.head_chunk, settings.rows);
  // All ranks have the same chunks.
  const std::int64_t row_bytes =
      aligned_columns(settings.architecture.largest_vocabulary()) * kernels::bytes_of(settings.type);
  const std::int64_t most = std::max<std::int64_t>(1, kLogitBytes / row_bytes);
  if (settings.rows <= most) return settings.rows;
  const std::int64_t chunks = (settings.rows + most - 1) / most, rows = (settings.rows + chunks - 1) / chunks;
  return std::min(most, (rows + 7) / 8 * 8);
}

OutputHead::Buffers::Buffers(const TransformerSettings& settings, model::StepArena& arena)
    : chunk(head_chunk(settings)) {
  arena.purpose("head");
  const std::int64_t rows = settings.keeps_head_rows() ? settings.rows : chunk,
                     stride = aligned_columns(settings.architecture.largest_vocabulary());
  logits = arena.take_matrix(settings.type, rows, stride);
  softmax_parts = arena.take<kernels::SoftmaxPart>(settings.architecture.tensor_ranks > 1 ? chunk : 0);
}

kernels::CrossEntropy OutputHead::loss(const Tokens& tokens) const {
  const Architecture& part = context_.settings.architecture;
  const std::int64_t all = tokens.vocabulary == 0 ? part.whole_vocabulary() : tokens.vocabulary;
  return {.vocabulary = std::clamp<std::int64_t>(all - part.first_token, 0, part.vocabulary),
          .softcap = static_cast<float>(context_.model().logit_softcap),
          .temperature = tokens.temperature};
}

AnyMatrix OutputHead::logits_of(std::int64_t begin, std::int64_t count) const {
  return buffers_.logits.rows_from(begin, count).columns_from(0, head().outputs());
}

/// Calls each(first row, logits of a chunk).
template <class EachChunk>
void OutputHead::each_chunk(const Pass& pass, AnyMatrix hidden, const EachChunk& each) const {
  for (std::int64_t begin = 0; begin < hidden.rows; begin += buffers_.chunk) {
    const std::int64_t count = std::min(buffers_.chunk, hidden.rows - begin);
    const AnyMatrix logits = logits_of(context_.settings.keeps_head_rows() ? begin : 0, count);
    context_.timers.pass("forward");
    products_.multiply(pass, head(), hidden.rows_from(begin, count), logits);
    each(begin, logits);
  }
}

void OutputHead::losses(const Pass& pass, AnyMatrix hidden, kernels::Array<float> losses) const {
  each_chunk(pass, hidden, [&](std::int64_t begin, const AnyMatrix& logits) {
    context_.timers.phase("loss");
    const kernels::Array<const std::int32_t> targets{pass.tokens.targets.data + begin, logits.rows};
    truncate(pass.tokens, logits, targets);
    cross_entropy(loss(pass.tokens), logits, targets, {losses.data + begin, logits.rows}, false);
  });
}

void OutputHead::losses_and_gradient(const Pass& pass, AnyMatrix hidden, AnyMatrix gradient,
                                     kernels::Array<float> losses) const {
  const Tokens& tokens = pass.tokens;
  each_chunk(pass, hidden, [&](std::int64_t begin, const AnyMatrix& logits) {
    context_.timers.phase("loss");
    kernels::CrossEntropy loss = this->loss(tokens);
    loss.scale = tokens.scale;
    if (tokens.weights.size > 0) loss.weights = {tokens.weights.data + begin, logits.rows};
    const kernels::Array<const std::int32_t> targets{tokens.targets.data + begin, logits.rows};
    truncate(tokens, logits, targets);
    cross_entropy(loss, logits, targets, {losses.data + begin, logits.rows}, true);
    context_.timers.pass("backward");
    const AnyMatrix x = hidden.rows_from(begin, logits.rows), dx = gradient.rows_from(begin, logits.rows);
    products_.propagate(pass, head(), x, logits, dx);
    if (!pass.rows_stay) products_.give_gradients(pass, head(), x, {logits}, begin);
    context_.await_sum(dx);
  });
  if (pass.rows_stay) products_.give_gradients(pass, head(), hidden, {logits_of(0, hidden.rows)});
}

/// Leaves the ids of the distribution of the targets.
void OutputHead::truncate(const Tokens& tokens, AnyMatrix logits, kernels::Array<const std::int32_t> targets) const {
  if (tokens.top_p == 1) return;
  if (context_.tensor != nullptr) throw error(ExitCode::internal, "top_p with a vocabulary in parts");
  kernels::keep_probable(context_.execution,
                         {.vocabulary = loss(tokens).vocabulary,
                          .softcap = static_cast<float>(context_.model().logit_softcap),
                          .temperature = tokens.temperature,
                          .top_p = tokens.top_p},
                         logits, targets);
}

/// Cross entropy over the vocabulary of all ranks.
void OutputHead::cross_entropy(kernels::CrossEntropy loss, AnyMatrix logits, kernels::Array<const std::int32_t> targets,
                               kernels::Array<float> losses, bool gradient) const {
  if (context_.tensor != nullptr) {
    loss.first_token = context_.settings.architecture.first_token;
    const kernels::Array<kernels::SoftmaxPart> own{buffers_.softmax_parts.data, logits.rows};
    kernels::softmax_parts(context_.execution, loss, logits, targets, own);
    context_.timers.phase("exchange");
    loss.parts = context_.tensor->gather(own, "softmax");
    context_.timers.phase("loss");
  }
  kernels::cross_entropy(context_.execution, loss, logits, targets, losses, gradient);
}

AnyMatrix OutputHead::logits(const Pass& pass, AnyMatrix hidden) const {
  if (hidden.rows > buffers_.logits.rows)
    throw error(ExitCode::internal, "{} rows of logits do not fit a chunk of {}", hidden.rows, buffers_.logits.rows);
  const AnyMatrix logits = logits_of(0, hidden.rows);
  products_.multiply(pass, head(), hidden, logits);
  return logits;
}

AnyMatrix OutputHead::all_logits(const Pass& pass, AnyMatrix hidden, AnyMatrix all) const {
  const AnyMatrix own = logits(pass, hidden);
  if (context_.tensor == nullptr) return own;
  context_.timers.phase("exchange");
  const Architecture& part = context_.settings.architecture;
  const std::int64_t row_bytes = own.stride * kernels::bytes_of(own.type),
                     together = std::max<std::int64_t>(1, context_.tensor->most_gathered() / row_bytes);
  for (std::int64_t begin = 0; begin < own.rows; begin += together) {
    const std::int64_t count = std::min(together, own.rows - begin), bytes = count * row_bytes;
    const AnyMatrix rows = own.rows_from(begin, count);
    // Whole rows of the memory, which all ranks have of one width.
    const auto parts =
        context_.tensor->gather(kernels::Array<std::byte>{static_cast<std::byte*>(rows.data), bytes}, "logits");
    for (std::int64_t rank = 0; rank < part.tensor_ranks; ++rank) {
      const parallel::Range tokens = parallel::part(part.whole_vocabulary(), part.tensor_ranks, rank);
      const AnyMatrix of_rank{const_cast<std::byte*>(parts.data) + rank * bytes, own.type, count, tokens.size(),
                              own.stride};
      kernels::copy_rows(context_.execution, of_rank,
                         all.rows_from(begin, count).columns_from(tokens.begin, tokens.size()));
    }
  }
  return all.rows_from(0, own.rows);
}

}  // namespace weft::language_model
