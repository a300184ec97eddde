// SPDX-License-Identifier: Apache-2.0
#include "commands/command_line.hpp"

#include <fmt/ranges.h>
#include <poll.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <mutex>
#include <optional>
#include <set>
#include <span>

#include "commands/commands.hpp"
#include "commands/external.hpp"
#include "commands/family.hpp"
#include "commands/help.hpp"
#include "input/print.hpp"
#include "input/strings.hpp"
#include "parallel/phases.hpp"
#include "run/build.hpp"
#include "run/log_session.hpp"

namespace weft::commands {
namespace {

std::string version_text() {
  const run::BuildRecord& build = run::build_record;
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
  if (run::current_step() >= 0) return;
  const std::lock_guard lock(mutex);
  if (seen.emplace(phase).second) run::detail(phase);
}

/// Throws Error(io) if text that was printed did not reach standard output. Call it on rank 0. A reader that has read
/// enough (`weft inspect RUN | head`) is no error.
void require_printed() {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return;
  pollfd output{STDOUT_FILENO, 0, 0};
  if (poll(&output, 1, 0) == 1 && (output.revents & POLLERR) != 0) return;  // a pipe without a reader
  throw error(ExitCode::io, "standard output cannot be written (is its disk full?); what was printed is incomplete");
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
Error usage(const Command* command, fmt::format_string<Args...> format, Args&&... args) {
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
            if (!option.implied.empty()) declared->expected(0, 1)->default_str(option.implied);
          }
        },
        option.target);
}

/// Throws unless the values that were given are those that the options can have. Notes the keys that they replace.
void check_values(const Command& command, const CLI::App& app, const Options& options) {
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
    if (option.problem)
      if (const std::string problem = option.problem(); !problem.empty()) throw usage(&command, "{}", problem);
    if (option.replaces) options.request.overrides.push_back(option.replaces(value));
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

/// The command of this group ("": of none) with this word; nullptr if there is none.
const Command* command_named(std::string_view group, std::string_view word) {
  for (const Command* command : command_list())
    if (command->group() == group && command->word() == word) return command;
  return nullptr;
}

/// The group with this name; nullptr if there is none.
const Group* group_named(std::string_view name) {
  for (const Group& group : groups())
    if (group.name == name) return &group;
  return nullptr;
}

bool is_option(const std::string& word) { return word.size() > 1 && word[0] == '-'; }

/// The error for arguments that the library did not recognise: a misspelt command or option, or an extra argument.
/// `group`, `chosen`: null if the line names none.
Error unexpected(const std::vector<std::string>& extras, const CLI::App& app, const Group* group,
                 const Command* chosen) {
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
    known = words_after(group != nullptr ? group->name : "");
  }
  // The dashes are not compared: they would make any two options similar.
  const std::string dashes = first[0] == '-' ? "--" : "";
  std::string hint =
      input::nearest(std::string_view(first).substr(std::min(first.find_first_not_of('-'), first.size())), known);
  if (!dashes.empty() && hint == std::string_view(first).substr(2) && chosen != nullptr)
    return usage(chosen, "option \"{}\" is before its command; options follow it: weft {} {}", first, chosen->name,
                 first);
  // "weft generate" is "weft lm generate".
  if (chosen == nullptr && group == nullptr)
    for (const Group& one : groups())
      if (const Command* const command = command_named(one.name, first)) hint = command->name;
  return usage(chosen, "unknown {} \"{}\"{}{}", dashes.empty() ? "command" : "option", first,
               chosen != nullptr  ? fmt::format(" of weft {}", chosen->name)
               : group != nullptr ? fmt::format(" of weft {}", group->name)
                                  : "",
               hint.empty() ? "" : fmt::format(" (did you mean \"{}{}\"?)", dashes, hint));
}

/// The text of the input. Throws Error(usage) if it is one of another family than the command takes. Collective.
std::string read_input_text(const Call& call, const parallel::World& world) {
  const std::string& path = call.request.subject;
  const std::string text = world.on_root([&] { return input::load_text(path); });
  if (call.command->table.empty() || input::has_table(text, call.command->table)) return text;
  for (const Family* family : families())
    if (input::has_table(text, family->table))
      for (const Command* command : command_list())
        if (command->table == family->table)
          throw collective_error(ExitCode::usage, "{0}: is an input of {1} (it has a table [{2}]); weft {3} {0}", path,
                                 family->model, family->table, command->name);
  return text;
}

/// The keys of all families: those of the first one, then the tables of the others that differ from them.
std::string reference_of_all() {
  const Keys first = families().front()->keys();
  std::string text;
  for (const Family* family : families())
    text += fmt::format("{}# {}\n\n{}", text.empty() ? "" : "\n", family->title,
                        text.empty() ? input::reference_markdown(first.schema)
                                     : input::reference_markdown(family->keys().schema, &first.schema));
  return text;
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

bool is_empty(const Option::Target& target) {
  if (const auto* list = std::get_if<std::vector<std::string>*>(&target)) return (*list)->empty();
  const auto* text = std::get_if<std::string*>(&target);
  return text != nullptr && (*text)->empty();
}

/// Reads the words of the command line into `call`. Throws a collective Error(usage).
void parse_words(int argc, const char* const* argv, Call& call) {
  Request& request = call.request;
  for (int i = 0; i < argc; ++i) request.command_line += fmt::format("{}{}", i == 0 ? "" : " ", argv[i]);

  // weft help lm train = weft lm train --help
  std::vector<std::string> arguments(argv + std::min(argc, 1), argv + argc);
  if (!arguments.empty() && arguments.front() == "help") {
    arguments.erase(arguments.begin());
    arguments.emplace_back("--help");
  }
  // Not subcommands of one CLI::App: it would take an argument that is named like a command for a second command.
  CLI::App program, of_group, of_command;
  std::vector<std::string> extras;
  WordSpan words = arguments;
  std::size_t at =
      command_in(words, [&](const std::string& word) { return group_named(word) || command_named("", word); });
  bool completion = false;
  program.add_flag("--reference", request.reference);  // these generate documentation: not in the help
  program.add_flag("--completion", completion);
  parse_with(program, options_of_program(request), words.first(at), extras);
  const Group* const group = at < words.size() ? group_named(words[at]) : nullptr;
  if (group != nullptr) {
    words = words.subspan(at + 1);
    at = command_in(words, [&](const std::string& word) { return command_named(group->name, word); });
    parse_with(of_group, options_of_group(request), words.first(at), extras);
  }
  // The command itself: weft train, or weft lm train.
  const Command* chosen = nullptr;
  std::optional<Options> options;
  if (at < words.size()) {
    chosen = command_named(group != nullptr ? group->name : "", words[at]);
    // A command whose name begins with that of another one: weft privacy audit.
    if (at + 1 < words.size())
      if (const Command* const longer = command_named(words[at], words[at + 1]); longer != nullptr) {
        chosen = longer;
        ++at;
      }
    options.emplace(options_of(*chosen, request));
    parse_with(of_command, *options, words.subspan(at + 1), extras);
  }
  if (!extras.empty())
    throw unexpected(extras, chosen != nullptr ? of_command : group != nullptr ? of_group : program, group, chosen);
  if (request.help || request.version || completion) {
    call.text = completion          ? bash_completion()
                : request.version   ? version_text()
                : chosen != nullptr ? help_of(*chosen)
                : group != nullptr  ? help_of_group(*group)
                                    : help_of_program();
    return;
  }
  if (group != nullptr && chosen == nullptr)
    throw usage(nullptr, "weft {} needs one of its commands ({})", group->name,
                fmt::join(words_after(group->name), ", "));
  if (chosen == nullptr && !request.defaults && !request.reference) throw usage(nullptr, "no command was given");
  call.command = chosen != nullptr ? chosen : command_list().front();  // weft --defaults
  request.command = call.command->name;
  if (!options || request.reference) return;
  if (!chosen->subject.empty() && is_empty(options->list().front().target) && !request.defaults)
    throw usage(chosen, "weft {} needs its {}", chosen->name, chosen->subject);
  check_values(*chosen, of_command, *options);
  if (request.quiet && request.verbose) throw usage(chosen, "--quiet and --verbose exclude each other");
  if (request.json && (request.defaults || request.print_config))
    throw usage(chosen, "--json has no effect here (inputs are TOML); leave it out");
}

}  // namespace

Call parse(int argc, const char* const* argv) {
  Call call;
  try {
    parse_words(argc, argv, call);
    const Request& request = call.request;
    const bool calculates = call.text.empty() && !request.defaults && !request.reference && !request.print_config;
    if (calculates && !request.dry_run) call.needs = request.profile ? Needs::device : call.command->needs;
  } catch (const Error& problem) {
    call.problem = problem;
  }
  return call;
}

int run(Call call, const parallel::World& world) {
  if (call.problem) throw *call.problem;
  Request& request = call.request;
  if (!call.text.empty()) return print_once(world, call.text), 0;
  run::set_output(request.quiet     ? run::Verbosity::quiet
                  : request.verbose ? run::Verbosity::verbose
                                    : run::Verbosity::normal,
                  request.json);
  if (request.verbose) {
    parallel::observe_phases(describe_phase);
    run::detail(version_text());
    run::detail(request.command_line);
  }
  if (call.command->keys && !request.subject.empty() && !request.defaults)
    request.input_text = read_input_text(call, world);
  if (request.reference || request.defaults || request.print_config) {
    const Keys keys = call.command->keys ? call.command->keys(request.input_text) : families().front()->keys();
    if (request.print_config && !request.defaults) read_input(request, keys.schema, world);
    std::string text = request.reference  ? reference_of_all()
                       : request.defaults ? input::defaults(keys.schema)
                                          : input::print(keys.schema);
    text.pop_back();  // the newline that printing adds
    return print_once(world, text), 0;
  }
  const int code = call.command->run(request, world);
  if (call.command->prints_result || request.dry_run || request.json) world.on_root([] { require_printed(); });
  return code;
}

}  // namespace weft::commands
