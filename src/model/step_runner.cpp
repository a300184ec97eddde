// SPDX-License-Identifier: Apache-2.0
#include "model/step_runner.hpp"

#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "parallel/peers.hpp"

namespace weft::model {

StepRunner::Buffers::Buffers(StepArena& arena)
    : constants(arena.take<kernels::AdamStep>(1)),
      guard(arena.take<kernels::StepGuard>(1)),
      host_constants(arena.take_host<kernels::AdamStep>(kRing)),
      outcomes(arena.take_host<kernels::StepOutcome>(kRing)) {}

StepRunner::StepRunner(const Settings& settings, const kernels::Execution& execution, run::Timers& timers,
                       const Buffers& buffers, std::function<ExchangeGroups()> exchanges)
    : settings_(settings),
      execution_(execution),
      timers_(timers),
      counted_(std::move(exchanges)),
      buffers_(buffers),
      ahead_(device::is_asynchronous(execution) && settings.runs_ahead ? kStepsAhead : 0),
      capturable_(settings.capture && device::Graph::possible(execution)),
      captures_(capturable_) {
  device::zero(execution, buffers_.guard);
  parallel::Peers::withhold_when_aborted(buffers_.constants.data, buffers_.guard.data);
}

StepRunner::~StepRunner() { parallel::Peers::withhold_when_aborted(nullptr, nullptr); }

void StepRunner::begin(const kernels::AdamStep& constants) {
  before_step_ = total_traffic();
  // The copy may run later: the host's place is written again kRing steps from now.
  kernels::AdamStep& host = buffers_.host_constants[(steps_done_ + 1) % kRing];
  host = constants;
  device::copy(execution_, buffers_.constants.data, &host, sizeof host, device::Direction::to_device);
}

void StepRunner::run(const std::function<void()>& compute) {
  if (captures_ && prepared_) {
    if (graph_) {
      for (std::size_t i = 0; i < captured_.size(); ++i) replayed_[i] += captured_[i];
    } else {
      const ExchangeGroups before = counted_();
      graph_.emplace().capture(execution_, compute);
      captured_ = counted_();
      for (std::size_t i = 0; i < captured_.size(); ++i) captured_[i] = captured_[i].since(before[i]);
      replayed_.resize(captured_.size());
    }
    timers_.phase("step");
    graph_->replay(execution_);
  } else {
    compute();
    prepared_ = true;
  }
  pending_[(steps_done_ + 1) % kRing].done.record(execution_);
}

void StepRunner::change() {
  wait();
  graph_.reset();
  prepared_ = false;
}

void StepRunner::guard(const kernels::StepFlags* flags, const kernels::LossScale* scale) {
  kernels::guard_step(execution_, flags, settings_.skip ? settings_.skip_at_most : 0, buffers_.guard.data,
                      buffers_.constants.data, buffers_.outcomes.data, scale);
}

void StepRunner::resume_at(std::int64_t step) {
  steps_done_ = steps_known_ = step;
  device::zero(execution_, kernels::Array<std::int64_t>{&buffers_.guard.data->halted, 1});
}

void StepRunner::end(std::function<std::string()> rows) {
  const std::int64_t step = steps_done_ + 1;
  pending_[step % kRing].rows = std::move(rows);
  learn_outcomes(step - ahead_);
  step_traffic_ = total_traffic() - before_step_;
  ++steps_done_;
  ++steps_here_;
}

void StepRunner::wait() { learn_outcomes(steps_done_); }

void StepRunner::learn_outcomes(std::int64_t last) {
  for (; steps_known_ < last; ++steps_known_) {
    const std::int64_t step = steps_known_ + 1;
    const Pending& pending = pending_[step % kRing];
    pending.done.wait();
    const kernels::StepOutcome outcome = buffers_.outcomes[step % kRing];
    if (outcome.loss_scale != loss_scale_ && loss_scale_ > 0)
      log::info("loss scale {:g} instead of {:g} from step {} on", outcome.loss_scale, loss_scale_, step);
    loss_scale_ = outcome.loss_scale;
    if (outcome.withheld == 0) continue;
    if (outcome.overflow != 0) {
      log::info("the gradient overflows fp16 at step {} with the loss scale {:g}: no update", step, outcome.loss_scale);
      continue;
    }
    if (outcome.halted == kernels::kExchangeAborted)
      throw error(ExitCode::communication,
                  "an exchange between GPUs was given up before step {} (a rank is lost); a restart resumes from the "
                  "newest checkpoint",
                  step);
    if (outcome.halted == kernels::kModelFault && explain_fault_) explain_fault_(step);
    if (outcome.halted == kernels::kModelFault)
      throw collective_error(ExitCode::internal, "step {} is not valid, {}", step, pending.rows());
    const std::string what = fmt::format("the loss or its gradient is not finite at step {}, {}", step, pending.rows());
    if (outcome.halted != 0) refuse(what, step);
    log::warning("{}: step skipped", what);
  }
}

void StepRunner::refuse(const std::string& what, std::int64_t step) const {
  if (settings_.skip)
    throw collective_error(ExitCode::numeric,
                           "{}; run.skip_at_most = {} such steps have been skipped already; look at these rows, lower "
                           "optimizer.learning_rate, or raise run.skip_at_most",
                           what, settings_.skip_at_most);
  // The set of records that the step has drawn is private, so no message names them.
  if (!settings_.may_skip)
    throw collective_error(ExitCode::numeric,
                           "the gradient with its noise is not finite at step {} (parameters are those of step {}, "
                           "unharmed); lower optimizer.learning_rate or privacy.clip",
                           step, step - 1);
  throw collective_error(ExitCode::numeric,
                         "{} (parameters are those of step {}, unharmed); look at these rows, lower "
                         "optimizer.learning_rate, or skip such batches with run.nonfinite = \"skip\"",
                         what, step - 1);
}

StepRunner::ExchangeGroups StepRunner::exchanges() const {
  ExchangeGroups all = counted_();
  for (std::size_t i = 0; i < replayed_.size(); ++i) all[i] += replayed_[i];
  return all;
}

parallel::Traffic StepRunner::total_traffic() const {
  parallel::Traffic sum;
  for (const parallel::Exchanges& group : exchanges()) sum += group.total();
  return sum;
}

}  // namespace weft::model
