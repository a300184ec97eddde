// SPDX-License-Identifier: Apache-2.0
#include "commands/sweep/processes.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>

#include "base/error.hpp"
#include "kernels/runtime.hpp"

namespace weft::commands {
namespace {

namespace fs = std::filesystem;

constexpr const char* kParent = "WEFT_PARENT";  // the process that a run of a sweep belongs to

/// As this process was started: the MPI library adds variables that would connect its processes to this one.
std::vector<std::string> first_environment() {
  std::ifstream file("/proc/self/environ", std::ios::binary);
  std::vector<std::string> variables;
  for (std::string one; std::getline(file, one, '\0');) variables.push_back(one);
  return variables;
}

/// The value of NAME in the first environment; "" = none.
std::string variable(const std::string& name) {
  for (const std::string& one : first_environment())
    if (one.starts_with(name + "=")) return one.substr(name.size() + 1);
  return "";
}

int code_of(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status); }

}  // namespace

fs::path own_program() { return fs::read_symlink("/proc/self/exe"); }

pid_t start_process(const std::vector<std::string>& arguments, const std::vector<std::string>& variables,
                    const fs::path& log) {
  std::vector<std::string> environment = first_environment();
  for (const std::string& added : variables) {
    std::erase_if(environment,
                  [&](const std::string& one) { return one.starts_with(added.substr(0, added.find('=') + 1)); });
    environment.push_back(added);
  }
  const auto pointers = [](const std::vector<std::string>& texts) {
    std::vector<char*> all;
    for (const std::string& text : texts) all.push_back(const_cast<char*>(text.c_str()));
    all.push_back(nullptr);
    return all;
  };
  if (!log.empty() && !std::ofstream(log, std::ios::app))  // the error of the new process would not name the file
    throw error(ExitCode::io, "{}: cannot be written ({}); check the directory", log.string(), std::strerror(errno));
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  posix_spawn_file_actions_init(&actions);
  posix_spawnattr_init(&attributes);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  if (!log.empty()) {
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
    posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
  }
  // A group of its own: an interrupt of the terminal reaches this process alone, which passes it on once.
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  posix_spawnattr_setpgroup(&attributes, 0);
  pid_t process = 0;
  const int failure = posix_spawnp(&process, arguments.front().c_str(), &actions, &attributes,
                                   pointers(arguments).data(), pointers(environment).data());
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (failure != 0)
    throw error(ExitCode::io, "{}: cannot be started ({}); is it installed?", arguments.front(),
                std::strerror(failure));
  return process;
}

std::string tied_to_this_process() { return fmt::format("{}={}", kParent, getpid()); }

void stop_with_parent() {
  const char* const parent = std::getenv(kParent);
  if (parent == nullptr) return;
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (std::to_string(getppid()) != parent) raise(SIGTERM);  // it has ended before the request
}

int wait_for(pid_t process) {
  int status = 0;
  while (waitpid(process, &status, 0) < 0)
    if (errno != EINTR) throw error(ExitCode::internal, "waitpid: {}", std::strerror(errno));
  return code_of(status);
}

int ended(pid_t process) {
  int status = 0;
  return waitpid(process, &status, WNOHANG) == process ? code_of(status) : -1;
}

std::vector<std::string> gpu_of_slot(std::size_t slot) {
  if (!kernels::kCudaBuild) return {};
  std::vector<std::string> gpus;
  std::string visible = variable("CUDA_VISIBLE_DEVICES");
  for (std::size_t comma; !visible.empty(); visible = comma == std::string::npos ? "" : visible.substr(comma + 1)) {
    comma = visible.find(',');
    gpus.push_back(visible.substr(0, comma));
  }
  std::error_code none;
  if (gpus.empty())
    for (auto gpu = fs::directory_iterator("/proc/driver/nvidia/gpus", none); gpu != fs::directory_iterator(); ++gpu)
      gpus.push_back(std::to_string(gpus.size()));
  if (gpus.size() < 2) return {};
  return {"CUDA_VISIBLE_DEVICES=" + gpus[slot % gpus.size()]};
}

}  // namespace weft::commands
