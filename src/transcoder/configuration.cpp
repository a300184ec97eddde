// SPDX-License-Identifier: Apache-2.0
#include "transcoder/configuration.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/error.hpp"

namespace weft::transcoder {
namespace {

using dataset::Normalise;
using kernels::StatePolicy;
using optimizer::ClipMode;
using optimizer::Schedule;

// Sizes in an input are bounded so that no product of them, in bytes, can leave 64 bits: features * layers * width *
// layers.
constexpr double kMostFeatures = 1 << 28;
constexpr double kMostTokens = 1 << 28;
constexpr double kMostSteps = 1e12;

void add_run(input::Schema& schema, RunSettings& run) {
  schema.table("run", "What this run is: how long, and where its results go.");
  schema.add("run.output", run.output, "the run directory: log, metrics, run.json, checkpoints").path_name().free();
  schema.add("run.steps", run.steps, "optimizer steps until the run is finished")
      .in("steps")
      .at_least(1)
      .at_most(kMostSteps)
      .free();
  schema.add("run.seed", run.seed, "seed of every random number: initial weights, order of the rows, rounding")
      .at_least(0);
  schema
      .add("run.walltime", run.walltime,
           "stop cleanly, with a checkpoint, before this much time has passed; \"\" = no limit")
      .in("hh:mm:ss")
      .free();
  schema
      .add("run.nonfinite", run.nonfinite, {{"stop", NonFinite::stop}, {"skip", NonFinite::skip}},
           "a loss or gradient that is not finite: end the run (exit code 4), or leave the step out")
      .free();
  schema.add("run.skip_at_most", run.skip_at_most, "steps that nonfinite = \"skip\" may leave out before the run ends")
      .in("steps")
      .at_least(0)
      .free();
}

void add_data(input::Schema& schema, dataset::Settings& data) {
  schema.table("data", "Activations to learn from, and how they become batches.");
  schema.add("data.train", data.train, "directory of the training activations").path_name().free();
  schema.add("data.validation", data.validation, "directory of held-out activations; \"\" = none").path_name().free();
  schema.add("data.batch_tokens", data.batch_tokens, "tokens of one step, all ranks together")
      .in("tokens")
      .at_least(1)
      .at_most(kMostTokens)
      .changeable();
  schema
      .add("data.micro_tokens", data.micro_tokens, "tokens decoded at a time on a rank; 0 = chosen to fit into memory")
      .in("tokens")
      .at_least(0)
      .at_most(kMostTokens)
      .free();
  schema.add("data.normalise", data.normalise,
             {{"per_dimension", Normalise::per_dimension}, {"scalar", Normalise::scalar}, {"none", Normalise::none}},
             "divide activations by the standard deviation of each dimension, by one number a layer, or not at all");
  schema.add("data.block_rows", data.block_rows, "consecutive rows read at once; part of the order of the data")
      .in("rows")
      .at_least(1)
      .at_most(kMostTokens);
  schema
      .add("data.window_rows", data.window_rows,
           "rows mixed with one another; two windows are held in memory by all ranks together")
      .in("rows")
      .at_least(1)
      .at_most(kMostTokens);
  schema
      .add("data.prefetch", data.prefetch,
           "false: read each window only when its first row is needed: slower, for measurements")
      .free();
  schema
      .add("data.stored_as", data.stored_as,
           "\"bf16\": 16-bit integers in the files are bf16 bit patterns; \"\" = what type and attributes of the file "
           "say")
      .one_of({"", "bf16"});
  schema
      .add("data.layers", data.layers,
           "layers that the files must have; 0 = what they have. With d_model, --dry-run plans without the files")
      .at_least(0)
      .at_most(1 << 12)
      .free();
  schema.add("data.d_model", data.d_model, "width that the files must have; 0 = what they have")
      .at_least(0)
      .at_most(1 << 20)
      .free();
  schema.add("data.accept_changed", data.accept_changed, "resume although the fingerprint of the dataset changed")
      .free();
}

void add_transcoder(input::Schema& schema, ModelSettings& model) {
  schema.table("transcoder", "The model: L layers of features, each writing to its own and every later layer.");
  schema.add("transcoder.features", model.features, "features per layer")
      .at_least(1)
      .at_most(kMostFeatures)
      .required("768");
  schema
      .add("transcoder.activation", model.activation,
           {{"batch_topk", Activation::batch_topk}, {"topk", Activation::topk}, {"relu", Activation::relu}},
           "what stays active: the largest of the batch, the largest of each token, all that are positive")
      .changeable();
  schema
      .add("transcoder.k", model.k,
           "active features per token and layer; batch_topk: on average, and may be fractional")
      .in("features")
      .more_than(0)
      .at_most(kMostFeatures)
      .changeable();
  schema
      .add("transcoder.scope", model.scope, {{"layer", Scope::layer}, {"all_layers", Scope::all_layers}},
           "one budget of active features for each layer, or one for all layers together")
      .changeable();
  schema
      .add("transcoder.dead_window", model.dead_window,
           "a feature that has not fired for this many tokens counts as dead")
      .in("tokens")
      .at_least(1)
      .changeable();
}

void add_optimizer(input::Schema& schema, optimizer::Settings& adam) {
  schema.table("optimizer", "How parameters move, and how they are stored.");
  schema.add("optimizer.name", adam.name, "the method: Adam with bias correction").one_of({"adam"});
  schema.add("optimizer.learning_rate", adam.learning_rate, "largest learning rate, reached after the warm-up")
      .more_than(0)
      .changeable();
  schema.add("optimizer.beta1", adam.beta1, "decay of the first moment").at_least(0).less_than(1).changeable();
  schema.add("optimizer.beta2", adam.beta2, "decay of the second moment").at_least(0).less_than(1).changeable();
  schema.add("optimizer.epsilon", adam.epsilon, "added to the root of the second moment").more_than(0).changeable();
  schema.add("optimizer.weight_decay", adam.weight_decay, "decoupled weight decay, weights only (not biases)")
      .at_least(0)
      .changeable();
  schema.add("optimizer.state", adam.state,
             {{"fp32", StatePolicy::fp32}, {"bf16", StatePolicy::bf16}, {"8bit", StatePolicy::eight_bit}},
             "storage of weights and moments: 12, 6 or 4 bytes a parameter");
  schema
      .add("optimizer.schedule", adam.schedule,
           {{"constant", Schedule::constant},
            {"linear", Schedule::linear},
            {"cosine", Schedule::cosine},
            {"step", Schedule::step}},
           "how the learning rate falls after decay_begin")
      .changeable();
  schema.add("optimizer.warmup_steps", adam.warmup_steps, "steps over which the learning rate rises linearly from zero")
      .in("steps")
      .at_least(0)
      .at_most(kMostSteps)
      .changeable();
  schema.add("optimizer.decay_begin", adam.decay_begin, "where the learning rate begins to fall")
      .in("fraction of run.steps")
      .at_least(0)
      .at_most(1)
      .changeable();
  schema.add("optimizer.final_fraction", adam.final_fraction, "learning rate at the end of the run")
      .in("fraction of learning_rate")
      .at_least(0)
      .at_most(1)
      .changeable();
  schema.add("optimizer.clip_norm", adam.clip_norm, "gradients are scaled down to this global norm; 0 = never")
      .at_least(0)
      .changeable();
  schema
      .add("optimizer.clip_mode", adam.clip_mode, {{"exact", ClipMode::exact}, {"previous", ClipMode::previous}},
           "clip by this step's norm (one more pass) or by the previous step's")
      .changeable();
}

void add_machine(input::Schema& schema, Configuration& configuration) {
  ParallelSettings& parallel = configuration.parallel;
  schema.table("parallel", "How the ranks share the work: data x feature = number of ranks.");
  schema
      .add("parallel.feature", parallel.feature,
           "ranks that share the features of each layer; 0 = all that data leaves")
      .in("ranks")
      .at_least(0)
      .at_most(1 << 20)
      .free();
  schema.add("parallel.data", parallel.data, "groups of ranks that share the tokens of a batch")
      .in("groups")
      .at_least(1)
      .at_most(1 << 20)
      .free();
  schema
      .add("parallel.timeout", parallel.timeout, "the job ends when a rank makes no progress for this long; 0 = never")
      .in("seconds")
      .at_least(0)
      .free();
  schema.add("parallel.world", parallel.world, "plan for this many ranks; 0 = those of this job; with --dry-run only")
      .in("ranks")
      .at_least(0)
      .at_most(1 << 20)
      .free();
  schema
      .add("parallel.nvls", parallel.nvls,
           "between GPUs: true leaves NVLink multicast to NCCL; false turns it off, unless NCCL_NVLS_ENABLE is set")
      .free();
  schema
      .add("parallel.blocks", parallel.blocks,
           "between GPUs: layers are exchanged in this many blocks, each while others are computed; 1 = after one "
           "another")
      .at_least(1)
      .at_most(256)
      .free();
  ExchangeManner& manner = parallel.manner;
  schema
      .add("parallel.selection", manner.selection,
           {{"everywhere", SelectionPlace::everywhere}, {"rank_0", SelectionPlace::rank_0}},
           "all ranks select together, or rank 0 alone from all pre-activations (batch_topk only): same result, slow, "
           "for measurements")
      .free();
  schema
      .add("parallel.wait", manner.wait,
           "true: the host waits for each exchange of GPUs (those of CPUs always wait): slower, for measurements")
      .free();
  schema
      .add("parallel.together", manner.together,
           "false: rows and counts are exchanged layer by layer instead of all at once: slower, for measurements")
      .free();
  schema
      .add("parallel.direct", manner.way.direct,
           "GPUs of one host write rows into one another's memory; false, or where they cannot: NCCL moves them")
      .free();
  schema
      .add("parallel.keep_buffers", manner.way.keep_buffers,
           "false: memory of exchanges is asked for and given back each time: slower, for measurements")
      .free();

  device::Settings& device = configuration.device;
  schema.table("device", "What computes.");
  schema
      .add("device.backend", device.backend,
           "kernels: hand-written CUDA, portable Kokkos, or the best that this program and machine have")
      .one_of({"auto", "portable", "cuda"})
      .free();
  schema
      .add("device.precision", configuration.precision, {{"fp32", Precision::fp32}, {"bf16", Precision::bf16}},
           "type of products, partial reconstructions and gradient rows; sums are fp32 in both")
      .free();
  schema
      .add("device.graphs", device.graphs,
           "on a GPU: record a training step once and replay it (less work for the host)")
      .free();
  schema
      .add("device.algorithms", device.algorithms,
           "on a GPU: file written by weft benchmark --tune; \"\" = the dense library's first proposal")
      .path_name()
      .free();
  schema.add("device.tile", device.tile, "pre-activations made at a time; 0 = as many as suit the processor or GPU")
      .in("MiB")
      .at_least(0)
      .at_most(1 << 16)
      .free();
  schema
      .add("device.memory", device.memory,
           "of a GPU that may be used; 0 = all that is free (with --dry-run: not checked)")
      .in("GB")
      .at_least(0.0)
      .free();
  schema.add("device.threads", device.threads, "host threads of each process; 0 = cores of the node / processes on it")
      .in("threads")
      .at_least(0)
      .at_most(4096)
      .free();
}

void add_records(input::Schema& schema, Configuration& configuration) {
  using checkpoint::Staging;
  using checkpoint::Verify;
  checkpoint::Settings& checkpoint = configuration.checkpoint;
  schema.table("checkpoint", "What is kept to go on from. The last step always writes a checkpoint.");
  schema.add("checkpoint.every", checkpoint.every, "steps between checkpoints; 0 = only the last step writes one")
      .in("steps")
      .at_least(0)
      .free();
  schema.add("checkpoint.keep", checkpoint.keep, "newest checkpoints kept").at_least(2).free();
  schema
      .add("checkpoint.keep_every", checkpoint.keep_every,
           "also keep each checkpoint whose step is a multiple of this; 0 = none")
      .in("steps")
      .at_least(0)
      .free();
  schema
      .add("checkpoint.verify", checkpoint.verify,
           {{"none", Verify::none}, {"size", Verify::size}, {"full", Verify::full}},
           "what is checked before a run goes on from a checkpoint: nothing, sizes, every digest")
      .free();
  schema
      .add("checkpoint.staging", checkpoint.staging, {{"full", Staging::full}, {"chunked", Staging::chunked}},
           "full: a host copy of the state, written while training goes on; chunked: less memory, training waits for "
           "the disk")
      .free();
  schema
      .add("checkpoint.failures_allowed", checkpoint.failures_allowed,
           "checkpoints that may fail one after the other before the run ends with exit code 6")
      .at_least(0)
      .free();

  schema.table("log", "What is told on the way.");
  schema.add("log.every", configuration.log.every, "steps between lines of the log and records of metrics.jsonl")
      .in("steps")
      .at_least(1)
      .free();

  schema.table("resume", "Going on from a checkpoint (--resume auto is the default).");
  schema
      .add("resume.accept_changed", configuration.resume.accept_changed,
           "go on although keys that shape the training have changed")
      .free();
  schema
      .add("resume.ignore_no_progress", configuration.resume.ignore_no_progress,
           "start although the last starts made no step (exit code 93)")
      .free();
}

bool whole(double value) { return value == std::floor(value); }

void add_rules(input::Schema& schema, const Configuration& configuration) {
  const auto rule = [&](std::vector<std::string> paths, auto problem) {
    schema.rule(std::move(paths), std::move(problem));
  };
  rule({"run.walltime"}, [&] {
    return configuration.run.walltime.empty() || parse_walltime(configuration.run.walltime)
               ? std::string()
               : fmt::format("run.walltime = \"{}\" is no time (hours:minutes:seconds); write it as \"11:55:00\"",
                             configuration.run.walltime);
  });
  rule({"transcoder.k", "transcoder.activation", "transcoder.scope"}, [&]() -> std::string {
    const ModelSettings& model = configuration.transcoder;
    if (model.activation != Activation::topk || model.scope == Scope::all_layers || whole(model.k)) return {};
    return fmt::format(
        "transcoder.k = {} must be whole (activation = \"topk\" counts the features of each token and layer); "
        "take {} or activation = \"batch_topk\"",
        model.k, std::max(1.0, std::round(model.k)));
  });
  rule({"transcoder.k", "transcoder.features"}, [&]() -> std::string {
    const ModelSettings& model = configuration.transcoder;
    if (model.features == 0 || model.activation == Activation::relu || model.k <= static_cast<double>(model.features))
      return {};
    return fmt::format(
        "transcoder.k = {} is more than transcoder.features = {} (k counts active features per token and layer); take "
        "a smaller k",
        model.k, model.features);
  });
  rule({"optimizer.warmup_steps", "run.steps"}, [&]() -> std::string {
    if (configuration.optimizer.warmup_steps <= configuration.run.steps) return {};
    return fmt::format(
        "optimizer.warmup_steps = {} is more than run.steps = {} (the learning rate would never be reached); shorten "
        "the warm-up",
        configuration.optimizer.warmup_steps, configuration.run.steps);
  });
  rule({"data.micro_tokens", "data.batch_tokens"}, [&]() -> std::string {
    if (configuration.data.micro_tokens <= configuration.data.batch_tokens) return {};
    return fmt::format(
        "data.micro_tokens = {} is more than data.batch_tokens = {} (a part cannot exceed the whole); take 0 to let "
        "Weft choose",
        configuration.data.micro_tokens, configuration.data.batch_tokens);
  });
  rule({"device.backend", "device.precision"}, [&]() -> std::string {
    if (configuration.device.backend != "cuda" || configuration.precision == Precision::bf16) return {};
    return "device.backend = \"cuda\" with device.precision = \"fp32\" (the hand-written kernels compute in bf16); "
           "take "
           "precision = \"bf16\" or backend = \"portable\"";
  });
  rule({"parallel.selection", "transcoder.activation"}, [&]() -> std::string {
    if (configuration.parallel.manner.selection == SelectionPlace::everywhere ||
        configuration.transcoder.activation == Activation::batch_topk)
      return {};
    return "parallel.selection = \"rank_0\" is for transcoder.activation = \"batch_topk\" alone (the others need no "
           "comparison with all tokens); take \"everywhere\"";
  });
  rule({"data.layers", "data.d_model"}, [&]() -> std::string {
    const auto& data = configuration.data;
    if ((data.layers > 0) == (data.d_model > 0)) return {};
    return fmt::format(
        "data.layers = {} and data.d_model = {} (one alone says too little about the model); give both or neither",
        data.layers, data.d_model);
  });
  rule({"data.window_rows", "data.block_rows"}, [&]() -> std::string {
    const auto& data = configuration.data;
    if (data.window_rows % data.block_rows == 0) return {};
    return fmt::format(
        "data.window_rows = {} is no multiple of data.block_rows = {} (a window is made of whole blocks); take {}",
        data.window_rows, data.block_rows, (data.window_rows / data.block_rows + 1) * data.block_rows);
  });
}

}  // namespace

std::optional<std::int64_t> parse_walltime(std::string_view text) {
  std::int64_t parts[3] = {};
  int part = 0;
  std::size_t digits = 0;
  for (const char c : text) {
    if (c == ':') {
      if (digits == 0 || ++part > 2) return std::nullopt;
      digits = 0;
    } else if (c >= '0' && c <= '9' && digits < 6) {
      parts[part] = 10 * parts[part] + (c - '0');
      ++digits;
    } else {
      return std::nullopt;
    }
  }
  if (part != 2 || digits == 0 || parts[1] > 59 || parts[2] > 59) return std::nullopt;
  return 3600 * parts[0] + 60 * parts[1] + parts[2];
}

device::Settings device_settings(const Configuration& configuration) {
  device::Settings settings = configuration.device;
  if (settings.backend == "auto" && configuration.precision == Precision::fp32) settings.backend = "portable";
  return settings;
}

void check_layers(const ModelSettings& model, std::int64_t n_layers) {
  const double budget = model.k * static_cast<double>(n_layers);
  if (model.activation != Activation::topk || model.scope != Scope::all_layers || whole(budget)) return;
  throw collective_error(
      ExitCode::usage,
      "transcoder.k = {} times {} layers = {} must be whole (activation = \"topk\" with scope = \"all_layers\" counts "
      "the features of each token); take k = {} or activation = \"batch_topk\"",
      model.k, n_layers, budget, std::max(1.0, std::round(model.k)));
}

input::Schema schema(Configuration& configuration) {
  input::Schema schema;
  add_run(schema, configuration.run);
  add_data(schema, configuration.data);
  add_transcoder(schema, configuration.transcoder);
  add_optimizer(schema, configuration.optimizer);
  add_machine(schema, configuration);
  add_records(schema, configuration);
  add_rules(schema, configuration);
  return schema;
}

}  // namespace weft::transcoder
