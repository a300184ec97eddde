// SPDX-License-Identifier: Apache-2.0
//
// The commands and their options, each with its help: parsing (request.cpp), --help and completion in bash (help.hpp)
// follow from these lists.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "commands/arguments.hpp"

namespace weft::commands {

/// An option, or an argument without one (names without dashes).
struct Option {
  using Target = std::variant<bool*, std::string*, std::vector<std::string>*, std::int64_t*, std::uint64_t*, double*>;

  std::string names;  ///< "--data", "-h,--help", "DIR"
  std::string value;  ///< "DIR"; "" for a flag, and for arguments
  std::string help;   ///< lower case, without a full stop
  Target target;
  std::vector<std::string> choices = {};  ///< the only values; empty: any
  std::pair<std::int64_t, std::int64_t> range = {std::numeric_limits<std::int64_t>::min(),
                                                 std::numeric_limits<std::int64_t>::max()};

  bool is_argument() const { return names.front() != '-'; }
  /// "--data": the name that messages use.
  std::string_view long_name() const { return std::string_view(names).substr(names.find(',') + 1); }
  /// True if the value is the name of a file or directory: those are completed.
  bool takes_path() const;

  Option& one_of(std::vector<std::string> values) {
    choices = std::move(values);
    return *this;
  }
  Option& between(std::int64_t least, std::int64_t most) {
    range = {least, most};
    return *this;
  }
};

/// The options of a command, in the order of its help.
class Options {
 public:
  /// `value`: how the help names it. A list receives one value each time that the option is given.
  template <class T>
  Option& add(std::string names, T& target, std::string value, std::string help) {
    return list_.emplace_back(Option{std::move(names), std::move(value), std::move(help), &target});
  }
  Option& flag(std::string names, bool& target, std::string help) {
    return add(std::move(names), target, "", std::move(help));
  }

  const std::vector<Option>& list() const { return list_; }

 private:
  std::vector<Option> list_;
};

struct CommandEntry {
  Command command;
  std::string_view name;    ///< "train", or with its family "lm train"
  const char* subject;      ///< INPUT, CHECKPOINT, MODEL, PATH, DIR, FILES; "" = none
  bool takes_input;         ///< the subject is a TOML file
  const char* summary;      ///< in lists of commands: lower case, without a full stop
  const char* description;  ///< one or more sentences

  /// "lm" of "lm train"; "" of "train".
  std::string_view family() const { return name.substr(0, name.find(' ') == name.npos ? 0 : name.find(' ')); }
  /// "train" of both.
  std::string_view word() const { return name.substr(family().empty() ? 0 : family().size() + 1); }
};

/// All commands but those of Command::nothing and Command::language_benchmark, in the order of the help.
std::span<const CommandEntry> command_entries();
/// nullptr for the two others.
const CommandEntry* entry_of(Command command);

/// What a command line needs: MPI, if its command calculates, and for most of these a device. Errors of usage need
/// nothing.
enum class Needs { nothing, ranks, device };
Needs needs_of(int argc, const char* const* argv);

/// The family of the commands `weft lm ...`.
inline constexpr std::string_view kLanguageModels = "lm";

/// The arguments and options of a command, bound to the members of `request`, which must outlive them.
Options options_of(Command command, Request& request);
/// The options of `weft` and `weft lm` without a command: --help and --version, and of weft alone --defaults.
Options options_of_program(Request& request);
Options options_of_family(Request& request);

}  // namespace weft::commands
