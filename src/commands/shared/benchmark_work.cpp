// SPDX-License-Identifier: Apache-2.0
//
// N tokens (n own ones), L layers, d, F features of this rank, W = L d; P_e = L F d encoder and P_d = F d L(L+1)/2
// decoder parameters. Each datum counts once a phase, and twice where it is read and written; what a kernel reads again
// counts again only where no cache could hold it (the decoder's strips, one for every entry). So a phase that the
// caches serve well may pass 100 %.
#include "commands/shared/benchmark_work.hpp"

namespace weft::commands {

Work work_of(std::string_view phase, Formulation formulation, const StepSizes& s) {
  const auto number = [](std::int64_t n) { return static_cast<double>(n); };
  const double n = number(s.group_tokens), own = number(s.own_tokens), width = number(s.shape.width());
  const double layers = number(s.shape.n_layers), d = number(s.shape.d_model), features = number(s.n_features);
  const double encoder = layers * features * d, decoder = features * d * layers * (layers + 1) / 2;
  const double e = number(s.row_bytes), w = number(s.weight_bytes), update = 2 * (w + s.moments_bytes);
  const double raw = 4, products = n * layers * features;
  const bool dense = formulation == Formulation::dense;

  if (phase == "normalise") return {n * width * (raw + e) + own * width * (raw + 4), 0};
  if (phase == "encode") return {encoder * w + n * width * e + products * e, 2 * n * encoder};
  if (phase == "select") return {products * e + s.entries * 16, 0};
  if (phase == "transpose") return {s.entries * 12 + layers * features * 8, 0};
  if (phase == "loss") return {own * width * (e + 4 + e), 0};
  if (phase == "check") return {n * width * e, 0};
  if (phase == "bookkeeping") return {layers * features * 24, 0};
  if (phase == "biases") return {(n * width + (dense ? products : 0)) * e, 0};
  if (!dense) {
    if (phase == "decode") return {s.entry_columns * w + n * width * e, 0};
    if (phase == "decoder backward") return {decoder * update + n * width * e + s.entries * 12, 0};
    if (phase == "encoder backward") return {encoder * update + n * width * e + s.entries * 12, 0};
  } else {
    if (phase == "scatter") return {products * 4 + s.entries * 8, 0};
    if (phase == "decode") return {products * 4 + decoder * 4 + n * width * 4, 2 * n * decoder};
    if (phase == "decoder backward") return {2 * (products * 4 + decoder * 4 + n * width * 4), 4 * n * decoder};
    if (phase == "mask") return {products * 12, 0};
    if (phase == "encoder backward") return {products * 4 + encoder * 4 + n * width * 4, 2 * n * encoder};
    if (phase == "optimizer") return {(encoder + decoder) * (update + 4), 0};
  }
  return {};
}

}  // namespace weft::commands
