// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "transcoder/settings/presets.hpp"
#include "transcoder/settings/settings_schema.hpp"

namespace weft::transcoder {
namespace {

/// What the kinds of decoders need and exclude.
void add_decoder_rules(input::Schema& schema, const ModelSettings& model) {
  schema.rule({"transcoder.rank", "transcoder.decoder"}, [&model]() -> std::string {
    if ((model.rank > 0) == (model.decoder == Decoder::low_rank)) return {};
    return model.rank > 0 ? "transcoder.rank is for transcoder.decoder = \"low_rank\" only; leave it out"
                          : "transcoder.decoder = \"low_rank\" needs transcoder.rank (it has no default); give a rank "
                            "below d_model";
  });
  schema.rule({"transcoder.decoder_affine", "transcoder.decoder"}, [&model]() -> std::string {
    if (!model.decoder_affine || model.decoder == Decoder::tied_target) return {};
    return "transcoder.decoder_affine is for transcoder.decoder = \"tied_target\" only (other decoders have a vector "
           "for "
           "each feature, which includes its scale); leave it out";
  });
  schema.rule({"transcoder.resample_every", "transcoder.decoder"}, [&model]() -> std::string {
    if (model.resample_every == 0 || (model.decoder != Decoder::tied_target && model.decoder != Decoder::low_rank))
      return {};
    return "transcoder.resample_every does not go with transcoder.decoder = \"tied_target\" and \"low_rank\" (a dead "
           "feature has no decoder row of its own that could be directed at a token); use transcoder.auxk";
  });
  schema.rule(
      {"transcoder.decoder", "transcoder.sparsity", "transcoder.preactivation_penalty", "transcoder.ranking"},
      [&model]() -> std::string {
        const bool of_norms =
            model.sparsity > 0 || model.ranking == Ranking::decoder_norm ||
            (model.preactivation_penalty > 0 && model.preactivation_form == PreactivationForm::below_threshold);
        if (model.decoder != Decoder::low_rank || !of_norms) return {};
        return "transcoder.decoder = \"low_rank\" does not go with penalties or a ranking by decoder norms "
               "(those of products of factors, which are never formed); leave them out, or take another decoder";
      });
}

}  // namespace

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
  schema.rule({"transcoder.k_initial", "transcoder.k", "transcoder.features", "transcoder.activation"},
              [&model]() -> std::string {
                if (model.k_initial == 0) return {};
                if (!kernels::activation_keeps_k(model.activation))
                  return "transcoder.k_initial is for transcoder.activation = \"batch_topk\" and \"topk\" (the others "
                         "keep no number of features); leave it out";
                if (model.k_initial < model.k)
                  return fmt::format("transcoder.k_initial = {} is less than transcoder.k = {} (k declines); raise it",
                                     model.k_initial, model.k);
                if (model.features == 0 || model.k_initial <= static_cast<double>(model.features)) return {};
                return fmt::format("transcoder.k_initial = {} is more than transcoder.features = {}; lower it",
                                   model.k_initial, model.features);
              });
  schema.rule({"transcoder.ranking", "transcoder.activation"}, [&model]() -> std::string {
    if (model.ranking == Ranking::value || kernels::activation_keeps_k(model.activation)) return {};
    return "transcoder.ranking is for transcoder.activation = \"batch_topk\" and \"topk\" (the others compare no "
           "features "
           "with one another); leave it out";
  });
  schema.rule({"transcoder.ranking", "parallel.data"}, [&configuration]() -> std::string {
    if (configuration.transcoder.ranking != Ranking::z_score || configuration.parallel.data == 1) return {};
    return "transcoder.ranking = \"z_score\" needs parallel.data = 1 (the moments are those of all tokens of a batch, "
           "which a data axis divides); put all ranks on the feature axis";
  });
  schema.rule({"transcoder.bandwidth_initial", "transcoder.activation"}, [&model]() -> std::string {
    if (model.bandwidth_initial == 0 || model.activation == Activation::jumprelu) return {};
    return "transcoder.bandwidth_initial is for transcoder.activation = \"jumprelu\" only; leave it out";
  });
  schema.rule({"transcoder.sparsity_end", "transcoder.sparsity_begin"}, [&model]() -> std::string {
    if (model.sparsity_begin <= model.sparsity_end) return {};
    return fmt::format("transcoder.sparsity_end = {} is before transcoder.sparsity_begin = {}; exchange them",
                       model.sparsity_end, model.sparsity_begin);
  });
  schema.rule({"transcoder.threshold_gradient", "transcoder.pseudo_derivative", "transcoder.preactivation_penalty"},
              [&model]() -> std::string {
                if (!lists_windows(model) || !passes_below_threshold(model)) return {};
                return "transcoder.threshold_gradient = \"listed\" does not go with a gradient of inactive "
                       "pre-activations outside the windows (transcoder.pseudo_derivative = \"goreg\" and "
                       "transcoder.preactivation_penalty have one); take \"dense\"";
              });
  schema.rule({"transcoder.threshold_gradient", "transcoder.activation"}, [&model]() -> std::string {
    if (model.threshold_gradient == ThresholdGradient::dense || model.activation == Activation::jumprelu) return {};
    return "transcoder.threshold_gradient is for transcoder.activation = \"jumprelu\" only (the others have no "
           "thresholds); leave it out";
  });
  schema.rule({"transcoder.preactivation_penalty", "transcoder.activation"}, [&model]() -> std::string {
    if (model.preactivation_penalty == 0 || model.activation == Activation::jumprelu) return {};
    return "transcoder.preactivation_penalty is for transcoder.activation = \"jumprelu\" only (the others form no "
           "gradient of inactive pre-activations); leave it out";
  });
  schema.rule({"transcoder.auxk", "transcoder.pseudo_derivative", "transcoder.preactivation_penalty"},
              [&model]() -> std::string {
                if (model.auxk == 0 || model.activation != Activation::jumprelu) return {};
                if (!passes_below_threshold(model)) return {};
                return "transcoder.auxk does not go with a gradient of inactive pre-activations "
                       "(transcoder.pseudo_derivative = \"goreg\" and transcoder.preactivation_penalty revive features "
                       "themselves); leave one of them out";
              });
  schema.rule({"transcoder.auxk", "transcoder.error"}, [&model]() -> std::string {
    if (model.auxk == 0 || model.error == ErrorForm::normalised) return {};
    return "transcoder.auxk is for transcoder.error = \"normalised\" only (dead features reconstruct the error in "
           "normalised space); leave one of them out";
  });
  schema.rule({"transcoder.error_reduction", "transcoder.error"}, [&model]() -> std::string {
    if (model.error != ErrorForm::unexplained || model.error_reduction == Reduction::elements) return {};
    return "transcoder.error = \"unexplained\" has a reduction of its own (the variance of the targets); leave "
           "transcoder.error_reduction out";
  });
  schema.rule({"transcoder.k_total", "transcoder.k_initial"}, [&model]() -> std::string {
    if (model.k_total == 0 || model.k_initial == 0) return {};
    return "transcoder.k_total does not go with transcoder.k_initial (which counts features of each layer); give "
           "transcoder.k";
  });
  schema.rule({"transcoder.k", "data.batch_tokens", "transcoder.activation", "transcoder.scope"},
              [&configuration]() -> std::string {
                return configuration.transcoder.scope == Scope::layer ? empty_budget(configuration, 1) : "";
              });
  schema.rule({"transcoder.skip", "data.targets"}, [&configuration]() -> std::string {
    if (configuration.transcoder.skip == Skip::none || configuration.data.targets == dataset::Targets::outputs)
      return {};
    return "transcoder.skip = \"linear\" is of no use with data.targets = \"inputs\" (the identity reconstructs the "
           "inputs without any feature); take \"none\"";
  });
  add_decoder_rules(schema, model);
  schema.rule({"optimizer.warmup_steps", "run.steps"}, [&configuration]() -> std::string {
    if (configuration.optimizer.warmup_steps <= configuration.run.steps) return {};
    return fmt::format(
        "optimizer.warmup_steps = {} is more than run.steps = {} (the learning rate would never be reached); shorten "
        "the warm-up",
        configuration.optimizer.warmup_steps, configuration.run.steps);
  });
}

void add_training_rules(input::Schema& schema, const Configuration& configuration) {
  const ModelSettings& model = configuration.transcoder;
  schema.rule({"transcoder.decoder_affine", "transcoder.activation"}, [&model]() -> std::string {
    if (!model.decoder_affine || model.activation != Activation::jumprelu) return {};
    return "transcoder.decoder_affine does not train with transcoder.activation = \"jumprelu\" (with an offset the "
           "activation jumps by more than its threshold, for which no pseudo-derivative is published); leave it out";
  });
}

}  // namespace weft::transcoder
