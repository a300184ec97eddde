// SPDX-License-Identifier: Apache-2.0
//
// The three functions of the GPU driver that Kokkos calls, loaded on first use. A program linked to the driver itself
// does not start on a machine without one, where Weft plans, inspects and reports.
#include <dlfcn.h>

namespace {

constexpr int kDriverIsMissing = 3;  // CUDA_ERROR_NOT_INITIALIZED

template <class Function>
Function driver_function(const char* name) {
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  return driver == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(driver, name));
}

}  // namespace

extern "C" {

int cuStreamGetCtx(void* stream, void** context) {
  static const auto function = driver_function<int (*)(void*, void**)>("cuStreamGetCtx");
  return function == nullptr ? kDriverIsMissing : function(stream, context);
}

int cuCtxPushCurrent_v2(void* context) {
  static const auto function = driver_function<int (*)(void*)>("cuCtxPushCurrent_v2");
  return function == nullptr ? kDriverIsMissing : function(context);
}

int cuCtxGetDevice(int* device) {
  static const auto function = driver_function<int (*)(int*)>("cuCtxGetDevice");
  return function == nullptr ? kDriverIsMissing : function(device);
}

}  // extern "C"
