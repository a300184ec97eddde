# SPDX-License-Identifier: Apache-2.0
# weft_python_test(NAME SCRIPT a.py [ARGUMENTS …] [LABELS unit] [TIMEOUT 600] [PROCESSORS 1])
# A test in Python, run by the first interpreter that has NumPy and h5py: $WEFT_PYTHON, the system's, the one in PATH.
# Exit code 77 means skipped; the last line of the output states the reason.
include_guard(GLOBAL)
include(WeftTestEnvironment)

foreach(candidate "$ENV{WEFT_PYTHON}" /usr/bin/python3 python3)
  if(candidate AND NOT WEFT_PYTHON)
    execute_process(COMMAND ${candidate} -c "import numpy, h5py" RESULT_VARIABLE result OUTPUT_QUIET ERROR_QUIET)
    if(result EQUAL 0)
      set(WEFT_PYTHON ${candidate} CACHE STRING "Python with NumPy and h5py, for tests")
    endif()
  endif()
endforeach()

function(weft_python_test name)
  cmake_parse_arguments(arg "" "SCRIPT;TIMEOUT;PROCESSORS" "ARGUMENTS;LABELS" ${ARGN})
  foreach(default LABELS=unit TIMEOUT=600 PROCESSORS=1)
    string(REPLACE "=" ";" default ${default})
    list(GET default 0 key)
    list(GET default 1 value)
    if(NOT arg_${key})
      set(arg_${key} ${value})
    endif()
  endforeach()
  if(WEFT_PYTHON)
    add_test(NAME ${name} COMMAND ${WEFT_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/${arg_SCRIPT} ${arg_ARGUMENTS})
  else()
    add_test(NAME ${name} COMMAND sh -c "echo 'skipped: no Python with NumPy and h5py (scripts/setup.sh --tests installs them)'; exit 77")
  endif()
  set_tests_properties(${name} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT} PROCESSORS ${arg_PROCESSORS}
    SKIP_RETURN_CODE 77
    ENVIRONMENT "PYTHONPATH=${PROJECT_SOURCE_DIR}/tests/reference:${PROJECT_SOURCE_DIR}/tests/end_to_end;PYTHONDONTWRITEBYTECODE=1;OPENBLAS_NUM_THREADS=1;${WEFT_TEST_ENVIRONMENT}")
  if("long" IN_LIST arg_LABELS)
    set_tests_properties(${name} PROPERTIES COST 50)  # half a minute and more: started first, so that none is alone at the end
  endif()
endfunction()
