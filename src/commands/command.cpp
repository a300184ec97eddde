// SPDX-License-Identifier: Apache-2.0
#include "commands/command.hpp"

#include <algorithm>

namespace weft::commands {
namespace {

struct Subject {
  std::string_view name;
  const char* help;
};
constexpr Subject subjects[] = {
    {"INPUT", "a TOML file; weft train --defaults and weft lm train --defaults print a commented template"},
    {"CHECKPOINT", "a checkpoint, or a run, which stands for its newest one"},
    {"MODEL", "a checkpoint, a run, which stands for its newest one, or a directory of Hugging Face"},
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

}  // namespace

bool Option::takes_path() const {
  static constexpr std::string_view paths[] = {"FILE",       "FILES",           "DIR",       "PATH", "INPUT", "MODEL",
                                               "CHECKPOINT", "auto|never|PATH", "bytes|PATH"};
  return std::find(std::begin(paths), std::end(paths), is_argument() ? names : value) != std::end(paths);
}

Options& Options::set(std::string help) { return add("--set", request.sets, "KEY=VALUE", std::move(help)); }

Options& Options::templates() {
  return flag("--defaults", request.defaults, "print a commented template of an input")
      .flag("--print-config", request.print_config, "print the input with every key, as it will run");
}

Options& Options::dry_run() {
  return flag("--dry-run", request.dry_run,
              "check input, data headers and memory; print what is needed and whether it fits");
}

Options& Options::output(std::string help, std::string key) {
  return add("--output", request.output, "DIR", std::move(help)).replacing(std::move(key));
}

Options& Options::replacing(std::string key) {
  last().replaces = [key = std::move(key), name = std::string(last().long_name())](const std::string& text) {
    return input::override_text(key, text, name + " " + text);
  };
  return *this;
}

Options& Options::profile() {
  return flag("--profile", request.profile,
              "write a time line of a few steps (OUTPUT/profile.json, for ui.perfetto.dev) and five figures");
}

Options& Options::texts() {
  return flag("-h,--help", request.help, "print this text")
      .flag("-V,--version", request.version, "print version, revision and libraries");
}

Options options_of(const Command& command, Request& request) {
  Options options(request);
  if (command.subject == "FILES")
    options.add("FILES", request.files, "", help_of_subject("FILES"));
  else if (!command.subject.empty())
    options.add(std::string(command.subject), request.subject, "", help_of_subject(command.subject));
  command.options(options);
  return options.flag("--json", request.json, "print the result as one JSON document; all else goes to standard error")
      .flag("--quiet", request.quiet, "print only results, warnings and errors")
      .flag("--verbose", request.verbose, "also print versions, and when each phase outside the steps begins")
      .texts();
}

Options options_of_program(Request& request) {
  return Options(request).flag("--defaults", request.defaults, "the same as weft train --defaults").texts();
}

Options options_of_group(Request& request) { return Options(request).texts(); }

}  // namespace weft::commands
