# SPDX-License-Identifier: Apache-2.0
# weft_test(NAME SOURCES a.cpp LIBRARIES weft_x [LABELS unit] [RANKS 1 2 4])
# A doctest program. Without RANKS it runs as one process; with RANKS once per count under mpiexec, as NAME_rN with label
# `ranks`.
include(WeftTestEnvironment)
if(NOT TARGET doctest::doctest)  # a bundle defines it already
  find_package(doctest REQUIRED)
endif()
set(WEFT_MPIEXEC_FLAGS --oversubscribe --bind-to none CACHE STRING "Flags of mpiexec in tests")
set(weft_test_optimisation $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release>>:-O1>)  # compiles faster
if(NOT TARGET weft_test_main)
  add_library(weft_test_main STATIC ${PROJECT_SOURCE_DIR}/tests/main.cpp ${PROJECT_SOURCE_DIR}/tests/doctest.cpp)
  target_link_libraries(weft_test_main PUBLIC weft_compiler doctest::doctest weft_parallel weft_device)
  target_compile_options(weft_test_main PRIVATE ${weft_test_optimisation})
  # Compiled once for all tests: reading these headers takes a quarter of the compile time of a test. None of the project's
  # own: with g++ 12 a header with `#pragma once` was once in a while read again after it had been precompiled.
  target_precompile_headers(weft_test_main PRIVATE <algorithm> <cmath> <cstring> <filesystem> <fstream> <functional> <limits> <map>
    <memory> <optional> <span> <string> <thread> <vector> <fmt/format.h> <doctest/doctest.h>)
  # Links a test in a fifth of the time.
  include(CheckLinkerFlag)
  check_linker_flag(CXX -fuse-ld=gold WEFT_HAS_GOLD)
  if(WEFT_HAS_GOLD AND NOT WEFT_ENABLE_CUDA AND NOT WEFT_ENABLE_SANITIZERS)
    target_link_options(weft_test_main PUBLIC -fuse-ld=gold)
  endif()
  set_source_files_properties(${PROJECT_SOURCE_DIR}/tests/doctest.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
endif()

function(weft_test name)
  cmake_parse_arguments(arg "" "" "SOURCES;LIBRARIES;LABELS;RANKS" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE weft_test_main ${arg_LIBRARIES})
  target_compile_options(${name} PRIVATE ${weft_test_optimisation})
  target_precompile_headers(${name} REUSE_FROM weft_test_main)
  if(arg_RANKS)
    foreach(n ${arg_RANKS})
      add_test(NAME ${name}_r${n} COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${n} ${WEFT_MPIEXEC_FLAGS} $<TARGET_FILE:${name}>)
      set_tests_properties(${name}_r${n} PROPERTIES LABELS "ranks;${arg_LABELS}" TIMEOUT 600 PROCESSORS 2 COST ${n}
        ENVIRONMENT "${WEFT_TEST_ENVIRONMENT}")
    endforeach()
  else()
    if(NOT arg_LABELS)
      set(arg_LABELS unit)
    endif()
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT 600 ENVIRONMENT "${WEFT_TEST_ENVIRONMENT}")
  endif()
endfunction()
