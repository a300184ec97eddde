// SPDX-License-Identifier: Apache-2.0
//
// weft export CHECKPOINT DIR --to FORMAT: the weights of a transcoder, with the normalisation of its activations folded
// in, in the files of another program.
#include <cmath>
#include <filesystem>

#include "base/log.hpp"
#include "commands/commands.hpp"
#include "commands/shared/interchange_document.hpp"
#include "dataset/activations/description.hpp"
#include "interchange/fold.hpp"
#include "interchange/formats.hpp"
#include "interchange/hooks.hpp"
#include "language_model/mlp_recorder.hpp"
#include "transcoder/parameters/model.hpp"
#include "transcoder/run/statistics_state.hpp"

namespace weft::commands {
namespace {

interchange::Format format_of(const std::string& name) {
  if (name == "circuit-tracer") return interchange::Format::circuit_tracer;
  if (name == "crosslayer-coding") return interchange::Format::crosslayer_coding;
  if (name == "saelens") return interchange::Format::saelens;
  if (name == "sparsify") return interchange::Format::sparsify;
  throw collective_error(
      ExitCode::usage, "{} (formats: circuit-tracer, crosslayer-coding, saelens, sparsify); name one with --to FORMAT",
      name.empty() ? "weft export needs a format" : "--to " + name + ": not a format");
}

interchange::Storage storage_of(const std::string& type, interchange::Format format) {
  using kernels::Scalar;
  if (type == "bf16") return {Scalar::bf16, Scalar::fp32};
  if (type == "fp32") return {Scalar::fp32, Scalar::fp32};
  if (!type.empty()) throw collective_error(ExitCode::usage, "--type {}: not a type of weights (bf16 or fp32)", type);
  return {format == interchange::Format::circuit_tracer ? Scalar::bf16 : Scalar::fp32, Scalar::fp32};
}

/// True if the format is to hold single layers. The tensors of a model of one layer do not show its transcoder.decoder:
/// a format of single layers takes it, and circuit-tracer loads the skip connections of single layers only.
bool is_per_layer(const transcoder::Shape& shape, const transcoder::Configuration& configuration,
                  interchange::Format format) {
  if (format == interchange::Format::crosslayer_coding) return false;
  if (shape.n_layers > 1) return shape.decoder == transcoder::Decoder::per_layer;
  return format != interchange::Format::circuit_tracer || shape.skip ||
         configuration.transcoder.decoder == transcoder::Decoder::per_layer;
}

/// What the format is to hold: a per-layer model and tied decoders as such where the format has them. Folded
/// normalisation gives the vector of a source a scale for each target.
interchange::Contents contents_of(const transcoder::Shape& shape, const transcoder::Configuration& configuration,
                                  interchange::Format format) {
  interchange::Contents contents{.sizes = {shape.n_layers, shape.d_model, shape.n_features}};
  contents.per_layer = is_per_layer(shape, configuration, format);
  if (format == interchange::Format::crosslayer_coding) {
    if (shape.decoder == transcoder::Decoder::tied_target) contents.tying = interchange::Tying::per_target;
    if (shape.decoder == transcoder::Decoder::tied && configuration.data.normalise == dataset::Normalise::none)
      contents.tying = interchange::Tying::per_source;
    contents.affine = shape.affine;
  }
  if (format != interchange::Format::saelens && format != interchange::Format::sparsify) return contents;
  contents.autoencoder = configuration.data.targets == dataset::Targets::inputs;
  const transcoder::ModelSettings& settings = configuration.transcoder;
  const bool of_a_token = settings.activation == transcoder::Activation::topk &&
                          settings.ranking == transcoder::Ranking::value &&
                          (settings.scope == transcoder::Scope::layer || shape.n_layers == 1);
  if (of_a_token) contents.k = static_cast<std::int64_t>(std::llround(settings.k));
  return contents;
}

/// Model and hook points of the activations, as the data of the run states them: the rows of a language model, or the
/// attributes of the first file of a dataset that is still there.
dataset::HookPoints points_of(const transcoder::Configuration& configuration) {
  if (!configuration.data.model.empty())
    return {configuration.data.model, language_model::kInputHook, language_model::kOutputHook};
  try {
    return dataset::hook_points(dataset::expand_environment(configuration.data.train));
  } catch (const Error&) {  // the weights can be exported without it
    return {};
  }
}

/// What the options say, checked against the data, and what the data say where they do not.
interchange::Origin origin_of(const Request& request, const transcoder::Configuration& configuration,
                              interchange::Format format, std::int64_t n_layers) {
  interchange::Origin origin{request.model_name, request.input_hook, request.output_hook};
  dataset::HookPoints points = points_of(configuration);
  if (configuration.data.targets == dataset::Targets::inputs) points.targets = points.inputs;
  const std::string data = configuration.data.model.empty() ? configuration.data.train : configuration.data.model;
  interchange::require_same_point("--input-hook", origin.input_hook, points.inputs, data, n_layers);
  interchange::require_same_point("--output-hook", origin.output_hook, points.targets, data, n_layers);
  if (origin.model.empty()) origin.model = points.model;
  // sparsify has names of modules, by which it calls its directories.
  if (format == interchange::Format::sparsify) return origin;
  if (origin.input_hook.empty()) origin.input_hook = interchange::transformer_lens_name(points.inputs);
  if (origin.output_hook.empty()) origin.output_hook = interchange::transformer_lens_name(points.targets);
  return origin;
}

}  // namespace

int export_weights(const Request& request, const parallel::World& world) {
  // 1. What to write.
  const interchange::Format format = format_of(request.format);
  const interchange::Storage storage = storage_of(request.stored_type, format);
  if (request.directory.empty())
    throw collective_error(ExitCode::usage, "weft export needs the directory to write: weft export CHECKPOINT DIR");
  if (world.size() > 1)
    throw collective_error(ExitCode::usage, "weft export runs on one process (it is bound by the disk); use one");

  // 2. The checkpoint, and how it normalises activations.
  const checkpoint::Found found = open_checkpoint(request.subject, world);
  require_kind(found, "encoder_0/weight", "language models are not exported");
  Input input;
  const input::Schema schema = commands::schema(input, request.command);
  read_input_of(found, request, schema, world);
  const transcoder::Configuration& configuration = input.configuration;
  const auto stored = transcoder::stored_model(found.manifest.tensors);
  if (stored->shape.affine && format != interchange::Format::crosslayer_coding)
    throw collective_error(
        ExitCode::usage,
        "{}: its features have an offset for each target (circuit-tracer, saelens and sparsify have one activation for "
        "all targets); train with transcoder.decoder_affine = false to export",
        found.path.string());
  dataset::Description description;
  description.path = found.path.string();
  description.n_layers = stored->shape.n_layers;
  description.d_model = stored->shape.d_model;
  const dataset::Statistics statistics = transcoder::load_statistics(
      world, found, description.n_layers, description.d_model, description.path, kernels::Execution{});
  const interchange::CheckpointRows trained(world.all(), found, contents_of(stored->shape, configuration, format));
  if (!trained.contents().thresholds && trained.contents().k == 0 &&
      configuration.transcoder.activation != transcoder::Activation::relu)
    throw collective_error(ExitCode::usage,
                           "{}: its features are the largest of a batch or of a token (other programs know ReLU and "
                           "JumpReLU, saelens and sparsify also TopK per token and layer); convert the "
                           "transcoder to JumpReLU first",
                           found.path.string());

  // 3. Fold, write.
  const interchange::FoldedRows rows(
      trained, dataset::normalisation(statistics, description, configuration.data.normalise), storage.matrices);
  const interchange::Origin origin = origin_of(request, configuration, format, stored->shape.n_layers);
  interchange::write_directory(rows, format, storage, origin, request.directory);
  const interchange::Opened written = interchange::open_directory(request.directory);
  report::Json document = document_of(written);
  document["output"] = request.directory;
  document["checkpoint"] = found.path.string();
  print_written(request, interchange::summary(written, request.directory), document);
  if (origin.model.empty() || origin.input_hook.empty() || origin.output_hook.empty())
    log::warning(
        "{}: does not say of which model and hook points its activations are (a transcoder is of use at these points "
        "only); give --model, --input-hook and --output-hook",
        request.directory);
  return 0;
}

}  // namespace weft::commands
