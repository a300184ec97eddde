// SPDX-License-Identifier: Apache-2.0
//
// Table [transcoder], and all tables that the training of a transcoder reads. Each module owns the settings of its
// table and adds its keys to the schema; conditions between tables are added here.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_settings.hpp"
#include "dataset/dataset_settings.hpp"
#include "device/device_settings.hpp"
#include "kernels/transcoder/activation/activation.hpp"
#include "kernels/transcoder/activation/jump_relu.hpp"
#include "optimizer/optimizer_settings.hpp"
#include "parallel/parallel_settings.hpp"
#include "privacy/privacy_settings.hpp"
#include "run/run_settings.hpp"

namespace weft::transcoder {

using device::Precision;
using run::NonFinite;

using kernels::Activation;
using kernels::JumpForm;
using kernels::PreactivationForm;
using kernels::SparsityForm;
enum class Scope { layer, all_layers };
/// Form of the vector that feature f of layer s writes to target layer t: a separate vector for each pair of layers, or
/// for t = s alone; one vector for every t >= s; a row of a matrix of t, the same for every s.
enum class Decoder { cross_layer, per_layer, tied, tied_target };
enum class EncoderInitial { features, width };
enum class EncoderBiasInitial { zero, data };
enum class DecoderInitial { uniform, zero };
enum class Skip { none, linear };
enum class Ranking { value, decoder_norm, z_score };
enum class Decline { linear, exponential };
/// Source of the gradient of jumprelu's thresholds: all pre-activations, formed again (parts/thresholds.hpp), or lists
/// of those in the bands about thresholds (kernels/transcoder/activation/threshold_band.hpp).
enum class ThresholdGradient { dense, listed };
/// Project whose conventions are the defaults of keys that the input does not give (presets.hpp).
enum class Preset { weft, crosslayer_coding, eleuther, goreg, clt_forge, openmoss, anthropic };
/// Space and measure of the error of a reconstruction, with normalised y~ and raw y: squares of y^~ - y~; squares of
/// y^ - y; or squares of y^ - y over the variance of the batch's targets, layer by layer (fraction of variance
/// unexplained).
enum class ErrorForm { normalised, raw, unexplained };
/// Divisor of a sum over tokens, layers and elements (dimensions or features) of a layer. `elements`: the number of
/// tokens times the elements of a layer.
enum class Reduction { sum, tokens, elements, layers, all };
/// Number of decoder biases: one per target layer, or one per pair of layers, of which t + 1 equal ones add up in
/// target layer t (from 0).
enum class DecoderBias { target, pair };

/// Table [transcoder].
struct ModelSettings {
  Preset preset = Preset::weft;
  std::string initial;        ///< run or checkpoint whose weights the training begins with; "": random weights
  std::int64_t features = 0;  ///< per layer; required
  Activation activation = Activation::batch_topk;
  double k = 16;                             ///< active per token and layer (batch_topk: on average, may be fractional)
  double k_total = 0;                        ///< active per token over all layers; 0: k in each layer
  double k_initial = 0;                      ///< k of the first step; 0: k is constant
  double k_end = 0.5;                        ///< fraction of the run from which k holds
  Decline k_decline = Decline::exponential;  ///< course of k between k_initial and k
  Ranking ranking = Ranking::value;          ///< quantity by which batch_topk and topk rank features
  Scope scope = Scope::layer;
  Decoder decoder = Decoder::cross_layer;
  bool decoder_affine = false;       ///< tied_target: an offset and a scale for each feature and target
  double decoder_scale_initial = 0;  ///< initial scale of the targets after a feature's own layer
  Skip skip = Skip::none;
  DecoderBias decoder_bias = DecoderBias::target;
  EncoderInitial encoder_initial = EncoderInitial::features;
  DecoderInitial decoder_initial = DecoderInitial::uniform;
  EncoderBiasInitial encoder_bias_initial = EncoderBiasInitial::zero;
  std::int64_t initially_active = 10'000;  ///< features per token and layer, with biases from data
  std::int64_t capacity =
      0;  ///< relu, jumprelu: room for active (or listed) features per token and layer; 0: room for all
  JumpForm pseudo_derivative = JumpForm::anthropic;  ///< jumprelu, as the following two
  double threshold = 0.1;                            ///< initial theta
  double bandwidth = 2;
  double bandwidth_initial = 0;  ///< bandwidth of the first step; 0: the bandwidth is constant
  double bandwidth_end = 0.5;    ///< fraction of the run from which it is `bandwidth`, linear before
  ThresholdGradient threshold_gradient = ThresholdGradient::dense;
  ErrorForm error = ErrorForm::normalised;
  Reduction error_reduction = Reduction::elements;
  double sparsity = 0;  ///< coefficient of the penalty tanh(c a nu), full from sparsity_end on
  SparsityForm sparsity_form = SparsityForm::tanh;
  double sparsity_scale = 4;  ///< c
  Reduction sparsity_reduction = Reduction::tokens;
  double sparsity_begin = 0, sparsity_end = 1;  ///< fractions of the run: the coefficient rises from 0 between them
  double preactivation_penalty = 0;             ///< coefficient; jumprelu
  PreactivationForm preactivation_form = PreactivationForm::below_threshold;
  Reduction preactivation_reduction = Reduction::tokens;
  double auxk = 0;                       ///< coefficient of the auxiliary loss of dead features; 0: none
  std::int64_t auxk_features = 512;      ///< largest number of dead features per token and layer
  std::int64_t dead_window = 1'000'000;  ///< a feature that has not fired for this many tokens is dead
  std::int64_t resample_every = 0;       ///< steps; 0: dead features are not resampled
  double resample_end = 0.5;             ///< fraction of the run after which features are not resampled
};

/// Returns the arithmetic of jumprelu that the settings select.
inline kernels::JumpRule jump_rule(const ModelSettings& settings) {
  return kernels::jump_rule(settings.pseudo_derivative, static_cast<float>(settings.bandwidth));
}

/// True if inactive pre-activations have a gradient, in or out of the band: then all of them are needed.
inline bool passes_below_threshold(const ModelSettings& settings) {
  return jump_rule(settings).passes_below || settings.preactivation_penalty > 0;
}
/// True if the selection of a step also lists the entries in the bands about thresholds.
inline bool lists_bands(const ModelSettings& settings) {
  return kernels::activation_has_thresholds(settings.activation) &&
         settings.threshold_gradient == ThresholdGradient::listed;
}

/// Batches of tokens that the backward pass works on: dead features have one of their own (parts/dead_features.hpp).
inline std::int64_t backward_batches(const ModelSettings& settings) { return settings.auxk > 0 ? 2 : 1; }
/// True if the loss has a penalty in addition to the error of the reconstruction.
inline bool has_penalties(const ModelSettings& settings) {
  return settings.sparsity > 0 || settings.preactivation_penalty > 0;
}

/// Returns the divisor of a sum over n_tokens, all layers and `elements` per layer.
double divisor(Reduction, std::int64_t n_tokens, std::int64_t n_layers, std::int64_t elements);
/// Returns the divisor of the squared errors. Twice its inverse is the factor of the gradient rows.
double error_divisor(const ModelSettings&, std::int64_t n_tokens, std::int64_t n_layers, std::int64_t d_model);

/// Returns k of a step, from 1. During the decline it is a whole number, so that one captured graph serves several
/// steps.
double k_at(const ModelSettings&, std::int64_t step, std::int64_t steps);
/// Returns the settings with the largest k of a run, which the lists of active features must hold.
ModelSettings with_largest_k(const ModelSettings&);

class SelectorFactory;

struct Configuration {
  run::RunSettings run;
  dataset::Settings data;
  ModelSettings transcoder;
  optimizer::Settings optimizer;
  privacy::Settings privacy;
  parallel::Settings parallel;
  device::Settings device;
  Precision precision = Precision::fp32;  ///< device.precision
  std::int64_t tile = 0;  ///< device.tile, MiB of pre-activations made at a time; 0 = chosen for the backend
  checkpoint::Settings checkpoint;
  run::LogSettings log;
  run::ResumeSettings resume;

  /// Alternative implementations with the same result bit for bit, which a benchmark compares with those of training.
  /// They have no keys and must outlive the objects made with them.
  struct Alternatives {
    const SelectorFactory* selector = nullptr;  ///< selection/drivers.hpp
    bool rows_by_layer = false;                 ///< one exchange per layer on the feature axis
  } alternatives;
};

/// Returns the settings of table [device] for the runtime.
inline device::Settings device_settings(const Configuration& configuration) {
  return device::for_precision(configuration.device, configuration.precision);
}

/// Largest number of rows of a record.
std::int64_t record_rows(const Configuration&);
/// Describes why batch_topk would keep no feature of a batch (k times its tokens and the layers of one budget rounds to
/// 0); "" if it keeps some.
std::string empty_budget(const Configuration&, std::int64_t layers_of_budget);

inline bool is_whole(double value) { return value == std::floor(value); }

/// Sets k of each of n_layers layers from k_total, if that is given.
void resolve_k(Configuration&, std::int64_t n_layers);

/// Checks the conditions on the number of layers, known from the header of a dataset: at most kernels::kMostLayers;
/// topk over all layers has a whole budget per token, batch_topk a budget of at least one feature per batch. Throws a
/// collective Error(usage).
void check_layers(const Configuration&, std::int64_t n_layers);

/// Returns warnings about values with which training runs but learns nothing.
std::vector<std::string> idle_settings(const Configuration&);

}  // namespace weft::transcoder
