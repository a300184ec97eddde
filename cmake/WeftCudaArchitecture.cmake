# SPDX-License-Identifier: Apache-2.0
# The architecture of the GPU, for Weft and for Kokkos: WEFT_CUDA_ARCH (90 for compute capability 9.0), named once as a CMake or an
# environment variable. Otherwise that of this machine's GPU, else the one that scripts/setup.sh built Kokkos for, else 90.
# CMAKE_CUDA_ARCHITECTURES, for several, takes precedence. scripts/setup.sh finds it in the same order.

# weft_kokkos_arch(OUT PREFIX): what the Kokkos installed in PREFIX was compiled for, or "".
function(weft_kokkos_arch out prefix)
  set(${out} "" PARENT_SCOPE)
  foreach(lib lib lib64)
    set(file ${prefix}/${lib}/cmake/Kokkos/KokkosConfigCommon.cmake)
    if(EXISTS ${file})
      file(STRINGS ${file} line REGEX "Kokkos_CUDA_ARCHITECTURES" LIMIT_COUNT 1)
      if(line MATCHES "Kokkos_CUDA_ARCHITECTURES ([0-9]+)")
        set(${out} ${CMAKE_MATCH_1} PARENT_SCOPE)
      endif()
    endif()
  endforeach()
endfunction()

# Sets CMAKE_CUDA_ARCHITECTURES if it is not set. The choice stays with the build folder.
macro(weft_choose_cuda_arch)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(weft_named ${WEFT_CUDA_ARCH})
    if("${weft_named}" STREQUAL "")
      set(weft_named $ENV{WEFT_CUDA_ARCH})
    endif()
    execute_process(COMMAND ${CMAKE_COMMAND} -E env WEFT_CUDA_ARCH=${weft_named} bash ${PROJECT_SOURCE_DIR}/scripts/cuda_arch.sh
      OUTPUT_VARIABLE weft_answer ERROR_VARIABLE weft_error RESULT_VARIABLE weft_failed OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(weft_failed OR NOT weft_answer MATCHES "^([0-9]+) (.*)$")
      message(FATAL_ERROR "the architecture of the GPU is not known: ${weft_error}")
    endif()
    set(WEFT_CUDA_ARCH ${CMAKE_MATCH_1} CACHE STRING
      "Compute capability of the GPU without its point, for Weft (scripts/setup.sh: for Kokkos)" FORCE)
    message(STATUS "CUDA architecture ${WEFT_CUDA_ARCH} (${CMAKE_MATCH_2})")
    set(CMAKE_CUDA_ARCHITECTURES ${WEFT_CUDA_ARCH})
  endif()
endmacro()

# weft_check_cuda_arch(KOKKOS): Kokkos compiled for a later GPU than one that Weft is compiled for ends the process on this GPU.
# Architectures named -virtual are code for any later GPU and ask for none.
function(weft_check_cuda_arch kokkos)
  foreach(architecture ${CMAKE_CUDA_ARCHITECTURES})
    if(architecture MATCHES "^([0-9]+)[a-z]?(-real)?$" AND kokkos GREATER CMAKE_MATCH_1)
      set(number ${CMAKE_MATCH_1})
      if(Kokkos_DIR MATCHES "^${PROJECT_SOURCE_DIR}/\\.deps/")
        set(remedy "build Kokkos for it: WEFT_CUDA_ARCH=${number} bash scripts/setup.sh --cuda; then configure again")
      else()
        set(remedy "set Kokkos_ROOT to one built for it, or compile Weft for ${kokkos}: -DCMAKE_CUDA_ARCHITECTURES=${kokkos}")
      endif()
      message(FATAL_ERROR "Kokkos in ${Kokkos_DIR} was built for CUDA architecture ${kokkos}, Weft is configured for "
                          "\"${CMAKE_CUDA_ARCHITECTURES}\" (a GPU of architecture ${number} cannot run that Kokkos); ${remedy}")
    endif()
  endforeach()
endfunction()
