// SPDX-License-Identifier: Apache-2.0
#include "transcoder/parts/resampling.hpp"

#include <algorithm>
#include <cmath>

#include "kernels/optimize/adam.hpp"
#include "kernels/transcoder/encode/resample.hpp"

namespace weft::transcoder {
namespace {

constexpr std::int64_t kLargestRows = 64 << 20;  // bytes

/// Norm of a fresh row of n uniform weights within +-bound: the root of the expected square.
float fresh_norm(double bound, std::int64_t n) {
  return static_cast<float>(bound * std::sqrt(static_cast<double>(n) / 3));
}

}  // namespace

Resampling::Buffers::Buffers(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid,
                             model::StepArena& arena) {
  const std::int64_t widest = std::max(shape.d_model, shape.decoder_columns(0)), owned = largest_owned(shape, grid);
  rows = std::clamp<std::int64_t>(kLargestRows / (4 * widest), 1, std::max<std::int64_t>(1, owned));
  arena.purpose("dead features");
  weights = arena.take<float>(rows * widest);
  sums = arena.take<double>(configuration.data.batch_tokens);
  token = arena.take<std::int64_t>(owned);
}

Resampling::Resampling(PartContext& context)
    : settings_(context.configuration.transcoder),
      steps_(context.configuration.run.steps),
      seed_(static_cast<std::uint64_t>(context.configuration.run.seed)),
      model_(context.model),
      forward_(context.forward),
      data_axis_(context.data_axis),
      gradient_rows_(context.gradient_rows),
      changes_(context.changes),
      timers_(context.timers),
      execution_(context.execution),
      buffers_(context.configuration, model_.shape(), context.grid.shape(), context.arena) {}

void Resampling::after_step(std::int64_t step) {
  if (!is_due(step)) return;
  timers_.phase("resampling");
  resample(forward_.all_inputs(), gradient_rows_.all(), step);
  ++changes_;
  data_axis_.gather_weights(model_.encoder());
  for (const kernels::AnyMatrix& vectors : model_.feature_vectors()) data_axis_.gather_vectors(vectors);
}

bool Resampling::is_due(std::int64_t step) const {
  return step % settings_.resample_every == 0 &&
         static_cast<double>(step) <= settings_.resample_end * static_cast<double>(steps_);
}

void Resampling::resample(kernels::AnyMatrix x, kernels::AnyMatrix gradient_rows, std::int64_t step) {
  const Shape& shape = model_.shape();
  const std::int64_t d = shape.d_model, owned = model_.owned().size();
  if (owned == 0) return;
  const std::int64_t first = model_.features().begin + model_.owned().begin;
  const double encoder_bound = 1 / std::sqrt(static_cast<double>(
                                       shape.encoder_initial == EncoderInitial::width ? d : shape.n_features)),
               decoder_bound = 1 / std::sqrt(static_cast<double>(shape.decoder_columns(0)));
  const kernels::Array<std::int64_t> token{buffers_.token.data, owned};
  const kernels::Array<double> sums{buffers_.sums.data, x.rows};
  for (std::int64_t s = 0; s < shape.n_layers; ++s) {
    const auto layer = static_cast<std::size_t>(s);
    const kernels::ParameterRows &encoder = model_.owned_encoder()[layer], &decoder = model_.owned_decoder()[layer];
    const kernels::AnyMatrix rows = gradient_rows.columns_from(s * d, decoder.columns);
    const kernels::Array<std::int64_t> clocks{model_.clocks().data + s * owned, owned};
    kernels::sums_of_squares(execution_, rows, sums);
    kernels::draw_tokens(execution_, clocks, settings_.dead_window, sums, seed_, static_cast<std::uint64_t>(step),
                         s * shape.n_features + first, token);
    direct(encoder, x.columns_from(s * d, d), fresh_norm(encoder_bound, d));
    direct(decoder, rows, -fresh_norm(decoder_bound, decoder.columns));
    kernels::reset_moments(execution_, token, encoder);
    kernels::reset_moments(execution_, token, decoder);
    kernels::reset_elements(execution_, token, 0.0f, model_.owned_encoder_bias()[layer]);
    if (shape.threshold)
      kernels::reset_elements(execution_, token, static_cast<float>(*shape.threshold),
                              model_.owned_thresholds()[layer]);
    kernels::reset_clocks(execution_, token, clocks);
  }
}

/// Directs the rows that have a token at it. The other rows keep their bits in the conversion.
void Resampling::direct(const kernels::ParameterRows& parameters, kernels::AnyMatrix source, float factor) {
  const std::int64_t owned = model_.owned().size(), columns = parameters.columns;
  for (std::int64_t begin = 0; begin < owned; begin += buffers_.rows) {
    const std::int64_t count = std::min(buffers_.rows, owned - begin);
    const kernels::Matrix<float> rows{buffers_.weights.data, count, columns, columns};
    kernels::weights_to_float(execution_, parameters, begin, rows);
    kernels::direct_rows(execution_, {buffers_.token.data + begin, count}, source, factor, rows);
    kernels::weights_from_float(execution_, parameters, begin, {rows.data, count, columns, columns});
  }
}

}  // namespace weft::transcoder
