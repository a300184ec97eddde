// SPDX-License-Identifier: Apache-2.0
#include "kernels/kokkos_runtime.hpp"

#include <cblas.h>

#include <algorithm>
#include <limits>
#include <string_view>
#include <vector>

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
  // OpenBLAS maps its buffers at the first product that is not small, and tries for ever where the address space is
  // limited: take them before other memory.
  constexpr int kSize = 192;
  std::vector<float> values(3 * kSize * kSize);
  const float* const factor = values.data();
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, kSize, kSize, kSize, 1.0f, factor, kSize,
              factor + kSize * kSize, kSize, 0.0f, values.data() + 2 * kSize * kSize, kSize);
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

std::string wanted_blas_core() {
#if defined(__x86_64__) && !defined(KOKKOS_ENABLE_CUDA)
  const bool chooses = std::string_view(openblas_get_config()).find("DYNAMIC_ARCH") != std::string_view::npos;
  if (!chooses || std::string_view(openblas_get_corename()) != "Prescott") return "";
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return "";
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  return wide ? "SkylakeX" : "Haswell";
#else
  return "";
#endif
}

}  // namespace weft::kernels
