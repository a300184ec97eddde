#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the CUDA program and measures the training step on one NVIDIA GPU: the tables of docs/performance.md. Results are in
# runs/benchmark_gpt2_small, runs/benchmark_llama_3_2_1b and runs/benchmark_gemma_2_2b: benchmark.json.
#
#   bash scripts/benchmark_gpu.sh [gpt2_small] [llama_3_2_1b] [gemma_2_2b]     which cases; none: all
#   WEFT_BUNDLE=DIR      without network access: libraries from a bundle (scripts/bundle.sh)
#
# Exit codes: 0 measured; 1 something failed; 2 the machine could not be set up.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
if ! nvidia-smi >/dev/null 2>&1; then
  echo "benchmark_gpu.sh: nvidia-smi finds no GPU here; run it on a machine with a GPU" >&2
  exit 2
fi
bash scripts/setup.sh --cuda || exit 2
options=(-DWEFT_BUNDLE="${WEFT_BUNDLE:-}")
command -v ccache >/dev/null && options+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
cmake --preset cuda-release "${options[@]}"
cmake --build build/cuda-release --target weft
names=("$@")
[[ ${#names[@]} -gt 0 ]] || names=(gpt2_small llama_3_2_1b gemma_2_2b)
for name in "${names[@]}"; do
  build/cuda-release/weft benchmark "inputs/benchmark_$name.toml"
done
