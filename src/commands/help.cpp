// SPDX-License-Identifier: Apache-2.0
#include "commands/help.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "commands/external.hpp"

namespace weft::commands {
namespace {

constexpr std::size_t kWidth = 80, kColumn = 28;

constexpr const char* kProgram = "Weft trains cross-layer transcoders: sparse replacements of a transformer's MLPs.";
constexpr const char* kHelp = "help";
constexpr const char* kProcesses = "Several processes: mpirun -n 4 weft train INPUT, or srun. One process per GPU.";

struct CodeEntry {
  const char *code, *meaning;
};
constexpr CodeEntry kCodes[] = {
    {"0", "finished"},
    {"1", "internal"},
    {"2", "input or usage (any path that does not exist)"},
    {"3", "data"},
    {"4", "numeric"},
    {"5", "communication or hang"},
    {"6", "I/O or checkpoint"},
    {"75", "stopped cleanly with more to do (requeue)"},
    {"93", "no progress since the last start"},
    {"128+n", "stopped on request by signal n, resumable"},
};

/// Words of `text` in lines of at most kWidth columns; later lines begin at column `indent`. `used`: columns of the
/// first line that are taken.
std::string wrapped(std::string_view text, std::size_t indent, std::size_t used) {
  std::string out;
  while (!text.empty()) {
    const std::string_view word = text.substr(0, text.find(' '));
    text.remove_prefix(std::min(word.size() + 1, text.size()));
    if (used > indent && used + 1 + word.size() > kWidth) {
      out += "\n" + std::string(indent, ' ');
      used = indent;
    } else if (used > indent) {
      out += " ";
      ++used;
    }
    out += word;
    used += word.size();
  }
  return out;
}

std::string paragraph(std::string_view text) { return wrapped(text, 0, 0) + "\n"; }

/// A name, and its meaning beginning at kColumn.
std::string row(const std::string& name, std::string_view meaning) {
  const std::string gap =
      name.size() + 2 <= kColumn ? std::string(kColumn - name.size(), ' ') : "\n" + std::string(kColumn, ' ');
  return name + gap + wrapped(meaning, kColumn, kColumn) + "\n";
}

/// "-h, --help", "--data DIR".
std::string left_side(const Option& option) {
  std::string names = option.names;
  if (const std::size_t comma = names.find(','); comma != names.npos) names.insert(comma + 1, " ");
  return names + (option.value.empty() ? "" : " " + option.value);
}

std::string option_rows(const Options& options) {
  std::string text;
  for (const Option& option : options.list())
    if (!option.is_argument()) text += row("  " + left_side(option), option.help);
  return text;
}

/// "weft export CHECKPOINT DIR"
std::string synopsis(const Command& command, const Options& options) {
  std::string text = fmt::format("weft {}", command.name);
  for (const Option& option : options.list())
    if (option.is_argument()) text += " " + option.names;
  return text;
}

/// Commands of a group, "" for the others.
std::string command_rows(std::string_view group) {
  Request request;
  std::string text;
  for (const Command* command : command_list())
    if (command->group() == group) text += row(synopsis(*command, options_of(*command, request)), command->summary);
  return text;
}

/// "-h --help" as separate words.
std::vector<std::string> names_of(const Option& option) {
  const std::size_t comma = option.names.find(',');
  if (comma == option.names.npos) return {option.names};
  return {option.names.substr(0, comma), option.names.substr(comma + 1)};
}

/// Words that can be the value of an option: its choices, and the literal ones of "auto|never|PATH".
std::vector<std::string> values_of(const Option& option) {
  std::vector<std::string> values = option.choices;
  std::string_view rest = option.value;
  while (rest.find('|') != rest.npos) {
    values.emplace_back(rest.substr(0, rest.find('|')));
    rest.remove_prefix(rest.find('|') + 1);
  }
  return values;
}

std::string sh_quoted(std::string_view text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

}  // namespace

std::vector<std::string> words_after(std::string_view group) {
  std::vector<std::string> words;
  for (const Command* command : command_list())
    if (command->group() == group) words.emplace_back(command->word());
  if (!group.empty()) return words;
  for (const Group& one : groups()) words.emplace_back(one.name);
  for (const PackageCommand& command : package_commands()) words.emplace_back(command.name);
  return words;
}

std::string help_of_program() {
  Request request;
  std::string text = paragraph(kProgram) + "\n" + command_rows("");
  for (const Group& group : groups()) text += row(fmt::format("weft {} COMMAND", group.name), group.summary);
  text += row("weft help COMMAND", "its options; the same as weft COMMAND --help");
  text += "\nOf the Python package (pip install ./python):\n";
  for (const PackageCommand& command : package_commands())
    text += row(fmt::format("weft {} {}", command.name, command.arguments), command.summary);
  text += "\n" + option_rows(options_of_program(request));
  text += fmt::format("\n{}\n\n", kProcesses);
  // A code stays on the line of its meaning's first word.
  std::string codes = "Exit codes:";
  for (const CodeEntry& entry : kCodes)
    codes += fmt::format(" {}\t{}{}", entry.code, entry.meaning, &entry == std::end(kCodes) - 1 ? "" : ",");
  codes = wrapped(codes, 2, 0);
  std::replace(codes.begin(), codes.end(), '\t', ' ');
  return text + codes;
}

std::string help_of_group(const Group& group) {
  Request request;
  std::string text = paragraph(group.description) + "\n" + command_rows(group.name);
  text += row(fmt::format("weft help {} COMMAND", group.name), "its options");
  text += "\n" + option_rows(options_of_group(request));
  return text + "\nExit codes: see weft --help";
}

std::string help_of(const Command& command) {
  Request request;
  const Options options = options_of(command, request);
  std::string text = synopsis(command, options) + " [OPTIONS]\n\n" + paragraph(command.description) + "\n";
  for (const Option& option : options.list())
    if (option.is_argument()) text += row("  " + option.names, option.help);
  text += "\nOptions:\n" + option_rows(options);
  if (const std::string more = command_rows(command.name); !more.empty()) text += "\n" + more;
  text += fmt::format("\nExample:\n  {}\n",
                      options.example().empty()
                          ? fmt::format("weft {} INPUT --output RUN --set run.steps=500", command.name)
                          : options.example());
  return text + "\nExit codes: see weft --help";
}

std::string bash_completion() {
  Request request;
  std::string commands, words, values;
  // `name`: a command, "lm" or "" for the program; `after`: words that may follow it.
  const auto add = [&](std::string_view name, const std::vector<std::string>& after, const Options& options) {
    std::string names, dashed;
    for (const std::string& word : after) {
      names += " " + word;
      const std::string next = word == kHelp ? "" : name.empty() ? word : fmt::format("{} {}", name, word);
      commands +=
          fmt::format("      {}) command={} ;;\n", sh_quoted(fmt::format("{} {}", name, word)), sh_quoted(next));
    }
    for (const Option& option : options.list()) {
      if (option.is_argument()) continue;
      for (const std::string& one : names_of(option)) dashed += " " + one;
      if (option.value.empty()) continue;
      std::string given;
      for (const std::string& value : values_of(option)) given += " " + value;
      values += fmt::format(
          "    {}) {}{}return ;;\n", sh_quoted(fmt::format("{} {}", name, option.long_name())),
          given.empty() ? ""
                        : fmt::format("COMPREPLY=($(compgen -W {} -- \"$current\")); ", sh_quoted(given.substr(1))),
          option.takes_path() ? "" : "compopt +o default; ");
    }
    words += fmt::format("    {}) words={} options={} ;;\n", sh_quoted(name), sh_quoted(names), sh_quoted(dashed));
  };
  std::vector<std::string> first = words_after("");
  first.emplace_back(kHelp);  // followed by a command
  add("", first, options_of_program(request));
  for (const Group& group : groups()) add(group.name, words_after(group.name), options_of_group(request));
  for (const Command* command : command_list())
    add(command->name, words_after(command->name), options_of(*command, request));
  return R"(# bash completion of weft. Generated by the build from the options of the program.
_weft() {
  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}
  local command='' words='' options='' i
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "$command ${COMP_WORDS[i]}" in
)" + commands +
         R"(    esac
  done
  case "$command $previous" in
)" + values +
         R"(  esac
  case "$command" in
)" + words +
         R"(  esac
  if [[ $current == -* ]]; then
    COMPREPLY=($(compgen -W "$options" -- "$current"))
  elif [[ -n $words ]]; then
    compopt +o default
    COMPREPLY=($(compgen -W "$words" -- "$current"))
  fi
}
complete -o default -F _weft weft)";
}

}  // namespace weft::commands
