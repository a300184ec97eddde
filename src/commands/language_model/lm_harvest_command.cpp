// SPDX-License-Identifier: Apache-2.0
//
// weft lm harvest MODEL --text FILES --output DIR: MLP inputs and outputs of a language model as an activation
// dataset for weft train.
#include <algorithm>

#include "base/format.hpp"
#include "base/log.hpp"
#include "commands/language_model/loaded_language_model.hpp"
#include "commands/language_model/texts.hpp"
#include "dataset/activations/description.hpp"
#include "language_model/run/harvester.hpp"
#include "storage/durable.hpp"
#include "storage/pending_output.hpp"

namespace weft::commands {
namespace {

using namespace language_model;

// Rows of a forward pass: large enough for fast products; inputs and outputs of all layers are held for as many.
constexpr std::int64_t kMostRows = 16384;
constexpr std::int64_t kBatchBytes =
    256 << 20;  // as stored; the host holds one batch of each file that is being written

struct HarvestOptions {
  std::vector<std::string> texts;
  std::string split;               ///< "" or train | validation
  std::string stored_type;         ///< "" or bf16 | fp16 | fp32
  std::int64_t rows = 0;           ///< 0: all
  std::int64_t rows_per_file = 0;  ///< about; 0: default
};

kernels::Scalar stored_type(const HarvestOptions& options, const Configuration& configuration) {
  if (options.stored_type.empty()) return activation_type(configuration);
  return options.stored_type == "bf16"   ? kernels::Scalar::bf16
         : options.stored_type == "fp16" ? kernels::Scalar::fp16
                                         : kernels::Scalar::fp32;
}

/// Most windows of a forward pass.
std::int64_t windows_together(const HarvestOptions& options, const Configuration& configuration) {
  const ModelSettings& model = configuration.language_model;
  const std::int64_t row_bytes =
                         2 * model.layers * model.d_model * kernels::bytes_of(stored_type(options, configuration)),
                     rows = std::min({configuration.micro_tokens(), kMostRows, kBatchBytes / row_bytes});
  return std::max<std::int64_t>(1, rows / configuration.data.sequence);
}

int print_harvest_plan(const Request& request, const HarvestOptions& options, const parallel::World& world) {
  const OpenedModel opened(request, world);
  const Configuration& configuration = opened.configuration();
  const std::int64_t rows = windows_together(options, configuration) * configuration.data.sequence;
  Plan plan = ForwardModel::plan(opened, rows);
  plan.device.emplace_back("recorded rows",
                           MlpRecorder::bytes(rows, stored_type(options, configuration), configuration.language_model));
  return print_plan(request, opened, plan);
}

HarvestSettings harvest_settings(const HarvestOptions& options, const Configuration& configuration,
                                 std::int64_t tokens) {
  HarvestSettings settings;
  settings.length = configuration.data.sequence;
  settings.windows = (options.rows == 0 ? tokens : options.rows) / settings.length;
  if (settings.windows == 0 || settings.windows * settings.length > tokens)
    throw collective_error(ExitCode::usage,
                           "the text has {} tokens, {} are asked for (whole windows of data.sequence = {} are "
                           "harvested); give more text{}",
                           format::grouped(tokens), options.rows == 0 ? "more" : format::grouped(options.rows),
                           settings.length, options.rows == 0 ? "" : ", or another --tokens");
  const std::int64_t per_file = options.rows_per_file == 0 ? kRowsPerFile : options.rows_per_file;
  settings.windows_per_file = std::min(settings.windows, std::max<std::int64_t>(1, per_file / settings.length));
  settings.together = std::min(windows_together(options, configuration), settings.windows_per_file);
  return settings;
}

int run_harvest(const Request& request, const HarvestOptions& options, const parallel::World& world) {
  if (request.dry_run) return print_harvest_plan(request, options, world);
  if (request.output.empty())
    throw collective_error(ExitCode::usage, "harvest needs --output DIR (the activations are written there)");
  // 1. The model, and the text in its tokens.
  const LoadedLanguageModel loaded(request, world);
  const Configuration& configuration = loaded.configuration();
  if (!options.texts.empty() && !options.split.empty())
    throw collective_error(ExitCode::usage, "--split and --text exclude each other (a split is of the run's own text)");
  const Texts texts = load_texts({options.texts, options.split}, loaded.opened, loaded.tokenizer, world);
  const TextStream stream(texts.sets);
  const HarvestSettings settings = harvest_settings(options, configuration, stream.size());

  // 2. The dataset: what is there already, and whether the disk holds the rest.
  const ModelSettings& model = configuration.language_model;
  const std::string name = loaded.opened.found
                               ? fmt::format("{}, step {}", request.subject, loaded.opened.found->manifest.step)
                               : request.subject;
  dataset::WriterSettings writer;
  writer.path = request.output;
  writer.n_layers = model.layers;
  writer.d_model = model.d_model;
  writer.dtype = stored_type(options, configuration);
  writer.rows_per_file = settings.windows_per_file * settings.length;
  writer.model = name;
  writer.hook_inputs = kInputHook;
  writer.hook_targets = kOutputHook;
  writer.dataset = texts.names;
  writer.split = texts.split;
  writer.tokens = true;
  if (loaded.tokenizer) writer.vocabulary = token_texts(*loaded.tokenizer);
  dataset::ChunkFiles files(writer, {{"model", name},
                                     {"checkpoint", loaded.opened.identity(world)},
                                     {"text", stream.fingerprint()},
                                     {"precision", configuration.precision == device::Precision::tf32
                                                       ? "tf32"
                                                       : dataset::name_of(activation_type(configuration))},
                                     {"store", dataset::name_of(writer.dtype)},
                                     {"context", settings.length},
                                     {"windows", settings.windows},
                                     {"windows_per_file", settings.windows_per_file},
                                     {"batch", settings.together}});
  const std::int64_t row_bytes = 2 * model.layers * model.d_model * kernels::bytes_of(writer.dtype);
  // Rank 0 lists the files, so that the same ones are missing for all ranks.
  const std::string there = world.on_root([&] {
    std::string present;
    std::int64_t missing = 0;
    for (std::int64_t file = 0; file < settings.files(); ++file) {
      const bool holds = files.holds(file, settings.rows_of(file));
      present += holds ? '1' : '0';
      if (!holds) missing += settings.rows_of(file) * row_bytes;
    }
    storage::make_directory(request.output);
    const std::int64_t free = storage::free_bytes(request.output);
    log::info("{}: {} rows of {} layers, d_model {}, {}: {} in {} files{}; {} free on the disk", request.output,
              format::grouped(settings.windows * settings.length), model.layers, model.d_model,
              dataset::name_of(writer.dtype),
              format::decimal_bytes_text(static_cast<double>(settings.windows * settings.length * row_bytes)),
              settings.files(),
              missing == 0 || present.find('1') == present.npos
                  ? ""
                  : fmt::format(", of which {} are there", std::count(present.begin(), present.end(), '1')),
              free < 0 ? "an unknown amount is" : format::decimal_bytes_text(static_cast<double>(free)));
    if (free >= 0 && missing > free)
      throw error(ExitCode::io,
                  "{}: {} are to be written (the disk has {} free); free space, give fewer --tokens, or "
                  "take --type bf16",
                  request.output, format::decimal_bytes_text(static_cast<double>(missing)),
                  format::decimal_bytes_text(static_cast<double>(free)));
    return present;
  });

  // 3. The files that are missing, in turn by the groups of ranks, of which one rank writes.
  const ModelRanks& ranks = loaded.part.ranks;
  ForwardOnly forward(loaded, settings.together * settings.length);
  Harvester harvester(settings, stream, model, forward.transformer, forward.staging, loaded.execution());
  std::int64_t missing = 0;
  std::vector<std::int64_t> own;
  for (std::int64_t file = 0; file < settings.files(); ++file)
    if (there[static_cast<std::size_t>(file)] == '0' && missing++ % ranks.peers.size() == ranks.peers.rank())
      own.push_back(file);
  harvester.write(own, files, ranks.leads());
  world.all().barrier();

  // 4. What completes the dataset.
  world.on_root([&] {
    std::vector<std::int64_t> rows;
    for (std::int64_t file = 0; file < settings.files(); ++file) rows.push_back(settings.rows_of(file));
    storage::remove_interrupted_outputs(request.output);  // of files that are complete
    dataset::write_index(writer, rows);
  });
  print_written(request,
                fmt::format("{}: {} of {} files written, {} to {}", request.output, missing, settings.files(),
                            kInputHook, kOutputHook),
                {{"output", request.output},
                 {"model", name},
                 {"rows", settings.windows * settings.length},
                 {"layers", model.layers},
                 {"d_model", model.d_model},
                 {"type", dataset::name_of(writer.dtype)},
                 {"files", settings.files()},
                 {"files_written", missing}});
  log::info("next: weft train INPUT, with data.train = \"{0}\", or weft evaluate RUN --data {0}", request.output);
  return 0;
}

}  // namespace

extern const Command lm_harvest_command = with_options(
    {"lm harvest", "MODEL", "MLP inputs and outputs on a text, as data of weft train",
     "Writes MLP inputs and outputs of a language model on a text as an activation dataset for weft train. An "
     "interrupted harvest resumes with the same command."},
    run_harvest, [](Options& options, HarvestOptions& own) {
      options.example("weft lm harvest gpt2 --text held_out.txt --tokens 8192 --output validation");
      options.add("--text", own.texts, "FILES", "texts or token files (default: the run's training text)");
      options.add("--split", own.split, "PART", "without --text: which part of the run's text, train or validation",
                  {"train", "validation"});
      options.add("--type", own.stored_type, "TYPE",
                  "type of the stored values, bf16, fp16 or fp32 (default: that of the model's computation)",
                  {"bf16", "fp16", "fp32"});
      options.add("--tokens", own.rows, "N", "rows to store (default: all), in whole windows", 1,
                  std::int64_t{1} << 40);
      options.add("--rows-per-file", own.rows_per_file, "N", "approximate number of rows per file (default 65536)", 1,
                  1 << 30);
      options.set().dry_run().output("the dataset");
    });

}  // namespace weft::commands
