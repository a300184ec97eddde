// SPDX-License-Identifier: Apache-2.0
//
// What cases without training share: a model of random weights, without moments.
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
  std::int64_t state_bytes() const override { return model_->parameters().bytes().weights; }

 protected:
  void build_model(const language_model::TransformerSettings& settings) {
    arena_.emplace(execution_, grid_);
    model_.emplace(architecture_, configuration_.optimizer.state, grid_.shape(), 0, execution_, model::Moments::none);
    model_->initialise(static_cast<std::uint64_t>(configuration_.run.seed));
    model_->parameters().add_to(registry_);
    transformer_.emplace(*model_, settings, timers_, *arena_);
  }

  const language_model::Configuration configuration_;
  const language_model::Architecture architecture_;
  const parallel::Grid& grid_;
  const kernels::Execution execution_;
  run::Timers timers_;
  checkpoint::Registry registry_;
  std::optional<model::StepArena> arena_;
  std::optional<language_model::Model> model_;
  std::optional<language_model::Transformer> transformer_;
};

}  // namespace weft::bench
