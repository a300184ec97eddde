# SPDX-License-Identifier: Apache-2.0
# Language standard and compiler flags of all targets, in the interface target weft_compiler.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Release, Debug or RelWithDebInfo" FORCE)
endif()

if(CMAKE_CXX_COMPILER_LAUNCHER MATCHES "ccache$")  # only then it stores objects that use precompiled headers
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros ${CMAKE_CXX_COMPILER_LAUNCHER})
endif()

if(WEFT_ENABLE_CUDA)
  include(WeftCudaArchitecture)
  weft_choose_cuda_arch()
  set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)  # Kokkos links the shared runtime; a process must not contain two runtimes
  enable_language(CUDA)
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know the C++20 option of nvcc
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_EXTENSIONS OFF)
endif()

add_library(weft_compiler INTERFACE)
target_include_directories(weft_compiler INTERFACE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/src)
target_compile_options(weft_compiler INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wno-unknown-pragmas>)
# clang warns about functions that only the GPU build calls ("if constexpr").
target_compile_options(weft_compiler INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wno-unneeded-internal-declaration>)
# g++ collects its garbage first at 512 MB: a twentieth of the time of a compilation, for a few hundred megabytes of memory.
target_compile_options(weft_compiler INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:--param=ggc-min-heapsize=524288>)
if(WEFT_WARNINGS_AS_ERRORS)
  target_compile_options(weft_compiler INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
# Otherwise the compiler may contract a*b+c to an FMA where available, and results would differ between builds of the same source.
target_compile_options(weft_compiler INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)
if(WEFT_ENABLE_FUZZERS)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "WEFT_ENABLE_FUZZERS needs clang (it contains libFuzzer); use preset fuzz, or run the corpus "
                        "with any compiler: ctest -L fuzz")
  endif()
  target_compile_options(weft_compiler INTERFACE -fsanitize=fuzzer-no-link)
  set(WEFT_ENABLE_SANITIZERS ON)
endif()
if(WEFT_ENABLE_SANITIZERS)
  target_compile_options(weft_compiler INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer>)
  target_link_options(weft_compiler INTERFACE -fsanitize=address,undefined)
endif()
if(WEFT_ENABLE_CUDA)
  target_compile_definitions(weft_compiler INTERFACE WEFT_ENABLE_CUDA)
endif()
