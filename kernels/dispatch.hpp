// SPDX-License-Identifier: Apache-2.0
//
// Selects the implementation of a kernel by backend.
//
// A kernel with a hand-written CUDA implementation has three parts of the same name and signature:
//
//   NAME.hpp           weft::kernels::f             the interface; callers see nothing else
//   NAME_portable.cpp  weft::kernels::portable::f   Kokkos: the reference, and the fallback on other hardware
//   NAME_cuda.cu       weft::kernels::cuda::f       hand-written
//
// NAME.cpp connects them:
//
//   namespace portable { decltype(kernels::f) f; }
//   namespace cuda { decltype(kernels::f) f; }
//   void f(const Execution& execution, int n) { dispatch<portable::f, cuda::f>(execution, n); }
//
// `dispatch` cannot be called with one implementation only, and decltype gives both the signature of the interface: an
// implementation that is missing or has another signature is an error at compile or link time. A kernel without a CUDA
// implementation is defined in NAME_portable.cpp directly in weft::kernels and runs through Kokkos on every backend.
#pragma once

#include <type_traits>
#include <utility>

#include "kernels/execution.hpp"

namespace weft::kernels {

constexpr Backend backend_of(Backend backend) { return backend; }
constexpr Backend backend_of(const Execution& execution) { return execution.backend; }

/// Calls the implementation for the backend that `where` (an Execution, or a Backend for functions of sizes) names,
/// with `where` as its first argument. A build without CUDA does not refer to the second one.
template <auto portable_function, auto cuda_function, class Where, class... Arguments>
decltype(auto) dispatch(const Where& where, Arguments&&... arguments) {
  static_assert(std::is_same_v<decltype(portable_function), decltype(cuda_function)>);
  if constexpr (kCudaBuild)
    if (backend_of(where) == Backend::cuda) return cuda_function(where, std::forward<Arguments>(arguments)...);
  return portable_function(where, std::forward<Arguments>(arguments)...);
}

}  // namespace weft::kernels
