// SPDX-License-Identifier: Apache-2.0
#include "commands/help.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>

namespace weft::commands {
namespace {

constexpr std::size_t kWidth = 80, kColumn = 28;

constexpr const char* kProgram = "Weft trains cross-layer transcoders: sparse replacements of a transformer's MLPs.";
constexpr const char* kFamily = "Language models: GPT-2- and Llama-style transformers.";
constexpr const char* kFamilySummary = "language models: weft lm --help";
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
std::string synopsis(const CommandEntry& entry, const Options& options) {
  std::string text = fmt::format("weft {}", entry.name);
  for (const Option& option : options.list())
    if (option.is_argument()) text += " " + option.names;
  return text;
}

/// Commands of a family, "" for the others.
std::string command_rows(std::string_view family, Request& request) {
  std::string text;
  for (const CommandEntry& entry : command_entries())
    if (entry.family() == family) text += row(synopsis(entry, options_of(entry.command, request)), entry.summary);
  return text;
}

// --- Manual pages -------------------------------------------------------------------------------------------------

/// Text of a manual page: a line must not begin with a control character, and "-" is a hyphen unless escaped.
std::string roff(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '-')
      out += "\\-";
    else if (c == '\\')
      out += "\\e";
    else
      out += c;
  }
  if (!out.empty() && (out.front() == '.' || out.front() == '\'')) out.insert(0, "\\&");
  return out;
}

/// "weft-lm-train"
std::string page_name(std::string_view name) {
  std::string page = "weft" + std::string(name.empty() ? "" : "-") + std::string(name);
  std::replace(page.begin(), page.end(), ' ', '-');
  return page;
}

std::string upper(std::string text) {
  for (char& c : text) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return text;
}

std::string page_head(const std::string& page, const std::string& version, std::string_view summary) {
  return fmt::format(".TH {} 1 \"\" \"weft {}\" \"Weft\"\n.SH NAME\n{} \\- {}\n", roff(upper(page)), roff(version),
                     roff(page), roff(summary));
}

std::string page_options(const Options& options) {
  std::string text;
  for (const bool arguments : {true, false}) {
    bool first = true;
    for (const Option& option : options.list()) {
      if (option.is_argument() != arguments) continue;
      if (std::exchange(first, false)) text += arguments ? ".SH ARGUMENTS\n" : ".SH OPTIONS\n";
      text += fmt::format(
          ".TP\n\\fB{}\\fR{}\n{}\n",
          roff(option.names.find(',') == option.names.npos ? option.names
                                                           : left_side({option.names, "", "", option.target})),
          option.value.empty() ? "" : " \\fI" + roff(option.value) + "\\fR", roff(option.help));
    }
  }
  return text;
}

std::string page_tail(const std::string& page) {
  std::string text = ".SH EXIT STATUS\n";
  for (const CodeEntry& entry : kCodes) text += fmt::format(".TP\n\\fB{}\\fR\n{}\n", entry.code, roff(entry.meaning));
  text += ".SH ENVIRONMENT\n.TP\n\\fBNO_COLOR\\fR\nif set and not empty: no colours on terminals\n.SH SEE ALSO\n";
  std::string others;
  const auto add = [&](const std::string& other) {
    if (other != page) others += fmt::format("{}.BR {} (1)", others.empty() ? "" : ",\n", roff(other));
  };
  add(page_name(""));
  add(page_name(kLanguageModels));
  for (const CommandEntry& entry : command_entries()) add(page_name(entry.name));
  return text + others + "\n";
}

/// The page of the program or of its family: its commands.
std::string page_of_commands(std::string_view family, const Options& options, const std::string& version) {
  Request request;
  const std::string page = page_name(family);
  std::string text = page_head(page, version, family.empty() ? "train cross-layer transcoders" : "language models");
  text += fmt::format(".SH SYNOPSIS\n\\fBweft{}{}\\fR \\fICOMMAND\\fR [\\fIOPTIONS\\fR]\n", family.empty() ? "" : " ",
                      family);
  text += fmt::format(".SH DESCRIPTION\n{}\n", roff(family.empty() ? kProgram : kFamily));
  if (family.empty()) text += fmt::format(".PP\n{}\n", roff(kProcesses));
  text += ".SH COMMANDS\n";
  for (const CommandEntry& entry : command_entries())
    if (entry.family() == family)
      text += fmt::format(".TP\n\\fB{}\\fR\n{}; see\n.BR {} (1)\n",
                          roff(synopsis(entry, options_of(entry.command, request))), roff(entry.summary),
                          roff(page_name(entry.name)));
  if (family.empty())
    text += fmt::format(".TP\n\\fBweft {} COMMAND\\fR\nlanguage models; see\n.BR {} (1)\n", kLanguageModels,
                        roff(page_name(kLanguageModels)));
  return text + page_options(options) + page_tail(page);
}

std::string page_of(const CommandEntry& entry, const std::string& version) {
  Request request;
  const Options options = options_of(entry.command, request);
  const std::string page = page_name(entry.name);
  return page_head(page, version, entry.summary) +
         fmt::format(".SH SYNOPSIS\n\\fB{}\\fR [\\fIOPTIONS\\fR]\n.SH DESCRIPTION\n{}\n",
                     roff(synopsis(entry, options)), roff(entry.description)) +
         page_options(options) + page_tail(page);
}

// --- Completion ---------------------------------------------------------------------------------------------------

/// What a shell has to know of a command: "" is the program, "lm" the family.
struct Completed {
  std::string name;
  std::vector<std::pair<std::string, std::string>> words;  ///< commands that may follow, with their summaries
  Options options;

  /// The command after one of `words`. "help" is followed by a command.
  std::string after(const std::string& word) const {
    return word == kHelp ? "" : name.empty() ? word : name + " " + word;
  }
};

std::vector<Completed> all_completed() {
  Request request;
  std::vector<Completed> all = {{"", {}, options_of_program(request)},
                                {std::string(kLanguageModels), {}, options_of_family(request)}};
  for (const CommandEntry& entry : command_entries()) {
    all[entry.family().empty() ? 0 : 1].words.emplace_back(entry.word(), entry.summary);
    all.push_back({std::string(entry.name), {}, options_of(entry.command, request)});
  }
  all[0].words.emplace_back(kLanguageModels, kFamilySummary);
  all[0].words.emplace_back(kHelp, "the options of a command");
  return all;
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

std::string bash_completion() {
  std::string commands, words, values;
  for (const Completed& one : all_completed()) {
    std::string names, options;
    for (const auto& [word, summary] : one.words) {
      names += " " + word;
      commands +=
          fmt::format("      {}) command={} ;;\n", sh_quoted(one.name + " " + word), sh_quoted(one.after(word)));
    }
    for (const Option& option : one.options.list()) {
      if (option.is_argument()) continue;
      for (const std::string& name : names_of(option)) options += " " + name;
      if (option.value.empty()) continue;
      std::string given;
      for (const std::string& value : values_of(option)) given += " " + value;
      values += fmt::format(
          "    {}) {}{}return ;;\n", sh_quoted(one.name + " " + std::string(option.long_name())),
          given.empty() ? ""
                        : fmt::format("COMPREPLY=($(compgen -W {} -- \"$current\")); ", sh_quoted(given.substr(1))),
          option.takes_path() ? "" : "compopt +o default; ");
    }
    words += fmt::format("    {}) words={} options={} ;;\n", sh_quoted(one.name), sh_quoted(names), sh_quoted(options));
  }
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
complete -o default -F _weft weft
)";
}

/// Text inside [...] of a specification of _arguments.
std::string zsh_text(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '[' || c == ']' || c == ':' || c == '\\') out += '\\';
    out += c;
  }
  return out;
}

std::string zsh_completion() {
  std::string cases;
  for (const Completed& one : all_completed()) {
    cases += fmt::format("    {})\n", sh_quoted(one.name));
    if (!one.words.empty()) {
      cases += "      words_here=(";
      for (const auto& [word, summary] : one.words) cases += " " + sh_quoted(word + ":" + summary);
      cases += " )\n";
    }
    cases += "      specifications=(";
    for (const Option& option : one.options.list()) {
      if (option.is_argument()) continue;
      std::string value;
      if (!option.value.empty()) {
        const std::vector<std::string> given = values_of(option);
        std::string literal;
        for (const std::string& word : given) literal += " " + word;
        value = ":" + zsh_text(option.value) + ":" +
                (option.takes_path() ? given.empty() ? "_files" : "{compadd" + literal + "; _files}"
                 : given.empty()     ? " "
                                     : "(" + literal.substr(1) + ")");
      }
      const bool repeated = std::holds_alternative<std::vector<std::string>*>(option.target);
      for (const std::string& name : names_of(option))
        cases += "\n        " + sh_quoted((repeated ? "*" : "") + name + "[" + zsh_text(option.help) + "]" + value);
    }
    cases += "\n      ) ;;\n";
  }
  std::string commands;
  for (const Completed& one : all_completed())
    for (const auto& [word, summary] : one.words)
      commands +=
          fmt::format("      {}) command={} ;;\n", sh_quoted(one.name + " " + word), sh_quoted(one.after(word)));
  return R"(#compdef weft
# zsh completion of weft. Generated by the build from the options of the program.
_weft() {
  local command='' i
  local -a words_here specifications
  for ((i = 2; i < CURRENT; i++)); do
    case "$command ${words[i]}" in
)" + commands +
         R"(    esac
  done
  case "$command" in
)" + cases +
         R"(  esac
  if (( ${#words_here} )) && [[ ${words[CURRENT]} != -* ]]; then
    _describe command words_here
  else
    _arguments -S $specifications '*:file:_files'
  fi
}
_weft "$@"
)";
}

/// In single quotes of fish, \ and ' are escaped.
std::string fish_quoted(std::string_view text) {
  std::string out = "'";
  for (const char c : text) {
    if (c == '\'' || c == '\\') out += '\\';
    out += c;
  }
  return out + "'";
}

std::string fish_completion() {
  std::string commands, lines;
  for (const Completed& one : all_completed()) {
    const std::string condition = fish_quoted(fmt::format("test (__weft_command) = \"{}\"", one.name));
    for (const auto& [word, summary] : one.words) {
      commands += fmt::format("            case {}\n                set command {}\n",
                              fish_quoted(one.name + " " + word), fish_quoted(one.after(word)));
      lines += fmt::format("complete -c weft -n {} -f -a {} -d {}\n", condition, word, fish_quoted(summary));
    }
    for (const Option& option : one.options.list()) {
      if (option.is_argument()) continue;
      std::string name;
      for (const std::string& part : names_of(option))
        name += part.starts_with("--") ? " -l " + part.substr(2) : " -s " + part.substr(1);
      std::string value;
      if (!option.value.empty()) {
        value = option.takes_path() ? " -r -F" : " -x";
        std::string given;
        for (const std::string& word : values_of(option)) given += (given.empty() ? "" : " ") + word;
        if (!given.empty()) value += " -a " + fish_quoted(given);
      }
      lines += fmt::format("complete -c weft -n {}{}{} -d {}\n", condition, name, value, fish_quoted(option.help));
    }
  }
  return R"(# fish completion of weft. Generated by the build from the options of the program.
function __weft_command
    set -l command ''
    for word in (commandline -opc)[2..-1]
        switch "$command $word"
)" + commands +
         R"(        end
    end
    echo "$command"
end
)" + lines;
}

}  // namespace

std::string help_of_program() {
  Request request;
  std::string text = paragraph(kProgram) + "\n" + command_rows("", request);
  text += row(fmt::format("weft {} COMMAND", kLanguageModels), kFamilySummary);
  text += row("weft help COMMAND", "its options; the same as weft COMMAND --help");
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

std::string help_of_family() {
  Request request;
  std::string text = paragraph(kFamily) + "\n" + command_rows(kLanguageModels, request);
  text += row(fmt::format("weft help {} COMMAND", kLanguageModels), "its options");
  text += "\n" + option_rows(options_of_family(request));
  return text + "\nExit codes: see weft --help";
}

std::string help_of(const CommandEntry& entry) {
  Request request;
  const Options options = options_of(entry.command, request);
  std::string text = synopsis(entry, options) + " [OPTIONS]\n\n" + paragraph(entry.description) + "\n";
  for (const Option& option : options.list())
    if (option.is_argument()) text += row("  " + option.names, option.help);
  text += "\nOptions:\n" + option_rows(options);
  return text + "\nExit codes: see weft --help";
}

std::vector<std::pair<std::string, std::string>> shared_files(const std::string& version) {
  Request request;
  std::vector<std::pair<std::string, std::string>> files = {
      {"man/man1/weft.1", page_of_commands("", options_of_program(request), version)},
      {fmt::format("man/man1/{}.1", page_name(kLanguageModels)),
       page_of_commands(kLanguageModels, options_of_family(request), version)}};
  for (const CommandEntry& entry : command_entries())
    files.emplace_back(fmt::format("man/man1/{}.1", page_name(entry.name)), page_of(entry, version));
  files.emplace_back("bash-completion/completions/weft", bash_completion());
  files.emplace_back("zsh/site-functions/_weft", zsh_completion());
  files.emplace_back("fish/vendor_completions.d/weft.fish", fish_completion());
  return files;
}

}  // namespace weft::commands
