// SPDX-License-Identifier: Apache-2.0
#include "device/address_space.hpp"

#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/error.hpp"

namespace weft::device {
namespace {

// Measured with OpenBLAS 0.3.21 and Open MPI 4.1: a command that does not compute needs 240 MB with one thread, a
// training 740 MB, with two threads 890 MB, without the memory of the model.
constexpr rlim_t kMiB = rlim_t{1} << 20;
constexpr rlim_t kBuffer = 128 * kMiB;  // of a thread of OpenBLAS
constexpr rlim_t kProgram = 192 * kMiB, kProgramToCompute = 768 * kMiB;

/// The number in a variable of the environment; 0: none.
long number_in(char** environment, const char* name) {
  const std::size_t length = strlen(name);
  for (char** variable = environment; *variable != nullptr; ++variable)
    if (strncmp(*variable, name, length) == 0 && (*variable)[length] == '=')
      return strtol(*variable + length + 1, nullptr, 10);
  return 0;
}

/// Threads for which OpenBLAS maps buffers when it is loaded. Builds with OpenMP know only OMP_NUM_THREADS.
rlim_t blas_threads(char** environment) {
  long threads = number_in(environment, "OMP_NUM_THREADS");
  if (cpu_set_t allowed; threads < 1 && sched_getaffinity(0, sizeof allowed, &allowed) == 0)
    threads = CPU_COUNT(&allowed);
  return static_cast<rlim_t>(std::max({threads, number_in(environment, "OPENBLAS_NUM_THREADS"), 1L}));
}

void require(rlim_t program, char** environment) {
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  const rlim_t threads = blas_threads(environment), least = program + threads * kBuffer;
  if (limit.rlim_cur >= least) return;
  dprintf(STDERR_FILENO,
          "error: the address space of this process is limited to %llu MiB (%llu MiB are needed, %llu of them for each "
          "of %llu threads); raise the limit (ulimit -v), or set OMP_NUM_THREADS to fewer\n",
          static_cast<unsigned long long>(limit.rlim_cur / kMiB), static_cast<unsigned long long>(least / kMiB),
          static_cast<unsigned long long>(kBuffer / kMiB), static_cast<unsigned long long>(threads));
  _exit(static_cast<int>(ExitCode::usage));
}

#ifndef WEFT_ENABLE_SANITIZERS  // instrumented code cannot run this early
void require_before_libraries(int, char**, char** environment) { require(kProgram, environment); }
/// Functions of this section run before the libraries are initialised, with the C library alone, which does not know
/// the environment yet.
[[gnu::section(".preinit_array"), gnu::used]] void (*const first)(int, char**, char**) = require_before_libraries;
#endif

}  // namespace

void require_address_space_to_compute() { require(kProgramToCompute, environ); }

}  // namespace weft::device
