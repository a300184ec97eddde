// SPDX-License-Identifier: Apache-2.0
#include "transcoder/settings/presets.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include "input/print.hpp"

namespace weft::transcoder {
namespace {

/// Values of a preset by the path of their key. Choices are strings.
using Conventions = std::map<std::string, input::Value>;

input::Value name(const char* value) { return std::string(value); }
input::Value steps(std::int64_t value) { return value; }

constexpr Preset kPresets[] = {Preset::crosslayer_coding, Preset::eleuther, Preset::goreg,
                               Preset::clt_forge,         Preset::openmoss, Preset::anthropic};

/// Number of features to which the published learning rates of clt-training apply.
constexpr double kFeaturesOfRate = 1 << 14;

// Formulas: R sum of squared errors, P sum of tanh(c a nu), Q sum of q(z), over N tokens, L layers, d dimensions and F
// features; lambda rises linearly over the run unless stated. All have beta 0.9, 0.999 and an epsilon of 1e-8.

/// R / (N d), raw; P; Q = sum of relu(-z) / (N L F). AdamW; the rate falls linearly to a tenth.
Conventions crosslayer_coding() {
  return {{"data.normalise", name("per_dimension")},
          {"transcoder.activation", name("jumprelu")},
          {"transcoder.pseudo_derivative", name("crosslayer-coding")},
          {"transcoder.decoder_bias", name("pair")},
          {"transcoder.error", name("raw")},
          {"transcoder.error_reduction", name("elements")},
          {"transcoder.sparsity", 1e-3},
          {"transcoder.sparsity_reduction", name("sum")},
          {"transcoder.sparsity_scale", 1.0},
          {"transcoder.preactivation_penalty", 3e-6},
          {"transcoder.preactivation_form", name("negative")},
          {"transcoder.preactivation_reduction", name("all")},
          {"optimizer.epsilon_scale", name("none")},
          {"optimizer.weight_decay", 0.01},
          {"optimizer.schedule", name("linear")},
          {"optimizer.decay_begin", 0.0},
          {"optimizer.final_fraction", 0.1}};
}

/// Sum over layers of the variance unexplained; no penalty. Adam; warm-up, then linearly to 0. Source: its sweeps for
/// GPT-2.
Conventions eleuther(const ModelSettings& model) {
  return {{"data.normalise", name("scalar")},
          {"transcoder.activation", name("topk")},
          {"transcoder.k", 16.0},
          {"transcoder.scope", name("layer")},
          {"transcoder.decoder", name("per_layer")},
          {"transcoder.encoder_initial", name("width")},
          {"transcoder.decoder_initial", name("zero")},
          {"transcoder.skip", name("linear")},
          {"transcoder.error", name("unexplained")},
          {"optimizer.learning_rate",
           2e-4 / std::sqrt(static_cast<double>(std::max<std::int64_t>(1, model.features)) / kFeaturesOfRate)},
          {"optimizer.epsilon_scale", name("none")},
          {"optimizer.schedule", name("linear")},
          {"optimizer.warmup_steps", steps(1000)},
          {"optimizer.decay_begin", 0.0},
          {"optimizer.final_fraction", 0.0}};
}

/// R / (N L d); P / N and Q = sum of relu(-z) / (N L) with jumprelu. Adam; the rate is a tenth in the last fifth.
Conventions goreg(const ModelSettings& model) {
  Conventions of{{"data.normalise", name("per_dimension")},
                 {"transcoder.activation", name("jumprelu")},
                 {"transcoder.k", 16.0},
                 {"transcoder.pseudo_derivative", name("goreg")},
                 {"transcoder.error_reduction", name("all")},
                 {"optimizer.learning_rate", 1e-4},
                 {"optimizer.epsilon_scale", name("none")},
                 {"optimizer.schedule", name("step")},
                 {"optimizer.decay_begin", 0.8},
                 {"optimizer.final_fraction", 0.1}};
  const bool jumps = model.activation == Activation::jumprelu;
  of["transcoder.sparsity"] = jumps ? 7e-4 : 0.0;
  of["transcoder.sparsity_scale"] = 1.0;
  of["transcoder.preactivation_penalty"] = jumps ? 1e-6 : 0.0;
  of["transcoder.preactivation_form"] = name("negative");
  of["transcoder.preactivation_reduction"] = name("layers");
  return of;
}

/// R / N; P / N, c = 4, full at 0.7 of the run; Q = sum of relu(theta - z) nu / N. Source: its run for GPT-2.
Conventions clt_forge() {
  return {{"data.normalise", name("scalar")},
          {"transcoder.activation", name("jumprelu")},
          {"transcoder.pseudo_derivative", name("clt-forge")},
          {"transcoder.encoder_bias_initial", name("data")},
          {"transcoder.decoder_bias", name("pair")},
          {"transcoder.error_reduction", name("tokens")},
          {"transcoder.sparsity", 2.0},
          {"transcoder.sparsity_scale", 4.0},
          {"transcoder.sparsity_end", 0.7},
          {"transcoder.preactivation_penalty", 1e-5},
          {"transcoder.preactivation_form", name("below_threshold")},
          {"optimizer.learning_rate", 4e-4},
          {"optimizer.epsilon_scale", name("none")},
          {"optimizer.schedule", name("linear")},
          {"optimizer.warmup_steps", steps(1000)},
          {"optimizer.decay_begin", 0.95},
          {"optimizer.final_fraction", 0.0},
          {"optimizer.clip_norm", 1.0}};
}

/// R / (N L); no penalty. Constant rate after the warm-up. Source: its example for Pythia-160M.
Conventions openmoss() {
  return {{"data.normalise", name("scalar")},
          {"transcoder.activation", name("topk")},
          {"transcoder.k_total", 256.0},
          {"transcoder.ranking", name("decoder_norm")},
          {"transcoder.scope", name("all_layers")},
          {"transcoder.error_reduction", name("layers")},
          {"optimizer.learning_rate", 5e-5},
          {"optimizer.epsilon_scale", name("none")},
          {"optimizer.schedule", name("constant")},
          {"optimizer.warmup_steps", steps(1000)}};
}

/// R / N; P / N, c = 4; Q = sum of relu(theta - z) nu / N. The rate falls linearly in the last fifth.
Conventions anthropic() {
  return {{"data.normalise", name("scalar")},
          {"transcoder.activation", name("jumprelu")},
          {"transcoder.pseudo_derivative", name("anthropic")},
          {"transcoder.encoder_bias_initial", name("data")},
          {"transcoder.error_reduction", name("tokens")},
          {"transcoder.sparsity", 10.0},
          {"transcoder.sparsity_scale", 4.0},
          {"transcoder.preactivation_penalty", 3e-6},
          {"transcoder.preactivation_form", name("below_threshold")},
          {"optimizer.epsilon_scale", name("none")},
          {"optimizer.schedule", name("linear")},
          {"optimizer.decay_begin", 0.8},
          {"optimizer.final_fraction", 0.0},
          {"optimizer.clip_norm", 1.0}};
}

Conventions conventions(Preset preset, const ModelSettings& model) {
  switch (preset) {
    case Preset::weft:
      return {};
    case Preset::crosslayer_coding:
      return crosslayer_coding();
    case Preset::eleuther:
      return eleuther(model);
    case Preset::goreg:
      return goreg(model);
    case Preset::clt_forge:
      return clt_forge();
    case Preset::openmoss:
      return openmoss();
    case Preset::anthropic:
      return anthropic();
  }
  return {};
}

}  // namespace

void add_preset(input::Schema& schema, const ModelSettings& model) {
  std::set<std::string> paths;
  for (const Preset preset : kPresets)
    for (const auto& [path, value] : conventions(preset, model)) paths.insert(path);
  for (const std::string& path : paths) {
    input::Key& key = schema.at(path);
    const std::string otherwise = key.derive ? key.derivation : input::toml_value(key.initial);
    const auto derive = key.derive ? key.derive : [initial = key.initial] { return initial; };
    key.derived(fmt::format("{}; or of the preset", otherwise), [&model, path, derive] {
      const Conventions of = conventions(model.preset, model);
      const auto found = of.find(path);
      return found == of.end() ? derive() : found->second;
    });
  }
}

std::string missing_of_preset(const ModelSettings& model) {
  const bool keeps_k = kernels::activation_keeps_k(model.activation);
  if (model.preset == Preset::crosslayer_coding && keeps_k)
    return "transcoder.preset = \"crosslayer-coding\" is for transcoder.activation = \"jumprelu\" and \"relu\" (its "
           "batch_topk and topk also keep negative pre-activations, which Weft does not); take one of these, or leave "
           "the preset out";
  if (model.preset == Preset::openmoss && !keeps_k)
    return "transcoder.preset = \"openmoss\" is for transcoder.activation = \"topk\" and \"batch_topk\" (its "
           "thresholds "
           "apply to pre-activations times the norm of the decoder row, those of Weft do not); take one of these, or "
           "leave the preset out";
  if (model.preset == Preset::eleuther && model.activation != Activation::topk)
    return "transcoder.preset = \"eleuther\" is for transcoder.activation = \"topk\" only (its batch_topk first cuts "
           "each token to its 4 k largest features, and it has no relu or jumprelu); take \"topk\", or leave the "
           "preset out";
  return {};
}

}  // namespace weft::transcoder
