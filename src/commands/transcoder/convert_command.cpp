// SPDX-License-Identifier: Apache-2.0
//
// weft convert CHECKPOINT --output DIR: the same transcoder with thresholds (jumprelu) in place of batch_topk or topk,
// calibrated on data that it was not trained on.
#include <algorithm>
#include <cmath>
#include <filesystem>

#include "base/format.hpp"
#include "base/log.hpp"
#include "checkpoint/checkpoint_writer.hpp"
#include "checkpoint/resume.hpp"
#include "commands/transcoder/loaded_transcoder.hpp"
#include "dataset/activations/describe.hpp"
#include "dataset/activations/loader.hpp"
#include "device/runtime.hpp"
#include "input/print.hpp"
#include "parallel/affinity.hpp"
#include "parallel/nccl.hpp"
#include "run/build.hpp"
#include "run/pass.hpp"
#include "storage/json_file.hpp"
#include "transcoder/run/conversion.hpp"
#include "transcoder/run/result.hpp"
#include "transcoder/run/statistics_state.hpp"
#include "transcoder/step/trainer.hpp"

namespace weft::commands {
namespace {

transcoder::Configuration with_thresholds(transcoder::Configuration configuration, std::int64_t capacity) {
  configuration.transcoder.activation = transcoder::Activation::jumprelu;
  configuration.transcoder.capacity = capacity;
  return configuration;
}

double mean(const std::vector<double>& values) { return transcoder::mean_over_layers(values); }

struct ConvertOptions {
  std::string data;
  std::string thresholds;     ///< "" or per_feature | per_layer
  std::string stored_type;    ///< "" or bf16 | fp32
  std::int64_t finetune = 0;  ///< steps
};

/// NMSE after the conversion from which on a warning is due, in multiples of the one before.
constexpr double kGrown = 1.1;

/// Continues the training, whose state `trainer` has, from step `from` to run.steps. Collective.
void finetune(transcoder::Trainer& trainer, const dataset::Description& data,
              const transcoder::Configuration& configuration, std::int64_t from, const parallel::World& world,
              const parallel::Grid& grid, const device::Runtime& runtime) {
  dataset::Loader loader(data, configuration.data, static_cast<std::uint64_t>(configuration.run.seed), world,
                         world.node(), grid, {}, runtime.threads());
  trainer.resume_at(from);
  const std::int64_t steps = configuration.run.steps - from;
  run::Pass pass("fine-tuning", steps, "steps");
  for (std::int64_t step = 0; step < steps; ++step) {
    trainer.step(loader.next());
    loader.release();
    pass.done(step + 1);
  }
  trainer.wait();
}

int run_convert(const Request& request, const ConvertOptions& options, const parallel::World& world) {
  // 1. The checkpoint, its input, and the data.
  const checkpoint::Found found = open_checkpoint(request.subject, world);
  require_kind(found, "encoder_0/weight", "only transcoders have an activation that can be converted");
  bench::TranscoderInput input;
  const input::Schema schema = bench::trained_keys(input);
  read_input_of(found, request, schema, world, options.data.empty() ? "" : "data.stored_as");
  const transcoder::Configuration trained = input.configuration;
  if (!kernels::activation_keeps_k(trained.transcoder.activation))
    throw collective_error(
        ExitCode::usage,
        "{}: transcoder.activation is not \"batch_topk\" or \"topk\" (only what depends on a number of "
        "features needs thresholds); it can be exported as it is",
        found.path.string());
  if (trained.transcoder.ranking != transcoder::Ranking::value)
    throw collective_error(
        ExitCode::usage,
        "{}: transcoder.ranking is not \"value\" (thresholds are placed on pre-activations); convert "
        "one that was trained with \"value\"",
        found.path.string());
  if (trained.transcoder.decoder_affine)
    throw collective_error(
        ExitCode::usage,
        "{}: transcoder.decoder_affine is on (with offsets a feature does not begin at its threshold); convert "
        "one that was trained without",
        found.path.string());
  if (request.output.empty())
    throw collective_error(ExitCode::usage,
                           "weft convert needs --output DIR (the converted checkpoint is written there)");
  NewDirectory output(world, request.output);
  const std::string path = options.data.empty() ? trained.data.validation : options.data;
  if (path.empty())
    throw collective_error(ExitCode::usage,
                           "no data to calibrate on (the run has no data.validation); give --data DIR");
  require_directory(world, path, options.data.empty() ? "data.validation" : "--data");
  const transcoder::Conversion conversion{.per_feature = options.thresholds != "per_layer",
                                          .bf16 = options.stored_type != "fp32"};
  const dataset::Description description = dataset::describe(world, path, trained.data);

  const std::int64_t steps = options.finetune;
  if (steps > 0 && trained.privacy.enabled)
    throw collective_error(
        ExitCode::usage,
        "{}: --finetune after training with privacy.enabled (its steps are not private); leave it out, "
        "for thresholds alone",
        found.path.string());
  if (steps > 0 && trained.data.train.empty())
    throw collective_error(ExitCode::usage,
                           "{}: --finetune without data.train (no files of activations to train on); record some, for "
                           "example with weft lm harvest, and give --set data.train=DIR",
                           found.path.string());
  std::optional<dataset::Description> training;
  if (steps > 0) {
    require_directory(world, trained.data.train, "data.train (of --finetune)");
    training = dataset::describe(world, trained.data.train, trained.data);
  }

  // 2. The transcoder with thresholds: a trainer's state, so that training can go on from the result. Without
  //    fine-tuning it performs no step: the least room.
  const std::int64_t step = found.manifest.step;
  const transcoder::Configuration finetuned =
      training ? transcoder::finetuning(trained, step, steps) : with_thresholds(trained, 1);
  const device::Runtime runtime(transcoder::device_settings(trained), world.node_rank(),
                                parallel::bind_to_cpus(world, trained.device));
  parallel::nccl::allow_multicast(trained.parallel.nvls);
  const kernels::Execution& execution = runtime.execution();
  const parallel::Grid grid(world, parallel::data_by_feature(1, world.size()));
  dataset::Statistics statistics =
      transcoder::load_statistics(world, found, description.n_layers, description.d_model, path, execution);
  transcoder::Trainer trainer(
      finetuned,
      transcoder::shape_of(with_thresholds(trained, 1).transcoder, description.n_layers, description.d_model),
      dataset::normalisation(statistics, description, trained.data.normalise), statistics, grid, execution,
      std::max(description.row_bytes(), training ? training->row_bytes() : 0),
      [](const dataset::RawBatch&, std::int64_t) { return std::string(); });
  checkpoint::Registry loaded, converted;  // the latter with thresholds
  for (const checkpoint::Tensor& tensor : trainer.registry().tensors()) {
    if (tensor.name.starts_with("selection/")) continue;  // of batch_topk
    converted.add(tensor);
    if (tensor.name.find("/threshold") == std::string::npos) loaded.add(tensor);
  }
  loaded.make_optional("optimizer/previous_gradient_norm");  // training with privacy.enabled has none
  checkpoint::load(world.all(), found, loaded, execution, checkpoint::Load::part);
  transcoder::add_statistics(converted, statistics, world.rank());

  // 3. Quality before, fine-tuning, thresholds, quality after.
  run::Timers timers;
  const auto pass = [&](const transcoder::Configuration& configuration) {
    return std::make_unique<transcoder::Pass>(configuration, trainer.model(), trainer.normalisation(), grid, execution,
                                              timers);
  };
  const auto measure = [&](transcoder::Forward& forward) {
    return transcoder::evaluate(description, trainer.model(), trainer.normalisation(), forward, world, grid, execution,
                                trained.data.batch_tokens);
  };
  auto counting = pass(trained);
  const transcoder::EvaluationResult before = measure(counting->forward);
  if (training) {
    counting.reset();
    finetune(trainer, *training, finetuned, step, world, grid, runtime);
  }
  if (conversion.bf16) transcoder::round_to_bf16(trainer.model(), execution);
  const transcoder::Calibrated calibrated = transcoder::calibrate(
      conversion, description, training ? finetuned.transcoder : trained.transcoder, trainer.model(),
      training ? trainer.forward() : counting->forward,
      [&](std::int64_t capacity) { return pass(with_thresholds(trained, capacity)); }, grid, execution,
      trained.data.batch_tokens);
  const transcoder::EvaluationResult after = measure(calibrated.jumping->forward);
  input.configuration = with_thresholds(trained, calibrated.capacity);

  // 4. The checkpoint and the record.
  checkpoint::Manifest manifest;
  manifest.step = step;
  manifest.tokens = found.manifest.tokens;
  manifest.cursor = found.manifest.cursor;
  manifest.grid = grid.shape().sizes();
  manifest.input = input::print(schema);
  manifest.original_input = found.manifest.original_input;
  manifest.code_revision = run::build_record.revision;
  manifest.libraries = library_versions();
  manifest.dataset_fingerprint = found.manifest.dataset_fingerprint;
  checkpoint::Writer writer(world.all(), output.place() / "checkpoints", trained.checkpoint, converted, execution);
  writer.start(manifest);
  const auto written = writer.finish();
  if (!written || !written->durable)
    throw collective_error(ExitCode::io, "{}: the converted checkpoint could not be written{}", request.output,
                           written ? " (" + written->failure + ")" : "");
  std::string text = fmt::format(
      "{}: thresholds {}, calibrated on {} tokens of {}, weights and thresholds rounded to {}\n"
      "  {:<10}{:>14}{:>14}\n  {:<10}{:>14.3f}{:>14.3f}\n  {:<10}{:>14.5f}{:>14.5f}\n"
      "  transcoder.capacity = {}: at most {:.1f} features are active per token and layer of a batch",
      output.published(written->path), conversion.per_feature ? "per feature" : "per layer",
      format::grouped(after.tokens), path, conversion.bf16 ? "bf16" : "fp32", "", "before", "after", "L0",
      mean(before.l0), mean(after.l0), "NMSE", mean(before.nmse), mean(after.nmse), calibrated.capacity,
      calibrated.active);
  if (training) text += fmt::format("\n  trained for {} more steps on {}, with batch_topk", steps, trained.data.train);
  if (world.is_root() && mean(after.nmse) > kGrown * mean(before.nmse))
    log::warning("{}: the error grows from an NMSE of {:.5f} to {:.5f}; {}", found.path.string(), mean(before.nmse),
                 mean(after.nmse),
                 training ? "take more steps, or train with \"batch_topk\" or \"jumprelu\" from the start"
                          : "--finetune 500 trains on before thresholds are placed");
  Json record = {{"checkpoint", found.path.string()},
                 {"step", step},
                 {"data", path},
                 {"thresholds", conversion.per_feature ? "per_feature" : "per_layer"},
                 {"type", conversion.bf16 ? "bf16" : "fp32"},
                 {"capacity", calibrated.capacity},
                 {"fullest_batch", calibrated.active},
                 {"finetuned_steps", steps},
                 {"before", transcoder::to_json(before)},
                 {"after", transcoder::to_json(after)}};
  world.on_root([&] { storage::write_pending_json(output.place() / "conversion.json", record); });
  output.publish();
  record["output"] = request.output;
  print_written(request, text, record);
  log::info("next: weft evaluate {}", request.output);
  return 0;
}

}  // namespace

extern const Command convert_command = with_options(
    {"convert", "CHECKPOINT", "batch_topk or topk to thresholds (jumprelu)",
     "Replaces the activation batch_topk or topk by thresholds (jumprelu), calibrated on data. Writes a new "
     "checkpoint, which can be trained further."},
    run_convert, [](Options& options, ConvertOptions& own) {
      options.example("weft convert runs/quickstart --output thresholds");
      data_option(options, own.data)
          .add("--thresholds", own.thresholds, "WHICH", "per_feature or per_layer (default per_feature)",
               {"per_feature", "per_layer"});
      options.add("--type", own.stored_type, "TYPE",
                  "type to which weights and thresholds are rounded, bf16 or fp32 (default bf16)", {"bf16", "fp32"});
      options.add("--finetune", own.finetune, "STEPS",
                  "first train this many more steps on the run's training data, with batch_topk (default 0)", 0,
                  1 << 30);
      options.set().output("a new directory: the checkpoint and conversion.json");
    });

}  // namespace weft::commands
