// SPDX-License-Identifier: Apache-2.0
#include "privacy/private_step.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/kokkos_runtime.hpp"
#include "privacy/modes.hpp"

namespace weft::privacy {
namespace {

/// Passes whose sinks get the rows of trained parameters alone.
class TrainedPasses final : public Passes {
 public:
  TrainedPasses(Passes& passes, const model::Parameters& parameters) : passes_(passes), parameters_(parameters) {}
  void pass(parallel::Range records, model::GradientSink& sink) override {
    struct Trained final : model::GradientSink {
      Trained(model::GradientSink& to_, std::span<const model::ParameterSpec> specs_) : to(to_), specs(specs_) {}
      void take(const model::GradientRows& rows) override {
        if (!specs[rows.parameter].frozen) to.take(rows);
      }
      void complete_from(std::size_t first) override { to.complete_from(first); }
      void end_micro_batch() override { to.end_micro_batch(); }
      bool takes_sums() const override { return to.takes_sums(); }
      model::GradientSink& to;
      const std::span<const model::ParameterSpec> specs;
    } trained(sink, parameters_.specs());
    passes_.pass(records, trained);
  }

 private:
  Passes& passes_;
  const model::Parameters& parameters_;
};

}  // namespace

PrivateStep::PrivateStep(const Parts& parts, const ClippingContext& context, std::int64_t micro_records,
                         std::string_view sums_phase, kernels::Array<kernels::StepFlags> flags,
                         ClippingBuffers&& buffers)
    : parts_(parts),
      context_(context),
      micro_records_(micro_records),
      sums_phase_(sums_phase),
      flags_(flags),
      bound_(buffers.bound),
      clipping_(make_clipping(context, std::move(buffers))),
      earlier_(context.parameters, context.settings.bands, context.execution) {
  device::copy(context.execution, bound_.data, &context_.settings.clip, sizeof(double), device::Direction::to_device);
  kernels::fence(context.execution);
}

void PrivateStep::register_in(checkpoint::Registry& registry, bool writes) {
  earlier_.register_in(registry);
  if (!context_.settings.adapts_clip()) return;
  registry.add({.name = "privacy/clip_bound",
                .type = kernels::Scalar::fp64,
                .shape = {1},
                .held = {0, 1},
                .owned = {0, writes ? 1 : 0},
                .data = bound_.data,
                .on_device = true});
}

double PrivateStep::clip_bound() const {
  return context_.settings.adapts_clip() ? device::read(context_.execution, bound_.data) : context_.settings.clip;
}

void PrivateStep::add(const MicroBatch& batch, Passes& passes) {
  TrainedPasses trained(passes, context_.parameters);
  clipping_->add(batch, trained);
}

void PrivateStep::run(const kernels::AdamStep& constants, std::int64_t records) {
  std::vector<std::int64_t> micro_batches;
  for (std::int64_t first = 0; first < records; first += micro_records_)
    micro_batches.push_back(std::min(micro_records_, records - first));
  run(constants, micro_batches);
}

void PrivateStep::run(const kernels::AdamStep& constants, std::span<const std::int64_t> micro_batches) {
  model::DataParallel& exchange = parts_.update.exchange();
  parts_.runner.begin(constants);
  exchange.begin_step();
  const std::int64_t own = std::ssize(micro_batches),
                     most = exchange.in_micro_batches() ? exchange.most(std::max<std::int64_t>(1, own)) : own;
  if (context_.tensor != nullptr) context_.tensor->mark(&exchange.idle());
  parts_.runner.run([&] { compute(micro_batches, most); });
  exchange.end_step();
  if (context_.tensor != nullptr) context_.tensor->mark(nullptr);
  parts_.timers.phase("waiting for the device");
  parts_.runner.end([step = parts_.runner.steps_done() + 1] { return fmt::format("batch of step {}", step); });
  parts_.timers.stop();
}

/// most: micro-batches of any rank, where ranks exchange in each of them.
void PrivateStep::compute(std::span<const std::int64_t> micro_batches, std::int64_t most) {
  device::zero(context_.execution, flags_);
  parts_.timers.phase(sums_phase_);
  clear();
  parts_.model.prepare_weights();
  const bool meets = parts_.update.exchange().in_micro_batches();
  for (std::int64_t i = 0, first = 0; i < most; ++i) {
    reduce_beside_sums(meets || (context_.settings.overlap && i + 1 == most));
    const std::int64_t count = i < std::ssize(micro_batches) ? micro_batches[static_cast<std::size_t>(i)] : 0;
    add(count > 0 ? parts_.model.load(first, count) : MicroBatch(), parts_.model);
    context_.sum.end_micro_batch();
    first += count;
  }
  reduce_beside_sums(false);
  parts_.timers.phase("exchange");
  parts_.update.reduce();
  parts_.timers.phase("noise");
  add_noise();
  if (context_.settings.adapts_clip()) adapt_bound();
  parts_.timers.phase("check");
  parts_.update.form_norm(flags_.data);
  parts_.runner.guard(flags_.data);
  parts_.timers.phase("update");
  parts_.update.apply(parts_.runner.constants());
}

void PrivateStep::clear() {
  device::zero(context_.execution, &bound_[1], sizeof(double));
  context_.sum.clear();
  context_.sum.end_micro_batch();
}

/// Sends sums to the owners of their rows as soon as they are complete: in the last micro-batch, or in every one.
void PrivateStep::reduce_beside_sums(bool wanted) {
  if (!wanted || !parts_.update.exchange().active()) return context_.sum.when_complete({});
  context_.sum.when_complete([this](std::size_t parameter) {
    parts_.timers.phase("exchange");
    parts_.update.exchange().reduce_from(parameter);
    parts_.timers.phase(sums_phase_);
  });
}

/// The gradients of the owned rows become (S + sigma C xi) / expected, xi standard normal by (key, update, parameter,
/// global element): once per update, the same on any grid. C bounds what one record adds to S: the sensitivity.
void PrivateStep::add_noise() {
  const model::Parameters& parameters = context_.parameters;
  const auto update = static_cast<std::uint64_t>(parts_.runner.steps_done() + 1);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters.specs()[i].frozen) continue;
    const bool is_matrix = parameters.specs()[i].is_matrix();
    const model::RowParts& parts = parameters.parts(i);
    const kernels::Array<float> vector = context_.sum.vector(i);
    const kernels::Matrix<float> owned =
        is_matrix ? context_.sum.matrix(i) : kernels::Matrix<float>{vector.data, 1, vector.size, vector.size};
    // Every rank has all elements of a vector, and draws the same noise for them.
    const std::int64_t first = is_matrix ? parts.owned.begin * owned.columns : parts.held.begin;
    const kernels::Array<float> values{owned.data, owned.rows * owned.columns};
    const kernels::NoiseStream stream = kernels::noise_stream(noise_.key, update, i);
    if (earlier_.active())
      earlier_.add(i, values, noise_.multiplier * context_.settings.clip, stream, static_cast<std::uint64_t>(first),
                   1 / noise_.expected, parts_.runner.steps_done() + 1);
    else
      kernels::add_noise(context_.execution, values, noise_.multiplier, stream, static_cast<std::uint64_t>(first),
                         1 / noise_.expected, bound_.data);
  }
}

/// The count is a sum of integers: the same on any grid. Ranks of the tensor axis have the same one.
void PrivateStep::adapt_bound() {
  if (parts_.update.exchange().active()) parts_.update.exchange().sum({&bound_[1], 1}, "count of clipped records");
  const Settings& settings = context_.settings;
  kernels::adapt_clip(context_.execution, &bound_[1],
                      {settings.clip_quantile, settings.clip_rate, noise_.count_deviation, noise_.expected},
                      kernels::noise_stream(noise_.key, static_cast<std::uint64_t>(parts_.runner.steps_done() + 1), 0,
                                            kernels::NoisePurpose::clip_bound),
                      bound_.data);
}

}  // namespace weft::privacy
