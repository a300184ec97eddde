# SPDX-License-Identifier: Apache-2.0
# Run by every build (cmake -P): writes OUTPUT from INPUT with the current git revision. The file is rewritten only if
# its text changes, so that a build without changes compiles nothing.
set(WEFT_REVISION unknown)
set(WEFT_MODIFIED false)
find_program(git NAMES git)
if(git)
  execute_process(COMMAND ${git} rev-parse --show-prefix HEAD WORKING_DIRECTORY ${SOURCE}
    OUTPUT_VARIABLE answer RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  # An empty prefix: this folder is the root of its repository, not an archive unpacked inside another one.
  if(NOT failed AND answer MATCHES "^\n?([0-9a-f]+)$")
    set(WEFT_REVISION ${CMAKE_MATCH_1})
    execute_process(COMMAND ${git} status --porcelain --untracked-files=no WORKING_DIRECTORY ${SOURCE}
      OUTPUT_VARIABLE changes ERROR_QUIET)
    if(changes)
      set(WEFT_MODIFIED true)
    endif()
  endif()
endif()
configure_file(${INPUT} ${OUTPUT} @ONLY)
