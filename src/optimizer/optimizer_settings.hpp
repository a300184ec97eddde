// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "kernels/optimize/parameter_rows.hpp"

namespace weft::input {
class Schema;
}

namespace weft::optimizer {

enum class Schedule { constant, linear, cosine, step, wsd };
enum class ClipMode { exact, previous };
/// How the learning rate is tuned by the loss (optimizer/tuning.hpp).
enum class Tuning { none, range, plateau, greedy };

/// What optimizer.epsilon is multiplied by: nothing, or the factor of the loss gradient. That of a transcoder is
/// 2 / (batch_tokens * d_model), and most features fire on few tokens of a batch: their gradients are proportional to
/// it. With `loss` a step of theirs depends neither on the batch nor on the width.
enum class EpsilonScale { none, loss };
/// The default with `loss`; 1 is the gradient that a token with activation 1 and a residual of 1 gives.
constexpr double kEpsilonOfLoss = 1e-3;

/// Table [optimizer]. The defaults are those of transcoders; another model family assigns its own before `add_keys`.
struct Settings {
  std::string name = "adam";
  double learning_rate = 4e-4;
  double beta1 = 0.9;
  double beta2 = 0.999;
  EpsilonScale epsilon_scale = EpsilonScale::none;  ///< add_keys sets `loss` for transcoders
  double epsilon = 1e-8;
  double weight_decay = 0.0;  ///< decoupled, weights only
  kernels::StorageType state = kernels::StorageType::fp32;
  Schedule schedule = Schedule::linear;
  std::int64_t warmup_steps = 0;    ///< steps of linear warm-up of the learning rate, unless there is a fraction
  double warmup_fraction = 0;       ///< the same as a fraction of the schedule; 0 = warmup_steps
  std::int64_t schedule_steps = 0;  ///< steps over which the schedule extends; 0 = run.steps
  double decay_begin = 0.8;         ///< start of the decay, as a fraction of the schedule, if not constant
  double final_fraction = 0.0;      ///< learning rate at the end, as a fraction of learning_rate, if not constant
  double clip_norm = 0.0;           ///< global gradient norm; 0 = no clipping
  ClipMode clip_mode = ClipMode::exact;
  Tuning tuning = Tuning::none;
  std::int64_t tuning_patience = 10;  ///< steps
};

/// Adds optimizer.warmup_fraction, after all defaults of warmup_steps.
void add_warmup_fraction(input::Schema&, Settings&);

/// The keys of the table, bound to the settings, which must outlive the schema. `of_loss`: with epsilon_scale, `loss`
/// unless the input says otherwise.
void add_keys(input::Schema&, Settings&, bool of_loss = false);
/// Keeps the epsilon of `recorded`, the resolved input of a resumed run (`name` in messages), if it is of an earlier
/// version, which had no epsilon_scale, and the new input gives no epsilon. True if it was kept.
bool keep_epsilon(const input::Schema&, Settings&, std::string_view recorded, const std::string& name);
/// Adds the keys of tuning, for a model family whose step applies it (model/learning_rate_tuning.hpp).
void add_tuning_keys(input::Schema&, Settings&);

}  // namespace weft::optimizer
