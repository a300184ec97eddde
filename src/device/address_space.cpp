// SPDX-License-Identifier: Apache-2.0
#include "device/address_space.hpp"

#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

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

/// Threads for which OpenBLAS maps buffers when it is loaded.
rlim_t blas_threads(char** environment) {
  for (const char* const name : {"OPENBLAS_NUM_THREADS=", "GOTO_NUM_THREADS=", "OMP_NUM_THREADS="})
    for (char** variable = environment; *variable != nullptr; ++variable)
      if (strncmp(*variable, name, strlen(name)) == 0)
        if (const long threads = strtol(*variable + strlen(name), nullptr, 10); threads > 0)
          return static_cast<rlim_t>(threads);
  cpu_set_t allowed;
  const bool known = sched_getaffinity(0, sizeof allowed, &allowed) == 0;
  return known ? static_cast<rlim_t>(CPU_COUNT(&allowed)) : 1;
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
