// SPDX-License-Identifier: Apache-2.0
//
// weft import DIR --output CHECKPOINT: weights that another program has trained, as a checkpoint; of a compressed cache
// of activations, a dataset.
#include <filesystem>

#include "base/format.hpp"
#include "bench/transcoder/transcoder_input.hpp"
#include "commands/commands.hpp"
#include "input/print.hpp"
#include "interchange/compressed_activations.hpp"
#include "interchange/formats.hpp"
#include "run/build.hpp"
#include "storage/json_file.hpp"

namespace weft::commands {
namespace {

/// The keys of an input that describe the model.
std::vector<input::Override> keys_of(const interchange::Opened& opened) {
  const interchange::Contents& contents = opened.rows->contents();
  const bool scalar = opened.normalised.mode == dataset::Normalise::scalar,
             per_dimension = opened.normalised.mode == dataset::Normalise::per_dimension;
  std::vector<input::Override> keys = {
      {fmt::format("data.layers={}", contents.sizes.n_layers), ""},
      {fmt::format("data.d_model={}", contents.sizes.d_model), ""},
      {fmt::format("data.normalise={}", scalar          ? "scalar"
                                        : per_dimension ? "per_dimension"
                                                        : "none"),
       ""},
      {fmt::format("transcoder.features={}", contents.sizes.n_features), ""},
      {fmt::format("transcoder.activation={}", contents.k > 0        ? "topk"
                                               : contents.thresholds ? "jumprelu"
                                                                     : "relu"),
       ""},
      {"optimizer.state=fp32", ""},
  };
  if (opened.keeps_equal) keys.push_back({"transcoder.pseudo_derivative=crosslayer-coding", ""});
  if (contents.skip) keys.push_back({"transcoder.skip=linear", ""});
  if (contents.per_layer) keys.push_back({"transcoder.decoder=per_layer", ""});
  if (contents.tying == interchange::Tying::per_source) keys.push_back({"transcoder.decoder=tied", ""});
  if (contents.tying == interchange::Tying::per_target) keys.push_back({"transcoder.decoder=tied_target", ""});
  if (contents.affine) keys.push_back({"transcoder.decoder_affine=true", ""});
  if (contents.autoencoder) keys.push_back({"data.targets=inputs", ""});
  if (contents.k > 0) {
    keys.push_back({fmt::format("transcoder.k={}", contents.k), ""});
    keys.push_back({"transcoder.scope=layer", ""});
  }
  return keys;
}

/// `statistics`: "" or norm_stats.json.
int run_import(const Request& request, const std::string& statistics, const parallel::World& world) {
  if (request.output.empty())
    throw collective_error(ExitCode::usage, "weft import needs the checkpoint to write: --output DIR");
  if (world.size() > 1)
    throw collective_error(ExitCode::usage, "weft import runs on one process (it is bound by the disk); use one");
  require_directory(world, request.subject, "DIR");
  if (interchange::is_compressed_cache(request.subject)) {
    const interchange::ConvertedActivations converted = interchange::convert_cache(request.subject, request.output);
    print_written(request,
                  fmt::format("{}: activations of CLT-Forge ({}), {} rows of {} layers, d_model {}, in {} "
                              "files\nwritten as a dataset: {}",
                              request.subject, converted.stored, format::grouped(converted.rows), converted.n_layers,
                              converted.d_model, converted.files, request.output),
                  {{"output", request.output},
                   {"kind", "dataset"},
                   {"rows", converted.rows},
                   {"layers", converted.n_layers},
                   {"d_model", converted.d_model},
                   {"files", converted.files}});
    return 0;
  }
  const interchange::Opened opened = interchange::open_directory(request.subject, statistics);

  // The input that a run of this model would have.
  bench::TranscoderInput input;
  const input::Schema schema = bench::trained_keys(input);
  input::read(schema, "", request.subject, keys_of(opened));
  checkpoint::Manifest manifest;
  manifest.input = input::print(schema);
  manifest.original_input =
      fmt::format("# weights in the format of {}, read by weft import\n", opened.format) + manifest.input;
  manifest.code_revision = run::build_record.revision;
  manifest.libraries = library_versions();
  interchange::write_checkpoint(*opened.rows, opened.normalised, std::move(manifest), request.output);
  Json document = document_of(opened);
  document["output"] = request.output;
  document["kind"] = "checkpoint";
  print_written(
      request,
      fmt::format("{}\nwritten as a checkpoint: {}", interchange::summary(opened, request.subject), request.output),
      document);
  return 0;
}

}  // namespace

extern const Command import_command = with_options(
    {"import", "DIR", "a checkpoint from the files of other programs",
     "Writes a checkpoint of the weights in DIR, a directory of circuit-tracer, crosslayer-coding, CLT-Forge, "
     "crosslayer-transcoder, saelens or sparsify, for evaluate, inspect and export; or a dataset of the compressed "
     "activations of CLT-Forge in DIR.",
     Needs::nothing},
    run_import, [](Options& options, std::string& statistics) {
      options.example("weft import downloaded --output imported");
      options.add("--statistics", statistics, "FILE",
                  "crosslayer-coding: norm_stats.json of the training data (default: in DIR or the directory above)");
      options.output("the checkpoint, or the dataset");
    });

}  // namespace weft::commands
