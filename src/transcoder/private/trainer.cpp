// SPDX-License-Identifier: Apache-2.0
#include "transcoder/private/trainer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "kernels/runtime.hpp"
#include "optimizer/schedule.hpp"

namespace weft::transcoder {
namespace {

const parallel::Grid& without_feature_axis(const parallel::Grid& grid) {
  require_private_grid(grid.shape());
  return grid;
}

}  // namespace

PrivateTrainer::Buffers::Buffers(const Configuration& configuration, const Shape& shape, std::int64_t row_bytes,
                                 training::StepArena& arena) {
  const std::int64_t rows = private_micro_rows(configuration), records = rows / record_rows(configuration);
  arena.purpose("rows as stored");
  host_inputs = raw_inputs = arena.take_host<std::byte>(rows * row_bytes);
  host_targets = raw_targets = arena.take_host<std::byte>(rows * row_bytes);
  host_offsets = offsets = arena.take_host<std::int64_t>(records + 1);
  if constexpr (kernels::kCudaBuild) {
    raw_inputs = arena.take<std::byte>(rows * row_bytes);
    raw_targets = arena.take<std::byte>(rows * row_bytes);
    offsets = arena.take<std::int64_t>(records + 1);
  }
  flags = arena.take<kernels::StepFlags>(1);
  runner = training::StepRunner::Buffers(arena);
  clipping = privacy::Clipping::Buffers(configuration.privacy, parameter_specs(shape),
                                        clipping_shape(configuration, shape), arena);
}

training::StepArena measure_private_step(const Configuration& configuration, const Shape& plain,
                                         const parallel::GridShape& grid, std::int64_t row_bytes,
                                         kernels::Backend backend) {
  training::StepArena arena(backend);
  const Shape shape = private_shape(plain);
  const std::vector<training::ParameterSpec> specs = parameter_specs(shape);
  const std::int64_t rows = private_micro_rows(configuration);
  const Forward::Buffers forward(configuration, shape, grid, configuration.data.batch_tokens, arena);
  const ExamplePass::Buffers pass(shape, rows, arena);
  const PrivateTrainer::Buffers trainer(configuration, shape, row_bytes, arena);
  arena.purpose("gradients");
  const training::ParameterUpdate::Buffers update(training::AccumulatingSink::elements(specs, grid, 0), arena, {},
                                                  training::DataParallel::Buffers(specs, grid, 0, arena));
  arena.purpose("gradients");
  arena.count(
      training::StepArena::Where::device,
      training::AccumulatingSink::bytes(specs, grid, 0, rows) +
          privacy::Clipping::own_bytes(configuration.privacy, specs, grid, clipping_shape(configuration, shape)));
  return arena;
}

PrivateTrainer::PrivateTrainer(const Configuration& configuration, const Shape& shape,
                               const dataset::Normalisation& normalisation, const dataset::Statistics& statistics,
                               const parallel::Grid& grid, const kernels::Execution& execution, kernels::Scalar stored)
    : configuration_(configuration),
      execution_(execution),
      stored_(stored),
      arena_(execution, without_feature_axis(grid)),
      model_(private_shape(shape), configuration.optimizer.state, grid, execution, Moments::held),
      normalisation_(normalisation, statistics, execution),
      forward_(configuration_, model_, normalisation_, grid, execution, timers_, configuration.data.batch_tokens,
               arena_),
      pass_(configuration_, model_, normalisation_, execution, arena_),
      sink_(model_.parameters(), execution, private_micro_rows(configuration)),
      buffers_(configuration_, model_.shape(), shape.width() * kernels::bytes_of(stored), arena_),
      clipping_(model_.parameters(), sink_, configuration_.privacy, clipping_shape(configuration_, model_.shape()),
                execution, std::move(buffers_.clipping)),
      update_(model_.parameters(), sink_, configuration.optimizer, grid, execution,
              training::ParameterUpdate::Buffers(
                  training::AccumulatingSink::elements(model_.parameters().specs(), grid.shape(), grid.world().rank()),
                  arena_, {}, training::DataParallel::Buffers(model_.parameters().specs(), grid.shape(), 0, arena_)),
              configuration.privacy.overlap),
      runner_(runner_settings(), execution, timers_, buffers_.runner,
              [this] { return training::StepRunner::ExchangeGroups{update_.exchange().exchanges()}; }) {
  model_.add_to(registry_);
  registry_.add({.name = "run/skipped_steps",
                 .type = kernels::Scalar::i64,
                 .shape = {1},
                 .held = {0, 1},
                 .owned = {0, grid.world().rank() == 0 ? 1 : 0},
                 .data = runner_.skipped(),
                 .on_device = true});
}

training::StepRunner::Settings PrivateTrainer::runner_settings() const {
  // The number of micro-batches changes from step to step.
  return {.record = false,
          .runs_ahead = !update_.exchange().active() || update_.exchange().leaves_the_host_free(),
          .may_skip = false};
}

void PrivateTrainer::step(std::span<const std::int64_t> lengths,
                          const std::function<void(std::int64_t first, std::int64_t count, Rows)>& read) {
  const Shape& shape = model_.shape();
  runner_.begin(optimizer::adam_step(
      configuration_.optimizer, steps_done() + 1, configuration_.run.steps,
      static_cast<std::uint64_t>(configuration_.run.seed),
      2 / error_divisor(configuration_.transcoder, configuration_.data.batch_tokens, shape.n_layers, shape.d_model)));
  runner_.run([&] { compute(lengths, read); });
  update_.exchange().end_step();
  timers_.phase("waiting for the device");
  runner_.end([step = steps_done() + 1] { return fmt::format("batch of step {}", step); });
  timers_.stop();
}

void PrivateTrainer::compute(std::span<const std::int64_t> lengths,
                             const std::function<void(std::int64_t first, std::int64_t count, Rows)>& read) {
  update_.exchange().begin_step();
  timers_.phase("exchange");
  update_.exchange().start_weights();
  update_.exchange().await_weights(model_.parameters().size());
  device::zero(execution_, buffers_.flags);
  clipping_.begin();
  const std::int64_t micro = private_micro_rows(configuration_) / record_rows(configuration_);
  const std::int64_t width = model_.shape().width(), records = std::ssize(lengths);
  for (std::int64_t first = 0; first < records; first += micro) {
    const std::int64_t count = std::min(micro, records - first);
    timers_.phase("reading rows");
    kernels::fence(execution_);  // the copies of the micro-batch before are over
    std::int64_t* const offsets = buffers_.host_offsets.data;
    offsets[0] = 0;
    for (std::int64_t i = 0; i < count; ++i) offsets[i + 1] = offsets[i] + lengths[static_cast<std::size_t>(first + i)];
    const std::int64_t rows = offsets[count], bytes = rows * width * kernels::bytes_of(stored_);
    read(first, count, {buffers_.host_inputs.data, buffers_.host_targets.data});
    if constexpr (kernels::kCudaBuild) {
      device::copy(execution_, buffers_.raw_inputs.data, buffers_.host_inputs.data, bytes,
                   device::Direction::to_device);
      device::copy(execution_, buffers_.raw_targets.data, buffers_.host_targets.data, bytes,
                   device::Direction::to_device);
      device::copy(execution_, buffers_.offsets.data, offsets, 8 * (count + 1), device::Direction::to_device);
    }
    timers_.phase("gradients of records");
    if (first + micro >= records && update_.exchange().active())
      sink_.when_complete([this](std::size_t parameter) {
        timers_.phase("exchange");
        update_.exchange().reduce_from(parameter);
        timers_.phase("gradients of records");
      });
    pass_.load({buffers_.raw_inputs.data, stored_, rows, width, width},
               {buffers_.raw_targets.data, stored_, rows, width, width});
    const kernels::Examples all{.offsets = {offsets, static_cast<std::size_t>(count + 1)},
                                .device_offsets = {buffers_.offsets.data, count + 1}};
    clipping_.add({.examples = all, .pass = [&](parallel::Range range, training::GradientSink& sink) {
                     // Only the naive mode takes examples one by one; it needs no limits of examples.
                     pass_.run({offsets[range.begin], offsets[range.end]},
                               range.size() == count ? all : kernels::Examples{}, steps_done() + 1, sink);
                   }});
  }
  sink_.when_complete({});
  timers_.phase("exchange");
  kernels::StepFlags* const flags = buffers_.flags.data;
  update_.form_norm(flags, [&] {
    timers_.phase("noise");
    clipping_.add_noise(noise_.key, static_cast<std::uint64_t>(steps_done() + 1), noise_.multiplier, noise_.expected);
    timers_.phase("check");
  });
  runner_.guard(flags);
  timers_.phase("update");
  update_.apply(runner_.constants(), nullptr, [&](std::size_t parameter, kernels::Array<const float> gradient) {
    return update_threshold(parameter, gradient);
  });
}

/// Thresholds are held as theta, whatever the trained parameter is.
bool PrivateTrainer::update_threshold(std::size_t parameter, kernels::Array<const float> gradient) {
  if (!model_.parameters().specs()[parameter].name.ends_with("/threshold")) return false;
  kernels::update_thresholds(execution_, jump_rule(configuration_.transcoder),
                             model_.parameters().owned_vector(parameter), gradient, runner_.constants());
  return true;
}

void PrivateTrainer::settle() {
  runner_.settle();
  update_.exchange().start_weights();
  update_.exchange().await_weights(model_.parameters().size());
}

PrivateTrainer::Metrics PrivateTrainer::metrics() {
  runner_.settle();
  return {.learning_rate = static_cast<double>(device::read(execution_, runner_.constants()).learning_rate),
          .gradient_norm = device::read(execution_, update_.norm())};
}

}  // namespace weft::transcoder
