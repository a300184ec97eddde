// SPDX-License-Identifier: Apache-2.0
//
// Tables [run], [log] and [resume]: what every training run has, whatever the model.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace weft::input {
class Schema;
}

namespace weft::run {

/// What happens when a loss or gradient is not finite.
enum class NonFinite { stop, skip };

/// Table [run].
struct RunSettings {
  std::string output = "runs/weft";
  std::int64_t steps = 1000;
  double epochs = 0;  ///< passes over the training data instead of `steps`; 0 = steps (use_epochs)
  std::int64_t seed = 1;
  std::int64_t stop_after = 0;  ///< evaluations in a row without a lower validation loss; 0 = no limit
  std::string walltime = "";    ///< hh:mm:ss; "" = no limit
  std::int64_t lease = 60;      ///< seconds (checkpoint/lease.hpp)
  NonFinite nonfinite = NonFinite::stop;
  std::int64_t skip_at_most = 10;  ///< nonfinite = "skip": steps that may be skipped in a run
};

/// Table [log].
struct LogSettings {
  std::int64_t every = 20;          ///< steps between lines of metrics.jsonl
  std::int64_t evaluate_every = 0;  ///< steps between evaluations on validation data; 0 = at the end only
};

/// Table [resume].
struct ResumeSettings {
  bool accept_changed = false;      ///< resume although keys that define the run have changed
  bool ignore_no_progress = false;  ///< start although the last starts made no step
};

/// Keys and rules of one table, bound to the settings, which must outlive the schema.
void add_keys(input::Schema&, RunSettings&);
void add_keys(input::Schema&, LogSettings&);
void add_keys(input::Schema&, ResumeSettings&);

/// Converts run.epochs, if it is given, into run.steps, the number of steps after which that many epochs are complete,
/// and checks the rules of the schema that depend on it. From then on run.epochs is 0: the resolved input of a run
/// states its steps. `steps_per_epoch`: 0 if it is not known. Throws a collective Error(usage).
void use_epochs(RunSettings&, const input::Schema&, double steps_per_epoch);

/// Throws a collective Error(usage) if run.stop_after or checkpoint.keep_best compares validation losses and there is
/// no validation data.
void require_validation(const RunSettings&, bool keep_best, bool has_validation);

/// Seconds of "hh:mm:ss" (hours may exceed 99); nothing when the text is not of this form.
std::optional<std::int64_t> parse_walltime(std::string_view text);

}  // namespace weft::run
