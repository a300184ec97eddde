// SPDX-License-Identifier: Apache-2.0
#include "transcoder/settings/transcoder_settings.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "kernels/constants.hpp"

namespace weft::transcoder {
namespace {

// A run learns almost nothing if it moves parameters by less than kSmallestMove of a typical weight, or with an epsilon
// of Adam from kUselessEpsilon on (docs/experiments_log.md). kUselessEpsilonOfLoss is kUselessEpsilon in units of a
// loss factor of 1e-5.
constexpr double kSmallestMove = 1e-4, kUselessEpsilon = 1e-2, kUselessEpsilonOfLoss = 1e3;

}  // namespace

double divisor(Reduction reduction, std::int64_t n_tokens, std::int64_t n_layers, std::int64_t elements) {
  const double tokens = static_cast<double>(n_tokens), layers = static_cast<double>(n_layers),
               width = static_cast<double>(elements);
  switch (reduction) {
    case Reduction::sum:
      return 1;
    case Reduction::tokens:
      return tokens;
    case Reduction::elements:
      return tokens * width;
    case Reduction::layers:
      return tokens * layers;
    case Reduction::all:
      return tokens * layers * width;
  }
  return tokens;
}

double error_divisor(const ModelSettings& settings, std::int64_t n_tokens, std::int64_t n_layers,
                     std::int64_t d_model) {
  return divisor(settings.error_reduction, n_tokens, n_layers, d_model);
}

double k_at(const ModelSettings& settings, std::int64_t step, std::int64_t steps) {
  const double end = settings.k_end * static_cast<double>(steps), from = settings.k_initial, to = settings.k;
  const double done = static_cast<double>(step - 1);  // the first step has k_initial
  if (from <= to || done >= end) return to;
  const double part = done / end;
  const double k = settings.k_decline == Decline::linear ? from + (to - from) * part : from * std::pow(to / from, part);
  return std::max(to, std::round(k));
}

ModelSettings with_largest_k(const ModelSettings& settings) {
  ModelSettings of = settings;
  of.k = std::max(settings.k, std::round(settings.k_initial));
  return of;
}

std::int64_t record_rows(const Configuration& configuration) {
  const privacy::Settings& settings = configuration.privacy;
  return settings.unit == privacy::Unit::token ? 1 : std::max<std::int64_t>(1, settings.record_rows);
}

std::string empty_budget(const Configuration& configuration, std::int64_t layers_of_budget) {
  const ModelSettings& model = configuration.transcoder;
  const double slots = static_cast<double>(configuration.data.batch_tokens) * static_cast<double>(layers_of_budget);
  if (model.activation != Activation::batch_topk || model.k * slots >= 0.5) return {};
  return fmt::format(
      "transcoder.k = {} keeps no feature (k * {} tokens{} = {:.2g} rounds to 0 active features per batch); take a k "
      "of "
      "at least {:.1g}",
      model.k, configuration.data.batch_tokens,
      layers_of_budget > 1 ? fmt::format(" * {} layers", layers_of_budget) : "", model.k * slots, 1 / slots);
}

void resolve_k(Configuration& configuration, std::int64_t n_layers) {
  ModelSettings& model = configuration.transcoder;
  if (model.k_total == 0) return;
  model.k = model.k_total / static_cast<double>(n_layers);
  if (model.k <= static_cast<double>(model.features) || !kernels::activation_keeps_k(model.activation)) return;
  throw collective_error(ExitCode::usage, "transcoder.k_total = {} is more than {} layers of {} features; lower it",
                         model.k_total, n_layers, model.features);
}

void check_layers(const Configuration& configuration, std::int64_t n_layers) {
  const ModelSettings& model = configuration.transcoder;
  if (n_layers > kernels::kMostLayers)
    throw collective_error(ExitCode::usage,
                           "the activations have {} layers (at most {} are supported); select fewer layers", n_layers,
                           kernels::kMostLayers);
  if (const std::string problem = empty_budget(configuration, model.scope == Scope::layer ? 1 : n_layers);
      !problem.empty())
    throw Error(ExitCode::usage, problem, KnownTo::all_ranks);
  const double budget = model.k_total > 0 ? model.k_total : model.k * static_cast<double>(n_layers);
  if (model.activation != Activation::topk) return;
  if (model.scope == Scope::layer && model.k_total > 0 && !is_whole(model.k))
    throw collective_error(ExitCode::usage,
                           "transcoder.k_total = {} over {} layers is not whole (activation = \"topk\" counts the "
                           "features of each token and layer); take a multiple of {}, or scope = \"all_layers\"",
                           model.k_total, n_layers, n_layers);
  if (model.scope != Scope::all_layers || is_whole(budget)) return;
  throw collective_error(
      ExitCode::usage,
      "transcoder.k = {} times {} layers = {} must be whole (activation = \"topk\" with scope = \"all_layers\" counts "
      "the features of each token); take k = {} or activation = \"batch_topk\"",
      model.k, n_layers, budget, std::max(1.0, std::round(model.k)));
}

std::vector<std::string> idle_settings(const Configuration& configuration) {
  const optimizer::Settings& adam = configuration.optimizer;
  std::vector<std::string> found;
  // Adam moves a parameter by at most about the learning rate per step. Initial encoder weights are about
  // 1/sqrt(features).
  const double weight = 1 / std::sqrt(static_cast<double>(configuration.transcoder.features));
  const double moved = adam.learning_rate * static_cast<double>(configuration.run.steps);
  // Stochastic rounding (bf16, 8bit) loses no small updates; rounding to nearest loses updates below half a spacing.
  const bool rounded_away = adam.state == kernels::StorageType::fp32 && adam.learning_rate < 0.5 * 0x1p-24 * weight;
  if (moved < kSmallestMove * weight || rounded_away)
    found.push_back(fmt::format(
        "optimizer.learning_rate = {:.2g} trains nothing (weights are about {:.1g}; {}); take a larger one",
        adam.learning_rate, weight,
        rounded_away ? "a step is lost in the rounding of fp32"
                     : fmt::format("{} steps move them by {:.1g} at most", configuration.run.steps, moved)));
  const bool of_loss = adam.epsilon_scale == optimizer::EpsilonScale::loss;
  if (adam.epsilon >= (of_loss ? kUselessEpsilonOfLoss : kUselessEpsilon))
    found.push_back(fmt::format(
        "optimizer.epsilon = {:.2g} trains next to nothing (it is far above usual gradients, so that steps shrink to "
        "learning_rate * gradient / epsilon); the default is {:.2g}",
        adam.epsilon, of_loss ? optimizer::kEpsilonOfLoss : optimizer::Settings().epsilon));
  return found;
}

}  // namespace weft::transcoder
