// SPDX-License-Identifier: Apache-2.0
#include "transcoder/private/private_trainer.hpp"

#include <utility>

#include "kernels/kokkos_runtime.hpp"
#include "optimizer/schedule.hpp"

namespace weft::transcoder {
namespace {

const parallel::Grid& without_feature_axis(const parallel::Grid& grid) {
  require_private_grid(grid.shape());
  return grid;
}

}  // namespace

PrivateTrainer::Buffers::Buffers(const Configuration& configuration, const Shape& shape, std::int64_t row_bytes,
                                 model::StepArena& arena) {
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
  runner = model::StepRunner::Buffers(arena);
  clipping = privacy::ClippingBuffers(configuration.privacy, parameter_specs(shape),
                                      clipping_shape(configuration, shape), arena);
}

model::StepArena measure_private_step(const Configuration& configuration, const Shape& plain,
                                      const parallel::GridShape& grid, std::int64_t row_bytes,
                                      kernels::Backend backend) {
  model::StepArena arena(backend);
  const Shape shape = private_shape(plain);
  const std::vector<model::ParameterSpec> specs = parameter_specs(shape);
  const std::int64_t rows = private_micro_rows(configuration);
  const Forward::Buffers forward(configuration, shape, grid, configuration.data.batch_tokens, arena);
  const ExamplePass::Buffers pass(shape, rows, arena);
  const PrivateTrainer::Buffers trainer(configuration, shape, row_bytes, arena);
  arena.purpose("gradients");
  const model::ParameterUpdate::Buffers update(model::AccumulatingSink::elements(specs, grid, 0), arena, {},
                                               model::DataParallel::Buffers(specs, grid, 0, arena));
  arena.purpose("gradients");
  arena.count(model::StepArena::Where::device,
              model::AccumulatingSink::bytes(specs, grid, 0, rows) +
                  privacy::own_bytes(configuration.privacy, specs, grid, clipping_shape(configuration, shape)));
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
      update_(model_.parameters(), sink_, configuration.optimizer, grid, execution,
              model::ParameterUpdate::Buffers(
                  model::AccumulatingSink::elements(model_.parameters().specs(), grid.shape(), grid.world().rank()),
                  arena_, {}, model::DataParallel::Buffers(model_.parameters().specs(), grid.shape(), 0, arena_)),
              configuration.privacy.overlap),
      runner_(runner_settings(), execution, timers_, buffers_.runner,
              [this] { return model::StepRunner::ExchangeGroups{update_.exchange().exchanges()}; }),
      private_({*this, update_, runner_, timers_},
               {.parameters = model_.parameters(),
                .sum = sink_,
                .settings = configuration.privacy,
                .shape = clipping_shape(configuration, model_.shape()),
                .execution = execution},
               private_micro_rows(configuration) / record_rows(configuration), "gradients of records", buffers_.flags,
               std::move(buffers_.clipping)) {
  model_.add_to(registry_);
  private_.register_in(registry_, grid.world().rank() == 0);
  registry_.add({.name = "run/skipped_steps",
                 .type = kernels::Scalar::i64,
                 .shape = {1},
                 .held = {0, 1},
                 .owned = {0, grid.world().rank() == 0 ? 1 : 0},
                 .data = runner_.skipped(),
                 .on_device = true});
}

model::StepRunner::Settings PrivateTrainer::runner_settings() const {
  // The number of micro-batches changes from step to step.
  return {.capture = false,
          .runs_ahead = !update_.exchange().active() || update_.exchange().leaves_the_host_free(),
          .may_skip = false};
}

void PrivateTrainer::step(std::span<const std::int64_t> lengths, const Read& read) {
  const Shape& shape = model_.shape();
  lengths_ = lengths;
  read_ = &read;
  private_.run(optimizer::adam_step(configuration_.optimizer, steps_done() + 1, configuration_.run.steps,
                                    static_cast<std::uint64_t>(configuration_.run.seed),
                                    2 / error_divisor(configuration_.transcoder, configuration_.data.batch_tokens,
                                                      shape.n_layers, shape.d_model)),
               std::ssize(lengths));
}

void PrivateTrainer::prepare_weights() {
  timers_.phase("exchange");
  update_.exchange().start_weights();
  update_.exchange().await_weights();
}

privacy::MicroBatch PrivateTrainer::load(std::int64_t first, std::int64_t count) {
  timers_.phase("reading rows");
  kernels::fence(execution_);  // wait for the copies of the previous micro-batch
  const std::int64_t width = model_.shape().width();
  std::int64_t* const offsets = buffers_.host_offsets.data;
  offsets[0] = 0;
  for (std::int64_t i = 0; i < count; ++i) offsets[i + 1] = offsets[i] + lengths_[static_cast<std::size_t>(first + i)];
  const std::int64_t rows = offsets[count], bytes = rows * width * kernels::bytes_of(stored_);
  (*read_)(first, count, {buffers_.host_inputs.data, buffers_.host_targets.data});
  if constexpr (kernels::kCudaBuild) {
    device::copy(execution_, buffers_.raw_inputs.data, buffers_.host_inputs.data, bytes, device::Direction::to_device);
    device::copy(execution_, buffers_.raw_targets.data, buffers_.host_targets.data, bytes,
                 device::Direction::to_device);
    device::copy(execution_, buffers_.offsets.data, offsets, 8 * (count + 1), device::Direction::to_device);
  }
  timers_.phase("gradients of records");
  pass_.load({buffers_.raw_inputs.data, stored_, rows, width, width},
             {buffers_.raw_targets.data, stored_, rows, width, width});
  batch_.examples = {.offsets = {offsets, static_cast<std::size_t>(count + 1)},
                     .device_offsets = {buffers_.offsets.data, count + 1}};
  return batch_;
}

void PrivateTrainer::pass(parallel::Range records, model::GradientSink& sink) {
  const kernels::Examples& all = batch_.examples;
  // Only the naive mode takes records one by one; it needs no limits of records.
  pass_.run({all.offsets[static_cast<std::size_t>(records.begin)], all.offsets[static_cast<std::size_t>(records.end)]},
            records.size() == all.count() ? all : kernels::Examples{}, steps_done() + 1, sink);
}

/// Thresholds are held as theta, whatever the trained parameter is.
bool PrivateTrainer::update(std::size_t parameter, kernels::Array<const float> gradient) {
  if (!model_.parameters().specs()[parameter].name.ends_with("/threshold")) return false;
  kernels::update_thresholds(execution_, jump_rule(configuration_.transcoder),
                             model_.parameters().owned_vector(parameter), gradient, runner_.constants());
  return true;
}

void PrivateTrainer::wait() {
  runner_.wait();
  update_.exchange().start_weights();
  update_.exchange().await_weights();
}

PrivateTrainer::Metrics PrivateTrainer::metrics() {
  runner_.wait();
  return {.learning_rate = static_cast<double>(device::read(execution_, runner_.constants()).learning_rate),
          .gradient_norm = device::read(execution_, update_.norm()),
          .clip_bound = private_.clip_bound()};
}

}  // namespace weft::transcoder
