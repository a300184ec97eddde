// SPDX-License-Identifier: Apache-2.0
#include "transcoder/parameters/model.hpp"

#include <fmt/format.h>

#include <cmath>
#include <functional>

namespace weft::transcoder {

using model::Cut;
using model::Initial;
using model::ParameterSpec;

namespace {

/// Name of the decoder's tensors in checkpoints. Names differ where meanings differ, so that no reader confuses them.
const char* decoder_name(Decoder decoder) {
  switch (decoder) {
    case Decoder::tied:
      return "tied_weight";
    case Decoder::tied_target:
      return "target_weight";
    case Decoder::cross_layer:
    case Decoder::per_layer:
      break;
  }
  return "weight";
}
std::string decoder_name(const Shape& shape, std::int64_t layer) {
  return fmt::format("decoder_{}/{}", layer, decoder_name(shape.decoder));
}

/// Visits the pairs of layers in the order of kernels::pair_of.
void for_each_pair(std::int64_t n_layers, const std::function<void(std::int64_t source, std::int64_t target)>& visit) {
  for (std::int64_t s = 0; s < n_layers; ++s)
    for (std::int64_t t = s; t < n_layers; ++t) visit(s, t);
}

Initial uniform_in_root(std::int64_t n, kernels::Purpose purpose) {
  return model::uniform(1.0 / std::sqrt(static_cast<double>(n)), purpose);
}

}  // namespace

// Source layer s:  z_s = W_enc,s x_s + b_enc,s     W_enc,s [F, d]    b_enc,s [F]
// Target layer t:  y_t = sum over s <= t of a_s W_dec,s[t] + b_dec,t + W_skip,t x_t
//                  W_dec,s [F, (L - s) * d]: the strips of targets s..L-1 in one row    b_dec [L * d]
//                  W_skip,t [d, d], zero at first
// per_layer:       y_t = a_t W_dec,t + ..., W_dec,t [F, d]
// tied:            y_t = sum over s <= t of a_s W_tied,s + ..., W_tied,s [F, d], named decoder_{s}/tied_weight.
// tied_target:     y_t = (sum over s <= t of a'_s,t) W_t + ..., W_t [F, d], named decoder_{t}/target_weight; a' = a, or
//                  (a + o_s,t) gamma_s,t where a is not 0: [F] each, decoder_{s}/offset_{t} and decoder_{s}/scale_{t}
// jumprelu:        theta_s [F], the thresholds themselves; their moments are those of the trained parameter, which is
//                  ln theta in most forms (kernels/transcoder/activation/jump_relu.hpp)
std::vector<ParameterSpec> parameter_specs(const Shape& shape) {
  const std::int64_t n_features = shape.n_features, d = shape.d_model;
  const Cut by_feature{0, parallel::kFeatureAxis};
  const Initial encoder_initial = uniform_in_root(shape.encoder_initial == EncoderInitial::width ? d : n_features,
                                                  kernels::Purpose::encoder_initial),
                decoder_initial = shape.decoder_initial == DecoderInitial::zero
                                      ? model::constant(0)
                                      : uniform_in_root(shape.decoder_columns(0), kernels::Purpose::decoder_initial);
  // Elements are numbered through all encoders, then through all decoders: part of the checkpoint contract.
  std::uint64_t encoder_element = 0, decoder_element = static_cast<std::uint64_t>(shape.n_layers * n_features * d);
  std::vector<ParameterSpec> specs;
  for (std::int64_t s = 0; s < shape.n_layers; ++s) {
    specs.push_back({.name = fmt::format("encoder_{}/weight", s),
                     .shape = {n_features, d},
                     .cut = by_feature,
                     .segment = d,
                     .initial = encoder_initial,
                     .first_element = encoder_element,
                     .weight_decay = true,
                     .export_name = fmt::format("W_enc_{}", s)});
    specs.push_back({.name = fmt::format("encoder_{}/bias", s),
                     .shape = {n_features},
                     .cut = by_feature,
                     .group = "encoder_bias",
                     .export_name = fmt::format("b_enc_{}", s),
                     .row_state = {{"tokens_since_fired", kernels::Scalar::i64}}});
    if (shape.threshold)
      specs.push_back({.name = fmt::format("encoder_{}/threshold", s),
                       .shape = {n_features},
                       .cut = by_feature,
                       .initial = model::constant(*shape.threshold),
                       .group = "threshold",
                       .export_name = fmt::format("threshold_{}", s)});
    specs.push_back({.name = decoder_name(shape, s),
                     .shape = {n_features, shape.decoder_columns(s)},
                     .cut = by_feature,
                     .segment = d,
                     .initial = decoder_initial,
                     .first_element = decoder_element,
                     .weight_decay = true,
                     .export_name = fmt::format("W_dec_{}{}", shape.decoder == Decoder::tied ? "tied_" : "", s)});
    encoder_element += static_cast<std::uint64_t>(n_features * d);
    decoder_element += static_cast<std::uint64_t>(n_features * shape.decoder_columns(s));
  }
  for (const bool scales : {false, true})
    if (shape.affine)
      for_each_pair(shape.n_layers, [&](std::int64_t s, std::int64_t t) {
        const char* const name = scales ? "scale" : "offset";
        specs.push_back({.name = fmt::format("decoder_{}/{}_{}", s, name, t),
                         .shape = {n_features},
                         .cut = by_feature,
                         .initial = model::constant(!scales  ? 0
                                                    : t == s ? 1
                                                             : shape.scale_initial),
                         .group = name});
      });
  specs.push_back(
      {.name = "decoder_bias", .shape = {shape.width()}, .update = model::Update::everywhere, .export_name = "b_dec"});
  for (std::int64_t t = 0; shape.skip && t < shape.n_layers; ++t)
    specs.push_back({.name = fmt::format("skip_{}/weight", t),
                     .shape = {d, d},
                     .update = model::Update::everywhere,
                     .segment = d,
                     .first_element = decoder_element + static_cast<std::uint64_t>(t * d * d),
                     .weight_decay = true,
                     .export_name = fmt::format("W_skip_{}", t)});
  return specs;
}

namespace {

std::string decoder_text(const Shape& shape) {
  switch (shape.decoder) {
    case Decoder::per_layer:
      return ", decoders per layer";
    case Decoder::tied:
      return ", tied decoders";
    case Decoder::tied_target:
      return shape.affine ? ", decoders tied per target with offsets and scales" : ", decoders tied per target";
    case Decoder::cross_layer:
      break;
  }
  return "";
}

}  // namespace

std::string to_text(const Shape& shape) {
  return fmt::format("{} layer{}, d_model {}, {} features per layer{}{}", shape.n_layers,
                     shape.n_layers == 1 ? "" : "s", shape.d_model, shape.n_features, decoder_text(shape),
                     shape.skip ? ", linear skip connection" : "");
}

Shape shape_of(const ModelSettings& settings, std::int64_t n_layers, std::int64_t d_model) {
  Shape shape{n_layers, d_model, settings.features, settings.decoder, settings.skip == Skip::linear};
  shape.affine = settings.decoder_affine;
  shape.scale_initial = settings.decoder_scale_initial;
  shape.encoder_initial = settings.encoder_initial;
  shape.decoder_initial = settings.decoder_initial;
  if (kernels::activation_has_thresholds(settings.activation)) shape.threshold = settings.threshold;
  return shape;
}

std::int64_t largest_owned(const Shape& shape, const parallel::GridShape& grid) {
  return parallel::largest_part(parallel::largest_part(shape.n_features, grid.size(parallel::kFeatureAxis)),
                                grid.size(parallel::kDataAxis));
}

std::int64_t Shape::parameters() const { return model::elements_of(parameter_specs(*this)); }

std::optional<StoredModel> stored_model(std::span<const checkpoint::TensorEntry> tensors) {
  const auto find = [&](const std::string& name) -> const checkpoint::TensorEntry* {
    for (const checkpoint::TensorEntry& tensor : tensors)
      if (tensor.name == name) return &tensor;
    return nullptr;
  };
  const checkpoint::TensorEntry *const weight = find("encoder_0/weight"),
                                       *const moment = find("encoder_0/weight.first_moment"),
                                       *const decoder = find("decoder_0/weight");
  if (weight == nullptr || weight->shape.size() != 2) return std::nullopt;
  StoredModel stored{{0, weight->shape[1], weight->shape[0]}};
  while (find(fmt::format("encoder_{}/weight", stored.shape.n_layers)) != nullptr) ++stored.shape.n_layers;
  if (decoder != nullptr && decoder->shape.size() == 2 &&
      decoder->shape[1] != stored.shape.n_layers * stored.shape.d_model)
    stored.shape.decoder = Decoder::per_layer;
  for (const Decoder kind : {Decoder::tied, Decoder::tied_target})
    if (find(fmt::format("decoder_0/{}", decoder_name(kind))) != nullptr) stored.shape.decoder = kind;
  stored.shape.affine = find("decoder_0/scale_0") != nullptr;
  stored.shape.skip = find("skip_0/weight") != nullptr;
  if (find("encoder_0/threshold") != nullptr) stored.shape.threshold = 0;
  if (weight->type == kernels::Scalar::bf16)
    stored.storage = moment != nullptr && moment->type == kernels::Scalar::u8 ? kernels::StorageType::eight_bit
                                                                              : kernels::StorageType::bf16;
  return stored;
}

Model::Model(const Shape& shape, kernels::StorageType storage, const parallel::Grid& grid,
             const kernels::Execution& execution, Moments moments)
    : shape_(shape),
      parameters_(parameter_specs(shape), storage, grid.shape(), grid.world().rank(), execution, moments),
      features_(grid.part(parallel::kFeatureAxis, shape.n_features)),
      owned_(parallel::part(features_.size(), grid.size(parallel::kDataAxis), grid.index(parallel::kDataAxis))) {
  for (std::int64_t s = 0; s < shape.n_layers; ++s) {
    const std::size_t encoder = parameters_.index(fmt::format("encoder_{}/weight", s)),
                      bias = parameters_.index(fmt::format("encoder_{}/bias", s)),
                      decoder = parameters_.index(decoder_name(shape, s));
    encoder_.push_back(parameters_.matrix(encoder));
    owned_encoder_.push_back(parameters_.owned_matrix(encoder));
    encoder_bias_.push_back(parameters_.vector(bias));
    owned_encoder_bias_.push_back(parameters_.owned_vector(bias));
    if (shape.threshold)
      owned_thresholds_.push_back(parameters_.owned_vector(parameters_.index(fmt::format("encoder_{}/threshold", s))));
    decoder_.push_back(parameters_.matrix(decoder));
    owned_decoder_.push_back(parameters_.owned_matrix(decoder));
    if (shape.skip) skip_.push_back(parameters_.matrix(parameters_.index(fmt::format("skip_{}/weight", s))));
  }
  for (const char* const name : {"offset", "scale"})
    if (shape.affine)
      for_each_pair(shape.n_layers, [&](std::int64_t s, std::int64_t t) {
        owned_affine_.push_back(
            parameters_.owned_vector(parameters_.index(fmt::format("decoder_{}/{}_{}", s, name, t))));
      });
  if (shape.affine) {
    const auto all = [&](const char* name) -> kernels::Matrix<float> {
      const kernels::AnyMatrix group = parameters_.group(name);
      return {static_cast<float*>(group.data), group.rows, group.columns, group.stride};
    };
    affine_ = {all("offset"), all("scale")};
  }
  decoder_bias_ = parameters_.vector(parameters_.index("decoder_bias"));
  clocks_ = parameters_.group_state<std::int64_t>("encoder_bias", "tokens_since_fired");
}

std::vector<kernels::AnyMatrix> Model::feature_vectors() const {
  std::vector<kernels::AnyMatrix> all{encoder_biases()};
  if (shape_.threshold) all.push_back(thresholds());
  if (shape_.affine)
    for (const kernels::Matrix<float>& vectors : {affine_.offset, affine_.scale})
      all.push_back({vectors.data, kernels::Scalar::fp32, vectors.rows, vectors.columns, vectors.stride});
  return all;
}

kernels::PairAffine Model::owned_affine() const {
  if (affine_.scale.data == nullptr) return {};
  const auto owned = [&](kernels::Matrix<float> all) -> kernels::Matrix<float> {
    return {all.data + owned_.begin, all.rows, owned_.size(), all.stride};
  };
  return {owned(affine_.offset), owned(affine_.scale)};
}

}  // namespace weft::transcoder
