#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the CUDA program and runs every test that needs NVIDIA GPUs: kernels against plain loops, the complete program against
# the portable kernels, stop and resume bit for bit; with two or four GPUs also every grid of them, and a lost rank.
# About five minutes with the build.
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
# Open MPI starts as root only with both variables set; containers often run as root.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
bash scripts/setup.sh --tests --cuda || exit 2
options=(-DWEFT_ENABLE_TESTS=ON -DWEFT_BUNDLE="${WEFT_BUNDLE:-}")
command -v ccache >/dev/null && options+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
cmake --preset cuda-release "${options[@]}" && cmake --build build/cuda-release --target gpu_tests || exit 1
ctest --test-dir build/cuda-release --label-regex gpu --output-on-failure --no-tests=error
