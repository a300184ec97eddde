// SPDX-License-Identifier: Apache-2.0
//
// What cases without training share: a model of random weights, without moments, on the ranks of the tensor axis.
#pragma once

#include <optional>

#include "bench/benchmark.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "language_model/step/transformer.hpp"

namespace weft::bench {

class ForwardSubject : public BenchmarkSubject {
 public:
  /// The grid must outlive the subject.
  ForwardSubject(const language_model::Configuration& configuration, const language_model::Architecture& architecture,
                 const parallel::Grid& grid, const kernels::Execution& execution)
      : configuration_(configuration),
        architecture_(architecture),
        grid_(grid),
        execution_{device::planned_backend(device_settings(configuration)), execution.stream,
                   device_settings(configuration).tf32} {}

  void wait() override { kernels::fence(execution_); }
  run::Timers& timers() override { return timers_; }
  checkpoint::Registry& registry() override { return registry_; }
  const kernels::Execution& execution() const override { return execution_; }
  void time_phases(bool one_by_one) override {
    timers_.before_switch(one_by_one ? std::function<void()>([this] { wait(); }) : std::function<void()>());
  }
  double row_bytes() const override { return 0; }  // nothing is read
  parallel::Exchanges exchanges() const override { return tensor_ ? tensor_->exchanges() : parallel::Exchanges(); }
  std::int64_t state_bytes() const override { return model_->parameters().bytes().weights; }

 protected:
  /// gathered: bytes that a rank of a divided model gives to the others at a time, at least.
  void build_model(const language_model::TransformerSettings& settings, std::int64_t gathered = 0) {
    arena_.emplace(execution_, grid_);
    model_.emplace(architecture_, configuration_.optimizer.state, grid_.shape(), grid_.world().rank(), execution_,
                   model::Moments::none);
    model_->initialise(static_cast<std::uint64_t>(configuration_.run.seed));
    model_->parameters().add_to(registry_);
    if (grid_.size(parallel::kTensorAxis) > 1)
      tensor_.emplace(grid_, execution_, language_model::tensor_buffers(settings, grid_.shape(), *arena_, gathered),
                      false);
    transformer_.emplace(*model_, settings, timers_, *arena_, tensor_ ? &*tensor_ : nullptr);
  }

  const language_model::Configuration configuration_;
  const language_model::Architecture architecture_;
  const parallel::Grid& grid_;
  const kernels::Execution execution_;
  run::Timers timers_;
  checkpoint::Registry registry_;
  std::optional<model::StepArena> arena_;
  std::optional<language_model::Model> model_;
  std::optional<model::TensorAxis> tensor_;
  std::optional<language_model::Transformer> transformer_;
};

}  // namespace weft::bench
