// SPDX-License-Identifier: Apache-2.0
//
// The command line, and the input that belongs to it. The same on every rank: rank 0 reads files and environment and
// broadcasts them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "dataset/activations/synthetic.hpp"
#include "input/read.hpp"
#include "input/schema.hpp"
#include "language_model/benchmark/settings.hpp"
#include "language_model/settings.hpp"
#include "parallel/world.hpp"
#include "transcoder/benchmark/settings.hpp"
#include "transcoder/settings.hpp"

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
  inspect,
  benchmark,
  language_benchmark,
  report,
  export_weights,
  import_weights,
  lm_train,
  lm_evaluate,
  lm_tokenize
};

/// The command line. Long options only; the help text (request.cpp) describes them.
struct Request {
  Command command = Command::nothing;
  std::string subject;             ///< INPUT, CHECKPOINT, PATH or RUN; "" with --defaults
  std::vector<std::string> files;  ///< lm tokenize: FILES
  std::string input_text;          ///< contents of INPUT, for the commands that take one
  std::vector<std::string> sets;   ///< --set table.key=value, in order
  bool print_config = false;
  bool defaults = false;
  bool reference = false;  ///< --reference: the keys as Markdown, for docs/input_reference.md
  bool dry_run = false;
  bool tune = false;            ///< benchmark
  bool profile = false;         ///< all but inspect and report
  std::string resume = "auto";  ///< auto | never | PATH
  bool take_over = false;       ///< train: the run directory, from a run that may be alive
  std::string walltime;         ///< "" or hh:mm:ss, checked
  std::string start_id;         ///< train: recorded in run.json as start_id
  std::string output;           ///< "" or DIR; report: FILE
  std::string data;             ///< evaluate, features, encode: DIR
  std::string text;             ///< lm evaluate: "" or FILE
  std::string tokens;           ///< lm tokenize: "" or the tokeniser, as data.tokens
  std::int64_t train_bpe = 0;   ///< lm tokenize: size of the vocabulary; 0 = none is trained
  std::string pattern;          ///< lm tokenize: "" or gpt2 | llama3
  std::string separator;        ///< lm tokenize: "" or the text between documents
  std::string compare;          ///< benchmark: "" or FILE
  std::string directory;        ///< export: DIR
  std::string format;           ///< export: circuit-tracer | crosslayer-coding
  std::string stored_type;      ///< export: "" or bf16 | fp32
  std::string model_name;       ///< export: "" or the name of the language model
  std::string input_hook;       ///< export: "" or the hook point of the inputs
  std::string output_hook;      ///< export: "" or the hook point of the targets
  std::string statistics;       ///< import: "" or FILE (norm_stats.json)
  std::string command_line;     ///< as given, for the record

  // features
  std::vector<std::string> features;  ///< --feature LAYER:INDEX, in order
  std::int64_t top = 16;              ///< strongest activations per feature
  std::int64_t context = 10;          ///< tokens on each side of them
};

/// Reads the command line and, for commands with an INPUT, the file. Prints --help and --version (rank 0). Collective.
/// Throws a collective Error(usage).
Request parse(int argc, const char* const* argv, const parallel::World& world);

/// All settings that an input can have, for every command: one file serves synth, train and benchmark. To add a table:
/// a member here, and its keys in `schema`.
struct Input {
  transcoder::Configuration configuration;
  language_model::Configuration language;  ///< of the commands `weft lm`
  dataset::SyntheticSettings synthetic;
  transcoder::BenchmarkSettings benchmark;
  language_model::BenchmarkSettings language_benchmark;
};

/// The keys of `input`, and which of them this command requires. `input` must outlive the schema.
input::Schema schema(Input& input, Command command);

/// --set, --output and --walltime as overrides of input keys.
std::vector<input::Override> overrides(const Request& request);

/// Reads the request's input, with the overrides, into the members that `schema` refers to. Paths are expanded with
/// rank 0's environment. Collective; throws a collective Error(usage).
void read_input(const Request& request, const input::Schema& schema, const parallel::World& world);

/// Throws Error(io) if text that was printed did not reach standard output. Call it on rank 0, after a command whose
/// result is what it prints. A reader that has read enough (`weft inspect RUN | head`) is no error.
void require_printed();

/// The name of a command on the command line: "train", "lm train".
std::string_view name(Command command);

}  // namespace weft::commands
