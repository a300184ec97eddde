// SPDX-License-Identifier: Apache-2.0
#include "language_model/attribution/attribution.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.hpp"
#include "base/progress.hpp"
#include "kernels/convert/affine.hpp"
#include "kernels/convert/own_rows.hpp"
#include "kernels/gemm/gemm.hpp"
#include "kernels/language/residual/residual.hpp"
#include "run/pass.hpp"

namespace weft::language_model {

using kernels::AnyMatrix;
using kernels::Form;
using kernels::Scalar;

namespace {

/// Memory of the gradients of MLP outputs, from which the number of targets follows.
constexpr std::int64_t kGradientBytes = std::int64_t{512} << 20, kMostTargets = 128;
/// Features that are added at a time, the strongest of those whose influence is known: as circuit-tracer with batches
/// of 128.
constexpr std::int64_t kAddedTogether = 512;

/// Features whose effects are formed in one product, at least those of one token: with more, products of several tokens
/// would be formed in vain.
std::int64_t columns_together(kernels::Backend backend) { return backend == kernels::Backend::cuda ? 128 : 8; }

AnyMatrix any(const kernels::Matrix<float>& matrix) {
  return {matrix.data, Scalar::fp32, matrix.rows, matrix.columns, matrix.stride};
}

}  // namespace

std::vector<Graph::Logit> salient_logits(const std::vector<float>& logits, const AttributionSettings& settings) {
  const float largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - static_cast<double>(largest));
  std::vector<std::uint32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0u);
  const auto most = std::min<std::ptrdiff_t>(settings.max_logits, std::ssize(order));
  std::partial_sort(order.begin(), order.begin() + most, order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  });
  std::vector<Graph::Logit> salient;
  double held = 0;
  for (std::ptrdiff_t i = 0; i < most && held < settings.logit_probability; ++i) {
    const std::uint32_t id = order[static_cast<std::size_t>(i)];
    const double probability = std::exp(static_cast<double>(logits[id]) - static_cast<double>(largest)) / sum;
    salient.push_back({id, probability});
    held += probability;
  }
  return salient;
}

std::int64_t targets_together(const ModelSettings& model, std::int64_t tokens) {
  return std::clamp<std::int64_t>(kGradientBytes / (tokens * model.layers * model.d_model * 4), 1, kMostTargets);
}

Attribution::Buffers::Buffers(const ModelSettings& model, std::int64_t vocabulary, Scalar weight, std::int64_t tokens,
                              std::int64_t sources, std::int64_t targets, model::StepArena& arena) {
  arena.purpose("effects");
  const auto take = [&](std::int64_t rows, std::int64_t columns) -> kernels::Matrix<float> {
    return {arena.take<float>(rows * columns).data, rows, columns, columns};
  };
  gradients = take(targets, model.d_model);
  effects = take(targets, sources);
  embeddings = take(tokens, model.d_model);
  mean = take(1, model.d_model);
  products = arena.take<float>(tokens * targets * columns_together(arena.backend()));
  token_of = arena.take<std::int32_t>(sources);
  ones = arena.take<float>(vocabulary);
  workspace = arena.take<std::byte>(
      std::max(kernels::gemm_workspace(Scalar::fp32, weight, Scalar::fp32, 1, model.d_model, vocabulary),
               kernels::gemm_workspace(Scalar::fp32, Scalar::fp32, Scalar::fp32, tokens * targets, sources,
                                       model.layers * model.d_model)));
}

Attribution::Attribution(FrozenBackward& backward, const Model& model, const ActiveFeatures& features, AnyMatrix errors,
                         const std::vector<std::uint32_t>& ids, std::int64_t targets,
                         const kernels::Execution& execution, model::StepArena& arena)
    : backward_(backward),
      model_(model),
      features_(features),
      errors_(errors),
      ids_(ids),
      together_(targets),
      execution_(execution),
      buffers_(model.architecture().model, model.architecture().vocabulary, model.layers().head().matrix.type,
               std::ssize(ids), std::ssize(features.list) + (model.architecture().model.layers + 1) * std::ssize(ids),
               targets, arena) {
  const std::int64_t layers = model.architecture().model.layers, n = std::ssize(ids), count = std::ssize(features.list);
  std::int64_t next = 0;
  for (std::int64_t layer = 0; layer < layers; ++layer)
    for (std::int64_t token = 0; token < n; ++token) {
      first_.push_back(next);
      while (next < count && features.list[static_cast<std::size_t>(next)].layer == layer &&
             features.list[static_cast<std::size_t>(next)].token == token)
        ++next;
    }
  first_.push_back(next);

  // Embeddings, and the mean row of the head.
  const AnyMatrix table = model.layers().token_embedding(), head = model.layers().head().matrix;
  for (std::int64_t token = 0; token < n; ++token)
    kernels::affine_rows(execution_, table.rows_from(ids[static_cast<std::size_t>(token)], 1), {}, {}, {},
                         any(buffers_.embeddings).rows_from(token, 1));
  if (const auto scale = static_cast<float>(model.architecture().model.embedding_scale); scale != 1)
    kernels::scale_rows(execution_, any(buffers_.embeddings), scale);
  const std::int64_t vocabulary = model.architecture().vocabulary;
  const std::vector<float> ones(static_cast<std::size_t>(vocabulary), 1.0f);
  device::copy(execution_, buffers_.ones.data, ones.data(), vocabulary * 4, device::Direction::to_device);
  kernels::gemm(execution_, 1.0f / static_cast<float>(vocabulary),
                {buffers_.ones.data, Scalar::fp32, 1, vocabulary, vocabulary}, Form::plain,
                head.rows_from(0, vocabulary), Form::plain, 0, any(buffers_.mean), buffers_.workspace);
  std::vector<std::int32_t> token_of;
  for (const ActiveFeature& feature : features.list) token_of.push_back(static_cast<std::int32_t>(feature.token));
  device::copy(execution_, buffers_.token_of.data, token_of.data(), 4 * count, device::Direction::to_device);
  kernels::fence(execution_);  // `ones` and `token_of` are destroyed on return
}

std::int64_t Attribution::sources() const { return buffers_.effects.columns; }

std::int64_t Attribution::matrix_bytes(std::int64_t active, std::int64_t layers, std::int64_t tokens,
                                       const AttributionSettings& settings) {
  const std::int64_t nodes = settings.max_nodes > 0 ? std::min(settings.max_nodes, active) : active;
  const auto bytes = [&](std::int64_t rows, std::int64_t features) {
    return 4.0 * static_cast<double>(rows + settings.max_logits) *
           static_cast<double>(features + (layers + 1) * tokens);
  };
  // The matrix of a selection is a copy. The square of a number of features may exceed 64 bits.
  constexpr double kMost = 4e18;
  return static_cast<std::int64_t>(std::min(kMost, bytes(nodes, active) + (nodes < active ? bytes(nodes, nodes) : 0)));
}

/// Targets of one layer in each, in the order of the list.
std::vector<Attribution::Batch> Attribution::batches_of(std::vector<std::int64_t> features) const {
  std::sort(features.begin(), features.end());
  std::vector<Batch> batches;
  for (const std::int64_t number : features) {
    const ActiveFeature& feature = features_.list[static_cast<std::size_t>(number)];
    if (batches.empty() || batches.back().block != feature.layer || std::ssize(batches.back().features) == together_)
      batches.push_back({.block = feature.layer, .tokens = {}, .features = {}, .logits = {}});
    batches.back().tokens.push_back(feature.token);
    batches.back().features.push_back(number);
  }
  return batches;
}

void Attribution::place_gradients(const Batch& batch) {
  const std::int64_t width = model_.architecture().model.d_model;
  const AnyMatrix encoders{features_.encoders.data(), Scalar::fp32, std::ssize(features_.list), width, width};
  std::int64_t row = 0;
  for (std::size_t i = 0, end = 0; i < batch.features.size(); i = end) {
    const std::int64_t first = batch.features[i];  // and those that follow it in memory
    while (end < batch.features.size() && batch.features[end] == first + static_cast<std::int64_t>(end - i)) ++end;
    const auto count = static_cast<std::int64_t>(end - i);
    kernels::affine_rows(execution_, encoders.rows_from(first, count), {}, {}, {},
                         any(buffers_.gradients).rows_from(row, count));
    row += count;
  }
  const AnyMatrix head = model_.layers().head().matrix, mean = any(buffers_.mean);
  for (const std::uint32_t id : batch.logits) {
    const AnyMatrix to = any(buffers_.gradients).rows_from(row++, 1);
    kernels::affine_rows(execution_, mean, {}, {}, {}, to);
    kernels::scale_rows(execution_, to, -1);
    kernels::affine_rows(execution_, head.rows_from(id, 1), {}, {}, to, to);
  }
}

/// Rows [targets of the batch, sources] on the host.
void Attribution::form(const Batch& batch, float* rows) {
  note_progress();
  const std::int64_t width = model_.architecture().model.d_model, n = std::ssize(ids_),
                     layers = model_.architecture().model.layers, targets = std::ssize(batch.tokens),
                     count = std::ssize(features_.list);
  place_gradients(batch);
  backward_.run({batch.block, batch.tokens, any(buffers_.gradients).rows_from(0, targets)});
  const AnyMatrix effects = any(buffers_.effects).rows_from(0, targets);
  device::zero(execution_, effects.data, targets * effects.stride * 4);
  const std::int64_t end = 1 + *std::max_element(batch.tokens.begin(), batch.tokens.end());
  // One vector per token, from token `first` on.
  const auto multiply_each = [&](const AnyMatrix& gradients, const AnyMatrix& vectors, std::int64_t first,
                                 std::int64_t source) {
    if (first < end)
      kernels::gemm_batched(execution_, 1, gradients, Form::plain, vectors.rows_from(first, 1), Form::transposed, 0,
                            effects.columns_from(source + first, 1),
                            {.count = end - first, .a = targets * gradients.stride, .b = vectors.stride, .c = 1},
                            buffers_.workspace);
  };
  multiply_each(backward_.embedding_gradients(0), any(buffers_.embeddings), 0, count + layers * n);
  for (std::int64_t layer = 0; layer < batch.block; ++layer) {
    if (end > 1)
      multiply_each(backward_.output_gradients(1).columns_from(layer * width, width),
                    errors_.columns_from(layer * width, width), 1, count + layer * n);
    // The first feature of the layer at each token; the first token has none.
    const std::int64_t* const first = first_.data() + layer * n;
    for (std::int64_t token = 1, next = 1; token < end; token = next) {
      for (++next; next < end && first[next + 1] - first[token] <= columns_together(execution_.backend);) ++next;
      if (first[next] > first[token]) form_effects(layer, token, next, batch.block, effects);
    }
  }
  device::copy(execution_, rows, effects.data, targets * sources() * 4, device::Direction::to_host);
  kernels::fence(execution_);
}

/// Effects of the features of a layer at the tokens [begin, end). One product of all these tokens and features, of
/// which each feature needs that with its own token.
void Attribution::form_effects(std::int64_t layer, std::int64_t begin, std::int64_t end, std::int64_t block,
                               AnyMatrix effects) {
  const std::int64_t width = model_.architecture().model.d_model, layers = model_.architecture().model.layers,
                     targets = effects.rows;
  const std::int64_t* const first = first_.data() + layer * std::ssize(ids_);
  const std::int64_t source = first[begin], active = first[end] - source;
  // What the features write to the layers below that of the targets.
  const std::int64_t written = (features_.per_layer ? 1 : layers - layer) * width,
                     read = (features_.per_layer ? 1 : block - layer) * width;
  const AnyMatrix decoders{features_.decoders[static_cast<std::size_t>(layer)].data(), Scalar::fp32,
                           first[end] - *first, written, written};
  AnyMatrix gradients = backward_.output_gradients(begin).columns_from(layer * width, read);
  gradients.rows *= end - begin;
  const AnyMatrix to = effects.columns_from(source, active);
  const kernels::Matrix<float> products{buffers_.products.data, gradients.rows, active, active};
  kernels::gemm(execution_, 1, gradients, Form::plain,
                decoders.rows_from(source - *first, active).columns_from(0, read), Form::transposed, 0,
                end - begin == 1 ? to : any(products), buffers_.workspace);
  if (end - begin > 1)
    kernels::own_rows(execution_, {products.data, products.rows, products.columns, products.stride},
                      {buffers_.token_of.data + source, active}, static_cast<std::int32_t>(begin),
                      {static_cast<float*>(to.data), targets, active, to.stride});
}

/// The rows of all batches, one batch after the other. Batch i is formed by rank i % size.
void Attribution::form_all(const std::vector<Batch>& batches, const parallel::Communicator& ranks, float* rows) {
  std::vector<float*> places;
  for (const Batch& batch : batches) {
    places.push_back(rows);
    rows += std::ssize(batch.tokens) * sources();
  }
  const auto owner = [&](std::size_t i) { return static_cast<int>(i % static_cast<std::size_t>(ranks.size())); };
  for (std::size_t i = 0; i < batches.size(); ++i)
    if (owner(i) == ranks.rank()) form(batches[i], places[i]);
  if (ranks.size() == 1) return;
  for (std::size_t i = 0; i < batches.size(); ++i)
    ranks.broadcast(places[i], std::ssize(batches[i].tokens) * sources() * 4, owner(i));
}

Graph Attribution::graph(const std::vector<Graph::Logit>& logits, const AttributionSettings& settings,
                         const parallel::Communicator& ranks) {
  const std::int64_t n = std::ssize(ids_), layers = model_.architecture().model.layers,
                     active = std::ssize(features_.list),
                     nodes = settings.max_nodes > 0 ? std::min(settings.max_nodes, active) : active;
  std::vector<Batch> of_logits;
  for (const Graph::Logit& logit : logits) {
    if (of_logits.empty() || std::ssize(of_logits.back().logits) == together_)
      of_logits.push_back({.block = layers, .tokens = {}, .features = {}, .logits = {}});
    of_logits.back().tokens.push_back(n - 1);
    of_logits.back().logits.push_back(logit.id);
  }

  // Rows of features in the order in which they are formed, then of logits.
  std::vector<float> effects(static_cast<std::size_t>((nodes + std::ssize(logits)) * sources()));
  const auto row = [&](std::int64_t number) { return effects.data() + number * sources(); };
  form_all(of_logits, ranks, row(nodes));
  std::vector<TargetRow> of_features, rows_of_logits;
  for (std::int64_t i = 0; i < std::ssize(logits); ++i)
    rows_of_logits.push_back({-1, logits[static_cast<std::size_t>(i)].probability, row(nodes + i)});
  run::Pass pass("attribution", nodes, "features");
  while (std::ssize(of_features) < nodes) {
    const std::vector<Batch> batches =
        batches_of(next_features(nodes - std::ssize(of_features), of_features, rows_of_logits));
    const std::int64_t first = std::ssize(of_features);
    for (const Batch& batch : batches)
      for (const std::int64_t feature : batch.features)
        of_features.push_back({feature, 0, row(std::ssize(of_features))});
    form_all(batches, ranks, row(first));
    pass.done(std::ssize(of_features));
  }
  if (!std::all_of(effects.begin(), effects.end(), [](float effect) { return std::isfinite(effect); }))
    throw collective_error(ExitCode::numeric,
                           "an effect is not finite (the model or the transcoder has weights that are not, or too "
                           "large)");

  Graph graph{.ids = ids_, .layers = layers, .active = active, .features = {}, .logits = logits, .effects = {}};
  if (nodes == active) {
    graph.features = features_.list;
    graph.effects = std::move(effects);
    return graph;
  }
  // The sources that are nodes.
  std::sort(of_features.begin(), of_features.end(),
            [](const TargetRow& a, const TargetRow& b) { return a.source < b.source; });
  std::vector<std::int64_t> kept;
  for (const TargetRow& feature : of_features) {
    kept.push_back(feature.source);
    graph.features.push_back(features_.list[static_cast<std::size_t>(feature.source)]);
  }
  of_features.insert(of_features.end(), rows_of_logits.begin(), rows_of_logits.end());
  for (const TargetRow& target : of_features) {
    for (const std::int64_t source : kept) graph.effects.push_back(target.effects[source]);
    graph.effects.insert(graph.effects.end(), target.effects + active, target.effects + sources());
  }
  return graph;
}

/// The features whose rows are formed next: all, or of those that have none the ones with the largest influence.
std::vector<std::int64_t> Attribution::next_features(std::int64_t missing, std::vector<TargetRow> formed,
                                                     const std::vector<TargetRow>& logits) const {
  std::vector<std::int64_t> next(features_.list.size());
  std::iota(next.begin(), next.end(), std::int64_t{0});
  if (missing == std::ssize(next)) return next;
  std::sort(formed.begin(), formed.end(), [](const TargetRow& a, const TargetRow& b) { return a.source < b.source; });
  std::vector<char> has_row(next.size());
  for (const TargetRow& feature : formed) has_row[static_cast<std::size_t>(feature.source)] = 1;
  formed.insert(formed.end(), logits.begin(), logits.end());
  const std::vector<double> known = influence(formed, sources());
  std::erase_if(next, [&](std::int64_t i) { return has_row[static_cast<std::size_t>(i)] != 0; });
  std::stable_sort(next.begin(), next.end(), [&](std::int64_t a, std::int64_t b) {
    return known[static_cast<std::size_t>(a)] > known[static_cast<std::size_t>(b)];
  });
  next.resize(static_cast<std::size_t>(std::min({kAddedTogether, missing, std::ssize(next)})));
  return next;
}

}  // namespace weft::language_model
