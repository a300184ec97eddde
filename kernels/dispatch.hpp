// SPDX-License-Identifier: Apache-2.0
//
// Selects the implementation of a kernel by backend.
//
// A kernel with a hand-written CUDA implementation has three parts of the same name and signature:
//
//   NAME.hpp           weft::kernels::f             WEFT_KERNEL(f, void(const Execution&, int n)): what callers use
//   NAME_portable.cpp  weft::kernels::portable::f   Kokkos: the reference, and the fallback on other hardware
//   NAME_cuda.cu       weft::kernels::cuda::f       hand-written
//
// A kernel that checks its arguments, or chooses between more implementations, is an ordinary function in NAME.hpp; its
// NAME.cpp declares both implementations and ends with `dispatch`:
//
//   namespace portable { decltype(kernels::f) f; }
//   namespace cuda { decltype(kernels::f) f; }
//   void f(const Execution& execution, int n) { require(n > 0); dispatch<portable::f, cuda::f>(execution, n); }
//
// Both forms give the implementations one signature: one that is missing or has another signature is an error at link
// time. A kernel without a CUDA implementation is defined in NAME_portable.cpp directly in weft::kernels and runs
// through Kokkos on every backend. A CUDA kernel without a portable one, which only some arguments have, returns false
// if it does not apply; NAME.cpp calls it by `try_cuda`.
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

/// Result of a CUDA kernel that has no portable counterpart: true if it did the work. False on the portable backend.
template <auto cuda_function, class... Arguments>
bool try_cuda(const Execution& execution, Arguments&&... arguments) {
  if constexpr (kCudaBuild)
    if (execution.backend == Backend::cuda) return cuda_function(execution, std::forward<Arguments>(arguments)...);
  return false;
}

/// A kernel with two implementations, called like a function of `Signature`.
template <class Signature, Signature* portable_function, Signature* cuda_function>
struct Kernel;

template <class Result, class Where, class... Arguments, Result (*portable_function)(Where, Arguments...),
          Result (*cuda_function)(Where, Arguments...)>
struct Kernel<Result(Where, Arguments...), portable_function, cuda_function> {
  Result operator()(Where where, Arguments... arguments) const {
    return dispatch<portable_function, cuda_function>(where, std::forward<Arguments>(arguments)...);
  }
};

}  // namespace weft::kernels

/// Declares the kernel `name` of the signature that follows, Result(const Execution&, ...) or Result(Backend, ...), and
/// its two implementations. In namespace weft::kernels.
#define WEFT_KERNEL(name, ...)            \
  namespace portable {                    \
  std::type_identity_t<__VA_ARGS__> name; \
  }                                       \
  namespace cuda {                        \
  std::type_identity_t<__VA_ARGS__> name; \
  }                                       \
  inline constexpr Kernel<__VA_ARGS__, portable::name, cuda::name> name {}
