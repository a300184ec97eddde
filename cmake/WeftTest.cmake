# SPDX-License-Identifier: Apache-2.0
# weft_test(NAME SOURCES a.cpp LIBRARIES weft_x [LABELS unit] [RANKS 1 2 4])
# A doctest program. Without RANKS it runs as one process; with RANKS once per count under mpiexec, as NAME_rN with label
# `ranks`.
include(WeftTestEnvironment)
if(NOT TARGET doctest::doctest)  # a bundle defines it already
  find_package(doctest REQUIRED)
endif()
set(WEFT_MPIEXEC_FLAGS --oversubscribe --bind-to none CACHE STRING "Flags of mpiexec in tests")
if(NOT TARGET weft_test_main)
  add_library(weft_test_main STATIC ${PROJECT_SOURCE_DIR}/tests/main.cpp)
  target_link_libraries(weft_test_main PUBLIC weft_compiler doctest::doctest weft_parallel weft_device)
endif()

function(weft_test name)
  cmake_parse_arguments(arg "" "" "SOURCES;LIBRARIES;LABELS;RANKS" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE weft_test_main ${arg_LIBRARIES})
  target_compile_options(${name} PRIVATE $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release>>:-O1>)  # compiles faster
  if(arg_RANKS)
    foreach(n ${arg_RANKS})
      add_test(NAME ${name}_r${n} COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${n} ${WEFT_MPIEXEC_FLAGS} $<TARGET_FILE:${name}>)
      set_tests_properties(${name}_r${n} PROPERTIES LABELS "ranks;${arg_LABELS}" TIMEOUT 300 PROCESSORS 2
        ENVIRONMENT "OMP_NUM_THREADS=1;${WEFT_TEST_ENVIRONMENT}")
    endforeach()
  else()
    if(NOT arg_LABELS)
      set(arg_LABELS unit)
    endif()
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT 300 ENVIRONMENT "${WEFT_TEST_ENVIRONMENT}")
  endif()
endfunction()
