// SPDX-License-Identifier: Apache-2.0
//
// A subcommand is an object: its help, its options and what it does. Parsing (command_line.hpp), --help and completion
// in bash (help.hpp) follow from the list of commands (lists.cpp).
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "input/read.hpp"
#include "input/schema.hpp"
#include "parallel/world.hpp"

namespace weft::commands {

/// What the command line says that several commands understand. The options of one command are a struct in its source.
struct Request {
  std::string command;       ///< name of the command, "lm train"
  std::string command_line;  ///< the command line as given, for the run record
  bool help = false, version = false;
  bool json = false;  ///< the result as one JSON document on standard output
  bool quiet = false, verbose = false;
  std::string subject;                     ///< INPUT, CHECKPOINT or PATH; "" with --defaults
  std::vector<std::string> files;          ///< the subject FILES
  std::vector<std::string> sets;           ///< --set table.key=value, in order
  std::vector<input::Override> overrides;  ///< keys of the input that other options replace
  std::string output;                      ///< "" or DIR
  bool print_config = false;
  bool defaults = false;
  bool reference = false;  ///< --reference: the keys as Markdown, for docs/input_reference.md
  bool dry_run = false;
  bool profile = false;
  std::string input_text;            ///< contents of INPUT, for the commands that take one
  bool input_of_checkpoint = false;  ///< input_text was written by this program, perhaps by an earlier version
};

/// An option, or an argument without one (names without dashes).
struct Option {
  using Target = std::variant<bool*, std::string*, std::vector<std::string>*, std::int64_t*, std::uint64_t*, double*>;
  using Replacement = std::function<input::Override(const std::string& value)>;

  std::string names;  ///< "--data", "-h,--help", "DIR"
  std::string value;  ///< "DIR"; "" for a flag, and for arguments; "[N]": can be left out (`implied`)
  std::string help;   ///< lower case, without a full stop
  Target target;
  std::vector<std::string> choices = {};  ///< the only values; empty: any
  std::pair<std::int64_t, std::int64_t> range = {std::numeric_limits<std::int64_t>::min(),
                                                 std::numeric_limits<std::int64_t>::max()};
  std::function<std::string()> problem = {};  ///< why the value that was given cannot be used; "": it can
  std::string implied = "";                   ///< the value of an option that is given without one; "": it needs one
  Replacement replaces = {};                  ///< the key of the input that the value replaces; empty: none

  bool is_argument() const { return names.front() != '-'; }
  /// "--data": the name that messages use.
  std::string_view long_name() const { return std::string_view(names).substr(names.find(',') + 1); }
  /// True if the value is the name of a file or directory: those are completed.
  bool takes_path() const;
};

/// The options of a command, in the order of its help.
class Options {
 public:
  /// `request` must outlive the options.
  explicit Options(Request& values) : request(values) {}

  /// `value`: how the help names it. `choices`: its only values; empty: any. A list receives one value each time that
  /// the option is given.
  template <class T>
  Options& add(std::string names, T& target, std::string value, std::string help,
               std::vector<std::string> choices = {}) {
    list_.push_back({std::move(names), std::move(value), std::move(help), &target, std::move(choices)});
    return *this;
  }
  Options& add(std::string names, std::int64_t& target, std::string value, std::string help, std::int64_t least,
               std::int64_t most) {
    add(std::move(names), target, std::move(value), std::move(help)).last().range = {least, most};
    return *this;
  }
  Options& flag(std::string names, bool& target, std::string help) {
    return add(std::move(names), target, "", std::move(help));
  }
  // Options that several commands have.
  Options& set(std::string help = "replace a value of the input, as in run.steps=500; repeatable");
  Options& templates();  ///< --defaults and --print-config
  Options& dry_run();
  Options& output(std::string help, std::string key = "run.output");
  Options& replacing(std::string key);  ///< the value of the last option replaces that of this key of the input
  Options& profile();
  Options& texts();  ///< --help and --version
  Options& example(std::string command) {
    example_ = std::move(command);
    return *this;
  }

  const std::vector<Option>& list() const { return list_; }
  const std::string& example() const { return example_; }  ///< "": that of a training
  Option& last() { return list_.back(); }

  Request& request;

 private:
  std::vector<Option> list_;
  std::string example_;
};

/// What a command needs. One that needs no device starts MPI only if a launcher started the process.
enum class Needs { nothing, device };

/// Settings, and the schema that reads an input into them.
struct Keys {
  std::shared_ptr<void> settings;
  input::Schema schema;
};
template <class Settings>
Keys keys_of(input::Schema (*schema)(Settings&)) {
  const auto settings = std::make_shared<Settings>();
  return {settings, schema(*settings)};
}

struct Command {
  std::string_view name;         ///< "train", or with its group "lm train"
  std::string_view subject;      ///< INPUT, CHECKPOINT, MODEL, PATH, DIR, FILES, FILE; "" = none
  std::string_view summary;      ///< in lists of commands: lower case, without a full stop
  std::string_view description;  ///< one or more sentences
  Needs needs = Needs::device;
  bool prints_result = true;  ///< false: prints an account of the files that are its result
  /// Returns the keys of an input with this text. Set if the subject is INPUT.
  std::function<Keys(std::string_view text)> keys = {};
  std::string_view table = "";  ///< the table of the inputs that it takes, if only those of one model family
  /// Adds the options that not every command has.
  std::function<void(Options&)> options = {};
  /// Called by every rank with the same request. Returns the exit code of this rank or throws an Error; never exits.
  std::function<int(const Request&, const parallel::World&)> run = {};

  /// "lm" of "lm train"; "" of "train".
  std::string_view group() const { return name.substr(0, name.find(' ') == name.npos ? 0 : name.find(' ')); }
  /// "train" of both.
  std::string_view word() const { return name.substr(group().empty() ? 0 : group().size() + 1); }
};

/// A command that owns the values of options of its own.
template <class Own>
Command with_options(Command command, int (*run)(const Request&, const Own&, const parallel::World&),
                     std::type_identity_t<void (*)(Options&, Own&)> add) {
  const auto own = std::make_shared<Own>();
  command.options = [own, add](Options& options) { add(options, *own); };
  command.run = [own, run](const Request& request, const parallel::World& world) { return run(request, *own, world); };
  return command;
}

inline Command with_options(Command command, int (*run)(const Request&, const parallel::World&),
                            void (*add)(Options&)) {
  command.options = add;
  command.run = run;
  return command;
}

/// Commands whose names begin with the same word, as `weft lm train`.
struct Group {
  std::string_view name, summary, description;
};
std::span<const Group> groups();

/// All commands in the order of the help.
std::span<const Command* const> command_list();

/// All options of a command, bound to `request` and to the command, which must outlive them.
Options options_of(const Command& command, Request& request);
/// The options of `weft` without a command, and of a group: --help and --version, and of weft alone --defaults.
Options options_of_program(Request& request);
Options options_of_group(Request& request);

}  // namespace weft::commands
