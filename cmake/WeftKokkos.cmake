# SPDX-License-Identifier: Apache-2.0
# Kokkos: an installed version 4.5 or later, else the one that scripts/setup.sh built in .deps/.
if(WEFT_ENABLE_CUDA)
  set(WEFT_KOKKOS_BUILT ${PROJECT_SOURCE_DIR}/.deps/kokkos-cuda)
else()
  set(WEFT_KOKKOS_BUILT ${PROJECT_SOURCE_DIR}/.deps/kokkos-cpu)
endif()
find_package(Kokkos 4.5 CONFIG QUIET COMPONENTS separable_compilation)
if(NOT Kokkos_FOUND OR (WEFT_ENABLE_CUDA AND NOT Kokkos_ENABLE_CUDA))
  unset(Kokkos_DIR CACHE)
  unset(Kokkos_FOUND)
  find_package(Kokkos 4.5 CONFIG QUIET PATHS ${WEFT_KOKKOS_BUILT} NO_DEFAULT_PATH)
endif()
if(NOT Kokkos_FOUND)
  message(FATAL_ERROR "Kokkos 4.5 or later was not found (neither installed nor in ${WEFT_KOKKOS_BUILT}); "
                      "run scripts/setup.sh, which builds it once, or set Kokkos_ROOT")
endif()
if(WEFT_ENABLE_CUDA AND NOT Kokkos_COMPILE_LANGUAGE STREQUAL "CUDA")
  message(FATAL_ERROR "this Kokkos (${Kokkos_DIR}) compiles CUDA through nvcc_wrapper, which would turn every C++ file into "
                      "CUDA; use one built with Kokkos_ENABLE_COMPILE_AS_CMAKE_LANGUAGE=ON (Spack: +cmake_lang)")
endif()
if(WEFT_ENABLE_CUDA)
  get_filename_component(weft_kokkos_prefix ${Kokkos_DIR}/../../.. ABSOLUTE)
  weft_kokkos_arch(WEFT_KOKKOS_ARCH ${weft_kokkos_prefix})  # "" where this Kokkos does not say
  if(WEFT_KOKKOS_ARCH)
    weft_check_cuda_arch(${WEFT_KOKKOS_ARCH})
  endif()
endif()
