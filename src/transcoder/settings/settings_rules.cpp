// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "transcoder/settings/presets.hpp"
#include "transcoder/settings/settings_schema.hpp"

namespace weft::transcoder {

void add_rules(input::Schema& schema, const Configuration& configuration) {
  const ModelSettings& model = configuration.transcoder;
  schema.rule({"transcoder.preset", "transcoder.activation"}, [&model] { return missing_of_preset(model); });
  schema.rule({"transcoder.k", "transcoder.activation", "transcoder.scope"}, [&model]() -> std::string {
    if (model.k_total > 0) return {};
    if (model.activation != Activation::topk || model.scope == Scope::all_layers || is_whole(model.k)) return {};
    return fmt::format(
        "transcoder.k = {} must be whole (activation = \"topk\" counts the features of each token and layer); "
        "take {} or activation = \"batch_topk\"",
        model.k, std::max(1.0, std::round(model.k)));
  });
  schema.rule({"transcoder.k", "transcoder.features"}, [&model]() -> std::string {
    if (model.features == 0 || model.k_total > 0 || !kernels::activation_keeps_k(model.activation) ||
        model.k <= static_cast<double>(model.features))
      return {};
    return fmt::format(
        "transcoder.k = {} is more than transcoder.features = {} (k counts active features per token and layer); take "
        "a smaller k",
        model.k, model.features);
  });
  schema.rule({"transcoder.k_initial", "transcoder.k", "transcoder.features"}, [&model]() -> std::string {
    if (model.k_initial == 0 || !kernels::activation_keeps_k(model.activation)) return {};
    if (model.k_initial < model.k)
      return fmt::format("transcoder.k_initial = {} is less than transcoder.k = {} (k declines); raise it",
                         model.k_initial, model.k);
    if (model.features == 0 || model.k_initial <= static_cast<double>(model.features)) return {};
    return fmt::format("transcoder.k_initial = {} is more than transcoder.features = {}; lower it", model.k_initial,
                       model.features);
  });
  schema.rule({"transcoder.ranking", "parallel.data"}, [&configuration]() -> std::string {
    if (configuration.transcoder.ranking != Ranking::z_score || configuration.parallel.data == 1) return {};
    return "transcoder.ranking = \"z_score\" needs parallel.data = 1 (the moments are those of all tokens of a batch, "
           "which a data axis divides); put all ranks on the feature axis";
  });
  schema.rule({"transcoder.sparsity_end", "transcoder.sparsity_begin"}, [&model]() -> std::string {
    if (model.sparsity_begin <= model.sparsity_end) return {};
    return fmt::format("transcoder.sparsity_end = {} is before transcoder.sparsity_begin = {}; exchange them",
                       model.sparsity_end, model.sparsity_begin);
  });
  schema.rule({"transcoder.threshold_gradient", "transcoder.pseudo_derivative", "transcoder.preactivation_penalty"},
              [&model]() -> std::string {
                if (!lists_bands(model) || !passes_below_threshold(model)) return {};
                return "transcoder.threshold_gradient = \"listed\" does not go with a gradient of inactive "
                       "pre-activations outside the bands (transcoder.pseudo_derivative = \"goreg\" and "
                       "transcoder.preactivation_penalty have one); take \"dense\"";
              });
  schema.rule({"transcoder.auxk", "transcoder.pseudo_derivative", "transcoder.preactivation_penalty"},
              [&model]() -> std::string {
                if (model.auxk == 0 || model.activation != Activation::jumprelu) return {};
                if (!passes_below_threshold(model)) return {};
                return "transcoder.auxk does not go with a gradient of inactive pre-activations "
                       "(transcoder.pseudo_derivative = \"goreg\" and transcoder.preactivation_penalty revive features "
                       "themselves); leave one of them out";
              });
  schema.rule({"transcoder.k", "data.batch_tokens", "transcoder.activation", "transcoder.scope"},
              [&configuration]() -> std::string {
                return configuration.transcoder.scope == Scope::layer ? empty_budget(configuration, 1) : "";
              });
  schema.rule({"optimizer.warmup_steps", "run.steps"}, [&configuration]() -> std::string {
    if (configuration.run.epochs > 0 || configuration.optimizer.warmup_fraction > 0 ||
        configuration.optimizer.warmup_steps <= configuration.run.steps)
      return {};
    return fmt::format(
        "optimizer.warmup_steps = {} is more than run.steps = {} (the learning rate would never be reached); shorten "
        "the warm-up",
        configuration.optimizer.warmup_steps, configuration.run.steps);
  });
}

void add_training_rules(input::Schema& schema, const Configuration& configuration) {
  schema.at("transcoder.decoder_affine")
      .not_with("transcoder.activation", {"jumprelu"},
                "with an offset the activation jumps by more than its threshold, for which no pseudo-derivative is "
                "published");
  // A private transcoder that weft convert gave thresholds was trained without them.
  schema.rule({"transcoder.threshold_gradient", "privacy.enabled"}, [&configuration]() -> std::string {
    const ModelSettings& model = configuration.transcoder;
    if (!configuration.privacy.enabled || !kernels::activation_has_thresholds(model.activation) || lists_bands(model))
      return {};
    return "transcoder.threshold_gradient = \"dense\" with privacy.enabled (the gradients of records are formed from "
           "lists of the pre-activations near thresholds); take \"listed\", with a pseudo_derivative other than "
           "\"goreg\"";
  });
}

}  // namespace weft::transcoder
