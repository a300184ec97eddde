// SPDX-License-Identifier: Apache-2.0
#include "commands/options.hpp"

#include <algorithm>
#include <array>
#include <limits>

namespace weft::commands {
namespace {

constexpr CommandEntry entries[] = {
    {Command::train, "train", "INPUT", true, "train a transcoder; resumes automatically",
     "Trains a cross-layer transcoder on activation files. A run that was interrupted resumes from its newest valid "
     "checkpoint when the same command is given again."},
    {Command::synth, "synth", "INPUT", true, "write an activation dataset with planted features",
     "Writes activations with planted cross-layer features, and the ground truth, as table [synthetic] of the input "
     "describes them."},
    {Command::evaluate, "evaluate", "CHECKPOINT", false, "quality on validation data, per layer",
     "Measures a transcoder on data that it was not trained on: errors, explained variance, active and dead features "
     "per layer; on planted data the features recovered."},
    {Command::features, "features", "CHECKPOINT", false, "what features respond to: tokens, densities, decoder rows",
     "Collects what features respond to: their strongest activations with the tokens around them, densities and "
     "decoder rows. With --output as features.h5 (weft serve shows it), with --feature as JSON of single features."},
    {Command::encode, "encode", "CHECKPOINT", false, "sparse activations of a dataset, for other programs",
     "Writes the active features of every row of a dataset as sparse matrices, for other programs."},
    {Command::convert, "convert", "CHECKPOINT", false, "batch_topk or topk to thresholds (jumprelu)",
     "Replaces the activation batch_topk or topk by thresholds (jumprelu), calibrated on data. Receives a new "
     "checkpoint, which can be trained further."},
    {Command::inspect, "inspect", "PATH", false, "list and check the contents of a dataset or checkpoint",
     "Lists the contents of a dataset, token files, a checkpoint, a run, exported weights or a directory of Hugging "
     "Face, and checks them."},
    {Command::benchmark, "benchmark", "INPUT", true, "time the phases of a step, of either kind of model",
     "Times the phases of a training step and compares them with the limits of the machine, for every case of table "
     "[benchmark]. Writes benchmark.json and benchmark.csv; weft report makes a page of them."},
    {Command::export_weights, "export", "CHECKPOINT", false, "weights in the files of other programs",
     "Writes the weights of a transcoder, which then apply to raw activations, in the files of another program "
     "(docs/interchange.md)."},
    {Command::import_weights, "import", "DIR", false, "a checkpoint from the files of other programs",
     "Writes a checkpoint of the weights in DIR, a directory of circuit-tracer, crosslayer-coding, CLT-Forge, "
     "crosslayer-transcoder, saelens or sparsify, for evaluate, inspect and export; or a dataset of the compressed "
     "activations of CLT-Forge in DIR."},
    {Command::privacy, "privacy", "", false, "epsilon of a private training, or the noise that it needs",
     "Computes the epsilon of a private training from its noise, or the noise that an epsilon needs, by each "
     "accountant "
     "(docs/privacy.md)."},
    {Command::lm_train, "lm train", "INPUT", true, "train a model on text; resumes automatically",
     "Trains a GPT-2- or Llama-style language model on text. A run that was interrupted resumes from its newest valid "
     "checkpoint when the same command is given again."},
    {Command::lm_polychromic, "lm polychromic", "INPUT", true,
     "train a model further for quality and diversity of answers",
     "Trains a language model further, so that sets of its answers to a prompt are good and differ "
     "(docs/polychromic.md). A run that was interrupted resumes from its newest valid checkpoint when the same command "
     "is given again."},
    {Command::lm_evaluate, "lm evaluate", "MODEL", false, "loss, perplexity and bits per byte on a text",
     "Measures loss, perplexity and bits per byte of a language model on a text; with --transcoder also with its MLPs "
     "replaced by a transcoder."},
    {Command::lm_harvest, "lm harvest", "MODEL", false, "MLP inputs and outputs on a text, as data of weft train",
     "Writes MLP inputs and outputs of a language model on a text as an activation dataset for weft train. An "
     "interrupted harvest resumes with the same command."},
    {Command::lm_export, "lm export", "MODEL", false, "a model in the files of Hugging Face",
     "Writes a language model in the files of the transformers library of Hugging Face. Adapters ([lora]) are merged "
     "into its weights; with --adapters they alone are written, in the files of PEFT."},
    {Command::lm_merge, "lm merge", "CHECKPOINT", false, "a checkpoint with its adapters merged into the weights",
     "Writes a checkpoint of a language model without adapters ([lora]): they are added to the weights, which can then "
     "be trained further, as a whole or with new adapters."},
    {Command::lm_generate, "lm generate", "MODEL", false, "text that the model writes",
     "Continues prompts with text that a language model writes."},
    {Command::lm_diversity, "lm diversity", "FILE", false, "how much the answers to each prompt differ",
     "Measures how much the answers to each prompt differ: distinct n-grams, self-BLEU and, with --model, the distance "
     "of "
     "their embeddings. FILE.jsonl (or .ndjson, .json) has {\"prompt\": TEXT, \"text\": TEXT} per line, as weft lm "
     "generate writes, or "
     "{\"prompt\": TEXT, \"answers\": [TEXT]}; other files have one answer per line."},
    {Command::lm_tokenize, "lm tokenize", "FILES", false, "text to token files",
     "Writes text files as token files; with --train-bpe trains a vocabulary on them first."},
};

struct Subject {
  std::string_view name;
  const char* help;
};
constexpr Subject subjects[] = {
    {"INPUT", "a TOML file; weft train --defaults and weft lm train --defaults print a commented template"},
    {"CHECKPOINT", "a checkpoint, or a run, which stands for its newest one"},
    {"MODEL",
     "a checkpoint, a run, which stands for its newest one, or a directory of Hugging Face with a GPT-2, Llama, Qwen3, "
     "OLMo 2 or Gemma 2"},
    {"PATH", "what to inspect: its kind is recognised"},
    {"DIR", "a directory of another program"},
    {"FILES", "text files"},
    {"FILE", "the answers"},
};

const char* help_of_subject(std::string_view name) {
  for (const Subject& subject : subjects)
    if (subject.name == name) return subject.help;
  return "";
}

bool is_training(Command command) {
  return command == Command::train || command == Command::lm_train || command == Command::lm_polychromic;
}

/// Options that every command has.
void add_common(Options& options, Request& request) {
  options.flag("-h,--help", request.help, "print this text");
  options.flag("-V,--version", request.version, "print version, revision and libraries");
}

}  // namespace

bool Option::takes_path() const {
  static constexpr std::array<std::string_view, 9> paths = {
      "FILE", "FILES", "DIR", "PATH", "INPUT", "MODEL", "CHECKPOINT", "auto|never|PATH", "bytes|PATH"};
  return std::find(paths.begin(), paths.end(), is_argument() ? names : value) != paths.end();
}

std::span<const CommandEntry> command_entries() { return entries; }

const CommandEntry* entry_of(Command command) {
  const auto* const found = std::find_if(std::begin(entries), std::end(entries),
                                         [&](const CommandEntry& one) { return one.command == command; });
  return found == std::end(entries) ? nullptr : found;
}

Options options_of(Command command, Request& request) {
  const CommandEntry& entry = *entry_of(command);
  Options options;
  const bool encodes = command == Command::evaluate || command == Command::features || command == Command::encode ||
                       command == Command::convert;
  const bool of_language_model = command == Command::lm_evaluate || command == Command::lm_harvest ||
                                 command == Command::lm_generate || command == Command::lm_diversity;
  if (command == Command::lm_tokenize)
    options.add(entry.subject, request.files, "", help_of_subject(entry.subject));
  else if (entry.subject[0] != '\0')
    options.add(entry.subject, request.subject, "", help_of_subject(entry.subject));

  // 1. What the command does, and to what.
  if (command == Command::export_weights) {
    options.add("DIR", request.directory, "", "the directory to write");
    options
        .add("--to", request.format, "FORMAT",
             "circuit-tracer or crosslayer-coding; saelens or sparsify for transcoders of single layers and "
             "autoencoders")
        .one_of({"circuit-tracer", "crosslayer-coding", "saelens", "sparsify"});
    options
        .add("--type", request.stored_type, "TYPE",
             "storage of matrices, bf16 or fp32 (default: bf16 for circuit-tracer, fp32 for the others); vectors are "
             "fp32")
        .one_of({"bf16", "fp32"});
    options.add("--model", request.model_name, "NAME",
                "the language model, for the configuration that circuit-tracer reads (default: not written)");
    options.add("--input-hook", request.input_hook, "NAME", "the point in it where the inputs were recorded");
    options.add("--output-hook", request.output_hook, "NAME", "the point in it where the targets were recorded");
  }
  if (encodes) options.add("--data", request.data, "DIR", "activations to use (default: the run's validation data)");
  if (command == Command::features) {
    options.add("--feature", request.features, "LAYER:INDEX", "print this feature as JSON; repeatable");
    options.add("--top", request.top, "N", "strongest activations per feature (default 16)").between(1, 1 << 16);
    options.add("--context", request.context, "N", "tokens on each side of them (default 10)").between(0, 1 << 16);
  }
  if (command == Command::convert) {
    options.add("--thresholds", request.thresholds, "WHICH", "per_feature or per_layer (default per_feature)")
        .one_of({"per_feature", "per_layer"});
    options
        .add("--type", request.stored_type, "TYPE",
             "what weights and thresholds are rounded to, bf16 or fp32 (default bf16)")
        .one_of({"bf16", "fp32"});
  }
  if (command == Command::import_weights)
    options.add("--statistics", request.statistics, "FILE",
                "crosslayer-coding: norm_stats.json of the training data (default: in DIR or the directory above)");
  if (command == Command::lm_evaluate) {
    options.add("--text", request.text, "FILE", "the text, or token files (default: the run's validation data)");
    options.add(
        "--transcoder", request.transcoder, "CHECKPOINT",
        "also the loss with MLP outputs replaced by a transcoder's reconstructions, all layers together and each "
        "alone");
  }
  if (command == Command::lm_harvest) {
    options.add("--text", request.files, "FILES", "texts or token files (default: the run's training text)");
    options.add("--split", request.split, "PART", "without --text: which part of the run's text, train or validation")
        .one_of({"train", "validation"});
    options
        .add("--type", request.stored_type, "TYPE",
             "of the stored values, bf16, fp16 or fp32 (default: as the model computes them)")
        .one_of({"bf16", "fp16", "fp32"});
    options.add("--tokens", request.rows, "N", "rows to store (default: all), in whole windows")
        .between(1, std::int64_t{1} << 40);
    options.add("--rows-per-file", request.rows_per_file, "N", "rows of a file, about (default 65536)")
        .between(1, 1 << 30);
  }
  if (command == Command::lm_export) {
    options.flag("--adapters", request.adapters, "the adapters of a run with [lora] alone, in the files of PEFT");
    options.add("--type", request.stored_type, "TYPE", "storage of the weights, bf16 or fp32 (default fp32)")
        .one_of({"bf16", "fp32"});
  }
  if (command == Command::lm_generate) {
    GenerateOptions& generate = request.generate;
    options.add("--prompt", generate.prompt, "TEXT", "the beginning of the text, or");
    options.add("--prompts", generate.prompts, "FILE",
                "one per line; FILE.jsonl, .ndjson or .json: {\"prompt\": TEXT} per line");
    options.add("--samples", generate.samples, "N", "texts per prompt (default 1)").between(1, 1 << 20);
    options.add("--max-new-tokens", generate.new_tokens, "N", "of each text (default 100)").between(1, 1 << 22);
    options.add("--temperature", generate.temperature, "T",
                "logits are divided by it; 0 = the most probable token (default 1)");
    options.add("--top-k", generate.top_k, "K", "draw from the K most probable tokens (default 0 = all)")
        .between(0, 1 << 23);
    options.add("--top-p", generate.top_p, "P", "of these from the fewest that reach probability P (default 1)");
    options.add("--stop", generate.stop, "TEXT", "end before this text; repeatable");
    options.add("--seed", generate.seed, "N", "of the random numbers (default 1)")
        .between(0, std::numeric_limits<std::int64_t>::max());
    options.add("--rows", generate.rows, "N", "texts computed together (default 64, without a GPU 16)")
        .between(1, 1 << 14);
    options.flag("--jsonl", generate.json_lines, "print one JSON object per text, each as soon as it is complete");
  }
  if (command == Command::lm_diversity)
    options.add("--model", request.model, "MODEL",
                "measure in its tokens, not in words, and add the distance of the answers' embeddings by this model");
  if (command == Command::lm_tokenize) {
    options.add("--tokens", request.tokens, "bytes|PATH", "the tokeniser: bytes, or a tokeniser file");
    options.add("--train-bpe", request.train_bpe, "SIZE", "train a byte-level BPE of this vocabulary on FILES first")
        .between(1, 1 << 24);
    options.add("--pattern", request.pattern, "NAME", "how it splits text into words, gpt2 or llama3 (default gpt2)")
        .one_of({"gpt2", "llama3"});
    options.add("--document-separator", request.separator, "TEXT",
                "text between the documents of a file (default: one document)");
  }
  if (command == Command::privacy) {
    PrivacyOptions& privacy = request.privacy;
    options.add("--epsilon", privacy.epsilon, "E", "the target, or");
    options.add("--noise-multiplier", privacy.noise_multiplier, "S",
                "standard deviation of the noise / largest norm of a record's gradient");
    options.add("--delta", privacy.delta, "D", "probability with which epsilon may not hold");
    options.add("--sample-rate", privacy.sample_rate, "Q", "probability with which a record joins a step");
    options.add("--steps", privacy.steps, "N", "updates of the model").between(0, std::int64_t{1} << 50);
    options.add("--accountant", privacy.accountant, "NAME", "prv, rdp, gdp or all (default all)")
        .one_of({"prv", "rdp", "gdp", "all"});
    options.add("--input", privacy.input, "FILE",
                "an input of weft lm train: what is not given above is taken from it, also the accountant");
  }
  if (command == Command::benchmark) {
    options.add("--compare", request.compare, "FILE",
                "end with 1 when a case takes longer than benchmark.compare_ratio times this benchmark.json's");
    options.flag("--tune", request.tune, "on a GPU: time products and attention, record the best");
  }

  // 2. The input.
  if (command == Command::lm_tokenize)
    options.add("--set", request.sets, "KEY=VALUE",
                "data.add_special_tokens=false: leave out what the post-processor of a tokenizer.json adds");
  if (entry.takes_input || encodes || of_language_model || command == Command::inspect)
    options.add("--set", request.sets, "KEY=VALUE",
                command == Command::inspect
                    ? "of a dataset: replace a value of table [data], as in data.stored_as=bf16; repeatable"
                    : "replace a value of the input, as in run.steps=500; repeatable");
  if (entry.takes_input) {
    options.flag("--defaults", request.defaults, "print a commented template of an input");
    options.flag("--print-config", request.print_config, "print the input with every key, as it will run");
    if (is_training(command))
      options.add("--device-memory", request.device_memory, "AMOUNT",
                  "with --dry-run: whether the run fits a GPU of another machine with this memory, as 141GB or 80GiB");
  }
  if (entry.takes_input)
    options.flag("--dry-run", request.dry_run,
                 "check input, data headers and memory; print what is needed and whether it fits");

  // 3. Where results go, and how the run continues.
  const auto output = [&](const char* value, const char* help) {
    options.add("--output", request.output, value, help);
  };
  if (is_training(command) || command == Command::benchmark) output("DIR", "the run directory (run.output)");
  if (command == Command::synth) output("DIR", "receives train/, validation/ and ground_truth.h5 (synthetic.output)");
  if (command == Command::evaluate || command == Command::lm_evaluate) output("DIR", "receives evaluation.json");
  if (command == Command::features) output("DIR", "receives features.h5");
  if (command == Command::encode) output("DIR", "receives the encoded files");
  if (command == Command::convert) output("DIR", "a new directory: the checkpoint and conversion.json");
  if (command == Command::import_weights) output("DIR", "the checkpoint, or the dataset");
  if (command == Command::lm_harvest) output("DIR", "the dataset");
  if (command == Command::lm_export) output("DIR", "the directory to write");
  if (command == Command::lm_merge) output("DIR", "a new directory: receives the checkpoint");
  if (command == Command::lm_tokenize) output("DIR", "receives the token files and tokenizer.json (data.tokens)");
  if (is_training(command)) {
    options.add("--resume", request.resume, "auto|never|PATH",
                "resume from the newest valid checkpoint, start a new run, or resume from PATH (default auto)");
    options.add("--walltime", request.walltime, "hh:mm:ss", "stop cleanly before (run.walltime)");
    options.flag("--take-over", request.take_over, "take the run directory from a live run, which stops");
    options.add("--start-id", request.start_id, "ID", "recorded in run.json, for job scripts");
  }
  if (entry.takes_input || command == Command::evaluate)
    options.flag("--profile", request.profile,
                 command == Command::evaluate
                     ? "with --output: write a time line (profile.json, for ui.perfetto.dev) and five figures"
                     : "write a time line of a few steps (OUTPUT/profile.json, for ui.perfetto.dev) and five figures");

  // 4. What is printed.
  options.flag("--json", request.json, "print the result as one JSON document; all else goes to standard error");
  options.flag("--quiet", request.quiet, "print results, warnings and errors alone");
  options.flag("--verbose", request.verbose, "also print versions, and when each phase outside the steps begins");
  add_common(options, request);
  return options;
}

Options options_of_program(Request& request) {
  Options options;
  options.flag("--defaults", request.defaults, "the same as weft train --defaults");
  add_common(options, request);
  return options;
}

Options options_of_family(Request& request) {
  Options options;
  add_common(options, request);
  return options;
}

}  // namespace weft::commands
