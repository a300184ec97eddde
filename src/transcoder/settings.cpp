// SPDX-License-Identifier: Apache-2.0
#include "transcoder/settings.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "kernels/constants.hpp"
#include "transcoder/presets.hpp"
#include "transcoder/private/settings.hpp"

namespace weft::transcoder {
namespace {

// Bounded so that no product of features, layers, widths and bytes of an element exceeds 64 bits.
constexpr double kMostFeatures = 1 << 28;
constexpr double kMostAuxiliary = 8192;  // per token and layer, on a GPU
// With less, of a typical weight, in a whole run, and from these epsilons on (1e-2: NMSE 0.96 where 1e-8 gave 0.30
// after 200 steps of the quickstart; 1e3 is that in units of a loss factor of 1e-5) next to nothing is learned.
constexpr double kSmallestMove = 1e-4, kUselessEpsilon = 1e-2, kUselessEpsilonOfLoss = 1e3;

bool whole(double value) { return value == std::floor(value); }

/// Of each published form: initial threshold and bandwidth as its project sets them.
struct JumpDefaults {
  double threshold, bandwidth;
};
JumpDefaults jump_defaults(JumpForm form) {
  switch (form) {
    case JumpForm::anthropic:
    case JumpForm::openmoss:  // which has no threshold of its own
      return {0.1, 2};
    case JumpForm::crosslayer_coding:
    case JumpForm::clt_forge:
      return {0.03, 1};
    case JumpForm::goreg:
      return {0.03, 0.01};
    case JumpForm::saelens:
      return {0.01, 0.05};
  }
  return {0.1, 2};
}

/// Why batch_topk would keep no feature of a batch: k times its tokens and the layers of one budget rounds to 0. "" if
/// it would.
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

/// A key of what a sum is divided by.
void add_reduction(input::Schema& schema, const char* path, Reduction& member, const std::string& of) {
  schema
      .add(path, member,
           {{"sum", Reduction::sum},
            {"tokens", Reduction::tokens},
            {"elements", Reduction::elements},
            {"layers", Reduction::layers},
            {"all", Reduction::all}},
           "what " + of + " is divided by: nothing, N, N E, N L or N L E")
      .changeable();
}

void add_keys(input::Schema& schema, ModelSettings& model) {
  schema.table("transcoder", "The model: L layers of features, each of which writes to its own and every later layer.");
  schema
      .add("transcoder.preset", model.preset,
           {{"weft", Preset::weft},
            {"crosslayer-coding", Preset::crosslayer_coding},
            {"eleuther", Preset::eleuther},
            {"goreg", Preset::goreg},
            {"clt-forge", Preset::clt_forge},
            {"openmoss", Preset::openmoss},
            {"anthropic", Preset::anthropic}},
           "the project whose conventions fill in what the input does not give: normalisation, losses with their "
           "reductions, thresholds, k, initial weights, optimizer")
      .changeable();
  schema.add("transcoder.features", model.features, "features per layer")
      .at_least(1)
      .at_most(kMostFeatures)
      .required("768");
  schema
      .add("transcoder.activation", model.activation,
           {{"batch_topk", Activation::batch_topk},
            {"topk", Activation::topk},
            {"relu", Activation::relu},
            {"jumprelu", Activation::jumprelu}},
           "which features are active: the largest of the batch, the largest of each token, all that are positive, all "
           "that exceed a learned threshold of their own")
      .changeable();
  schema
      .add("transcoder.k", model.k,
           "active features per token and layer; batch_topk: on average, and may be fractional")
      .in("features")
      .more_than(0)
      .at_most(kMostFeatures)
      .changeable();
  schema
      .add("transcoder.k_total", model.k_total,
           "active features per token over all layers together: k = k_total / layers, in either scope; 0: k as given")
      .in("features")
      .at_least(0)
      .at_most(kMostFeatures)
      .changeable();
  schema
      .add("transcoder.k_initial", model.k_initial,
           "batch_topk, topk: active features of the first step, from which they decline to k; 0: k at once")
      .in("features")
      .at_least(0)
      .at_most(kMostFeatures)
      .changeable();
  schema.add("transcoder.k_end", model.k_end, "fraction of the run from which k holds")
      .at_least(0)
      .at_most(1)
      .changeable();
  schema
      .add("transcoder.k_decline", model.k_decline,
           {{"linear", Decline::linear}, {"exponential", Decline::exponential}},
           "course from k_initial to k, in whole features: equal differences, or equal ratios")
      .changeable();
  schema
      .add("transcoder.ranking", model.ranking,
           {{"value", Ranking::value}, {"decoder_norm", Ranking::decoder_norm}, {"z_score", Ranking::z_score}},
           "batch_topk, topk: what the largest of are active, pre-activations, their products with the norm of the "
           "feature's decoder row, or their deviations from the mean over the batch in standard deviations")
      .changeable();
  schema
      .add("transcoder.scope", model.scope, {{"layer", Scope::layer}, {"all_layers", Scope::all_layers}},
           "one budget of active features for each layer, or one for all layers together")
      .changeable();
  schema.add(
      "transcoder.decoder", model.decoder,
      {{"cross_layer", Decoder::cross_layer},
       {"per_layer", Decoder::per_layer},
       {"tied", Decoder::tied},
       {"tied_target", Decoder::tied_target},
       {"low_rank", Decoder::low_rank}},
      "what a feature writes to its own and every later layer: a vector of its own for each (per_layer: to its own "
      "alone), one vector for all, the vector that the feature of this index of any layer writes to it, or for "
      "each a vector out of a space of transcoder.rank dimensions");
  schema
      .add("transcoder.rank", model.rank,
           "low_rank: dimensions of what the features of a layer write to a layer; required there")
      .at_least(0)
      .at_most(kMostFeatures);
  schema.add("transcoder.decoder_affine", model.decoder_affine,
             "tied_target: a feature writes (activation + offset) * scale to each of its layers, both learned");
  schema
      .add("transcoder.decoder_scale_initial", model.decoder_scale_initial,
           "decoder_affine: initial scale of the layers after the feature's own, whose scale is 1 at first")
      .at_least(0)
      .at_most(1e3);
  schema.add("transcoder.encoder_initial", model.encoder_initial,
             {{"features", EncoderInitial::features}, {"width", EncoderInitial::width}},
             "bound of the uniform initial encoder weights: 1 / sqrt(features) or 1 / sqrt(d_model)");
  schema.add("transcoder.decoder_initial", model.decoder_initial,
             {{"uniform", DecoderInitial::uniform}, {"zero", DecoderInitial::zero}},
             "initial decoder weights: uniform within 1 / sqrt(columns of the first decoder), or zero");
  schema.add(
      "transcoder.encoder_bias_initial", model.encoder_bias_initial,
      {{"zero", EncoderBiasInitial::zero}, {"data", EncoderBiasInitial::data}},
      "initial encoder biases: zero, or such that initially_active features are active on the first batch, each on "
      "as many tokens as the others");
  schema
      .add("transcoder.initially_active", model.initially_active,
           "encoder_bias_initial = \"data\": features active per token and layer, at most half of all")
      .in("features")
      .at_least(1)
      .at_most(kMostFeatures);
  schema.add("transcoder.skip", model.skip, {{"none", Skip::none}, {"linear", Skip::linear}},
             "linear: every layer has a matrix that adds a linear map of its input to its target");
  schema
      .add("transcoder.decoder_bias", model.decoder_bias,
           {{"target", DecoderBias::target}, {"pair", DecoderBias::pair}},
           "pair: as if every pair of layers had a bias of its own; equal ones add up, so that the sum of target layer "
           "t, counted from 0, moves t + 1 times as far per step")
      .changeable();
  schema
      .add("transcoder.capacity", model.capacity,
           "relu, jumprelu: room for active features per token and layer, on average over the batch and of equal size "
           "on each rank, with threshold_gradient = \"listed\" also for those in the windows; a step that needs more "
           "ends "
           "the run; 0: room for all features")
      .in("features")
      .at_least(0)
      .at_most(kMostFeatures)
      .free();
  schema
      .add("transcoder.pseudo_derivative", model.pseudo_derivative,
           {{"anthropic", JumpForm::anthropic},
            {"crosslayer-coding", JumpForm::crosslayer_coding},
            {"goreg", JumpForm::goreg},
            {"clt-forge", JumpForm::clt_forge},
            {"openmoss", JumpForm::openmoss},
            {"saelens", JumpForm::saelens}},
           "jumprelu: how thresholds learn, in the form that this project publishes")
      .changeable();
  schema.add("transcoder.threshold", model.threshold, "jumprelu: initial threshold of every feature")
      .more_than(0)
      .at_most(1e6)
      .derived("of the pseudo-derivative", [&model] { return jump_defaults(model.pseudo_derivative).threshold; });
  schema
      .add("transcoder.bandwidth", model.bandwidth,
           "jumprelu: width of the window about a threshold in which pre-activations move it")
      .more_than(0)
      .at_most(1e6)
      .derived("of the pseudo-derivative", [&model] { return jump_defaults(model.pseudo_derivative).bandwidth; })
      .changeable();
  schema
      .add("transcoder.bandwidth_initial", model.bandwidth_initial,
           "jumprelu: bandwidth of the first step, from which it changes linearly to bandwidth; 0: bandwidth at once")
      .at_least(0)
      .at_most(1e6)
      .changeable();
  schema.add("transcoder.bandwidth_end", model.bandwidth_end, "fraction of the run from which bandwidth holds")
      .at_least(0)
      .at_most(1)
      .changeable();
  schema
      .add(
          "transcoder.error", model.error,
          {{"normalised", ErrorForm::normalised}, {"raw", ErrorForm::raw}, {"unexplained", ErrorForm::unexplained}},
          "the loss of the reconstruction: squared errors of normalised targets, of raw targets, or their sum over the "
          "variance of the batch's targets, added over layers")
      .changeable();
  add_reduction(schema, "transcoder.error_reduction", model.error_reduction,
                "the sum of squared errors (but \"unexplained\") over N tokens, L layers and E = d_model dimensions");
  schema
      .add("transcoder.sparsity", model.sparsity,
           "coefficient of the penalty on activations, the mean over tokens of the sum over features of tanh(scale * "
           "activation * norm of the decoder row); 0: none")
      .at_least(0)
      .at_most(1e12)
      .changeable();
  schema
      .add("transcoder.sparsity_form", model.sparsity_form,
           {{"tanh", SparsityForm::tanh}, {"linear", SparsityForm::linear}},
           "tanh as above, or its argument itself: the L1 norm of activations, weighted by the decoder's norms")
      .changeable();
  schema.add("transcoder.sparsity_scale", model.sparsity_scale, "scale inside that penalty")
      .more_than(0)
      .at_most(1e6)
      .changeable();
  add_reduction(schema, "transcoder.sparsity_reduction", model.sparsity_reduction,
                "that penalty over N tokens, L layers and E = features of each");
  schema
      .add("transcoder.sparsity_begin", model.sparsity_begin,
           "fraction of the run from which the coefficient rises linearly from 0")
      .at_least(0)
      .at_most(1)
      .changeable();
  schema
      .add("transcoder.sparsity_end", model.sparsity_end,
           "fraction of the run from which the coefficient is transcoder.sparsity; equal to sparsity_begin: a step")
      .at_least(0)
      .at_most(1)
      .changeable();
  schema
      .add("transcoder.preactivation_penalty", model.preactivation_penalty,
           "jumprelu: coefficient of the penalty on inactive pre-activations, the mean over tokens of its sum over "
           "features; 0: none")
      .at_least(0)
      .at_most(1e12)
      .changeable();
  schema
      .add("transcoder.preactivation_form", model.preactivation_form,
           {{"below_threshold", PreactivationForm::below_threshold}, {"negative", PreactivationForm::negative}},
           "what that penalty sums: relu(threshold - z) * norm of the decoder row, or relu(-z)")
      .changeable();
  add_reduction(schema, "transcoder.preactivation_reduction", model.preactivation_reduction,
                "that penalty over N tokens, L layers and E = features of each");
  schema
      .add("transcoder.dead_window", model.dead_window,
           "a feature that has not fired for this many tokens counts as dead")
      .in("tokens")
      .at_least(1)
      .changeable();
  schema
      .add("transcoder.auxk", model.auxk,
           "coefficient of the auxiliary loss, in which dead features reconstruct the remaining error: relative to the "
           "loss of the reconstruction; 0: none")
      .at_least(0)
      .at_most(1e6)
      .changeable();
  schema
      .add("transcoder.auxk_features", model.auxk_features,
           "dead features that the auxiliary loss takes per token and layer: those with the largest positive "
           "pre-activations")
      .in("features")
      .at_least(1)
      .at_most(kMostAuxiliary)
      .changeable();
}

/// After the keys from which the default follows.
void add_threshold_gradient(input::Schema& schema, ModelSettings& model) {
  schema
      .add("transcoder.threshold_gradient", model.threshold_gradient,
           {{"dense", ThresholdGradient::dense}, {"listed", ThresholdGradient::listed}},
           "jumprelu: how the gradient of thresholds is formed, with equal results but for rounding: from every "
           "pre-activation and its product of gradient row and decoder row, or from lists of those in the windows, for "
           "which transcoder.capacity needs room")
      .derived(
          "\"listed\" if capacity > 0, threshold >= half of the bandwidth and inactive features have no gradient of "
          "their own (goreg, preactivation_penalty), else \"dense\"",
          [&model] {
            const double widest = std::max(model.bandwidth, model.bandwidth_initial);
            const bool lists = model.activation == Activation::jumprelu && model.capacity > 0 &&
                               2 * model.threshold >= widest && !passes_below_threshold(model);
            return input::Value(lists ? "listed" : "dense");
          })
      .free();
}

void add_resampling(input::Schema& schema, ModelSettings& model) {
  schema
      .add("transcoder.resample_every", model.resample_every,
           "dead features are directed at poorly reconstructed tokens after every so many steps; 0: never")
      .in("steps")
      .at_least(0)
      .at_most(input::kMostSteps)
      .changeable();
  schema.add("transcoder.resample_end", model.resample_end, "fraction of the run after which none is resampled")
      .at_least(0)
      .at_most(1)
      .changeable();
}

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

/// Conditions between keys of several tables, and between those of [transcoder].
void add_rules(input::Schema& schema, const Configuration& configuration) {
  const ModelSettings& model = configuration.transcoder;
  schema.rule({"transcoder.preset", "transcoder.activation"}, [&model] { return missing_of_preset(model); });
  schema.rule({"transcoder.k", "transcoder.activation", "transcoder.scope"}, [&model]() -> std::string {
    if (model.k_total > 0) return {};
    if (model.activation != Activation::topk || model.scope == Scope::all_layers || whole(model.k)) return {};
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
  schema.rule({"parallel.selection", "transcoder.k_initial"}, [&configuration]() -> std::string {
    if (configuration.parallel.exchange.selection == SelectionPlace::everywhere ||
        configuration.transcoder.k_initial == 0)
      return {};
    return "parallel.selection = \"rank_0\" does not go with transcoder.k_initial (it is a baseline with a constant "
           "k); "
           "take \"everywhere\"";
  });
  schema.rule({"parallel.selection", "transcoder.activation"}, [&configuration]() -> std::string {
    if (configuration.parallel.exchange.selection == SelectionPlace::everywhere ||
        configuration.transcoder.activation == Activation::batch_topk)
      return {};
    return "parallel.selection = \"rank_0\" is for transcoder.activation = \"batch_topk\" only (the others do not "
           "compare tokens with one another); take \"everywhere\"";
  });
}

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
  if (model.scope == Scope::layer && model.k_total > 0 && !whole(model.k))
    throw collective_error(ExitCode::usage,
                           "transcoder.k_total = {} over {} layers is not whole (activation = \"topk\" counts the "
                           "features of each token and layer); take a multiple of {}, or scope = \"all_layers\"",
                           model.k_total, n_layers, n_layers);
  if (model.scope != Scope::all_layers || whole(budget)) return;
  throw collective_error(
      ExitCode::usage,
      "transcoder.k = {} times {} layers = {} must be whole (activation = \"topk\" with scope = \"all_layers\" counts "
      "the features of each token); take k = {} or activation = \"batch_topk\"",
      model.k, n_layers, budget, std::max(1.0, std::round(model.k)));
}

void add_training_rules(input::Schema& schema, const Configuration& configuration) {
  const ModelSettings& model = configuration.transcoder;
  schema.rule({"transcoder.decoder_affine", "transcoder.activation"}, [&model]() -> std::string {
    if (!model.decoder_affine || model.activation != Activation::jumprelu) return {};
    return "transcoder.decoder_affine does not train with transcoder.activation = \"jumprelu\" (with an offset the "
           "activation jumps by more than its threshold, for which no pseudo-derivative is published); leave it out";
  });
}

std::vector<std::string> idle_settings(const Configuration& configuration) {
  const optimizer::Settings& adam = configuration.optimizer;
  std::vector<std::string> found;
  // Adam moves a parameter by at most about the learning rate per step. Encoder weights begin at 1/sqrt(features).
  const double weight = 1 / std::sqrt(static_cast<double>(configuration.transcoder.features));
  const double moved = adam.learning_rate * static_cast<double>(configuration.run.steps);
  // Stochastic rounding (bf16, 8bit) loses no small step, rounding to nearest loses less than half a spacing.
  const bool rounded_away = adam.state == kernels::StatePolicy::fp32 && adam.learning_rate < 0.5 * 0x1p-24 * weight;
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

input::Schema schema(Configuration& configuration) {
  input::Schema schema;
  training::add_keys(schema, configuration.run);
  dataset::add_keys(schema, configuration.data);
  add_keys(schema, configuration.transcoder);
  add_threshold_gradient(schema, configuration.transcoder);
  add_resampling(schema, configuration.transcoder);
  optimizer::add_keys(schema, configuration.optimizer, true);
  privacy::add_keys(schema, configuration.privacy);
  parallel::add_keys(schema, configuration.parallel);
  device::add_keys(schema, configuration.device, configuration.precision,
                   {{"fp32", Precision::fp32}, {"bf16", Precision::bf16}},
                   "type of activations, products and gradient rows; sums are fp32 in both");
  device::add_tile_key(schema, configuration.device);
  checkpoint::add_keys(schema, configuration.checkpoint);
  training::add_keys(schema, configuration.log);
  training::add_keys(schema, configuration.resume);
  add_rules(schema, configuration);
  add_private_keys(schema, configuration);
  add_preset(schema, configuration.transcoder);
  return schema;
}

}  // namespace weft::transcoder
