// SPDX-License-Identifier: Apache-2.0
#include "commands/request.hpp"

#include <fmt/ranges.h>
#include <poll.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <mutex>
#include <optional>
#include <set>
#include <span>

#include "commands/commands.hpp"
#include "commands/external.hpp"
#include "commands/help.hpp"
#include "commands/options.hpp"
#include "input/print.hpp"
#include "parallel/phases.hpp"
#include "parallel/watchdog.hpp"
#include "report/build.hpp"
#include "report/log.hpp"
#include "transcoder/settings/settings_schema.hpp"

namespace weft::commands {
namespace {

std::string version_text() {
  const report::BuildRecord& build = report::build_record;
  std::string text = fmt::format("weft {} ({}{}, {}, {}{}{})", build.version,
                                 std::string_view(build.revision).substr(0, 12), build.modified ? " modified" : "",
                                 build.compiler, build.build_type, build.cuda[0] ? ", CUDA " : "", build.cuda);
  for (const auto& [library, version] : library_versions()) text += fmt::format("\n  {}: {}", library, version);
  return text;
}

/// Prints for --verbose each phase that begins outside the steps, once.
void describe_phase(std::string_view phase) {
  static std::mutex mutex;
  static std::set<std::string, std::less<>> seen;
  if (report::current_step() >= 0) return;
  const std::lock_guard lock(mutex);
  if (seen.emplace(phase).second) report::detail(phase);
}

/// "141GB" or "80GiB" -> GB, 1e9 bytes; 0 if it is no amount of memory that a machine can have.
double gigabytes(const std::string& text) {
  double number = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  const double factor = unit == "GB" ? 1 : unit == "GiB" ? double{1 << 30} / 1e9 : 0;
  constexpr double most = 1e9;  // in bytes below 2^63
  return status == std::errc() && number * factor <= most ? number * factor : 0;
}

/// The text is the result of the command: throws Error(io) if it cannot be written. Collective.
void print_once(const parallel::World& world, const std::string& text) {
  world.on_root([&] {
    std::fputs((text + "\n").c_str(), stdout);
    require_printed();
  });
}

/// `command`: whose help the message refers to; nullptr: that of the program.
template <class... Args>
Error usage(const CommandEntry* command, fmt::format_string<Args...> format, Args&&... args) {
  return Error(ExitCode::usage,
               fmt::format("{}; see weft {}{}--help", fmt::format(format, std::forward<Args>(args)...),
                           command == nullptr ? "" : command->name, command == nullptr ? "" : " "),
               KnownTo::all_ranks);
}

void declare(CLI::App& app, const Options& options) {
  app.set_help_flag();
  app.allow_extras();
  for (const Option& option : options.list())
    std::visit(
        [&]<class T>(T* target) {
          if constexpr (std::is_same_v<T, bool>) {
            app.add_flag(option.names, *target);
          } else {
            CLI::Option* const declared = app.add_option(option.names, *target);
            // One value per option: a list would consume the INPUT that follows it.
            if (std::is_same_v<T, std::vector<std::string>> && !option.is_argument() && option.value != "FILES")
              declared->allow_extra_args(false);
          }
        },
        option.target);
}

/// Throws unless the values that were given are those that the options can have.
void check_values(const CommandEntry& command, const CLI::App& app, const Options& options) {
  for (const Option& option : options.list()) {
    const CLI::Option* const given = app.get_option_no_throw(std::string(option.long_name()));
    if (given == nullptr || given->count() == 0 || option.value.empty()) continue;
    const std::string value = given->results().back();
    if (value.empty())
      throw usage(&command, "{} is empty (it takes a value); give one, or leave the option out", option.long_name());
    if (!option.choices.empty() &&
        std::find(option.choices.begin(), option.choices.end(), value) == option.choices.end())
      throw usage(&command, "{} {} is not known (one of {})", option.long_name(), value,
                  fmt::join(option.choices, ", "));
    if (const auto* number = std::get_if<std::int64_t*>(&option.target))
      if (**number < option.range.first || **number > option.range.second)
        throw usage(&command, "{} {} is out of range (from {} to {})", option.long_name(), value, option.range.first,
                    option.range.second);
  }
}

/// What the library found wrong, in the words of this program.
std::string described(const CLI::ParseError& failure) {
  const std::string text = failure.what();
  const std::size_t colon = text.find(": ");
  if (colon == text.npos) return text;
  if (dynamic_cast<const CLI::ConversionError*>(&failure) != nullptr)  // "Could not convert: --seed = x"
    return fmt::format("{} is not what the option takes (a number; an integer has neither point nor exponent)",
                       text.substr(colon + 2));
  if (text.find("At Most 1") != text.npos)  // "--output: At Most 1 required but received 2"
    return fmt::format("{} is given several times (it takes one value); give it once", text.substr(0, colon));
  if (text.ends_with(" missing"))  // "--output: 1 required TEXT missing"
    return fmt::format("{} needs a value", text.substr(0, colon));
  return text;
}

/// The command of this family ("": of none) with this word; nullptr if there is none.
const CommandEntry* entry_named(std::string_view family, std::string_view word) {
  for (const CommandEntry& entry : command_entries())
    if (entry.family() == family && entry.word() == word) return &entry;
  return nullptr;
}

bool is_option(const std::string& word) { return word.size() > 1 && word[0] == '-'; }

/// The error for arguments that the library did not recognise: a misspelt command or option, or an extra argument.
Error unexpected(const std::vector<std::string>& extras, const CLI::App& app, bool of_family,
                 const CommandEntry* chosen) {
  std::string first = extras.front();
  // Options after an unknown command are those of the command that was meant.
  if (chosen != nullptr || is_option(first))
    for (const std::string& extra : extras)
      if (is_option(extra)) {
        first = extra.substr(0, extra.find('='));
        break;
      }
  std::vector<std::string> known;
  if (first[0] == '-') {
    for (const CLI::Option* option : app.get_options())
      known.insert(known.end(), option->get_lnames().begin(), option->get_lnames().end());
  } else if (chosen != nullptr) {
    return usage(chosen, "unexpected argument \"{}\" of weft {} (it takes one argument without an option)", first,
                 chosen->name);
  } else {
    for (const CommandEntry& entry : command_entries())
      if (entry.family() == (of_family ? kLanguageModels : "")) known.emplace_back(entry.word());
    if (!of_family) known.emplace_back(kLanguageModels);
    if (!of_family)
      for (const PackageCommand& command : package_commands()) known.emplace_back(command.name);
  }
  // The dashes are not compared: they would make any two options similar.
  const std::string dashes = first[0] == '-' ? "--" : "";
  std::string hint =
      input::nearest(std::string_view(first).substr(std::min(first.find_first_not_of('-'), first.size())), known);
  if (!dashes.empty() && hint == std::string_view(first).substr(2) && chosen != nullptr)
    return usage(chosen, "option \"{}\" is before its command; options follow it: weft {} {}", first, chosen->name,
                 first);
  // "weft generate" is "weft lm generate".
  if (chosen == nullptr && !of_family)
    if (const CommandEntry* const entry = entry_named(kLanguageModels, first)) hint = entry->name;
  return usage(chosen, "unknown {} \"{}\"{}{}", dashes.empty() ? "command" : "option", first,
               chosen != nullptr ? fmt::format(" of weft {}", chosen->name)
               : of_family       ? fmt::format(" of weft {}", kLanguageModels)
                                 : "",
               hint.empty() ? "" : fmt::format(" (did you mean \"{}{}\"?)", dashes, hint));
}

/// The text of the input. Throws Error(usage) if it is one of another kind of model. Collective.
std::string read_input_text(const Request& request, const parallel::World& world) {
  const std::string text = world.on_root([&] { return input::load_text(request.subject); });
  const bool transcoder = input::has_table(text, "transcoder"), language = input::has_table(text, "language_model");
  const bool wants_language = request.command == Command::lm_train || request.command == Command::lm_polychromic;
  if (wants_language && transcoder && !language)
    throw collective_error(ExitCode::usage,
                           "{0}: is an input of a transcoder (it has a table [transcoder]); weft train {0}",
                           request.subject);
  if (request.command == Command::train && language && !transcoder)
    throw collective_error(ExitCode::usage,
                           "{0}: is an input of a language model (it has a table [language_model]); weft lm train {0}",
                           request.subject);
  return text;
}

/// The keys of all families: those of transcoders, then the tables of language models that differ from them.
std::string reference_of_all(const input::Schema& transcoders) {
  Input input;
  return "# Transcoders\n\n" + input::reference_markdown(transcoders) + "\n# Language models\n\n" +
         input::reference_markdown(schema(input, Command::lm_evaluate), &transcoders);
}

using WordSpan = std::span<const std::string>;

/// The position of the command in `words`: the first word, or after options (which are wrong there, and `unexpected`
/// says so) the first word that names a command. Their number if there is none. The words after the command are its
/// arguments, also those that name a command.
template <class IsCommand>
std::size_t command_in(WordSpan words, IsCommand is_command) {
  const auto found = std::find_if(words.begin(), words.end(), is_command);
  const bool leads = found == words.begin() || is_option(words.front());
  return leads ? static_cast<std::size_t>(found - words.begin()) : words.size();
}

/// Parses `words` as the options and arguments of `app`; `extras` receives those that it does not have.
void parse_with(CLI::App& app, const Options& options, WordSpan words, std::vector<std::string>& extras) {
  declare(app, options);
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
  } catch (const CLI::ParseError& failure) {
    throw usage(nullptr, "{}", described(failure));
  }
  const std::vector<std::string> more = app.remaining();
  extras.insert(extras.end(), more.begin(), more.end());
}

/// The words of the command line, checked. `text`: what --help or --version prints. Throws a collective Error(usage).
Request parse_words(int argc, const char* const* argv, std::string& text) {
  Request request;
  for (int i = 0; i < argc; ++i) request.command_line += fmt::format("{}{}", i == 0 ? "" : " ", argv[i]);

  // weft help lm train = weft lm train --help
  std::vector<std::string> arguments(argv + std::min(argc, 1), argv + argc);
  if (!arguments.empty() && arguments.front() == "help") {
    arguments.erase(arguments.begin());
    arguments.emplace_back("--help");
  }
  // Not subcommands of one CLI::App: it would take an argument that is named like a command for a second command.
  CLI::App program, family, command;
  std::vector<std::string> extras;
  WordSpan words = arguments;
  std::size_t at =
      command_in(words, [](const std::string& word) { return word == kLanguageModels || entry_named("", word); });
  program.add_flag("--reference", request.reference);  // generates documentation: not in the help
  parse_with(program, options_of_program(request), words.first(at), extras);
  const bool of_family = at < words.size() && words[at] == kLanguageModels;
  if (of_family) {
    words = words.subspan(at + 1);
    at = command_in(words, [](const std::string& word) { return entry_named(kLanguageModels, word); });
    parse_with(family, options_of_family(request), words.first(at), extras);
  }
  // The command itself: weft train, or weft lm train.
  const CommandEntry* chosen = nullptr;
  if (at < words.size()) {
    chosen = entry_named(of_family ? kLanguageModels : "", words[at]);
    parse_with(command, options_of(chosen->command, request), words.subspan(at + 1), extras);
  }
  if (!extras.empty())
    throw unexpected(extras, chosen != nullptr ? command : of_family ? family : program, of_family, chosen);
  if (request.help || request.version) {
    text = request.version     ? version_text()
           : chosen != nullptr ? help_of(*chosen)
           : of_family         ? help_of_family()
                               : help_of_program();
    return request;
  }
  if (of_family && chosen == nullptr) {
    std::vector<std::string_view> words;
    for (const CommandEntry& entry : command_entries())
      if (entry.family() == kLanguageModels) words.push_back(entry.word());
    throw usage(nullptr, "weft {} needs one of its commands ({})", kLanguageModels, fmt::join(words, ", "));
  }
  if (chosen == nullptr && !request.defaults && !request.reference) throw usage(nullptr, "no command was given");
  if (chosen == nullptr) chosen = entry_of(Command::train);  // weft --defaults
  request.command = chosen->command;
  const bool given_subject =
      request.command == Command::lm_tokenize ? !request.files.empty() : !request.subject.empty();
  if (!given_subject && chosen->subject[0] != '\0' && !request.defaults && !request.reference)
    throw usage(chosen, "weft {} needs its {}", chosen->name, chosen->subject);
  check_values(*chosen, command, options_of(request.command, request));
  if (request.quiet && request.verbose) throw usage(chosen, "--quiet and --verbose exclude each other");
  if (request.json && (request.defaults || request.print_config))
    throw usage(chosen, "--json has no effect here (inputs are TOML); leave it out");
  if (!request.device_memory.empty() && !request.dry_run)
    throw usage(chosen,
                "--device-memory describes another machine (it needs --dry-run); device.memory limits this one's");
  if (!request.device_memory.empty() && gigabytes(request.device_memory) <= 0)
    throw usage(chosen, "--device-memory {} is no amount of memory (a number with GB or GiB, as in 141GB)",
                request.device_memory);
  if (!request.walltime.empty() && !training::parse_walltime(request.walltime))
    throw usage(chosen, "--walltime {} is not a time (hours:minutes:seconds, as in 11:55:00)", request.walltime);
  return request;
}

/// What a request needs: the ranks of the job, a device, or neither.
Needs needs_of(const Request& request) {
  if (request.defaults || request.reference || request.print_config || request.dry_run) return Needs::nothing;
  switch (request.command) {
    case Command::nothing:
    case Command::inspect:
    case Command::privacy:
    case Command::lm_tokenize:
      return Needs::nothing;
    case Command::export_weights:
    case Command::import_weights:
      return Needs::ranks;
    case Command::synth:
      return request.profile ? Needs::device : Needs::ranks;
    default:
      return Needs::device;
  }
}

}  // namespace

void require_printed() {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return;
  pollfd output{STDOUT_FILENO, 0, 0};
  if (poll(&output, 1, 0) == 1 && (output.revents & POLLERR) != 0) return;  // a pipe without a reader
  throw error(ExitCode::io, "standard output cannot be written (is its disk full?); what was printed is incomplete");
}

std::string_view name(Command command) {
  const CommandEntry* const entry = entry_of(command);
  return entry == nullptr ? "" : entry->name;
}

Needs needs_of(int argc, const char* const* argv) {
  try {
    std::string text;
    return needs_of(parse_words(argc, argv, text));
  } catch (const Error&) {
    return Needs::nothing;  // `parse` reports it
  }
}

Request parse(int argc, const char* const* argv, const parallel::World& world) {
  std::string text;
  Request request = parse_words(argc, argv, text);
  if (!text.empty()) {
    print_once(world, text);
    return request;
  }
  report::set_output(request.quiet     ? report::Verbosity::quiet
                     : request.verbose ? report::Verbosity::verbose
                                       : report::Verbosity::normal,
                     request.json);
  if (request.verbose) {
    parallel::observe_phases(describe_phase);
    report::detail(version_text());
    report::detail(request.command_line);
  }
  if (entry_of(request.command)->takes_input && !request.subject.empty() && !request.defaults)
    request.input_text = read_input_text(request, world);
  if (request.command == Command::benchmark && input::has_table(request.input_text, "language_model"))
    request.command = Command::language_benchmark;

  if (request.defaults || request.print_config || request.reference) {
    Input input;
    const input::Schema keys = schema(input, request.command);
    if (request.print_config && !request.defaults) read_input(request, keys, world);
    text = request.reference ? reference_of_all(keys) : request.defaults ? input::defaults(keys) : input::print(keys);
    text.pop_back();  // the newline that printing adds
    print_once(world, text);
    request.command = Command::nothing;
  }
  return request;
}

input::Schema schema(Input& input, Command command) {
  if (command == Command::lm_train || command == Command::lm_evaluate || command == Command::lm_harvest ||
      command == Command::lm_export || command == Command::lm_merge || command == Command::lm_generate ||
      command == Command::lm_diversity || command == Command::lm_polychromic ||
      command == Command::language_benchmark) {
    input::Schema keys = language_model::schema(input.language);
    bench::add_keys(keys, input.language_benchmark);
    if (command == Command::lm_train || command == Command::lm_polychromic)
      keys.at("data.train").required("\"data/text.txt\"");
    return keys;
  }
  input::Schema keys = transcoder::schema(input.configuration);
  if (command == Command::train) keys.at("data.train").required("\"data/train\"", "data.model");
  if (command == Command::train || command == Command::benchmark) transcoder::add_training_rules(keys);
  dataset::add_keys(keys, input.synthetic);
  bench::add_keys(keys, input.benchmark, input.configuration);
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
    all.push_back(input::override_text(request.command == Command::synth ? "synthetic.output" : "run.output",
                                       request.output, "--output " + request.output));
  if (!request.walltime.empty())
    all.push_back(input::override_text("run.walltime", request.walltime, "--walltime " + request.walltime));
  if (!request.device_memory.empty())
    all.push_back({fmt::format("device.memory={}", gigabytes(request.device_memory)), ""});
  return all;
}

void read_input(const Request& request, const input::Schema& schema, const parallel::World& world) {
  parallel::note_phase("reading the input");
  // The other ranks read the input as rank 0 resolved it: their environment, and so their paths, could differ.
  const std::string resolved = world.on_root([&] {
    input::read(schema, request.input_text, request.subject, overrides(request),
                request.input_of_checkpoint ? input::Writer::checkpoint : input::Writer::user);
    return input::print(schema);
  });
  if (!world.is_root()) input::read(schema, resolved, request.subject);
  parallel::set_timeout(std::get<double>(schema.find("parallel.timeout")->load()));
}

}  // namespace weft::commands
