// SPDX-License-Identifier: Apache-2.0
//
// Symbols: N tokens (n own ones), L layers of width d, F features of this rank, W = L d; P_e = L F d encoder and P_d =
// F d L(L+1)/2 decoder parameters (per layer: F d L). Each datum counts once per phase, and twice where it is read and
// written; repeated reads count only where no cache could hold the data (the decoder's strips, one per entry). A phase
// with a high cache hit rate may therefore exceed 100 %.
#include "transcoder/run/step_work.hpp"

#include <string>

#include "transcoder/forward/forward.hpp"

namespace weft::transcoder {
namespace {

/// Number of weights of a feature's decoder rows, all source layers together.
double decoder_elements(const Shape& shape) {
  double sum = 0;
  for (std::int64_t s = 0; s < shape.n_layers; ++s) sum += static_cast<double>(shape.decoder_columns(s));
  return sum;
}

}  // namespace

run::Work work_of(std::string_view phase, const StepSizes& s) {
  const auto number = [](std::int64_t n) { return static_cast<double>(n); };
  const double n = number(s.group_tokens), own = number(s.own_tokens), width = number(s.shape.width());
  const double layers = number(s.shape.n_layers), d = number(s.shape.d_model), features = number(s.n_features);
  const double encoder = layers * features * d, decoder = features * decoder_elements(s.shape);
  const double e = number(s.row_bytes), w = number(s.weight_bytes), update = 2 * (w + s.moments_bytes);
  const double raw = 4, products = n * layers * features, stored = s.stores_products ? products : 0;

  if (phase == "normalise") return {n * width * (raw + e) + own * width * (raw + 4), 0};
  if (phase == "encode") return {encoder * w + n * width * e + stored * e, 2 * n * encoder};
  if (phase == "select") return {stored * e + s.entries * 16, 0};
  if (phase == "transpose") return {s.entries * 12 + layers * features * 8, 0};
  if (phase == "skip" && s.shape.skip) {
    const double batch = number(s.batch_tokens);
    return {own * width * 3 * e + batch * width * 2 * e + width * d * (update + w + 8), 2 * (own + batch) * width * d};
  }
  // jumprelu from lists: values and gradients of the entries, of which only the active ones are counted, and the sums.
  if (phase == "thresholds" && s.lists_bands) return {s.entries * 16 + layers * features * 24, 0};
  // jumprelu without lists: pre-activations again, and the products of the gradient rows with the decoder.
  if (phase == "thresholds")
    return {(encoder + decoder) * w + 2 * n * width * e + products * (2 * e + 8), 2 * n * (encoder + decoder)};
  if (phase == "loss") return {own * width * (e + 4 + e), 0};
  if (phase == "check") return {n * width * e, 0};
  if (phase == "bookkeeping") return {layers * features * 24, 0};
  if (phase == "biases") return {n * width * e, 0};
  if (phase == "decode") return {s.entry_columns * w + n * width * e, 0};
  // A private step reads inputs once and gradient rows twice for the norms, and passes over the decoder without an
  // update.
  if (phase == "norms of records") return {3 * n * width * e + s.entries * 20, 0};
  if (phase == "gradients of activations") return {decoder * w + n * width * e + s.entries * 12, 0};
  if (phase == "decoder backward") return {decoder * update + n * width * e + s.entries * 12, 0};
  if (phase == "encoder backward") return {encoder * update + n * width * e + s.entries * 12, 0};
  return {};
}

StepSizes step_sizes(const Configuration& configuration, const Shape& shape, const parallel::Grid& grid,
                     std::span<const double> l0) {
  const std::int64_t tokens = configuration.data.batch_tokens, columns = shape.decoder_columns(0);
  const kernels::StorageType storage = configuration.optimizer.state;
  StepSizes sizes;
  sizes.shape = shape;
  sizes.n_features = grid.part(parallel::kFeatureAxis, shape.n_features).size();
  sizes.group_tokens = grid.part(parallel::kDataAxis, tokens).size();
  sizes.own_tokens = grid.own_part(tokens).size();
  sizes.batch_tokens = tokens;
  sizes.lists_bands = lists_bands(configuration.transcoder);
  sizes.is_private = configuration.privacy.enabled;
  sizes.row_bytes = kernels::bytes_of(scalar_of(configuration.precision));
  sizes.weight_bytes = model::weight_bytes(storage, 1, 1);
  sizes.moments_bytes =
      static_cast<double>(moment_bytes(storage, 1, columns, shape.d_model)) / static_cast<double>(columns);
  const double tokens_per_rank = static_cast<double>(tokens) / grid.world().size();
  for (std::size_t s = 0; s < l0.size(); ++s) {
    sizes.entries += l0[s] * tokens_per_rank;
    sizes.entry_columns +=
        l0[s] * tokens_per_rank * static_cast<double>(shape.decoder_columns(static_cast<std::int64_t>(s)));
  }
  return sizes;
}

run::PhaseBytes phase_bytes(const StepSizes& sizes) {
  run::PhaseBytes all;
  for (const char* phase : {"normalise", "encode", "select", "transpose", "decode", "skip", "loss", "check", "biases",
                            "thresholds", "decoder backward", "encoder backward", "bookkeeping"})
    all.emplace_back(phase, work_of(phase, sizes).bytes);
  for (const char* phase : {"norms of records", "gradients of activations"})
    if (sizes.is_private) all.emplace_back(phase, work_of(phase, sizes).bytes);
  return all;
}

}  // namespace weft::transcoder
