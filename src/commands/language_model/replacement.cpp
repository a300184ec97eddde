// SPDX-License-Identifier: Apache-2.0
#include "commands/language_model/replacement.hpp"

#include <type_traits>

#include "kernels/convert/affine.hpp"
#include "kernels/reduce/reduce.hpp"

namespace weft::commands {
namespace {

checkpoint::Found transcoder_for_mlps(const std::string& path, const parallel::World& world) {
  checkpoint::Found found = open_checkpoint(path, world);
  require_kind(found, "encoder_0/weight", "--transcoder takes that of a transcoder");
  return found;
}

/// The input of the checkpoint, for the kernels of the language model: the hand-written ones encode rows in 16 bits.
bench::TranscoderInput input_of(const checkpoint::Found& found, const parallel::World& world,
                                const kernels::Execution& execution) {
  bench::TranscoderInput input;
  read_input_of(found, {}, bench::trained_keys(input), world);
  if (execution.backend == kernels::Backend::cuda) input.configuration.precision = transcoder::Precision::bf16;
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

TranscoderReplacement::TranscoderReplacement(const std::string& path, const LoadedLanguageModel& loaded,
                                             std::int64_t rows, const parallel::World& world)
    : execution_(loaded.execution()),
      found_(transcoder_for_mlps(path, world)),
      input_(input_of(found_, world, execution_)),
      self_(world.all().split(world.rank(), 0)),
      grid_(self_, parallel::data_by_feature(1, 1)),
      shape_(require_fit(found_, input_.configuration, loaded.architecture().model)),
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

void TranscoderReplacement::form(const kernels::AnyMatrix& inputs, const kernels::Matrix<float>& outputs) {
  dataset::RawBatch batch;
  batch.inputs = inputs;
  batch.n_tokens = inputs.rows;
  forward_.load(batch);
  forward_.encode();
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

}  // namespace weft::commands
