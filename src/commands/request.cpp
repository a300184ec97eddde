// SPDX-License-Identifier: Apache-2.0
#include "commands/request.hpp"

#include <fmt/ranges.h>
#include <poll.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <optional>

#include "commands/commands.hpp"
#include "input/print.hpp"
#include "parallel/watchdog.hpp"
#include "report/build.hpp"

namespace weft::commands {
namespace {

constexpr const char* help_text =
    R"(Weft trains cross-layer transcoders: sparse replacements of a transformer's MLPs.

weft train INPUT              train a transcoder; resumes automatically
weft synth INPUT              write an activation dataset with planted features
weft evaluate CHECKPOINT      quality on validation data, per layer
weft features CHECKPOINT      what features respond to: tokens, densities, decoder rows
weft encode CHECKPOINT        sparse activations of a dataset, for other programs
weft convert CHECKPOINT       batch_topk or topk to thresholds (jumprelu)
weft inspect PATH             list and check the contents of a dataset or checkpoint
weft benchmark INPUT          time the phases of a step, of either kind of model
weft report RUN               one HTML page of a run (RUN/report.html, --output FILE)
weft export CHECKPOINT DIR    weights for other programs, and of them
  and weft import DIR         (weft export --help)
weft lm COMMAND               language models: weft lm --help

Options of commands with an INPUT (a TOML file):
  --set table.key=value       replace a value of the input; repeatable
  --defaults                  print a commented template of an input
  --print-config              print the input with every key, as it will run
  --dry-run                   check input, data headers and memory; print what is needed
  --output DIR                the run directory (run.output)
  --walltime hh:mm:ss         train: stop cleanly before (run.walltime)
  --resume auto|never|PATH    train: resume from the newest valid checkpoint,
                              start a new run, or resume from PATH (default auto)
  --take-over                 train: take the run directory from a live run, which stops
  --start-id ID               train: recorded in run.json, for job scripts
  --compare FILE              benchmark: end with 1 when a case takes longer than
                              benchmark.compare_ratio times this benchmark.json's
  --tune                      benchmark: time products and attention, record the best
  --profile                   not inspect, report: write a time line of a few steps
                              (OUTPUT/profile.json, for ui.perfetto.dev), five figures
inspect: --set data.stored_as=bf16; evaluate, features, encode, convert: evaluate --help
  --help, --version           this text; version, revision and libraries

Several processes: mpirun -n 4 weft train INPUT, or srun. One process per GPU.

Exit codes: 0 finished, 1 internal, 2 input or usage (any path that does not exist),
  3 data, 4 numeric, 5 communication or hang, 6 I/O or checkpoint, 75 stopped cleanly
  with more to do (requeue), 93 no progress since the last start, 128+n stopped on
  request by signal n, resumable)";

constexpr const char* trained_help_text =
    R"(A trained transcoder. CHECKPOINT is a checkpoint or a run, which stands for its newest
one; the input is the checkpoint's.

weft evaluate CHECKPOINT      quality on validation data, per layer
  --output DIR                receives evaluation.json
  --profile                   with --output: a time line, as of weft train
weft features CHECKPOINT      what features respond to: tokens, densities, decoder rows
  --output DIR                receives features.h5 and features.html
  --feature LAYER:INDEX       print this feature as JSON; repeatable
  --top N                     strongest activations per feature (default 16)
  --context N                 tokens on each side of them (default 10)
weft encode CHECKPOINT        sparse activations of a dataset, for other programs
  --output DIR                receives the encoded files
weft convert CHECKPOINT       batch_topk or topk to thresholds (jumprelu), calibrated on
                              the data
  --output DIR                a new directory: the checkpoint and conversion.json
  --thresholds per_feature|per_layer   (default per_feature)
  --type bf16|fp32            what weights and thresholds are rounded to (default bf16)

All of them:
  --data DIR                  activations to use (default: the run's validation data)
  --set table.key=value       replace a value of the input; repeatable
  --help, --version           this text; version, revision and libraries

Exit codes: see weft --help)";

constexpr const char* language_model_help_text =
    R"(Weft trains language models: GPT-2- and Llama-style transformers.

weft lm train INPUT           train a model on text; resumes automatically
weft lm evaluate CHECKPOINT   loss, perplexity and bits per byte on a text
weft lm tokenize FILES        text to token files (--output DIR)

train (INPUT is a TOML file): --set, --defaults, --print-config, --dry-run, --output,
  --walltime, --resume, --take-over, --start-id and --profile as in weft --help
evaluate (the input is the checkpoint's; a run stands for its newest checkpoint):
  --text FILE                 the text, or token files (default: the run's validation data)
  --set, --output             as in weft --help; --output DIR receives evaluation.json
tokenize:
  --tokens bytes|PATH         the tokeniser: bytes, or a tokeniser file
  --train-bpe SIZE            train a byte-level BPE of this vocabulary on FILES first
  --pattern gpt2|llama3       how it splits text into words (default gpt2)
  --document-separator TEXT   text between the documents of a file (default: one document)
  --output DIR                receives the token files and tokenizer.json (data.tokens)
  --help, --version           this text; version, revision and libraries

Exit codes: see weft --help)";

constexpr const char* interchange_help_text =
    R"(Weights in the files of other programs (docs/interchange.md).

weft export CHECKPOINT DIR    write DIR: weights that apply to raw activations
  --to FORMAT                 circuit-tracer or crosslayer-coding
  --type bf16|fp32            storage of matrices; the default is bf16 for circuit-tracer,
                              fp32 for crosslayer-coding. Vectors are fp32
  --model NAME                the language model, and the points in it where the
  --input-hook NAME           activations were recorded, for the configuration that
  --output-hook NAME          circuit-tracer reads (default: not written)

weft import DIR               write a checkpoint of the weights in DIR, a directory of
                              circuit-tracer, crosslayer-coding, CLT-Forge or
                              crosslayer-transcoder: for evaluate, inspect and export
  --output DIR                the checkpoint
  --statistics FILE           crosslayer-coding: norm_stats.json of the training data
                              (default: in DIR or the directory above)
  --help, --version           this text; version, revision and libraries

Exit codes: see weft --help)";

std::string version_text() {
  const report::BuildRecord& build = report::build_record;
  std::string text = fmt::format("weft {} ({}{}, {}, {}{}{})", build.version,
                                 std::string_view(build.revision).substr(0, 12), build.modified ? " modified" : "",
                                 build.compiler, build.build_type, build.cuda[0] ? ", CUDA " : "", build.cuda);
  for (const auto& [library, version] : library_versions()) text += fmt::format("\n  {}: {}", library, version);
  return text;
}

/// The text is the result of the command: throws Error(io) if it cannot be written. Collective.
void print_once(const parallel::World& world, const std::string& text) {
  world.on_root([&] {
    std::fputs((text + "\n").c_str(), stdout);
    require_printed();
  });
}

struct Declared {
  Command command;
  std::string_view name;  // "train", or with its family "lm train"
  const char* subject;
  bool takes_input;

  std::string_view family() const { return name.substr(0, name.find(' ') == name.npos ? 0 : name.find(' ')); }
  std::string word() const { return std::string(name.substr(family().empty() ? 0 : family().size() + 1)); }
};
constexpr Declared declared[] = {
    {Command::train, "train", "INPUT", true},
    {Command::synth, "synth", "INPUT", true},
    {Command::evaluate, "evaluate", "CHECKPOINT", false},
    {Command::features, "features", "CHECKPOINT", false},
    {Command::encode, "encode", "CHECKPOINT", false},
    {Command::convert, "convert", "CHECKPOINT", false},
    {Command::inspect, "inspect", "PATH", false},
    {Command::benchmark, "benchmark", "INPUT", true},
    {Command::report, "report", "RUN", false},
    {Command::export_weights, "export", "CHECKPOINT", false},
    {Command::import_weights, "import", "DIR", false},
    {Command::lm_train, "lm train", "INPUT", true},
    {Command::lm_evaluate, "lm evaluate", "CHECKPOINT", false},
    {Command::lm_tokenize, "lm tokenize", "FILES", false},
};
constexpr std::string_view kLanguageModels = "lm";

bool is_training(Command command) { return command == Command::train || command == Command::lm_train; }
bool takes_input(Command command) {
  for (const Declared& entry : declared)
    if (entry.command == command) return entry.takes_input;
  return false;
}

template <class... Args>
Error usage(fmt::format_string<Args...> format, Args&&... args) {
  return Error(ExitCode::usage, fmt::format(format, std::forward<Args>(args)...) + "; see weft --help",
               KnownTo::all_ranks);
}

void add_options(CLI::App& app, Command command, Request& request) {
  const bool encodes = command == Command::evaluate || command == Command::features || command == Command::encode ||
                       command == Command::convert;
  const bool evaluates = encodes || command == Command::lm_evaluate;
  if (takes_input(command)) {
    app.add_flag("--print-config", request.print_config);
    app.add_flag("--defaults", request.defaults);
    app.add_flag("--dry-run", request.dry_run);
  }
  // One value per option: a list would consume the INPUT that follows it.
  if (takes_input(command) || evaluates || command == Command::inspect)
    app.add_option("--set", request.sets)->allow_extra_args(false);
  if (takes_input(command) || evaluates || command == Command::report || command == Command::import_weights ||
      command == Command::lm_tokenize)
    app.add_option("--output", request.output);
  if (takes_input(command) || command == Command::evaluate) app.add_flag("--profile", request.profile);
  if (is_training(command)) {
    app.add_option("--resume", request.resume);
    app.add_option("--walltime", request.walltime);
    app.add_flag("--take-over", request.take_over);
    app.add_option("--start-id", request.start_id);
  }
  if (encodes) app.add_option("--data", request.data);
  if (command == Command::features) {
    app.add_option("--feature", request.features)->allow_extra_args(false);
    app.add_option("--top", request.top)->check(CLI::Range(1, 1 << 16));
    app.add_option("--context", request.context)->check(CLI::Range(0, 1 << 16));
  }
  if (command == Command::convert) {
    app.add_option("--thresholds", request.thresholds)->check(CLI::IsMember({"per_feature", "per_layer"}));
    app.add_option("--type", request.stored_type)->check(CLI::IsMember({"bf16", "fp32"}));
  }
  if (command == Command::lm_evaluate) app.add_option("--text", request.text);
  if (command == Command::lm_tokenize) {
    app.add_option("--tokens", request.tokens);
    app.add_option("--train-bpe", request.train_bpe)->check(CLI::Range(1, 1 << 24));
    app.add_option("--pattern", request.pattern);
    app.add_option("--document-separator", request.separator);
  }
  if (command == Command::export_weights) {
    app.add_option("DIR", request.directory);
    app.add_option("--to", request.format);
    app.add_option("--type", request.stored_type);
    app.add_option("--model", request.model_name);
    app.add_option("--input-hook", request.input_hook);
    app.add_option("--output-hook", request.output_hook);
  }
  if (command == Command::import_weights) app.add_option("--statistics", request.statistics);
  if (command == Command::benchmark) {
    app.add_option("--compare", request.compare);
    app.add_flag("--tune", request.tune);
  }
}

/// The error for arguments that the library did not recognise: a misspelt command or option, or an extra argument.
Error unexpected(const std::vector<std::string>& extras, CLI::App& app, const CLI::App* command,
                 const Declared* chosen) {
  std::string first = extras.front();
  for (const std::string& extra : extras)
    if (extra.size() > 1 && extra[0] == '-') {
      first = extra.substr(0, extra.find('='));
      break;
    }
  std::vector<std::string> known;
  if (first[0] == '-') {
    for (const CLI::App* level : {const_cast<const CLI::App*>(&app), command})
      if (level != nullptr)
        for (const CLI::Option* option : level->get_options())
          known.insert(known.end(), option->get_lnames().begin(), option->get_lnames().end());
  } else if (chosen != nullptr) {
    return usage("unexpected argument \"{}\" of weft {} (it takes one {})", first, chosen->name,
                 "argument without an option");
  } else {
    const std::string_view family = command == nullptr ? "" : kLanguageModels;
    for (const Declared& entry : declared)
      if (entry.family() == family) known.push_back(entry.word());
    if (command == nullptr) known.emplace_back(kLanguageModels);
  }
  // The dashes are no part of the name: they would make any two options look alike.
  const std::string dashes = first[0] == '-' ? "--" : "";
  const std::string hint =
      input::nearest(std::string_view(first).substr(std::min(first.find_first_not_of('-'), first.size())), known);
  return usage("unknown {} \"{}\"{}{}", dashes.empty() ? "command" : "option", first,
               chosen != nullptr    ? fmt::format(" of weft {}", chosen->name)
               : command != nullptr ? " of weft " + command->get_name()
                                    : "",
               hint.empty() ? "" : fmt::format(" (did you mean \"{}{}\"?)", dashes, hint));
}

/// The keys of all families: those of transcoders, then the tables of language models that differ from them.
std::string reference_of_all(const input::Schema& transcoders) {
  Input input;
  return "# Transcoders\n\n" + input::reference_markdown(transcoders) + "\n# Language models\n\n" +
         input::reference_markdown(schema(input, Command::lm_evaluate), &transcoders);
}

}  // namespace

void require_printed() {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return;
  pollfd output{STDOUT_FILENO, 0, 0};
  if (poll(&output, 1, 0) == 1 && (output.revents & POLLERR) != 0) return;  // a pipe without a reader
  throw error(ExitCode::io, "standard output cannot be written (is its disk full?); what was printed is incomplete");
}

std::string_view name(Command command) {
  for (const Declared& entry : declared)
    if (entry.command == command) return entry.name;
  return "";
}

Request parse(int argc, const char* const* argv, const parallel::World& world) {
  Request request;
  for (int i = 0; i < argc; ++i) request.command_line += fmt::format("{}{}", i == 0 ? "" : " ", argv[i]);

  bool help = false, version = false;
  CLI::App app;
  app.set_help_flag();
  app.allow_extras();
  app.add_flag("--help", help);
  app.add_flag("--version", version);
  app.add_flag("--defaults", request.defaults);
  app.add_flag("--reference", request.reference)->group("");  // generates documentation: not in the help
  const auto add_command = [&](CLI::App& parent, const std::string& word) {
    CLI::App* const command = parent.add_subcommand(word);
    command->set_help_flag();
    command->allow_extras();
    command->add_flag("--help", help);
    command->add_flag("--version", version);
    return command;
  };
  CLI::App* const family = add_command(app, std::string(kLanguageModels));
  for (const Declared& entry : declared) {
    CLI::App* const command = add_command(entry.family().empty() ? app : *family, entry.word());
    if (entry.command == Command::lm_tokenize)
      command->add_option(entry.subject, request.files);
    else
      command->add_option(entry.subject, request.subject);
    add_options(*command, entry.command, request);
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& failure) {
    throw usage("{}", failure.what());
  }

  if (help || version) {
    const auto any_of = [&](std::initializer_list<Command> commands) {
      return std::any_of(commands.begin(), commands.end(),
                         [&](Command one) { return app.got_subcommand(std::string(name(one))); });
    };
    print_once(world, version                                                      ? version_text()
                      : family->parsed()                                           ? language_model_help_text
                      : any_of({Command::export_weights, Command::import_weights}) ? interchange_help_text
                      : any_of({Command::evaluate, Command::features, Command::encode, Command::convert})
                          ? trained_help_text
                          : help_text);
    return request;
  }
  const std::vector<CLI::App*> given = app.get_subcommands();
  // The command itself: weft train, or weft lm train.
  const CLI::App* const first = given.empty() ? nullptr : given.front();
  const std::vector<CLI::App*> inner = first == family ? family->get_subcommands() : given;
  const CLI::App* const command = inner.empty() ? nullptr : inner.front();
  const Declared* chosen = nullptr;
  for (const Declared& entry : declared)
    if (command != nullptr && entry.word() == command->get_name() &&
        entry.family() == (first == family ? kLanguageModels : ""))
      chosen = &entry;
  if (const std::vector<std::string> extras = app.remaining(true); !extras.empty())
    throw unexpected(extras, app, command == nullptr ? first : command, chosen);
  if (given.size() > 1 || inner.size() > 1) {
    const std::vector<CLI::App*>& two = given.size() > 1 ? given : inner;
    throw usage("two commands, \"{}\" and \"{}\" (one at a time)", two[0]->get_name(), two[1]->get_name());
  }
  if (first == family && chosen == nullptr)
    throw usage("weft {} needs one of its commands (train, evaluate, tokenize)", kLanguageModels);
  if (chosen == nullptr && !request.defaults && !request.reference) throw usage("no command was given");
  if (chosen == nullptr) chosen = &declared[0];  // weft --defaults: those of train
  request.command = chosen->command;
  if (request.subject.empty() && request.files.empty() && !request.defaults && !request.reference)
    throw usage("weft {} needs its {}", chosen->name, chosen->subject);
  if (command != nullptr)
    for (const CLI::Option* option : command->get_options())
      if (option->nonpositional() && option->count() > 0 && option->get_items_expected_max() > 0 &&
          option->results().back().empty())
        throw usage("{} is empty (it takes a value); give one, or leave the option out", option->get_name());
  if (!request.walltime.empty() && !training::parse_walltime(request.walltime))
    throw usage("--walltime {} is not a time (hours:minutes:seconds, as in 11:55:00)", request.walltime);
  if (chosen->takes_input && !request.subject.empty() && !request.defaults)
    request.input_text = world.on_root([&] { return input::load_text(request.subject); });
  if (request.command == Command::benchmark && input::has_table(request.input_text, "language_model"))
    request.command = Command::language_benchmark;

  if (request.defaults || request.print_config || request.reference) {
    Input input;
    const input::Schema keys = schema(input, request.command);
    if (request.print_config && !request.defaults) read_input(request, keys, world);
    std::string text = request.reference  ? reference_of_all(keys)
                       : request.defaults ? input::defaults(keys)
                                          : input::print(keys);
    text.pop_back();  // the newline that printing adds
    print_once(world, text);
    request.command = Command::nothing;
  }
  return request;
}

input::Schema schema(Input& input, Command command) {
  if (command == Command::lm_train || command == Command::lm_evaluate || command == Command::language_benchmark) {
    input::Schema keys = language_model::schema(input.language);
    language_model::add_keys(keys, input.language_benchmark);
    if (command == Command::lm_train) keys.at("data.train").required("\"data/text.txt\"");
    return keys;
  }
  input::Schema keys = transcoder::schema(input.configuration);
  if (command == Command::train) keys.at("data.train").required("\"data/train\"");
  dataset::add_keys(keys, input.synthetic);
  transcoder::add_keys(keys, input.benchmark);
  if (command == Command::evaluate || command == Command::features || command == Command::encode ||
      command == Command::convert || command == Command::export_weights || command == Command::import_weights)
    keys.at("transcoder.features").must_be_given = false;
  if (command == Command::synth ||
      command == Command::inspect) {  // no transcoder: the key may be missing on every rank
    input::Key& features = keys.at("transcoder.features").at_least(0);
    features.must_be_given = false;
  }
  return keys;
}

std::vector<input::Override> overrides(const Request& request) {
  std::vector<input::Override> all;
  for (const std::string& set : request.sets) all.push_back({set, ""});
  if (!request.output.empty())
    all.push_back(input::override_text("run.output", request.output, "--output " + request.output));
  if (!request.walltime.empty())
    all.push_back(input::override_text("run.walltime", request.walltime, "--walltime " + request.walltime));
  return all;
}

void read_input(const Request& request, const input::Schema& schema, const parallel::World& world) {
  parallel::note_phase("reading the input");
  // The other ranks read the input as rank 0 resolved it: their environment, and so their paths, could differ.
  const std::string resolved = world.on_root([&] {
    input::read(schema, request.input_text, request.subject, overrides(request));
    return input::print(schema);
  });
  if (!world.is_root()) input::read(schema, resolved, request.subject);
  parallel::set_timeout(std::get<double>(schema.find("parallel.timeout")->load()));
}

}  // namespace weft::commands
