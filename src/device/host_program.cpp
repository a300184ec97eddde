// SPDX-License-Identifier: Apache-2.0
#include "device/host_program.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/log.hpp"
#include "device/gpu.hpp"
#include "kernels/execution.hpp"
#include "kernels/kokkos_runtime.hpp"

namespace weft::device {
namespace {

namespace fs = std::filesystem;

/// Environment variable of the program that replaces a CUDA build: the problem with the GPUs.
constexpr const char* kProblem = "WEFT_WITHOUT_GPU";
/// Environment variable of OpenBLAS: the core whose kernels it uses.
constexpr const char* kCore = "OPENBLAS_CORETYPE";

fs::path this_program() {
  std::error_code ignored;
  return fs::read_symlink("/proc/self/exe", ignored);
}

}  // namespace

fs::path host_program(const std::string& problem, const fs::path& program) {
  if (problem.empty()) return {};
  const fs::path folder = program.parent_path();
  for (const fs::path& candidate : {folder / "weft-cpu", folder.parent_path() / "cpu-release" / "weft"}) {
    std::error_code ignored;
    if (fs::is_regular_file(candidate, ignored) && access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return {};
}

void hand_over_without_gpu(char** argv) {
  // The variable is set if the other program was built with CUDA by mistake: it must not start itself again and again.
  if (!kernels::kCudaBuild || std::getenv(kProblem) != nullptr) return;
  const std::string problem = problem_of_gpus();
  const fs::path program = host_program(problem, this_program());
  if (program.empty()) return;
  setenv(kProblem, problem.c_str(), 1);
  execv(program.c_str(), argv);
  log::warning("{}: cannot be started ({})", program.string(), std::strerror(errno));
  unsetenv(kProblem);
}

void restart_with_blas_core(char** argv) {
  const std::string core = kernels::wanted_blas_core();
  if (core.empty() || std::getenv(kCore) != nullptr) return;
  setenv(kCore, core.c_str(), 1);
  execv(this_program().c_str(), argv);
  log::warning(
      "OpenBLAS does not know this processor and uses slow kernels (the program cannot be started again: {}); set "
      "{}={}",
      std::strerror(errno), kCore, core);
  unsetenv(kCore);
}

std::string replaces_cuda_because() {
  const char* const problem = kernels::kCudaBuild ? nullptr : std::getenv(kProblem);
  return problem == nullptr ? "" : problem;
}

std::string cuda_unavailable() {
  const std::string problem = replaces_cuda_because();
  if (problem.empty())
    return "device.backend = \"cuda\" is not available (built without CUDA); use \"auto\" or \"portable\", or the "
           "program of build/cuda-release";
  return fmt::format(
      "device.backend = \"cuda\" is not available ({}); start on a node with a GPU that the program was built for, or "
      "use \"auto\" or \"portable\" to compute on the host",
      problem);
}

}  // namespace weft::device
