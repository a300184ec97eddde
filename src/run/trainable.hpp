// SPDX-License-Identifier: Apache-2.0
//
// The interface between a model and the training loop. The loop handles steps, not tokens or features: a model takes
// its batches, runs its steps, and names its metrics and its state. One virtual call per step, none inside it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "checkpoint/registry.hpp"
#include "parallel/traffic.hpp"
#include "run/timers.hpp"
#include "storage/json_file.hpp"

namespace weft::run {

/// Position in the data: name -> number. The model that wrote it defines the names.
using Cursor = std::map<std::string, std::int64_t>;

/// One entry of a line of metrics.jsonl.
struct Metric {
  /// Names and numbers, written as a JSON object: {{"min", 1}, {"max", 3}}.
  using Group = std::vector<std::pair<std::string, double>>;

  std::string name;
  /// Vectors are by layer.
  std::variant<double, std::int64_t, std::vector<double>, Group> value;
  std::string progress = {};  ///< format of a number in the progress line, "loss {:.4g}"; "" = not shown
  bool in_result = false;     ///< also in result.train of run.json
  bool compared = false;      ///< of `evaluate`: the loss by which evaluations are compared, the same on all ranks
  bool optional = false;      ///< NaN means "not defined": null in metrics.jsonl, "-" in the progress line
};
/// The metrics of a step, in the order of the line of metrics.jsonl.
using Metrics = std::vector<Metric>;

/// What one step did.
struct Step {
  std::int64_t work = 0;       ///< units of work (Trainable::work_unit), all ranks together
  double waited_for_data = 0;  ///< seconds, this rank
};

/// What this rank sent to others.
struct Communication {
  parallel::Exchanges exchanges;     ///< inside the steps, since the model was constructed
  bool timed = true;                 ///< false: the host runs ahead of the device, seconds are not known
  std::int64_t step_bytes_sent = 0;  ///< bytes of the last step
  double step_exposed_seconds = 0;   ///< time that the computation of the last step waited for exchanges
  /// Rows of batches between ranks, since the model was constructed: they overlap with the steps.
  struct {
    std::int64_t bytes = 0;
    double seconds = 0;  ///< duration of the transfers
    double waited = 0;   ///< time for which steps waited for rows
  } rows = {};
};

class Trainable {
 public:
  virtual ~Trainable() = default;

  /// "tokens", "examples": the unit of Step::work, for rates and totals.
  virtual std::string work_unit() const = 0;

  /// The state: what checkpoints save and load. Complete before `initialise` or a load, and unchanged from then on.
  virtual checkpoint::Registry& registry() = 0;
  /// Sets the initial state. Collective. A resumed run loads the registry instead and calls `resume_at`.
  virtual void initialise() = 0;
  /// After the registry was loaded: the step and the position in the data that it belongs to. Throws Error(io) when the
  /// cursor lacks a name.
  virtual void resume_at(std::int64_t step, const Cursor& cursor) = 0;
  /// Position in the data after the last step.
  virtual Cursor cursor() const = 0;

  /// Before the first step: starts to prepare batches. Collective.
  virtual void start() {}
  /// Waits for the next batch and makes one step. Collective. May return before the device has finished. Throws
  /// Error(numeric) when a number of this step, or of one that was still in flight, is not finite.
  virtual Step step() = 0;
  /// After the last step, also when an exception ends the steps: releases what only steps need. Not collective in the
  /// second case.
  virtual void stop() noexcept {}

  /// Waits for the steps in flight and makes the registered state complete on every rank. Collective; throws as `step`.
  virtual void wait() = 0;
  /// Metrics of the last step, before its update. Collective.
  virtual Metrics metrics() = 0;
  /// Measures on validation data between two steps: every log.evaluate_every steps, after `metrics` and `wait`. Joins
  /// the metrics of the step, under names with the prefix "validation.". Changes no state of the run. Collective.
  virtual Metrics evaluate() { return {}; }
  /// After `metrics` or `wait`.
  virtual Communication communication() const = 0;
  virtual run::Timers& timers() = 0;

  /// Phase -> bytes that one rank must move in it per step, at least: --profile compares them with the limit of the
  /// memory. Collective.
  virtual std::vector<std::pair<std::string, double>> phase_bytes() = 0;

  /// After the last step of a finished run: measures on validation data, which go to the log and into `result` of
  /// run.json. Collective.
  virtual void conclude(Json& result) { static_cast<void>(result); }
  /// After `conclude`: the last line that a finished run prints; "" for none of its own.
  virtual std::string last_line() const { return {}; }
};

}  // namespace weft::run
