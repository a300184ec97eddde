// SPDX-License-Identifier: Apache-2.0
#include "transcoder/parts/record_clipping.hpp"

#include <algorithm>
#include <vector>

#include "device/memory.hpp"
#include "kernels/convert/convert_rows.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/privacy/norms.hpp"
#include "kernels/reduce/reduce.hpp"
#include "kernels/transcoder/records/sparse_records.hpp"
#include "privacy/clipping.hpp"

namespace weft::transcoder {

using kernels::AnyMatrix;
using kernels::Array;
using kernels::Matrix;

namespace {

/// Parts of the gradient that are clipped apart: decoder and encoder of each layer, and the decoder bias; or all.
std::int64_t parts_of(const privacy::Settings& settings, std::int64_t n_layers) {
  return settings.scheme == privacy::Scheme::flat ? 1 : 2 * n_layers + 1;
}

std::int64_t most_records(const Configuration& configuration) {
  return std::max<std::int64_t>(1, configuration.data.batch_tokens / record_rows(configuration));
}

/// True if a record may have several entries of a row of the decoder, whose vectors must be added.
bool decoder_shares_rows(const Configuration& configuration) {
  return record_rows(configuration) > 1 || configuration.transcoder.decoder == Decoder::tied_target;
}

}  // namespace

RecordClipping::Buffers::Buffers(const Configuration& configuration, const Shape& shape,
                                 const parallel::GridShape& grid, model::StepArena& arena) {
  const std::int64_t rows = configuration.data.batch_tokens, records = most_records(configuration), n = shape.n_layers,
                     parts = parts_of(configuration.privacy, n),
                     entries = DataAxis::capacity(configuration, shape, grid);
  arena.purpose("clipping");
  host_record = arena.take_host<std::int32_t>(kSlots * rows);
  host_offsets = arena.take_host<std::int64_t>(kSlots * (records + 1));
  record = arena.take<std::int32_t>(rows);
  offsets = arena.take<std::int64_t>(records + 1);
  if (configuration.privacy.bands > 1) {
    host_given = arena.take_host<const float*>(kSlots * kKinds * n);
    given = arena.take<const float*>(kKinds * n);
  }
  flags = arena.take<std::int32_t>(grid.largest_part(rows));
  alpha = arena.take<float>(entries);
  if (shape.threshold) {
    dz = arena.take<float>(entries);
    by_threshold = arena.take<float>(entries);
  }
  if (decoder_shares_rows(configuration))
    by_position = arena.take<double>(shape.decoder == Decoder::tied_target ? n * entries : entries);
  row_squares = arena.take<double>(n * rows);
  squares = arena.take<double>(n * rows);
  norms = arena.take<double>(parts * records);
  if (grid.ranks() > 1) gathered = arena.take<double>(grid.ranks() * parts * records);
  factors = arena.take<float>(parts * records);
  partial_sums = arena.take<float>(kernels::partial_sums(rows) * shape.width());
  if (record_rows(configuration) > 1) {
    record_sums = arena.take<float>(records * shape.width());
    workspace = arena.take<std::byte>(kernels::stored_norms_workspace(records, shape.width()));
  }
  if (shape.decoder == Decoder::tied)
    bias_rows = arena.take<std::byte>(rows * shape.width() * kernels::bytes_of(scalar_of(configuration.precision)));
  bound = arena.take<double>(2);
}

std::int64_t RecordClipping::largest_message(const Configuration& configuration, const Shape& shape,
                                             std::int64_t n_ranks) {
  return configuration.privacy.enabled
             ? 8 * n_ranks * parts_of(configuration.privacy, shape.n_layers) * most_records(configuration)
             : 0;
}

RecordClipping::RecordClipping(const Configuration& configuration, const Model& model, Forward& forward,
                               const kernels::Execution& execution, run::Timers& timers,
                               parallel::DeviceCommunicator& world, const Buffers& buffers)
    : settings_(configuration.privacy),
      configuration_(configuration),
      model_(model),
      forward_(forward),
      execution_(execution),
      timers_(timers),
      world_(world),
      buffers_(buffers),
      earlier_(model.parameters(), configuration.privacy.bands, execution) {
  const model::Parameters& parameters = model.parameters();
  first_[kEncoder] = parameters.index("encoder_0/weight");
  first_[kEncoderBias] = parameters.index("encoder_0/bias");
  first_[kThreshold] = model.shape().threshold ? parameters.index("encoder_0/threshold") : first_[kEncoderBias];
  first_[kDecoder] = first_[kThreshold] + 1;
  stride_ = first_[kDecoder] + 1 - first_[kEncoder];
  device::copy(execution, buffers_.bound.data, &settings_.clip, sizeof(double), device::Direction::to_device);
  kernels::fence(execution);
}

void RecordClipping::register_in(checkpoint::Registry& registry, bool writes) {
  earlier_.register_in(registry);
  if (!settings_.adapts_clip()) return;
  registry.add({.name = "privacy/clip_bound",
                .type = kernels::Scalar::fp64,
                .shape = {1},
                .held = {0, 1},
                .owned = {0, writes ? 1 : 0},
                .data = buffers_.bound.data,
                .on_device = true});
}

double RecordClipping::clip_bound() const {
  return settings_.adapts_clip() ? device::read(execution_, buffers_.bound.data) : settings_.clip;
}

void RecordClipping::begin(std::int64_t step, std::span<const std::int64_t> offsets, std::int64_t rows) {
  step_ = step;
  const std::int64_t slot = step % kSlots;
  std::int64_t* const host_offsets = buffers_.host_offsets.data + slot * buffers_.offsets.size;
  std::copy(offsets.begin(), offsets.end(), host_offsets);
  offsets_ = {host_offsets, offsets.size()};
  std::int32_t* const host = buffers_.host_record.data + slot * buffers_.record.size;
  std::fill(host, host + rows, -1);
  for (std::size_t b = 0; b + 1 < offsets.size(); ++b)
    std::fill(host + offsets[b], host + offsets[b + 1], static_cast<std::int32_t>(b));
  record_ = {buffers_.record.data, rows};
  device::copy(execution_, buffers_.offsets.data, host_offsets, 8 * std::ssize(offsets), device::Direction::to_device);
  device::copy(execution_, buffers_.record.data, host, 4 * rows, device::Direction::to_device);
  device::zero(execution_, &buffers_.bound[1], sizeof(double));
}

void RecordClipping::screen(AnyMatrix inputs, AnyMatrix targets) {
  timers_.phase("normalise");
  kernels::screen_rows(execution_, inputs, targets, {buffers_.flags.data, inputs.rows});
}

// --- Norms ----------------------------------------------------------------------------------------------------------

std::int64_t RecordClipping::parts() const { return parts_of(settings_, model_.shape().n_layers); }

/// Norms of the part of a matrix of each layer, in rows [L], or of the one part of all.
Matrix<double> RecordClipping::norms_of(Kind kind) const {
  const std::int64_t n = model_.shape().n_layers, first = apart() && kind == kEncoder ? n : 0;
  return {buffers_.norms.data + first * n_records(), apart() ? n : 1, n_records(), n_records()};
}
Array<double> RecordClipping::bias_norms() const {
  return {buffers_.norms.data + (parts() - 1) * n_records(), n_records()};
}
Matrix<const float> RecordClipping::factors_of(Kind kind) const {
  const Matrix<double> norms = norms_of(kind);
  return {buffers_.factors.data + (norms.data - buffers_.norms.data), norms.rows, norms.columns, norms.stride};
}

AnyMatrix RecordClipping::bias_rows(const BackwardPass& pass) const {
  AnyMatrix rows = pass.gradient_rows;
  if (buffers_.bias_rows.size > 0) rows.data = buffers_.bias_rows.data;
  return rows;
}

void RecordClipping::keep(const BackwardPass& pass) {
  if (buffers_.bias_rows.size > 0) kernels::copy_rows(execution_, pass.gradient_rows, bias_rows(pass));
}

void RecordClipping::clip(BackwardPass& pass, SparseDecoder& decoder, Array<float> bias_gradient) {
  if (pass.late.wait) pass.late.wait();
  pass.late = {};
  form_norms(pass, decoder);
  sum_over_ranks();
  timers_.phase("clipping factors");
  const Array<float> factors{buffers_.factors.data, parts() * n_records()};
  kernels::clip_factors(execution_, {buffers_.norms.data, factors.size},
                        privacy::part_share(static_cast<std::size_t>(parts())), settings_.clip_function,
                        record_rows(configuration_), factors, buffers_.bound.data);
  if (settings_.adapts_clip()) kernels::add_clip_balance(execution_, {factors.data, n_records()}, &buffers_.bound[1]);
  if (model_.owned().size() > 0) {
    const kernels::SparseActivations written = decoder.written(pass.all).activations;
    kernels::scale_entries(execution_, written, record_, factors_of(kDecoder), written.value);
    kernels::scale_entries(execution_, pass.all.activations, record_, factors_of(kEncoder), buffers_.alpha);
  }
  timers_.phase("noise");
  draw_noise();
  timers_.phase("biases");
  kernels::clipped_column_sums(execution_, bias_rows(pass), record_,
                               {factors.data + (parts() - 1) * n_records(), n_records()}, buffers_.partial_sums,
                               bias_gradient);
  const std::size_t bias = model_.parameters().index("decoder_bias");
  const double deviation = noise_.multiplier * settings_.clip;
  const kernels::NoiseStream stream = kernels::noise_stream(noise_.key, static_cast<std::uint64_t>(step_), bias);
  if (earlier_.active())
    earlier_.add(bias, bias_gradient, deviation, stream, 0, 1 / noise_.expected, step_);
  else
    kernels::add_noise(execution_, bias_gradient, noise_.multiplier, stream, 0, 1 / noise_.expected,
                       buffers_.bound.data);
}

/// Squares of the norms of the parameters that this rank updates.
void RecordClipping::form_norms(const BackwardPass& pass, SparseDecoder& decoder) {
  timers_.phase("norms of records");
  const Shape& shape = model_.shape();
  const std::int64_t n = shape.n_layers, rows = record_.size;
  const Array<const std::int64_t> offsets{buffers_.offsets.data, n_records() + 1};
  const Matrix<double> of_rows{buffers_.row_squares.data, n, rows, rows}, squares{buffers_.squares.data, n, rows, rows};
  device::zero(execution_, Array<double>{buffers_.norms.data, parts() * n_records()});
  // Rows that are not finite become 0, before anything is multiplied with them.
  kernels::row_squares(execution_, bias_rows(pass), false, of_rows);
  add_bias_norms(pass);
  const bool to_end = shape.decoder == Decoder::cross_layer, by_target = shape.decoder == Decoder::tied_target;
  kernels::row_squares(execution_, pass.gradient_rows, to_end, of_rows);
  if (model_.owned().size() > 0) {
    timers_.phase("gradients of activations");
    const kernels::LateRows none;
    decoder.backward(pass.all, pass.gradient_rows,
                     {.step = nullptr,
                      .gradient = buffers_.alpha,
                      .squared_norm = {},
                      .late = none,
                      .row_factors = {},
                      .new_norms = {}});
    timers_.phase("norms of records");
    const Lists written = decoder.written(pass.all);
    if (decoder_shares_rows(configuration_))
      kernels::shared_entry_squares(execution_, written.activations, written.hits,
                                    by_target ? pass.all.hits.offsets : Array<std::int64_t>{},
                                    written.activations.value, {}, pass.gradient_rows, to_end, 0, record_, offsets,
                                    buffers_.by_position, squares);
    else
      kernels::entry_squares(execution_, written.activations, written.activations.value, {}, of_rows, 0, squares);
    kernels::add_token_squares(execution_, squares, offsets, norms_of(kDecoder));
  }
  kernels::row_squares(execution_, pass.inputs, false, of_rows);
  if (model_.owned().size() > 0) {
    const kernels::SparseActivations& list = pass.all.activations;
    Array<const float> dz = buffers_.alpha;
    if (pass.band != nullptr) {
      kernels::band_gradients(execution_, *pass.band, pass.listed, pass.thresholds, buffers_.alpha, buffers_.dz,
                              buffers_.by_threshold);
      dz = buffers_.dz;
    }
    if (record_rows(configuration_) > 1)
      kernels::shared_entry_squares(execution_, list, pass.all.hits, {}, dz, buffers_.by_threshold, pass.inputs, false,
                                    1, record_, offsets, buffers_.by_position, squares);
    else
      kernels::entry_squares(execution_, list, dz, buffers_.by_threshold, of_rows, 1, squares);
    kernels::add_token_squares(execution_, squares, offsets, norms_of(kEncoder));
  }
  // Each rank knows which of its own rows were not finite.
  const parallel::Range own{forward_.layout().group.begin + forward_.layout().own.begin,
                            forward_.layout().group.begin + forward_.layout().own.end};
  for (std::int64_t part = 0; part < parts(); ++part)
    kernels::exclude_records(execution_, {buffers_.flags.data, own.size()}, own.begin, record_,
                             {buffers_.norms.data + part * n_records(), n_records()});
}

/// The norms of the decoder bias, whose gradient every rank has: one counts them. Before: squares of the rows.
void RecordClipping::add_bias_norms(const BackwardPass& pass) {
  if (world_.rank() != 0) return;
  const std::int64_t n = model_.shape().n_layers, rows = record_.size, width = model_.shape().width();
  const kernels::Examples records{.offsets = offsets_, .device_offsets = {buffers_.offsets.data, n_records() + 1}};
  if (record_rows(configuration_) == 1) {
    kernels::add_token_squares(execution_, {buffers_.row_squares.data, n, rows, rows}, records.device_offsets,
                               {bias_norms().data, 1, n_records(), n_records()});
  } else if (n_records() > 0) {
    const Matrix<float> sums{buffers_.record_sums.data, n_records(), width, width};
    kernels::form_column_sums(execution_, bias_rows(pass), records, sums);
    kernels::add_stored_norms(execution_, privacy::view(sums), bias_norms(), buffers_.workspace);
  }
}

void RecordClipping::sum_over_ranks() {
  if (world_.size() == 1 || n_records() == 0) return;
  timers_.phase("exchange");
  const std::int64_t size = parts() * n_records();
  device::copy(execution_, buffers_.gathered.data + world_.rank() * size, buffers_.norms.data, 8 * size,
               device::Direction::on_device);
  world_.all_gather(buffers_.gathered.data,
                    std::vector<std::int64_t>(static_cast<std::size_t>(world_.size()), 8 * size), "norms of records");
  device::zero(execution_, Array<double>{buffers_.norms.data, size});
  for (std::int64_t r = 0; r < world_.size(); ++r)
    kernels::accumulate(execution_, {buffers_.gathered.data + r * size, size}, {buffers_.norms.data, size});
}

void RecordClipping::restore(Array<float> gradient) const {
  device::copy(execution_, gradient.data, buffers_.alpha.data, 4 * buffers_.alpha.size, device::Direction::on_device);
}

// --- Noise ----------------------------------------------------------------------------------------------------------

/// Number of the first element of this rank's part of a parameter.
std::uint64_t RecordClipping::first_element(std::size_t parameter) const {
  return static_cast<std::uint64_t>(model_.parameters().parts(parameter).owned.begin *
                                    model_.parameters().specs()[parameter].columns());
}

void RecordClipping::draw_noise() {
  const std::int64_t n = model_.shape().n_layers;
  const auto update = static_cast<std::uint64_t>(step_);
  const float** const given = buffers_.host_given.data + step_ % kSlots * buffers_.given.size;
  for (int kind = 0; kind < kKinds; ++kind) {
    kernels::RowNoise& noise = kinds_[kind];
    noise = {.stream = kernels::noise_stream(noise_.key, update, first_[kind]),
             .stride = static_cast<std::uint32_t>(stride_),
             .deviation = noise_.multiplier,
             .unit = buffers_.bound.data,
             .scale = 1 / noise_.expected};
    if (!earlier_.active()) continue;
    noise.given = buffers_.given.data + kind * n;
    if (kind == kThreshold && !model_.shape().threshold) continue;
    for (std::int64_t s = 0; s < n; ++s) {
      const std::size_t parameter = first_[kind] + static_cast<std::size_t>(s) * stride_;
      given[kind * n + s] =
          earlier_
              .form(parameter, noise_.multiplier * settings_.clip, kernels::noise_stream(noise_.key, update, parameter),
                    first_element(parameter), step_)
              .data;
    }
  }
  if (earlier_.active())
    device::copy(execution_, buffers_.given.data, given, 8 * buffers_.given.size, device::Direction::to_device);
}

void RecordClipping::add_noise(Kind kind, std::int64_t layer, Array<float> gradient) const {
  const std::size_t parameter = first_[kind] + static_cast<std::size_t>(layer) * stride_;
  if (earlier_.active())
    kernels::add_given_noise(execution_, gradient, earlier_.formed(parameter, step_), 1 / noise_.expected);
  else
    kernels::add_noise(execution_, gradient, noise_.multiplier,
                       kernels::noise_stream(noise_.key, static_cast<std::uint64_t>(step_), parameter),
                       first_element(parameter), 1 / noise_.expected, buffers_.bound.data);
}

void RecordClipping::finish() {
  if (!settings_.adapts_clip()) return;
  kernels::adapt_clip(
      execution_, &buffers_.bound[1],
      {settings_.clip_quantile, settings_.clip_rate, noise_.count_deviation, noise_.expected},
      kernels::noise_stream(noise_.key, static_cast<std::uint64_t>(step_), 0, kernels::NoisePurpose::clip_bound),
      buffers_.bound.data);
}

}  // namespace weft::transcoder
