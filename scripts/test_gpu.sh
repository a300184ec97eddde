#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the CUDA program and runs every test that needs NVIDIA GPUs: kernels against plain loops, the complete program against
# the portable kernels, stop and resume bit for bit, initcheck, memcheck and racecheck; with two or four GPUs also every grid of
# them, a lost rank, and the exchanges under memcheck and racecheck. No failure ends it: the last line reads "N passed, N failed,
# N skipped"; failed and skipped tests are listed above it with the reason. About ten minutes with the build on 64 cores [estimate].
#
#   bash scripts/test_gpu.sh             on all GPUs of this machine
#   CUDA_VISIBLE_DEVICES=0,1 bash ...    on these GPUs only: one machine with four runs the tests of one, two and four
#   bash scripts/test_gpu.sh --virtual   one GPU, with code for compute capability 8.0 that the driver compiles for this one: the
#                                        kernels that GPUs older than Hopper run (build/cuda-virtual)
#   WEFT_BUNDLE=DIR      without network access: libraries from a bundle (scripts/bundle.sh)
#   WEFT_TEST_DATA=DIR   real activations (DIR/minilm-l6); without it these tests are skipped, with a message
#   WEFT_TEST_JOBS=N     tests of one GPU that run at a time (default: a quarter of the cores, at most 8)
#
# Exit codes: 0 no failures; 1 failures; 2 the machine could not be set up.
set -uo pipefail

virtual=no
for argument in "$@"; do
  case $argument in
    --virtual) virtual=yes ;;
    *) echo "test_gpu.sh: unknown option $argument (known: --virtual)" >&2; exit 2 ;;
  esac
done
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
if ! nvidia-smi >/dev/null 2>&1; then
  echo "test_gpu.sh: nvidia-smi finds no GPU here; run it on a machine with a GPU (scripts/test.sh runs all other tests)" >&2
  exit 2
fi
if [[ -z ${CUDA_VISIBLE_DEVICES:-} ]]; then
  CUDA_VISIBLE_DEVICES=$(seq -s , 0 $(($(nvidia-smi --list-gpus | wc -l) - 1)))
fi
export CUDA_VISIBLE_DEVICES
IFS=, read -ra gpus <<<"$CUDA_VISIBLE_DEVICES"
n_gpus=${#gpus[@]}
if [[ -n ${WEFT_TEST_DATA:-} ]]; then WEFT_TEST_DATA=$(realpath "$WEFT_TEST_DATA"); export WEFT_TEST_DATA; fi
# Open MPI starts as root only with both variables set; containers often run as root.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# Tests share the cores: waiting threads sleep instead of spinning.
export OMP_WAIT_POLICY=passive
jobs=${WEFT_TEST_JOBS:-$(($(nproc) / 4))}
jobs=$((jobs < 2 ? 2 : jobs > 8 ? 8 : jobs))

build=$([[ $virtual == yes ]] && echo cuda-virtual || echo cuda-release)
results=$PWD/build/test-results-gpu/$build-$n_gpus   # runs on other GPUs of the machine can go on meanwhile
rm -rf "$results"
mkdir -p "$results"
started=$SECONDS

bash scripts/setup.sh --tests --cuda || exit 2
echo "Set-up: $((SECONDS - started)) s; $n_gpus GPU$([[ $n_gpus -eq 1 ]] || echo s): $(nvidia-smi --query-gpu=name --format=csv,noheader | sort | uniq -c | xargs)"

# note FILE passed|failed|skipped NAME [REASON]: stages that run at a time write to files of their own.
note() { printf '%s\t%s\t%s\n' "$2" "$3" "${4:-}" >>"$results/$1.tsv"; }

summary() {
  echo
  echo "All tests: $((SECONDS - started)) s"
  shopt -s nullglob   # without a build there are no reports of ctest
  python3 tests/summary.py "$results"/*.tsv "$results"/*.xml
  exit
}

# stage FILE NAME LIMIT COMMAND...: one counted stage with a time limit in seconds; the end of its log is shown if it fails.
stage() {
  local file=$1 name=$2 limit=$3 log=$results/${2// /_}.log since=$SECONDS code=0
  shift 3
  timeout --kill-after=10 "$limit" "$@" >"$log" 2>&1 || code=$?
  echo "$name: $([[ $code -eq 0 ]] && echo passed || echo "failed with $code") ($((SECONDS - since)) s)"
  if [[ $code -eq 0 ]]; then
    note "$file" passed "$name"
  else
    tail -n 30 "$log"
    note "$file" failed "$name" "$([[ $code -eq 124 || $code -eq 137 ]] && echo "longer than $limit s" || echo "exit code $code"), see $log"
    return 1
  fi
}

# tests NAME OPTION...: ctest; the report is NAME.xml. Several can run at a time: each has a directory for its files.
tests() {
  local name=$1 since=$SECONDS
  shift
  mkdir -p "$results/$name"
  echo "subdirs(\"$PWD/build/$build\")" >"$results/$name/CTestTestfile.cmake"
  ctest --test-dir "$results/$name" --output-on-failure --no-tests=error --label-regex '^gpu$' --output-junit "$results/$name.xml" "$@" ||
    true   # failures are counted from the report
  [[ -s $results/$name.xml ]] || note "$name" failed "tests $name" "ctest wrote no report"
  echo "Tested $name: $((SECONDS - since)) s"
}

# sanitizer FILE TOOL OPTIONS LAUNCHER PROGRAM FILTER: TOOL of compute-sanitizer as a stage.
sanitizer() {
  local file=$1 tool=$2 program=build/$build/tests/$5
  # shellcheck disable=SC2086  # several options; a launcher with its arguments
  stage "$file" "$tool of ${5##*/}" 240 env OMP_NUM_THREADS=1 $4 compute-sanitizer --error-exitcode 9 --tool $tool $3 "$program" ${6:+"$6"}
}

# Sanitizers of one GPU, all at a time: they mostly wait for the host. Kernels that skip parts of their input under initcheck;
# copies to the host are not checked, since the tests copy whole buffers, used or not. Copies by the engine and barriers of
# clusters under memcheck and racecheck, without the loop of a graph, which the tools do not support.
sanitizers_of_one_gpu() {
  local test program filter tool
  for test in transcoder/select_test transcoder/encode_tile_test transcoder/sparse_test "transcoder/kernels_decode_test --test-case=*norm-only*"; do
    read -r program filter <<<"$test"
    sanitizer "initcheck_${program##*/}" initcheck "--check-api-memory-access no" "" "kernels/${program##*/}" "$filter" &
  done
  for tool in memcheck racecheck; do
    sanitizer "$tool" $tool "" "env WEFT_TEST_WITHOUT_GRAPHS=1" gpu/gpu_select_test "--test-case=small: products*" &
  done
  wait
}

# The exchange kernels on two GPUs. NCCL asks for functions that it does not have for the GPU and handles the error.
sanitizers_of_two_gpus() {
  local tool options test program filter
  for tool in memcheck racecheck; do
    options=$([[ $tool == memcheck ]] && echo "--report-api-errors no")
    for test in "communicator_test --test-case=*exchange*" peers_test; do
      read -r program filter <<<"$test"
      sanitizer exchanges $tool "$options" "mpirun -n 2 --oversubscribe --bind-to none" "parallel/$program" "$filter"
    done
  done
}

options=(-DWEFT_ENABLE_TESTS=ON -DWEFT_BUNDLE="${WEFT_BUNDLE:-}")
[[ $virtual == yes ]] && options+=(-DCMAKE_CUDA_ARCHITECTURES=80-virtual)
command -v ccache >/dev/null && options+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
stage build "configure $build" 300 cmake --preset cuda-release -B "build/$build" "${options[@]}" || summary
stage build "build $build" 1800 cmake --build "build/$build" --target gpu_tests || summary
since=$SECONDS

sanitized=yes
if [[ $virtual == yes ]]; then
  sanitized=no
  note ranks skipped "tests of several ranks, sanitizers" "--virtual"
elif ! command -v compute-sanitizer >/dev/null; then
  sanitized=no
  note sanitizers skipped "initcheck, memcheck and racecheck" "compute-sanitizer, part of the CUDA toolkit, is missing"
fi

# Tests of one process. Those that compare the driver's bytes or times run alone on their GPU (RUN_SERIAL).
one_process() { tests one_process --label-exclude '^(ranks|full)$' --parallel "$jobs"; }
if [[ $virtual == yes ]]; then
  one_process
  summary
fi

# Tests of several ranks: each needs a GPU for every rank, except that two ranks also share one. Ranks that share a GPU exchange
# through the host.
left_out=
for test in $(ctest --test-dir "build/$build" -N --label-regex '^gpu$' --label-exclude '^full$' | sed -n 's/^ *Test *#[0-9]*: //p'); do
  ranks=$(sed -n 's/.*_r\([0-9]*\)$/\1/p' <<<"$test")
  if ((${ranks:-0} > (n_gpus < 2 ? 2 : n_gpus))); then
    left_out+="${left_out:+|}^$test\$"
    note ranks skipped "$test" "needs $ranks GPUs, $n_gpus may be used"
  fi
done
several=(--label-regex '^ranks$' --label-exclude '^full$')
if ((n_gpus < 4)); then
  one_process
  [[ $sanitized == yes ]] && sanitizers_of_one_gpu
  tests ranks "${several[@]}" --exclude-regex "${left_out:-^$}"
  ((n_gpus >= 2)) && [[ $sanitized == yes ]] && sanitizers_of_two_gpus
else
  # One GPU for the tests of one process, one for the sanitizers, two for what needs two; then all four for the rest.
  if [[ $sanitized == yes ]]; then CUDA_VISIBLE_DEVICES=${gpus[1]} sanitizers_of_one_gpu & fi
  (
    export CUDA_VISIBLE_DEVICES=${gpus[2]},${gpus[3]}
    tests two_ranks "${several[@]}" --tests-regex '_r[12]$'
    tests lost "${several[@]}" --tests-regex '^gpu_lost_rank$'
    [[ $sanitized == yes ]] && sanitizers_of_two_gpus
  ) &
  CUDA_VISIBLE_DEVICES=${gpus[0]} one_process
  wait
  tests ranks "${several[@]}" --exclude-regex "_r[12]\$|^gpu_lost_rank\$${left_out:+|$left_out}"
fi
((n_gpus >= 2)) || note sanitizers skipped "memcheck and racecheck of exchanges" "they need two GPUs"
echo "Tests and sanitizers: $((SECONDS - since)) s"
summary
