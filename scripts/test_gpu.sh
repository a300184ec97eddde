#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the CUDA program and runs every test that needs NVIDIA GPUs: kernels against plain loops, the complete program against
# the portable kernels, stop and resume bit for bit; with two or four GPUs also every grid of them, a lost rank, and the
# exchanges under memcheck and racecheck; with compute-sanitizer also initcheck, memcheck and racecheck of the selection. About five
# minutes with the build.
#
#   bash scripts/test_gpu.sh
#   WEFT_BUNDLE=DIR      without network access: libraries from a bundle (scripts/bundle.sh)
#   WEFT_TEST_DATA=DIR   real activations (DIR/minilm-l6); without it these tests are skipped, with a message
#
# Exit codes: 0 no failures; 1 failures; 2 the machine could not be set up.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
if ! nvidia-smi >/dev/null 2>&1; then
  echo "test_gpu.sh: nvidia-smi finds no GPU here; run it on a machine with a GPU (scripts/test.sh runs all other tests)" >&2
  exit 2
fi
if [[ -n ${WEFT_TEST_DATA:-} ]]; then WEFT_TEST_DATA=$(realpath "$WEFT_TEST_DATA"); export WEFT_TEST_DATA; fi
# Open MPI starts as root only with both variables set; containers often run as root.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
bash scripts/setup.sh --tests --cuda || exit 2
options=(-DWEFT_ENABLE_TESTS=ON -DWEFT_BUNDLE="${WEFT_BUNDLE:-}")
command -v ccache >/dev/null && options+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
cmake --preset cuda-release "${options[@]}" && cmake --build build/cuda-release --target gpu_tests || exit 1
ctest --test-dir build/cuda-release --label-regex gpu --output-on-failure --no-tests=error || exit 1

if ! command -v compute-sanitizer >/dev/null; then
  echo "test_gpu.sh: skipped the sanitizers (compute-sanitizer, part of the CUDA toolkit, is missing)"
  exit 0
fi
sanitizer() {  # TOOL OPTIONS PROGRAM...
  echo "compute-sanitizer --tool $*"
  OMP_NUM_THREADS=1 "${launcher[@]}" compute-sanitizer --error-exitcode 9 --tool "$@" || exit 1
}

# Kernels that skip parts of their input. Copies to the host are not checked: the tests copy whole buffers, used or not.
launcher=(env)
for test in select_test encode_tile_test sparse_test "kernels_decode_test --test-case=*norm-only*"; do
  read -r program filter <<<"$test"
  sanitizer initcheck --check-api-memory-access no "build/cuda-release/tests/kernels/$program" ${filter:+"$filter"}
done

# Copies by the engine and barriers of clusters. The tools do not support the loop of a graph.
launcher=(env WEFT_TEST_WITHOUT_GRAPHS=1)
for tool in memcheck racecheck; do
  sanitizer "$tool" build/cuda-release/tests/gpu/gpu_select_test "--test-case=small: products*"
done

# The exchange kernels on two GPUs. NCCL asks for functions that it does not have for the GPU and handles the error.
if (($(nvidia-smi --list-gpus | wc -l) < 2)); then
  echo "test_gpu.sh: skipped memcheck and racecheck of exchanges (they need two GPUs)"
  exit 0
fi
launcher=(mpirun -n 2 --oversubscribe --bind-to none)
for tool in "memcheck --report-api-errors no" racecheck; do
  for test in "communicator_test --test-case=*exchange*" peers_test; do
    read -r program filter <<<"$test"
    # shellcheck disable=SC2086  # a tool and its options
    sanitizer $tool "build/cuda-release/tests/parallel/$program" ${filter:+"$filter"}
  done
done
