// SPDX-License-Identifier: Apache-2.0
#include "commands/external.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "commands/command.hpp"

namespace weft::commands {
namespace {

constexpr PackageCommand kPackage[] = {
    {"report", "RUN", "one HTML page of a run, or of several to compare them", false},
    {"sweep", "INPUT", "train at every point of a grid, and compare", false},
    {"serve", "DIR", "browse features and attribution graphs", false},
    {"follow", "RUN", "metrics of a run for TensorBoard, W&B or a table", false},
    {"prepare", "FILE", "conversations and Parquet to JSON Lines for weft lm", false},
    {"neuronpedia", "DIR", "features in the layout of Neuronpedia", false},
    {"score", "DIR", "labels of features, scored by a program", false},
    {"harvest", "MODEL", "activations of a Hugging Face model, by PyTorch", true},
};

/// True on the first process of a launcher, and without one.
bool is_first_process() {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"})
    if (const char* const rank = std::getenv(name)) return std::strtol(rank, nullptr, 10) == 0;
  return true;
}

/// The executable file of this name in PATH; "" if there is none.
std::string found_in_path(const std::string& name) {
  const char* const variable = std::getenv("PATH");
  std::string_view rest = variable == nullptr ? "" : variable;
  while (!rest.empty()) {
    const std::string_view directory = rest.substr(0, rest.find(':'));
    rest.remove_prefix(std::min(directory.size() + 1, rest.size()));
    const std::string path = std::string(directory.empty() ? "." : directory) + "/" + name;
    if (access(path.c_str(), X_OK) == 0 && std::filesystem::is_regular_file(path)) return path;
  }
  return "";
}

bool is_built_in(std::string_view word) {
  return std::any_of(groups().begin(), groups().end(), [&](const Group& group) { return group.name == word; }) ||
         std::any_of(command_list().begin(), command_list().end(),
                     [&](const Command* command) { return command->name == word; });
}

}  // namespace

std::span<const PackageCommand> package_commands() { return kPackage; }

void hand_over_to_external(int argc, const char* const* argv) {
  std::vector<std::string> words(argv + std::min(argc, 1), argv + argc);
  if (words.size() > 1 && words.front() == "help") {
    words.erase(words.begin());
    words.emplace_back("--help");
  }
  if (words.empty() || words.front() == "help" || words.front().starts_with('-') ||
      words.front().find('/') != std::string::npos || is_built_in(words.front()))
    return;
  const std::string name = words.front(), program = "weft-" + name;
  const auto* const known = std::find_if(std::begin(kPackage), std::end(kPackage),
                                         [&](const PackageCommand& one) { return one.name == name; });
  const bool is_package = known != std::end(kPackage);
  const std::string path = found_in_path(program);
  if (path.empty() && !is_package) return;  // an unknown command, which the parser reports
  if (!is_first_process() && !(is_package && known->on_every_rank)) std::_Exit(static_cast<int>(ExitCode::finished));
  if (path.empty()) {
    fmt::print(
        stderr,
        "error: weft {} is a command of the Python package of Weft, which is not installed (no {} in PATH); pip "
        "install ./python in the repository of Weft, or source env.sh of the build after scripts/quickstart.sh\n",
        name, program);
    std::_Exit(static_cast<int>(ExitCode::usage));
  }
  std::error_code ignored;
  setenv("WEFT_PROGRAM", std::filesystem::read_symlink("/proc/self/exe", ignored).c_str(), 1);
  words.front() = path;
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  execv(path.c_str(), arguments.data());
  fmt::print(stderr, "error: {}: cannot be started ({}); install the package again: pip install ./python\n", path,
             std::strerror(errno));
  std::_Exit(static_cast<int>(ExitCode::usage));
}

}  // namespace weft::commands
