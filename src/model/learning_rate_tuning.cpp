// SPDX-License-Identifier: Apache-2.0
#include "model/learning_rate_tuning.hpp"

#include <cstring>
#include <vector>

#include "base/error.hpp"
#include "device/memory.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/reduce/reduce.hpp"

namespace weft::model {
namespace {

/// A copy of the registered state in host memory.
class SavedState {
 public:
  SavedState(const checkpoint::Registry& registry, const kernels::Execution& execution)
      : registry_(registry), execution_(execution) {
    for (const checkpoint::Tensor& tensor : registry.tensors()) {
      copies_.emplace_back(tensor.held.size() * tensor.row_bytes(), device::Allocation::Where::host);
      const device::Allocation& copy = copies_.back();
      if (tensor.gather)
        tensor.gather(tensor.held, copy.data());
      else if (tensor.on_device)
        device::copy(execution, copy.data(), tensor.data, copy.bytes(), device::Direction::to_host);
      else if (copy.bytes() > 0)
        std::memcpy(copy.data(), tensor.data, static_cast<std::size_t>(copy.bytes()));
    }
    kernels::fence(execution);
  }

  void restore() const {
    for (std::size_t i = 0; i < copies_.size(); ++i) {
      const checkpoint::Tensor& tensor = registry_.tensors()[i];
      const device::Allocation& copy = copies_[i];
      if (tensor.scatter)
        tensor.scatter(tensor.held, copy.data());
      else if (tensor.on_device)
        device::copy(execution_, tensor.data, copy.data(), copy.bytes(), device::Direction::to_device);
      else if (copy.bytes() > 0)
        std::memcpy(tensor.data, copy.data(), static_cast<std::size_t>(copy.bytes()));
    }
    kernels::fence(execution_);
  }

 private:
  const checkpoint::Registry& registry_;
  const kernels::Execution execution_;
  std::vector<device::Allocation> copies_;
};

}  // namespace

LearningRateTuning::Buffers::Buffers(const optimizer::Settings& settings, std::int64_t n_losses, StepArena& arena) {
  if (settings.tuning == optimizer::Tuning::none) return;
  state = arena.take<kernels::TuningState>(1);
  sum = arena.take<double>(1);
  workspace = arena.take<double>(kernels::total_workspace(n_losses));
}

LearningRateTuning::LearningRateTuning(const optimizer::Settings& settings, std::int64_t steps,
                                       const kernels::Execution& execution, const Buffers& buffers)
    : settings_(settings), rule_(optimizer::tuning_rule(settings, steps)), execution_(execution), buffers_(buffers) {
  initialise();
}

void LearningRateTuning::add_to(checkpoint::Registry& registry, int world_rank) const {
  if (buffers_.state.size == 0) return;
  registry.add({.name = "optimizer/tuning",
                .type = kernels::Scalar::fp64,
                .shape = {kernels::kTuningNumbers},
                .held = {0, kernels::kTuningNumbers},
                .owned = {0, world_rank == 0 ? kernels::kTuningNumbers : 0},
                .data = buffers_.state.data,
                .on_device = true});
}

void LearningRateTuning::initialise() { set_factor(1); }

void LearningRateTuning::set_rate(double rate) { set_factor(rate / settings_.learning_rate); }

void LearningRateTuning::set_factor(double factor) {
  if (buffers_.state.size == 0) return;
  const kernels::TuningState state{.factor = factor};
  device::copy(execution_, buffers_.state.data, &state, sizeof state, device::Direction::to_device);
  kernels::fence(execution_);
}

double LearningRateTuning::factor() const {
  kernels::TuningState state;
  if (buffers_.state.size == 0) return state.factor;
  device::copy(execution_, &state, buffers_.state.data, sizeof state, device::Direction::to_host);
  kernels::fence(execution_);
  return state.factor;
}

void LearningRateTuning::apply(kernels::Array<const float> losses, const float* scale, kernels::AdamStep* step) const {
  if (buffers_.state.size == 0) return;
  kernels::total(execution_, losses, buffers_.workspace, buffers_.sum.data);
  kernels::tune_learning_rate(execution_, rule_, buffers_.sum.data, scale, buffers_.state.data, step);
}

double range_test(const checkpoint::Registry& registry, const kernels::Execution& execution,
                  const std::function<double(double rate)>& step) {
  const SavedState saved(registry, execution);
  optimizer::RangeTest test;
  try {
    for (std::int64_t i = 0; test.add(step(optimizer::RangeTest::rate(i))); ++i) {
    }
  } catch (const Error& failure) {
    // The error is known to all ranks: the loss has diverged.
    if (failure.code() != ExitCode::numeric || failure.known_to() != KnownTo::all_ranks) throw;
  }
  saved.restore();
  const double rate = test.result();
  if (rate == 0)
    throw collective_error(
        ExitCode::usage,
        "optimizer.tuning = \"range\" finds no learning rate (the loss falls at none between {:g} and "
        "{:g}); set optimizer.learning_rate, with optimizer.tuning = \"none\"",
        optimizer::RangeTest::kFirst, optimizer::RangeTest::kLast);
  return rate;
}

}  // namespace weft::model
