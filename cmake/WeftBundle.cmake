# SPDX-License-Identifier: Apache-2.0
# The header libraries of a bundle (scripts/bundle.sh), under the target names of their own CMake packages. All are used
# header-only: nothing is linked. WeftDependencies.cmake finds KISS FFT, and PCRE2 and utf8proc, which are linked.
foreach(folder archive include/toml++ include/CLI include/spdlog include/fmt include/nlohmann include/doctest include/kissfft pcre2 utf8proc)
  if(NOT EXISTS ${WEFT_BUNDLE}/${folder})
    message(FATAL_ERROR "WEFT_BUNDLE=${WEFT_BUNDLE} is not a bundle (${folder} is missing); make one with scripts/bundle.sh")
  endif()
endforeach()
foreach(target fmt::fmt spdlog::spdlog nlohmann_json::nlohmann_json CLI11::CLI11 tomlplusplus::tomlplusplus doctest::doctest)
  add_library(${target} INTERFACE IMPORTED)
  target_include_directories(${target} INTERFACE ${WEFT_BUNDLE}/include)
endforeach()
target_compile_definitions(fmt::fmt INTERFACE FMT_HEADER_ONLY=1)
target_compile_definitions(spdlog::spdlog INTERFACE SPDLOG_FMT_EXTERNAL)
target_link_libraries(spdlog::spdlog INTERFACE fmt::fmt Threads::Threads)
