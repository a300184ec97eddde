// SPDX-License-Identifier: Apache-2.0
#include "transcoder/step/trainer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/convert/convert_rows.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/reduce/reduce.hpp"
#include "optimizer/schedule.hpp"
#include "transcoder/parts/list.hpp"

namespace weft::transcoder {

Trainer::Buffers::Buffers(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid,
                          std::int64_t row_bytes, model::StepArena& arena) {
  const FeatureAxisSizes sizes(configuration, shape, grid, configuration.data.batch_tokens);
  arena.purpose("backward pass");
  dead = arena.take<std::int64_t>(1);
  if constexpr (kernels::kCudaBuild)
    for (device::Upload::Slot& slot : raw_rows)
      slot = {arena.take<std::byte>(sizes.own * row_bytes), arena.take<std::byte>(sizes.own * row_bytes)};
  runner = model::StepRunner::Buffers(arena);
}

model::StepArena measure_step(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid,
                              std::int64_t row_bytes, kernels::Backend backend) {
  model::StepArena arena(backend);
  const Forward::Buffers forward(configuration, shape, grid, configuration.data.batch_tokens, arena);
  const Trainer::Buffers trainer(configuration, shape, grid, row_bytes, arena);
  const Step::Buffers step(configuration, shape, grid, *forward.decoder, arena);
  const DataAxis::Buffers data_axis(configuration, shape, grid, arena);
  const GradientRows::Buffers gradient_rows(configuration, shape, grid, arena);
  measure_parts(configuration, shape, grid, arena);
  return arena;
}

Trainer::Trainer(const Configuration& configuration, const Shape& shape, const dataset::Normalisation& normalisation,
                 const dataset::Statistics& statistics, const parallel::Grid& grid, const kernels::Execution& execution,
                 std::int64_t row_bytes, Locate locate)
    : configuration_(configuration),
      locate_(std::move(locate)),
      grid_(grid),
      execution_(execution),
      arena_(execution, grid),
      model_(shape, configuration.optimizer.state, grid, execution, Moments::held),
      normalisation_(normalisation, statistics, execution),
      forward_(configuration, model_, normalisation_, grid, execution, timers_, configuration.data.batch_tokens,
               arena_),
      buffers_(configuration, shape, grid.shape(), row_bytes, arena_),
      world_(grid.all_on_an_axis(), execution, Step::largest_message(configuration, shape, grid.world().size()),
             configuration.parallel.exchange),
      upload_(execution, buffers_.raw_rows[0], buffers_.raw_rows[1]),
      runner_(runner_settings(), execution, timers_, buffers_.runner, [this] { return counted_exchanges(); }),
      step_(configuration_, model_, normalisation_, forward_, grid, execution_, timers_, world_, runner_, arena_) {
  runner_.explain_fault(
      [this](std::int64_t step) { forward_.require_valid_selections(fmt::format("of step {}", step)); });
  name_state();
}

model::StepRunner::Settings Trainer::runner_settings() const {
  const bool free = world_.leaves_the_host_free();
  const bool is_private = configuration_.privacy.enabled;  // each step has another number of records
  return {.capture = !is_private && configuration_.device.graphs && free &&
                     configuration_.parallel.exchange.leaves_the_host_free() && forward_.selection().is_on_device(),
          .runs_ahead = free,
          .skip = configuration_.run.nonfinite == NonFinite::skip,
          .may_skip = !is_private,
          .skip_at_most = configuration_.run.skip_at_most};
}

/// Adds all state of a run to the registry, in the order of checkpoints.
void Trainer::name_state() {
  model_.add_to(registry_);
  const auto replicated = [&](const std::string& name, kernels::Scalar type, std::int64_t size, void* data,
                              bool on_device) {
    registry_.add({.name = name,
                   .type = type,
                   .shape = {size},
                   .held = {0, size},
                   .owned = {0, grid_.world().rank() == 0 ? size : 0},
                   .data = data,
                   .on_device = on_device});
  };
  // Any content gives the same selection. It depends on transcoder.activation and scope, which a resumed run may
  // change.
  registry_.make_optional("selection/threshold");
  const Selector::ControllerState thresholds = forward_.selection().controller_state();
  if (thresholds.keys.size > 0)
    replicated("selection/threshold", kernels::Scalar::u32, thresholds.keys.size, thresholds.keys.data,
               thresholds.on_device);
  if (configuration_.privacy.enabled) registry_.make_optional("optimizer/previous_gradient_norm");  // earlier versions
  replicated("optimizer/previous_gradient_norm", kernels::Scalar::fp64, 1, step_.clipping().norm(), true);
  replicated("run/skipped_steps", kernels::Scalar::i64, 1, runner_.skipped(), true);
  if (step_.records() != nullptr) step_.records()->register_in(registry_, grid_.world().rank() == 0);
}

void Trainer::initialise() {
  model_.initialise(static_cast<std::uint64_t>(configuration_.run.seed));
  step_.parameters_changed();
}

void Trainer::step(const dataset::RawBatch& batch) {
  timers_.phase("normalise");
  const kernels::AdamStep constants = optimizer::adam_step(
      configuration_.optimizer, steps_done() + 1, configuration_.run.steps,
      static_cast<std::uint64_t>(configuration_.run.seed), 2 / error_divisor(public_tokens(batch)));
  learning_rate_ = static_cast<double>(constants.learning_rate);
  keep_k();
  runner_.begin(constants);
  load(batch);
  step_.begin(steps_done() + 1);
  runner_.run([this] { step_.run(); });
  step_.end(steps_done() + 1);
  timers_.phase("waiting for the device");
  upload_.finish();
  runner_.end([this, batch, step = steps_done() + 1] {
    return fmt::format("batch of {} tokens: {}", batch.n_tokens, locate_(batch, step));
  });
  timers_.stop();
}

/// Tokens of a batch, of a private step those that are expected.
std::int64_t Trainer::public_tokens(const dataset::RawBatch& batch) {
  const RecordClipping* const records = step_.records();
  return records == nullptr ? batch.n_tokens : std::llround(records->expected()) * record_rows(configuration_);
}

/// Announces the records of the batch, and leaves out those that are not finite.
void Trainer::load_records(const dataset::RawBatch& batch) {
  if (record_offsets_.empty())
    for (std::int64_t row = 0, rows = record_rows(configuration_);; row += rows) {
      record_offsets_.push_back(std::min(row, batch.n_tokens));
      if (row >= batch.n_tokens) break;
    }
  step_.records()->begin(steps_done() + 1, record_offsets_, batch.n_tokens);
  record_offsets_.clear();
  step_.records()->screen(batch.inputs, batch.targets);
}

/// Sets k for the next step. A captured graph is valid for one k only.
void Trainer::keep_k() {
  const double k = k_at(configuration_.transcoder, steps_done() + 1, configuration_.run.steps);
  forward_.selection().keep(k);  // an evaluation may have changed it
  if (k != std::exchange(k_, k)) runner_.change();
}

/// Loads a batch: normalised inputs x~ of the own tokens, and their targets.
void Trainer::load(const dataset::RawBatch& batch) {
  dataset::RawBatch here = batch;
  if (!batch.resident) {
    const auto bytes = [](const kernels::AnyMatrix& m) { return m.rows * m.stride * kernels::bytes_of(m.type); };
    const device::Upload::Blocks blocks =
        upload_.bring(execution_, {batch.inputs.data, batch.targets.data}, bytes(batch.inputs), bytes(batch.targets));
    here.inputs.data = blocks.first;
    here.targets.data = blocks.second;
  }
  if (step_.records() != nullptr) load_records(here);
  forward_.load(here);
  step_.load(here.targets);
  if (!batch.resident) upload_.consumed(execution_);
}

TrainingMetrics Trainer::metrics() {
  runner_.wait();
  MetricSums own(model_.shape().n_layers);
  device::copy(execution_, own.sums.data(), step_.loss().sums().data, step_.loss().sums().size * 8,
               device::Direction::to_host);
  kernels::count_at_least(execution_, model_.clocks(), configuration_.transcoder.dead_window, buffers_.dead.data);
  own.dead = static_cast<double>(device::read(execution_, buffers_.dead.data));
  const std::int64_t n_tokens = runner_.steps_here() == 0 ? 1 : forward_.layout().total;
  TrainingMetrics metrics = reduce_metrics(own, model_.shape(), n_tokens, error_divisor(n_tokens), grid_.world());
  if (runner_.steps_here() > 0) step_.fill(metrics, grid_.world());
  metrics.gradient_norm = gradient_norm();
  metrics.skipped = device::read(execution_, runner_.skipped());
  return metrics;
}

double Trainer::gradient_norm() {
  runner_.wait();
  return device::read(execution_, step_.clipping().norm());
}

double Trainer::error_divisor(std::int64_t n_tokens) const {
  return transcoder::error_divisor(configuration_.transcoder, n_tokens, model_.shape().n_layers,
                                   model_.shape().d_model);
}

void Trainer::wait() {
  runner_.wait();
  step_.complete_decoder();
}

void Trainer::time_phases(bool one_by_one) {
  static const parallel::IsolateExchange isolate;
  step_.observe(one_by_one && device::is_asynchronous(execution_) ? &isolate
                                                                  : configuration_.parallel.exchange.observer);
  runner_.capture(!one_by_one);
  timers_.before_switch(one_by_one ? std::function<void()>([this] { step_.fence(); }) : nullptr);
}

model::StepRunner::ExchangeGroups Trainer::counted_exchanges() {
  model::StepRunner::ExchangeGroups groups(3);
  groups[kFeature] = forward_.axis().ranks.exchanges();
  groups[kData] = step_.data_axis().ranks().exchanges();
  groups[kData] += step_.data_axis().overlapped().exchanges();
  for (const Selector* selector : step_.selectors()) groups[kOthers] += selector->exchanges();
  groups[kOthers] += world_.exchanges();
  return groups;
}

parallel::Exchanges Trainer::exchanges() const {
  parallel::Exchanges all;
  for (const parallel::Exchanges& group : runner_.exchanges()) all += group;
  return all;
}

double Trainer::step_exposed_seconds() const {
  return traffic_is_timed() ? runner_.step_traffic().seconds : forward_.idle().seconds();
}

}  // namespace weft::transcoder
