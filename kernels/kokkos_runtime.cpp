// SPDX-License-Identifier: Apache-2.0
#include "kernels/kokkos_runtime.hpp"

#include <cblas.h>

#include <algorithm>
#include <limits>

#include "kernels/portable.hpp"

#ifdef KOKKOS_ENABLE_OPENMP
#include <omp.h>
#endif

namespace weft::kernels {

void start(int threads, int device) {
  Kokkos::InitializationSettings settings;
  settings.set_num_threads(threads);
  settings.set_disable_warnings(true);
#ifdef KOKKOS_ENABLE_CUDA
  settings.set_device_id(device);
#else
  static_cast<void>(device);
#endif
  Kokkos::initialize(settings);
  openblas_set_num_threads(threads);
}

void stop() {
  forget_spaces();
  Kokkos::finalize();
}

void fence(const Execution& execution) { space_of(execution).fence(); }

int most_threads() {
#ifdef KOKKOS_ENABLE_OPENMP
  // Kokkos' OpenMP space has a fixed table of threads and does not check it (OpenMPTraits::MAX_THREAD_COUNT).
  constexpr int kKokkosThreads = 512;
  return std::min(kKokkosThreads, omp_get_thread_limit());
#else
  return std::numeric_limits<int>::max();
#endif
}

std::string portable_space() { return Kokkos::DefaultExecutionSpace::name(); }

std::string library_versions() {
  // Not with fmt: nvcc cannot evaluate its compile-time format strings.
  return "Kokkos " + std::to_string(KOKKOS_VERSION / 10000) + "." + std::to_string(KOKKOS_VERSION / 100 % 100) + "." +
         std::to_string(KOKKOS_VERSION % 100) + ", " + openblas_get_config();
}

}  // namespace weft::kernels
