// SPDX-License-Identifier: Apache-2.0
//
// The command line as values. options.cpp declares its options, request.cpp reads it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weft::commands {

/// `nothing`: the command line requested a text (--help, --version), which was printed. `language_benchmark`: weft
/// benchmark with an INPUT that has a table [language_model].
enum class Command {
  nothing,
  train,
  synth,
  evaluate,
  features,
  encode,
  convert,
  inspect,
  benchmark,
  language_benchmark,
  export_weights,
  import_weights,
  lm_train,
  lm_evaluate,
  lm_harvest,
  lm_export,
  lm_merge,
  lm_generate,
  lm_diversity,
  lm_tokenize,
  lm_polychromic,
  privacy
};

/// Options of lm generate.
struct GenerateOptions {
  std::string prompt;             ///< "" or the text
  std::string prompts;            ///< "" or FILE
  std::int64_t samples = 1;       ///< per prompt
  std::int64_t new_tokens = 100;  ///< per sample, at most
  double temperature = 1;         ///< 0: always the most probable token
  std::int64_t top_k = 0;         ///< 0: all
  double top_p = 1;
  std::vector<std::string> stop;  ///< texts before which a sample ends
  std::uint64_t seed = 1;
  std::int64_t rows = 0;  ///< sequences computed together; 0: automatic
  bool json_lines = false;
};

/// Options of privacy. What is not given is 0, sample_rate and steps -1.
struct PrivacyOptions {
  double epsilon = 0;
  double noise_multiplier = 0;
  double delta = 0;
  double sample_rate = -1;
  std::int64_t steps = -1;
  std::string accountant;  ///< "" or prv | rdp | gdp | all
  std::string input;       ///< "" or FILE
};

/// The command line. options.cpp describes its options.
struct Request {
  Command command = Command::nothing;
  bool help = false, version = false;
  bool json = false;  ///< the result as one JSON document on standard output
  bool quiet = false, verbose = false;
  std::string device_memory;         ///< train with --dry-run: "" or an amount of memory, as "141GB"
  std::string subject;               ///< INPUT, CHECKPOINT or PATH; "" with --defaults
  std::vector<std::string> files;    ///< lm tokenize: FILES; lm harvest: --text FILES
  std::string input_text;            ///< contents of INPUT, for the commands that take one
  bool input_of_checkpoint = false;  ///< input_text was written by this program, perhaps by an earlier version
  std::vector<std::string> sets;     ///< --set table.key=value, in order
  bool print_config = false;
  bool defaults = false;
  bool reference = false;  ///< --reference: the keys as Markdown, for docs/input_reference.md
  bool dry_run = false;
  bool tune = false;            ///< benchmark
  bool profile = false;         ///< all but inspect
  std::string resume = "auto";  ///< auto | never | PATH
  bool take_over = false;       ///< train: take over the run directory from a run that may be active
  std::string walltime;         ///< "" or hh:mm:ss, checked
  std::string start_id;         ///< train: recorded in run.json as start_id
  std::string output;           ///< "" or DIR
  std::string data;             ///< evaluate, features, encode, convert: DIR
  std::string thresholds;       ///< convert: "" or per_feature | per_layer
  std::string text;             ///< lm evaluate: "" or FILE
  std::string tokens;           ///< lm tokenize: "" or the tokeniser, as data.tokens
  std::int64_t train_bpe = 0;   ///< lm tokenize: size of the vocabulary; 0 = none is trained
  std::string pattern;          ///< lm tokenize: "" or gpt2 | llama3
  std::string separator;        ///< lm tokenize: "" or the text between documents
  std::string compare;          ///< benchmark: "" or FILE
  std::string directory;        ///< export: DIR
  std::string format;           ///< export: circuit-tracer | crosslayer-coding
  std::string stored_type;      ///< export, lm export, lm harvest, convert: "", bf16, fp16 or fp32
  std::string model_name;       ///< export: "" or the name of the language model
  std::string input_hook;       ///< export: "" or the hook point of the inputs
  std::string output_hook;      ///< export: "" or the hook point of the targets
  std::string statistics;       ///< import: "" or FILE (norm_stats.json)
  std::string command_line;     ///< the command line as given, for the run record

  // lm evaluate, lm harvest, lm diversity, lm export
  std::string transcoder;          ///< evaluate: "" or CHECKPOINT
  bool adapters = false;           ///< export: the adapters alone
  std::string model;               ///< diversity: "" or MODEL
  std::string split;               ///< harvest: "" or train | validation
  std::int64_t rows = 0;           ///< harvest: --tokens; 0 = all
  std::int64_t rows_per_file = 0;  ///< harvest: about; 0 = default

  // features
  std::vector<std::string> features;  ///< --feature LAYER:INDEX, in order
  std::int64_t top = 16;              ///< strongest activations per feature
  std::int64_t context = 10;          ///< tokens on each side of them

  GenerateOptions generate;
  PrivacyOptions privacy;
};

}  // namespace weft::commands
