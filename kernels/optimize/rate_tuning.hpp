// SPDX-License-Identifier: Apache-2.0
//
// A factor of the learning rate that follows the loss during training. It is formed in the memory of the kernels: a
// step neither waits for its loss nor reads it on the host, and a captured step can be replayed. All ranks get the same
// factor if the loss is reduced over them.
//
// With mean_t the mean of the last kTuningWindow losses and best the least mean so far, a step is
//
//   better    mean_t < best - change |best|      best = mean_t
//   worse     mean_t > best + change |best|, or with `lowers_on_plateau` every step that is not better
//
// After `patience` worse steps in a row the factor is multiplied by `down`, after `patience` better ones by `up`.
// A loss above `spike` times the mean of the losses before it lowers the factor at once. Each lowering is followed by
// `cooldown` steps that are not evaluated.
//
// "plateau" lowers only (PyTorch's ReduceLROnPlateau on a moving average, with spikes); "greedy" is GreedyLR
// (arXiv 2512.14527). Their constants: optimizer/tuning.hpp.
#pragma once

#include <cstdint>

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/optimize/parameter_rows.hpp"

namespace weft::kernels {

inline constexpr int kTuningWindow = 20;

struct TuningRule {
  std::int64_t first_step =
      1;  ///< earlier steps (the warm-up) are not evaluated; larger than any step: a constant factor
  std::int64_t patience = 10;
  std::int64_t cooldown = 0;
  double down = 1;    ///< at most 1
  double up = 1;      ///< at least 1; 1: the factor never rises
  double change = 0;  ///< relative
  double spike = 0;   ///< 0: losses are not compared with the mean
  bool lowers_on_plateau = false;
  double least = 0, largest = 1;  ///< bounds of the factor
};

/// The whole state, all in fp64, so that a checkpoint stores it as one tensor. The losses are a ring by their count.
struct TuningState {
  double factor = 1;
  double count = 0;  ///< losses so far
  double best = 0;   ///< valid if count > 0
  double better = 0, worse = 0;
  double cooldown = 0;  ///< steps left
  double losses[kTuningWindow] = {};
};
inline constexpr std::int64_t kTuningNumbers = sizeof(TuningState) / sizeof(double);
static_assert(sizeof(TuningState) == kTuningNumbers * sizeof(double) && kTuningNumbers == 6 + kTuningWindow);

/// Mean of the last kTuningWindow losses.
WEFT_HOST_DEVICE inline double tuning_mean(const TuningState& state) {
  const int n = state.count < kTuningWindow ? static_cast<int>(state.count) : kTuningWindow;
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += state.losses[i];
  return sum / (n > 0 ? n : 1);
}

/// Takes the loss of a step, which must be finite, and returns the factor for the update of this step.
WEFT_HOST_DEVICE inline double tune(const TuningRule& rule, std::int64_t step, double loss, TuningState& state) {
  if (step < rule.first_step) return state.factor;
  const bool spike = rule.spike > 0 && state.count >= kTuningWindow && loss > rule.spike * tuning_mean(state);
  state.losses[static_cast<std::int64_t>(state.count) % kTuningWindow] = loss;
  const bool first = state.count == 0;
  state.count += 1;
  const double mean = tuning_mean(state);
  const double change = rule.change * (state.best < 0 ? -state.best : state.best);
  const bool better = first || mean < state.best - change;
  const bool worse = !better && (rule.lowers_on_plateau || mean > state.best + change);
  if (better) state.best = mean;
  if (state.cooldown > 0) {
    state.cooldown -= 1;
    return state.factor;
  }
  state.better = better ? state.better + 1 : 0;
  state.worse = worse ? state.worse + 1 : 0;
  const auto patience = static_cast<double>(rule.patience);
  if (spike || state.worse >= patience) {
    state.factor = state.factor * rule.down > rule.least ? state.factor * rule.down : rule.least;
    state.worse = 0;
    state.cooldown = static_cast<double>(rule.cooldown);
  } else if (state.better >= patience) {
    state.factor = state.factor * rule.up < rule.largest ? state.factor * rule.up : rule.largest;
    state.better = 0;
  }
  return state.factor;
}

/// Multiplies step->learning_rate by the factor for the loss *loss_sum * *scale of this step. scale: 1 / counted
/// targets. No effect if the step is withheld.
void tune_learning_rate(const Execution&, const TuningRule&, const double* loss_sum, const float* scale,
                        TuningState* state, AdamStep* step);

}  // namespace weft::kernels
