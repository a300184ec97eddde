// SPDX-License-Identifier: Apache-2.0
#include "kernels/constants.hpp"
#include "transcoder/settings/settings_schema.hpp"

namespace weft::transcoder {
namespace {

// Bound of features: no product of features, layers, widths and bytes of an element exceeds 64 bits.
constexpr double kMostFeatures = 1 << 28;
constexpr double kMostAuxiliary = 8192;  // per token and layer, on a GPU

/// Initial threshold and bandwidth of a published form, as its project sets them.
struct JumpDefaults {
  double threshold, bandwidth;
};
JumpDefaults jump_defaults(JumpForm form) {
  switch (form) {
    case JumpForm::anthropic:
    case JumpForm::openmoss:  // publishes no threshold
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

/// Adds a key that selects the divisor of a sum.
input::Key& add_reduction(input::Schema& schema, const char* path, Reduction& member, const std::string& of) {
  return schema
      .add(path, member,
           {{"sum", Reduction::sum},
            {"tokens", Reduction::tokens},
            {"elements", Reduction::elements},
            {"layers", Reduction::layers},
            {"all", Reduction::all}},
           "divisor of " + of + ": 1, N, N E, N L or N L E")
      .changeable();
}

void add_table(input::Schema& schema, ModelSettings& model) {
  schema.table("transcoder", "The model: L layers of features, each of which writes to its own and every later layer.");
  schema
      .add(
          "transcoder.preset", model.preset,
          {{"weft", Preset::weft},
           {"crosslayer-coding", Preset::crosslayer_coding},
           {"eleuther", Preset::eleuther},
           {"goreg", Preset::goreg},
           {"clt-forge", Preset::clt_forge},
           {"openmoss", Preset::openmoss},
           {"anthropic", Preset::anthropic}},
          "project whose conventions are the defaults of keys that the input does not give: normalisation, losses with "
          "their reductions, thresholds, k, initial weights, optimizer")
      .changeable();
  schema
      .add("transcoder.initial", model.initial,
           "run or checkpoint (also of weft import or weft convert) with the initial weights and normalisation; "
           "moments begin at zero; the keys of this table must be those of its model; \"\" = random weights")
      .path_name()
      .free();
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
           "which features are active: the largest of the batch (batch_topk) or of each token (topk), all that "
           "are positive (relu), all above a learned threshold per feature (jumprelu)")
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
           "active features of the first step, from which their number declines to k; 0: k from the first step")
      .in("features")
      .at_least(0)
      .at_most(kMostFeatures)
      .only_with("transcoder.activation", {"batch_topk", "topk"}, "the others keep no number of features")
      .not_with("transcoder.k_total", {}, "transcoder.k_initial counts features of each layer, as transcoder.k does")
      .changeable();
  schema.add("transcoder.k_end", model.k_end, "fraction of the run from which k holds")
      .at_least(0)
      .at_most(1)
      .changeable();
  schema
      .add("transcoder.k_decline", model.k_decline,
           {{"linear", Decline::linear}, {"exponential", Decline::exponential}},
           "how k_initial declines to k, in whole numbers: by equal differences, or by equal ratios")
      .changeable();
  schema
      .add("transcoder.ranking", model.ranking,
           {{"value", Ranking::value}, {"decoder_norm", Ranking::decoder_norm}, {"z_score", Ranking::z_score}},
           "what features are ranked by: the pre-activation (value), times the norm of the decoder row "
           "(decoder_norm), or its deviation from the batch mean in standard deviations (z_score)")
      .only_with("transcoder.activation", {"batch_topk", "topk"}, "the others compare no features with one another")
      .changeable();
  schema
      .add("transcoder.scope", model.scope, {{"layer", Scope::layer}, {"all_layers", Scope::all_layers}},
           "one budget of active features for each layer, or one for all layers together")
      .changeable();
  schema
      .add("transcoder.decoder", model.decoder,
           {{"cross_layer", Decoder::cross_layer},
            {"per_layer", Decoder::per_layer},
            {"tied", Decoder::tied},
            {"tied_target", Decoder::tied_target}},
           "vectors of a feature: one for its own and each later layer (cross_layer), for its own layer only "
           "(per_layer), one for all layers (tied), or one per layer that features of the same index in all source "
           "layers share (tied_target)")
      .retired_value(
          "low_rank",
          "it was removed (with about as many weights \"per_layer\" has a smaller error and trains ten times as fast); "
          "take \"per_layer\", and for its checkpoints the version of Weft that wrote them");
  schema.retired("transcoder.rank", "it was of transcoder.decoder = \"low_rank\", which was removed; leave it out");
  schema
      .add("transcoder.decoder_affine", model.decoder_affine,
           "a feature writes (activation + offset) * scale to each of its layers, both learned")
      .only_with("transcoder.decoder", {"tied_target"},
                 "other decoders have a vector for each feature, which includes its scale");
  schema
      .add("transcoder.decoder_scale_initial", model.decoder_scale_initial,
           "decoder_affine: initial scale of later layers; that of the feature's own layer is 1")
      .at_least(0)
      .at_most(1e3);
  schema.add("transcoder.encoder_initial", model.encoder_initial,
             {{"features", EncoderInitial::features}, {"width", EncoderInitial::width}},
             "bound of the uniform initial encoder weights: 1 / sqrt(features) or 1 / sqrt(d_model)");
  schema.add("transcoder.decoder_initial", model.decoder_initial,
             {{"uniform", DecoderInitial::uniform}, {"zero", DecoderInitial::zero}},
             "initial decoder weights: uniform within 1 / sqrt(columns of the first decoder), or zero");
  schema.add("transcoder.encoder_bias_initial", model.encoder_bias_initial,
             {{"zero", EncoderBiasInitial::zero}, {"data", EncoderBiasInitial::data}},
             "initial encoder biases: zero, or such that initially_active features per token are active on the first "
             "batch, each on equally many tokens");
  schema.at("transcoder.encoder_bias_initial").not_with("transcoder.initial", {}, "its biases are taken");
  schema
      .add("transcoder.initially_active", model.initially_active,
           "encoder_bias_initial = \"data\": features active per token and layer, at most half of all")
      .in("features")
      .at_least(1)
      .at_most(kMostFeatures);
  schema
      .add("transcoder.skip", model.skip, {{"none", Skip::none}, {"linear", Skip::linear}},
           "linear: the reconstruction of each layer also has a learned linear map of its input")
      .not_with("data.targets", {"inputs"}, "the identity reconstructs the inputs without any feature");
  schema
      .add("transcoder.decoder_bias", model.decoder_bias,
           {{"target", DecoderBias::target}, {"pair", DecoderBias::pair}},
           "one bias per target layer, or per pair of layers: stored as their sum, which for target layer t, "
           "counted from 0, moves t + 1 times as far per step")
      .changeable();
  schema
      .add("transcoder.capacity", model.capacity,
           "relu, jumprelu: memory for this many active features per token and layer, on average over the batch, "
           "equally on each rank (threshold_gradient = \"listed\": also for features near their thresholds); a "
           "step that needs more ends the run; 0 = all features")
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
           "jumprelu: gradient of thresholds, as this project defines it; no effect on other activations")
      .changeable();
  schema.add("transcoder.threshold", model.threshold, "initial threshold of every feature")
      .more_than(0)
      .at_most(1e6)
      .derived("of the pseudo-derivative", [&model] { return jump_defaults(model.pseudo_derivative).threshold; })
      .only_with("transcoder.activation", {"jumprelu"});
  schema
      .add("transcoder.bandwidth", model.bandwidth,
           "width of the band about a threshold in which pre-activations move it")
      .more_than(0)
      .at_most(1e6)
      .derived("of the pseudo-derivative", [&model] { return jump_defaults(model.pseudo_derivative).bandwidth; })
      .only_with("transcoder.activation", {"jumprelu"})
      .changeable();
  schema
      .add("transcoder.bandwidth_initial", model.bandwidth_initial,
           "bandwidth of the first step, from which it changes linearly to bandwidth; 0: bandwidth from the first step")
      .at_least(0)
      .at_most(1e6)
      .only_with("transcoder.activation", {"jumprelu"})
      .changeable();
  schema.add("transcoder.bandwidth_end", model.bandwidth_end, "fraction of the run from which bandwidth holds")
      .at_least(0)
      .at_most(1)
      .only_with("transcoder.bandwidth_initial")
      .changeable();
  schema
      .add("transcoder.error", model.error,
           {{"normalised", ErrorForm::normalised}, {"raw", ErrorForm::raw}, {"unexplained", ErrorForm::unexplained}},
           "reconstruction loss: squared errors of normalised targets, of raw targets, or (unexplained) the sum "
           "over layers of squared errors divided by the variance of the batch's targets")
      .changeable();
  add_reduction(schema, "transcoder.error_reduction", model.error_reduction,
                "the sum of squared errors over N tokens, L layers and E = d_model dimensions")
      .not_with("transcoder.error", {"unexplained"}, "it is divided by the variance of the targets");
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
           "form of the penalty on activations: tanh, or its argument alone (L1 norm of activations weighted by "
           "decoder norms)")
      .changeable();
  schema.add("transcoder.sparsity_scale", model.sparsity_scale, "scale inside the penalty on activations")
      .more_than(0)
      .at_most(1e6)
      .changeable();
  add_reduction(schema, "transcoder.sparsity_reduction", model.sparsity_reduction,
                "the penalty on activations over N tokens, L layers and E = features of each");
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
           "coefficient of the penalty on inactive pre-activations, the mean over tokens of its sum over features; 0: "
           "none")
      .at_least(0)
      .at_most(1e12)
      .only_with("transcoder.activation", {"jumprelu"}, "the others form no gradient of inactive pre-activations")
      .changeable();
  schema
      .add("transcoder.preactivation_form", model.preactivation_form,
           {{"below_threshold", PreactivationForm::below_threshold}, {"negative", PreactivationForm::negative}},
           "summand of the penalty on pre-activations: relu(threshold - z) * norm of the decoder row, or relu(-z)")
      .changeable();
  add_reduction(schema, "transcoder.preactivation_reduction", model.preactivation_reduction,
                "the penalty on pre-activations over N tokens, L layers and E = features of each");
  schema
      .add("transcoder.dead_window", model.dead_window,
           "a feature that has not fired for this many tokens counts as dead")
      .in("tokens")
      .at_least(1)
      .changeable();
  schema
      .add("transcoder.auxk", model.auxk,
           "coefficient of the auxiliary loss, in which dead features reconstruct the remaining error, relative "
           "to the reconstruction loss; 0: none")
      .at_least(0)
      .at_most(1e6)
      .only_with("transcoder.error", {"normalised"}, "dead features reconstruct the error in normalised space")
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

/// Adds transcoder.threshold_gradient. Call after the keys from which its default follows.
void add_threshold_gradient(input::Schema& schema, ModelSettings& model) {
  schema
      .add("transcoder.threshold_gradient", model.threshold_gradient,
           {{"dense", ThresholdGradient::dense}, {"listed", ThresholdGradient::listed}},
           "how the gradient of thresholds is computed, with the same result up to rounding: from every "
           "pre-activation (dense), or from lists of those near thresholds, which transcoder.capacity must hold "
           "(listed)")
      .derived(
          "\"listed\" if capacity > 0, threshold >= half of the bandwidth and inactive features have no gradient of "
          "their own (goreg, preactivation_penalty), else \"dense\"",
          [&model] {
            const double widest = std::max(model.bandwidth, model.bandwidth_initial);
            const bool lists = model.activation == Activation::jumprelu && model.capacity > 0 &&
                               2 * model.threshold >= widest && !passes_below_threshold(model);
            return input::Value(lists ? "listed" : "dense");
          })
      .only_with("transcoder.activation", {"jumprelu"}, "the others have no thresholds")
      .free();
}

void add_resampling(input::Schema& schema, ModelSettings& model) {
  schema
      .add("transcoder.resample_every", model.resample_every,
           "interval at which dead features are directed at poorly reconstructed tokens; 0: never")
      .in("steps")
      .at_least(0)
      .at_most(input::kMostSteps)
      .not_with("transcoder.decoder", {"tied_target"},
                "a dead feature has no decoder row of its own that could be directed at a token; transcoder.auxk "
                "revives it")
      .changeable();
  schema
      .add("transcoder.resample_end", model.resample_end,
           "fraction of the run after which dead features are not resampled")
      .at_least(0)
      .at_most(1)
      .changeable();
}

}  // namespace

void add_model_keys(input::Schema& schema, ModelSettings& model) {
  add_table(schema, model);
  add_threshold_gradient(schema, model);
  add_resampling(schema, model);
}

}  // namespace weft::transcoder
