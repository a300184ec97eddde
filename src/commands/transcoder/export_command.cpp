// SPDX-License-Identifier: Apache-2.0
//
// weft export CHECKPOINT DIR --to FORMAT: the weights of a transcoder, with the normalisation of its activations folded
// in, in the files of another program.
#include <cmath>
#include <filesystem>

#include "base/log.hpp"
#include "bench/transcoder/transcoder_input.hpp"
#include "commands/commands.hpp"
#include "dataset/activations/describe.hpp"
#include "interchange/fold.hpp"
#include "interchange/formats.hpp"
#include "interchange/hooks.hpp"
#include "language_model/step/mlp_recorder.hpp"
#include "transcoder/parameters/model.hpp"
#include "transcoder/run/statistics_state.hpp"

namespace weft::commands {
namespace {

struct ExportOptions {
  std::string directory;
  std::string format;
  std::string stored_type;              ///< "" or bf16 | fp32
  std::string model;                    ///< "" or the name of the language model
  std::string input_hook, output_hook;  ///< "" or the hook point of inputs and targets
};

interchange::Format format_of(const std::string& name) {
  if (name == "circuit-tracer") return interchange::Format::circuit_tracer;
  if (name == "crosslayer-coding") return interchange::Format::crosslayer_coding;
  if (name == "saelens") return interchange::Format::saelens;
  if (name == "sparsify") return interchange::Format::sparsify;
  throw collective_error(ExitCode::usage,
                         "weft export needs a format (formats: circuit-tracer, crosslayer-coding, saelens, sparsify); "
                         "name one with --to FORMAT");
}

interchange::Storage storage_of(const std::string& type, interchange::Format format) {
  using kernels::Scalar;
  if (type == "bf16") return {Scalar::bf16, Scalar::fp32};
  if (type == "fp32") return {Scalar::fp32, Scalar::fp32};
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
interchange::Origin origin_of(const ExportOptions& options, const transcoder::Configuration& configuration,
                              interchange::Format format, std::int64_t n_layers) {
  interchange::Origin origin{options.model, options.input_hook, options.output_hook};
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

int run_export(const Request& request, const ExportOptions& options, const parallel::World& world) {
  // 1. What to write.
  const interchange::Format format = format_of(options.format);
  const interchange::Storage storage = storage_of(options.stored_type, format);
  if (options.directory.empty())
    throw collective_error(ExitCode::usage, "weft export needs the directory to write: weft export CHECKPOINT DIR");
  if (world.size() > 1)
    throw collective_error(ExitCode::usage, "weft export runs on one process (it is bound by the disk); use one");

  // 2. The checkpoint, and how it normalises activations.
  const checkpoint::Found found = open_checkpoint(request.subject, world);
  require_kind(found, "encoder_0/weight", "language models are not exported");
  bench::TranscoderInput input;
  read_input_of(found, request, bench::trained_keys(input), world);
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
  const interchange::Origin origin = origin_of(options, configuration, format, stored->shape.n_layers);
  interchange::write_directory(rows, format, storage, origin, options.directory);
  const interchange::Opened written = interchange::open_directory(options.directory);
  Json document = document_of(written);
  document["output"] = options.directory;
  document["checkpoint"] = found.path.string();
  print_written(request, interchange::summary(written, options.directory), document);
  if (configuration.data.targets == dataset::Targets::inputs && !trained.contents().autoencoder)
    log::warning(
        "{}: does not say that the targets are the inputs (the format of {} has no autoencoders: weft import and other "
        "programs take it for a transcoder); single layers can be exported to saelens or sparsify",
        options.directory, written.format);
  if (origin.model.empty() || origin.input_hook.empty() || origin.output_hook.empty())
    log::warning(
        "{}: does not say of which model and hook points its activations are (a transcoder is of use at these points "
        "only); give --model, --input-hook and --output-hook",
        options.directory);
  return 0;
}

}  // namespace

extern const Command export_command = with_options(
    {"export", "CHECKPOINT", "weights in the files of other programs",
     "Writes the weights of a transcoder, which then apply to raw activations, in the files of another program "
     "(docs/interchange.md).",
     Needs::nothing},
    run_export, [](Options& options, ExportOptions& own) {
      options.example("weft export thresholds exported --to circuit-tracer");
      options.add("DIR", own.directory, "", "the directory to write");
      options.add("--to", own.format, "FORMAT",
                  "circuit-tracer or crosslayer-coding; saelens or sparsify for transcoders of single layers and "
                  "autoencoders",
                  {"circuit-tracer", "crosslayer-coding", "saelens", "sparsify"});
      options.add("--type", own.stored_type, "TYPE",
                  "storage of matrices, bf16 or fp32 (default: bf16 for circuit-tracer, fp32 for the others); vectors "
                  "are fp32",
                  {"bf16", "fp32"});
      options.add("--model", own.model, "NAME",
                  "the language model, for the configuration that circuit-tracer reads (default: not written)");
      options.add("--input-hook", own.input_hook, "NAME", "where in the model the inputs were recorded");
      options.add("--output-hook", own.output_hook, "NAME", "where in the model the targets were recorded");
    });

}  // namespace weft::commands
