#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Sets the machine up and runs every test that it can run. The last line reads "N passed, N failed, N skipped"; skipped tests
# are listed above it with the reason.
#
#   bash scripts/test.sh            the quick set of the CPU program: at most a quarter of an hour on two cores
#   bash scripts/test.sh --long     also tests of half a minute and more (soak, requests, job scripts, real activations), and the
#                                   CUDA program is compiled, meanwhile: about half an hour on two cores
#   bash scripts/test.sh --full     everything: also the longest tests, those with released packages (scripts/peers.sh downloads 3 GB),
#                                   the sanitizers and a build with clang
#   bash scripts/test.sh --skip unit,end_to_end,benchmark      without the tests of these labels (docs/development.md);
#                                   also with --long and --full
#   WEFT_TEST_DATA=DIR              real activations (DIR/minilm-l6); without it the tests that need them are skipped and counted
#
# Exit codes: 0 no failures; 1 failures; 2 the machine could not be set up.
set -uo pipefail

long=no full=no skip=
labels=" unit ranks fault end_to_end benchmark scheduler fuzz parity peers "
left_out="long|full|gpu"
while [[ $# -gt 0 ]]; do
  case $1 in
    --long) long=yes left_out="full|gpu" ;;
    --full) long=yes full=yes left_out=gpu ;;
    --skip)
      skip=${2:-}
      [[ -n $skip ]] || { echo "test.sh: --skip needs labels, separated by commas (known:$labels)" >&2; exit 2; }
      for label in ${skip//,/ }; do
        [[ $labels == *" $label "* ]] || { echo "test.sh: --skip $label: no such label (known:$labels)" >&2; exit 2; }
      done
      shift ;;
    *) echo "test.sh: unknown option $1 (known: --long --full --skip LABELS)" >&2; exit 2 ;;
  esac
  shift
done
[[ -z $skip ]] || left_out+="|${skip//,/|}"
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
if [[ -n ${WEFT_TEST_DATA:-} ]]; then WEFT_TEST_DATA=$(realpath "$WEFT_TEST_DATA"); export WEFT_TEST_DATA; fi
# Open MPI starts as root only with both variables set; test machines and containers often run as root.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# Tests share the cores: waiting threads sleep instead of spinning.
export OMP_WAIT_POLICY=passive

results=build/test-results
rm -rf "$results"
mkdir -p "$results"
stages=$results/stages.tsv
: >"$stages"
started=$SECONDS

bash scripts/setup.sh --tests || exit 2
# Slurm, for the job scripts. If it cannot be installed, their tests are skipped and counted.
if [[ $long == yes ]]; then
  bash scripts/setup.sh --scheduler || echo "Slurm is not installed: the job scripts cannot be tested"
fi
# Released packages of other projects. Without network their tests are skipped and counted.
if [[ $full == yes && ,$skip, != *,peers,* ]]; then
  bash scripts/peers.sh || echo "The packages of tests/peers are not installed: their tests are skipped"
fi
echo "Set-up: $((SECONDS - started)) s"

note() { printf '%s\t%s\t%s\n' "$1" "$2" "${3:-}" >>"$stages"; }

# build NAME OPTION...: builds preset NAME, with $processes processes or as many as CMake chooses, the targets of the array `targets` or
# everything. A failure counts as a failed test; the end of its log is shown. Warnings are errors except in the quick set, which continues
# the build of the quickstart: other options would compile the program again.
build() {
  local name=$1 log=$results/$1.log since=$SECONDS
  shift
  local options=("-DWEFT_WARNINGS_AS_ERRORS=$([[ $long == yes ]] && echo ON || echo OFF)" -DWEFT_ENABLE_TESTS=ON "$@")
  command -v ccache >/dev/null && options+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
  if cmake --preset "$name" "${options[@]}" >"$log" 2>&1 &&
    cmake --build "build/$name" ${processes:+--parallel "$processes"} ${targets:+--target "${targets[@]}"} >>"$log" 2>&1; then
    note passed "build $name"
    echo "Built $name: $((SECONDS - since)) s"
  else
    tail -n 40 "$log"
    note failed "build $name" "see $log"
    return 1
  fi
}

# check NAME LOG COMMAND...: a failure counts as a failed test; the end of its log is shown.
check() {
  local name=$1 log=$results/$2 since=$SECONDS
  shift 2
  if "$@" >"$log" 2>&1; then
    note passed "$name"
    echo "Checked $name: $((SECONDS - since)) s"
  else
    tail -n 40 "$log"
    note failed "$name" "see $log"
  fi
}

# The CUDA program, which needs a GPU to compute, and the tests that only a CUDA build has: they are compiled, and the program is started
# without a GPU. Host code is not optimised. Then the sources whose code depends on the GPU are compiled for others.
#   --long  GPU code is hardly optimised (from CUDA 12.9: half the time of a kernel); src/ in groups (CMAKE_UNITY_BUILD), as the CPU program: a
#           third of the time; the sources for the oldest GPU, whose code differs most from that of the build
#   --full  GPU code is optimised; each source of src/ by itself, as in a build without a preset; all tests; the sources for every supported
#           GPU; each header alone
cuda_program() {
  local processes=2 targets=(weft gpu_programs) architectures=gpu_oldest gpu_code=
  if nvcc --help | grep -q -e --Ofast-compile; then gpu_code=" --Ofast-compile=max"; fi
  if [[ $full == yes ]]; then targets=() architectures=gpu_architectures gpu_code=; fi
  local plain=("-DCMAKE_CXX_FLAGS_RELEASE=-O0 -DNDEBUG" "-DCMAKE_CUDA_FLAGS_RELEASE=-O0 -DNDEBUG$gpu_code")
  if [[ $full == yes ]]; then plain+=("-DCMAKE_UNITY_BUILD=OFF"); fi
  bash scripts/setup.sh --cuda || { note failed "set-up for CUDA"; return; }
  build cuda-release "${plain[@]}" || return
  if [[ $built == yes ]]; then
    check "CUDA program without a GPU" fallback.log timeout 600 bash tests/install/fallback_test.sh build/cuda-release/weft build/cpu-release/weft
  fi
  check "compile for other GPUs ($architectures)" gpu_architectures.log \
    cmake --build build/cuda-release --target "$architectures" --parallel "$processes"
  [[ $full == no ]] || check "headers of CUDA sources" cuda_headers.log python3 tests/style/headers_test.py . build/cuda-release
}

# run_tests BUILD NAME OPTION...: ctest in build/BUILD; the report is NAME.xml. Tests mostly wait, for the start and the end of
# programs, so two cores are kept busy by four; a test of several ranks counts as two. The longest (COST in CMake) start first.
run_tests() {
  local build=$1 name=$2 since=$SECONDS
  shift 2
  ctest --test-dir "build/$build" --parallel 4 --output-on-failure --no-tests=error \
    --output-junit "$PWD/$results/$name.xml" "$@" || true   # failures are counted from the report
  [[ -s $results/$name.xml ]] || note failed "tests of $name" "ctest wrote no report"
  echo "Tested $name: $((SECONDS - since)) s"
}

quick=(--label-exclude "^($left_out)$")
for label in ${skip//,/ }; do note skipped "tests labelled $label" "--skip"; done

built=no
build cpu-release && built=yes
if [[ $long == no ]]; then
  note skipped "build cuda-release" "the quick set; --long compiles the CUDA program"
elif ! command -v nvcc >/dev/null; then
  note skipped "build cuda-release" "no nvcc (the CUDA Toolkit) on this machine"
else
  # Tests mostly wait: the compilers take the time that they leave. Tests that measure follow when both have ended.
  ( renice -n 19 -p "$BASHPID" >/dev/null; cuda_program ) &
  quick=(--label-exclude "^($left_out|benchmark)$") measured=yes
fi
[[ $built == no ]] || run_tests cpu-release cpu-release "${quick[@]}"
wait
if [[ $built == yes && ${measured:-no} == yes && ,$skip, != *,benchmark,* ]]; then
  run_tests cpu-release cpu-release-benchmark --label-regex '^benchmark$' --label-exclude "^($left_out)$"
fi
quick=(--label-exclude "^($left_out)$")

if [[ $full == yes ]]; then
  # Address and undefined-behaviour sanitizers: the unit tests, and the multi-rank tests on one rank. Open MPI and HDF5 keep
  # memory until the process ends, so leak detection is off.
  export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
  if build cpu-asan -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON; then   # so that each test includes what it uses
    [[ ,$skip, == *,unit,* ]] ||
      run_tests cpu-asan cpu-asan --label-regex unit "${quick[@]}" --exclude-regex '^style_|^reference_self$'
    [[ ,$skip, == *,ranks,* ]] ||
      run_tests cpu-asan cpu-asan-ranks --label-regex ranks --tests-regex '_r1$' "${quick[@]}"
  fi

  if command -v clang++ >/dev/null && [[ $(clang++ -dumpversion | cut -d. -f1) -ge 14 ]]; then
    if echo 'int main() {}' | clang++ -x c++ -fopenmp -o /dev/null - 2>/dev/null; then
      build cpu-debug -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_C_COMPILER=clang -DWEFT_ENABLE_TESTS=OFF
    else
      note skipped "build with clang" "clang has no OpenMP here (package libomp-dev)"
    fi
  else
    note skipped "build with clang" "no clang 14 or later on this machine"
  fi
fi

echo
echo "All tests: $((SECONDS - started)) s"
shopt -s nullglob   # no program, no reports
python3 tests/summary.py "$stages" "$results"/*.xml
