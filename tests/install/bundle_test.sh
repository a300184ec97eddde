#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# bundle_test.sh REPOSITORY CMAKE: a bundle is created complete or not at all, and src/input (toml++, fmt, nlohmann-json) compiles from
# it with the system's packages disabled in CMake.
#
# Exit codes: 0 passed; 1 failed; 77 the Kokkos archive is not available here
set -euo pipefail
repository=$1 cmake=$2
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"

fail() { echo "$*" >&2; exit 1; }

# A download that is not the pinned archive, and an existing folder.
echo "not Kokkos" >wrong.tar.gz
if WEFT_KOKKOS_ARCHIVE=$scratch/wrong.tar.gz bash "$repository/scripts/bundle.sh" wrong 2>message; then fail "a wrong archive was accepted"; fi
grep -q "not the pinned archive" message || fail "the wrong archive: $(cat message)"
[[ -z $(find . -name 'wrong*' ! -name wrong.tar.gz) ]] || fail "a failed bundle left files: $(ls)"
mkdir taken
if bash "$repository/scripts/bundle.sh" taken 2>message; then fail "an existing folder was overwritten"; fi

bash "$repository/scripts/bundle.sh" bundle >contents.log 2>message || {
  cat message
  echo "skipped: the Kokkos archive cannot be downloaded (no network?)"
  exit 77
}
for library in toml++ CLI spdlog fmt nlohmann doctest kissfft kokkos pcre2 utf8proc; do
  [[ -s bundle/licences/$library ]] || fail "no licence of $library"
done

forbidden=()
for package in fmt spdlog nlohmann_json CLI11 tomlplusplus doctest; do forbidden+=("-DCMAKE_DISABLE_FIND_PACKAGE_$package=ON"); done
if "$cmake" -S "$repository" -B without "${forbidden[@]}" >configure.log 2>&1; then fail "configured without libraries"; fi
"$cmake" -S "$repository" -B with -DWEFT_BUNDLE="$scratch/bundle" "${forbidden[@]}" >configure.log 2>&1 || fail "$(cat configure.log)"
"$cmake" --build with --target weft_input --parallel 2 >build.log 2>&1 || fail "$(tail -n 30 build.log)"
grep -q "WEFT_PCRE2_LIBRARY:FILEPATH=$scratch/bundle/pcre2/libpcre2-8.a" with/CMakeCache.txt || fail "the bundle's PCRE2 is not used"
grep -q "WEFT_UTF8PROC_LIBRARY:FILEPATH=$scratch/bundle/utf8proc/libutf8proc.a" with/CMakeCache.txt || fail "the bundle's utf8proc is not used"
grep -q "WEFT_KISSFFT_INCLUDE:PATH=$scratch/bundle/include/kissfft" with/CMakeCache.txt || fail "the bundle's KISS FFT is not used"
grep -q -- "-isystem $scratch/bundle/include" with/compile_commands.json || fail "the bundle's headers are not used"
