// SPDX-License-Identifier: Apache-2.0
#include "commands/language_model/replacement.hpp"

#include <algorithm>
#include <tuple>
#include <type_traits>
#include <utility>

#include "kernels/convert/affine.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/optimize/adam.hpp"
#include "kernels/reduce/reduce.hpp"
#include "kernels/transcoder/decode/by_target.hpp"
#include "transcoder/features/decoder_rows.hpp"

namespace weft::commands {
namespace {

checkpoint::Found transcoder_for_mlps(const std::string& path, const parallel::World& world) {
  checkpoint::Found found = open_checkpoint(path, world);
  require_kind(found, "encoder_0/weight", "--transcoder takes that of a transcoder");
  return found;
}

/// The input of the checkpoint, for the kernels of the language model: the hand-written ones encode rows in 16 bits.
bench::TranscoderInput input_of(const checkpoint::Found& found, const parallel::World& world,
                                kernels::Backend backend) {
  bench::TranscoderInput input;
  read_input_of(found, {}, bench::trained_keys(input), world);
  if (backend == kernels::Backend::cuda) input.configuration.precision = transcoder::Precision::bf16;
  return input;
}

/// The transcoder's shape. Throws a collective Error(usage) if it cannot replace the MLPs of the model.
transcoder::Shape require_fit(const checkpoint::Found& found, const transcoder::Configuration& configuration,
                              const language_model::ModelSettings& model) {
  const auto refuse = [&](const std::string& why) {
    return collective_error(ExitCode::usage, "--transcoder {}: {}", found.path.string(), why);
  };
  const std::optional<transcoder::StoredModel> stored = transcoder::stored_model(found.manifest.tensors);
  if (!stored) throw refuse("its tensors are not those of a transcoder; name another checkpoint");
  if (stored->shape.n_layers != model.layers || stored->shape.d_model != model.d_model)
    throw refuse(
        fmt::format("has {} layers of width {}, the language model {} of {} (one for each MLP); train it on "
                    "activations of this model (weft lm harvest)",
                    stored->shape.n_layers, stored->shape.d_model, model.layers, model.d_model));
  if (configuration.data.targets != dataset::Targets::outputs)
    throw refuse("reconstructs the inputs of MLPs (data.targets), not their outputs; name another checkpoint");
  if (configuration.transcoder.scope == transcoder::Scope::all_layers &&
      kernels::activation_keeps_k(configuration.transcoder.activation))
    throw refuse(
        "selects over all layers together (transcoder.scope = \"all_layers\": features of a layer depend on "
        "later ones); give it thresholds first, with weft convert");
  return transcoder::shape_of(configuration.transcoder, model.layers, model.d_model);
}

dataset::Description shape_alone(const checkpoint::Found& found, const transcoder::Shape& shape) {
  dataset::Description description;
  description.path = found.path.string();
  description.n_layers = shape.n_layers;
  description.d_model = shape.d_model;
  return description;
}

}  // namespace

void InterventionOptions::add_to(Options& options) {
  options.add("--set-feature", set, "LAYER:FEATURE=VALUE",
              "activation of a feature of the transcoder; @FIRST[-LAST]: at these positions only; repeatable");
  options.add("--scale-feature", scale, "LAYER:FEATURE=FACTOR", "likewise, times its activation");
}

std::vector<language_model::Intervention> InterventionOptions::list(const std::string& transcoder) const {
  std::vector<language_model::Intervention> list = language_model::interventions(set, scale);
  if (!list.empty() && transcoder.empty())
    throw collective_error(ExitCode::usage, "{}: of which transcoder? Add --transcoder CHECKPOINT", list.front().text);
  return list;
}

PlannedTranscoder::PlannedTranscoder(const std::string& path, const language_model::ModelSettings& model,
                                     std::int64_t rows, kernels::Backend backend, const parallel::World& world) {
  const checkpoint::Found found = transcoder_for_mlps(path, world);
  const bench::TranscoderInput input = input_of(found, world, backend);
  const transcoder::Shape shape = require_fit(found, input.configuration, model);
  const parallel::GridShape grid = parallel::data_by_feature(1, 1);
  const model::StateBytes state = model::largest_state_bytes(
      transcoder::parameter_specs(shape), grid, input.configuration.optimizer.state, backend, model::Moments::none);
  model::StepArena arena(backend);
  const transcoder::Forward::Buffers forward(input.configuration, shape, grid, rows, arena);
  bytes = state.weights + state.conversion + arena.device_bytes();
}

TranscoderReplacement::TranscoderReplacement(const std::string& path, const language_model::ModelSettings& model,
                                             std::int64_t rows, const kernels::Execution& execution,
                                             const parallel::World& world)
    : execution_(execution),
      found_(transcoder_for_mlps(path, world)),
      input_(input_of(found_, world, execution_.backend)),
      self_(world.all().split(world.rank(), 0)),
      grid_(self_, parallel::data_by_feature(1, 1)),
      shape_(require_fit(found_, input_.configuration, model)),
      statistics_(transcoder::load_statistics(world, found_, shape_.n_layers, shape_.d_model, found_.path.string(),
                                              execution_)),
      normalisation_(
          dataset::normalisation(statistics_, shape_alone(found_, shape_), input_.configuration.data.normalise),
          statistics_, execution_),
      model_(shape_, input_.configuration.optimizer.state, grid_, execution_, transcoder::Moments::none),
      arena_(execution_, grid_),
      forward_(input_.configuration, model_, normalisation_, grid_, execution_, timers_, rows, arena_) {
  checkpoint::Registry registry;
  model_.add_to(registry);
  checkpoint::load(world.all(), found_, registry, execution_, checkpoint::Load::part);
}

language_model::Reconstruction TranscoderReplacement::reconstruction() {
  return {.form = [this](const kernels::AnyMatrix& inputs,
                         const kernels::Matrix<float>& outputs) { form(inputs, outputs); },
          .mean = normalisation_.pivot.array()};
}

const kernels::SparseActivations& TranscoderReplacement::encode(const kernels::AnyMatrix& inputs) {
  dataset::RawBatch batch;
  batch.inputs = inputs;
  batch.n_tokens = inputs.rows;
  forward_.load(batch);
  forward_.encode();
  return forward_.activations();
}

void TranscoderReplacement::form(const kernels::AnyMatrix& inputs, const kernels::Matrix<float>& outputs) {
  encode(inputs);
  forward_.decode([&](const transcoder::Forward::OwnPart& part) {
    const std::int64_t first = part.layers.begin * shape_.d_model, columns = part.layers.size() * shape_.d_model;
    const auto of_layers = [&](auto* all) {
      return kernels::Array<std::remove_pointer_t<decltype(all)>>{all + first, columns};
    };
    const kernels::Matrix<float> y{outputs.row(part.begin) + first, part.count, columns, outputs.stride};
    kernels::reconstruct(execution_, part.partial, part.n_parts, of_layers(model_.decoder_bias().weight.data), y);
    // Back to raw values: y = mean + spread * y~.
    const kernels::AnyMatrix rows{y.data, kernels::Scalar::fp32, y.rows, y.columns, y.stride};
    kernels::affine_rows(execution_, rows, of_layers(normalisation_.target_spread.data()),
                         of_layers(normalisation_.target_mean.data()), {}, rows);
  });
}

language_model::ChangedFeatures TranscoderReplacement::changed_features(
    std::vector<language_model::Intervention> changes, std::int64_t positions, bool alone) {
  language_model::require_fit(changes, shape_.n_layers, shape_.n_features, positions);
  const bool of_batches = input_.configuration.transcoder.activation == transcoder::Activation::batch_topk;
  if (const std::string why = alone && of_batches
                                  ? "it selects features over the rows of a batch, which are those of unrelated texts; "
                                    "give it thresholds first, with weft convert"
                                  : attribution_obstacle();
      !why.empty())
    throw collective_error(ExitCode::usage, "--transcoder {}: no interventions on its features ({})",
                           found_.path.string(), why);
  std::vector<language_model::ActiveFeature> list;
  for (const language_model::Intervention& change : changes) list.push_back({change.layer, 0, change.feature, 1.0f});
  return {.changes = std::move(changes),
          .n_features = shape_.n_features,
          .vectors = vectors_of(std::move(list)),
          .encode = [this](const kernels::AnyMatrix& inputs) -> const kernels::SparseActivations& {
            return encode(inputs);
          },
          .mean = normalisation_.input_mean.array()};
}

std::string TranscoderReplacement::attribution_obstacle() const {
  return shape_.affine
             ? "its features write offsets (transcoder.decoder_affine), which are not proportional to activations"
             : "";
}

std::vector<language_model::ActiveFeature> TranscoderReplacement::active_features() const {
  const kernels::SparseActivations& activations = forward_.activations();
  std::vector<std::int64_t> offsets(static_cast<std::size_t>(activations.n_tokens + 1));
  const auto to_host = [&]<class T>(const T* from, std::vector<T>& to) {
    device::copy(execution_, to.data(), from, static_cast<std::int64_t>(to.size() * sizeof(T)),
                 device::Direction::to_host);
  };
  to_host(activations.row_offsets.data, offsets);
  kernels::fence(execution_);
  std::vector<std::uint32_t> keys(static_cast<std::size_t>(offsets.back()));
  std::vector<float> values(keys.size());
  to_host(activations.key.data, keys);
  to_host(activations.value.data, values);
  kernels::fence(execution_);
  std::vector<language_model::ActiveFeature> features;
  for (std::int64_t token = 1; token < activations.n_tokens; ++token)
    for (std::int64_t i = offsets[static_cast<std::size_t>(token)]; i < offsets[static_cast<std::size_t>(token) + 1];
         ++i) {
      const auto at = static_cast<std::size_t>(i);
      if (values[at] != 0)
        features.push_back({keys[at] / activations.n_features, token, keys[at] % activations.n_features, values[at]});
    }
  std::sort(features.begin(), features.end(), [](const auto& a, const auto& b) {
    return std::tie(a.layer, a.token, a.index) < std::tie(b.layer, b.token, b.index);
  });
  return features;
}

std::int64_t TranscoderReplacement::vector_bytes(const std::vector<language_model::ActiveFeature>& features) const {
  std::int64_t vectors = 0;
  for (const language_model::ActiveFeature& feature : features) vectors += 1 + shape_.targets(feature.layer);
  return vectors * shape_.d_model * 4;
}

/// With x~ = (x - mean) u of the inputs and y = mean + v y~ of the outputs: u W_enc, and a v w_dec.
language_model::ActiveFeatures TranscoderReplacement::vectors_of(
    std::vector<language_model::ActiveFeature> list) const {
  const std::int64_t width = shape_.d_model, n = std::ssize(list);
  language_model::ActiveFeatures features{.list = std::move(list),
                                          .per_layer = shape_.decoder == transcoder::Decoder::per_layer,
                                          .encoders = device::Buffer<float>(n * width),
                                          .decoders = {}};
  const kernels::Matrix<float> encoders = features.encoders.matrix(n, width);
  const auto any = [](const kernels::Matrix<float>& matrix, std::int64_t row, std::int64_t rows) -> kernels::AnyMatrix {
    return {matrix.row(row), kernels::Scalar::fp32, rows, matrix.columns, matrix.stride};
  };
  const auto scale = [&](const kernels::AnyMatrix& rows, const float* factors, std::int64_t layer,
                         const kernels::AnyMatrix& out) {
    kernels::affine_rows(execution_, rows, {factors + layer * width, width}, {}, {}, out);
  };
  for (std::int64_t layer = 0, first = 0, end = 0; layer < shape_.n_layers; ++layer, first = end) {
    while (end < n && features.list[static_cast<std::size_t>(end)].layer == layer) ++end;
    const std::int64_t count = end - first, targets = shape_.targets(layer), columns = targets * width,
                       written = transcoder::row_columns(shape_, layer);
    features.decoders.emplace_back(count * columns);
    if (count == 0) continue;
    const kernels::Matrix<float> decoders = features.decoders.back().matrix(count, columns);
    device::HostBuffer<float> values(count);
    for (std::int64_t i = 0; i < count; ++i) {
      const language_model::ActiveFeature& feature = features.list[static_cast<std::size_t>(first + i)];
      values.data()[i] = feature.activation;
      kernels::weights_to_float(execution_, model_.encoder()[static_cast<std::size_t>(layer)], feature.index,
                                {encoders.row(first + i), 1, width, width});
      transcoder::decoder_rows(model_, layer, feature.index, execution_, {decoders.row(i), 1, written, columns});
    }
    scale(any(encoders, first, count), normalisation_.input_scale.data(), layer, any(encoders, first, count));
    const auto strip = [&](std::int64_t t) { return any(decoders, 0, count).columns_from(t * width, width); };
    // Tied decoders have one vector for all targets, in the place of the first.
    for (std::int64_t t = targets; t-- > 0;)
      scale(strip(written == columns ? t : 0), normalisation_.target_spread.data(), layer + t, strip(t));
    const device::Buffer<float> activations(count);
    device::copy(execution_, activations.data(), values.data(), values.bytes(), device::Direction::to_device);
    kernels::scale_each_row(execution_, activations.array(), decoders);
    kernels::fence(execution_);  // `activations` is destroyed
  }
  return features;
}

std::vector<device::Buffer<float>> TranscoderReplacement::skip_matrices() const {
  const std::int64_t width = shape_.d_model;
  std::vector<device::Buffer<float>> matrices;
  for (std::size_t layer = 0; layer < model_.skip().size(); ++layer) {
    const kernels::Matrix<float> matrix = matrices.emplace_back(width * width).matrix(width, width);
    const kernels::AnyMatrix rows{matrix.data, kernels::Scalar::fp32, width, width, width};
    const std::int64_t first = static_cast<std::int64_t>(layer) * width;
    kernels::weights_to_float(execution_, model_.skip()[layer], 0, matrix);
    kernels::affine_rows(execution_, rows, {normalisation_.input_scale.data() + first, width}, {}, {}, rows);
    kernels::scale_each_row(execution_, {normalisation_.target_spread.data() + first, width}, matrix);
  }
  return matrices;
}

}  // namespace weft::commands
