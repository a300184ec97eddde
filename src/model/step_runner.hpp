// SPDX-License-Identifier: Apache-2.0
//
// How the steps of a run are given to the device, whatever the model.
//
// On a GPU the host only submits work. It runs up to kStepsAhead steps ahead, and from the second step on the whole
// step is one captured graph: the first step runs eagerly and prepares what is prepared on first use, the second is
// captured, and from then on the graph is replayed. What differs from step to step (rows, constants) is copied into
// fixed places before it.
//
// Whether a step may update anything is decided on the device (kernels/optimize/guard.hpp). The host reads the outcome
// from a ring in its own memory kStepsAhead steps later, and always in `wait`.
//
// One step:
//
//   runner.begin(constants);                  // copied to the device
//   …                                         // copy the batch to the device
//   runner.run([&] { compute(); });           // eager, captured or replayed; calls runner.guard before any update
//   runner.end([=] { return "which rows"; }); // outcomes of earlier steps
//
// On the host every call returns when its work is done, and `end` reports the outcome of its own step.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "device/stream.hpp"
#include "kernels/optimize/guard.hpp"
#include "model/step_arena.hpp"
#include "parallel/traffic.hpp"
#include "run/agreement.hpp"
#include "run/timers.hpp"

namespace weft::model {

class StepRunner {
 public:
  static constexpr std::int64_t kStepsAhead = run::kStepsAhead;

  struct Settings {
    bool capture = true;            ///< capture and replay, where the execution can (device.graphs)
    bool runs_ahead = true;         ///< exchanges of a step do not wait for the host
    bool skip = false;              ///< skip steps that are not finite (run.nonfinite = "skip"); false: stop
    bool may_skip = true;           ///< false: a private run, in which skipping would break the guarantee
    std::int64_t skip_at_most = 0;  ///< skips in a run
  };

  struct Buffers {
    Buffers() = default;
    explicit Buffers(StepArena&);
    kernels::Array<kernels::AdamStep> constants;       ///< [1], of the present step
    kernels::Array<kernels::StepGuard> guard;          ///< [1]
    kernels::Array<kernels::AdamStep> host_constants;  ///< ring by step number
    kernels::Array<kernels::StepOutcome> outcomes;     ///< ring by step number
  };

  /// Exchanges since the start, in groups that the model chooses (one per axis, say).
  using ExchangeGroups = std::vector<parallel::Exchanges>;

  /// `exchanges`: what the model's communicators have counted. The timers and the arena of the buffers must outlive the
  /// runner.
  StepRunner(const Settings&, const kernels::Execution&, run::Timers&, const Buffers&,
             std::function<ExchangeGroups()> exchanges);
  StepRunner(const StepRunner&) = delete;
  ~StepRunner();

  /// Starts step `steps_done() + 1`.
  void begin(const kernels::AdamStep& constants);
  /// Submits `compute`, which must launch the same work in every step (but for `change`): neither allocate nor wait
  /// when captured.
  void run(const std::function<void()>& compute);
  /// Called in `compute`. Withholds the update of this step (constants()->withheld) when a flag is set, and halts all
  /// later steps when no more may be skipped. The same on all ranks if *flags is. `scale`: of an fp16 backward pass.
  void guard(const kernels::StepFlags* flags, const kernels::LossScale* scale = nullptr);
  /// Ends the step. `rows` says which rows it worked on, for messages; called for steps without an update only. When an
  /// earlier step halted the run, throws on all ranks: a collective Error(numeric) if it was not finite, what
  /// `explain_fault` throws if the model found a fault; Error(communication) if an exchange was aborted.
  void end(std::function<std::string()> rows);
  /// Waits for all steps and their outcomes. Throws as `end`.
  void wait();

  /// `explain(step)` throws the collective error of a step that halted with StepFlags::model_fault. Called by `end` and
  /// `wait`, on all ranks.
  void explain_fault(std::function<void(std::int64_t step)> explain) { explain_fault_ = std::move(explain); }

  /// False: from now on every step runs eagerly, so that its phases can be timed.
  void capture(bool capture) { captures_ = capture && capturable_; }

  /// From the next step on, `compute` launches other work: the first such step runs eagerly, the second is captured.
  /// Waits for all steps; throws as `end`.
  void change();

  kernels::AdamStep* constants() const { return buffers_.constants.data; }
  /// Steps without an update since the start of the run; where the kernels run, for the checkpoint.
  std::int64_t* skipped() const { return &buffers_.guard.data->skipped; }
  std::int64_t steps_done() const { return steps_done_; }
  std::int64_t steps_here() const { return steps_here_; }  ///< by this object
  /// After a resume: the step of the loaded state. A run that was halted continues.
  void resume_at(std::int64_t step);

  /// Exchanges since the start, replayed steps included.
  ExchangeGroups exchanges() const;
  /// Traffic of the last step.
  const parallel::Traffic& step_traffic() const { return step_traffic_; }

 private:
  static constexpr std::int64_t kRing = kernels::kOutcomes;
  static_assert(kStepsAhead < kRing);

  struct Pending {
    std::function<std::string()> rows;
    device::Event done;
  };
  void learn_outcomes(std::int64_t last);
  [[noreturn]] void refuse(const std::string& what, std::int64_t step) const;
  parallel::Traffic total_traffic() const;

  const Settings settings_;
  const kernels::Execution execution_;
  run::Timers& timers_;
  const std::function<ExchangeGroups()> counted_;  // by calls; a replay makes none
  std::function<void(std::int64_t step)> explain_fault_;
  const Buffers buffers_;
  const std::int64_t ahead_;
  const bool capturable_;
  bool captures_;
  std::optional<device::Graph> graph_;
  bool prepared_ = false;               // this work has run once
  ExchangeGroups captured_, replayed_;  // exchanges of one replay; of all replays
  parallel::Traffic before_step_, step_traffic_;
  Pending pending_[kRing];
  std::int64_t steps_done_ = 0;   // submitted
  std::int64_t steps_known_ = 0;  // with known outcome
  std::int64_t steps_here_ = 0;
  double loss_scale_ = 0;  // the scale of the last step with a known outcome
};

}  // namespace weft::model
