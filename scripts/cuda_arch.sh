#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Prints the architecture of the GPU that Weft and Kokkos are built for (90 for compute capability 9.0), and why it is that one.
# Used by scripts/setup.sh and by CMake, so that both name the same.
#
#   bash scripts/cuda_arch.sh               "80 the GPU of this machine"
#   bash scripts/cuda_arch.sh --kokkos 120  "HOPPER90 90": the latest that the pinned Kokkos knows and that such a GPU runs
#   WEFT_CUDA_ARCH=80                       names the architecture
#
# Without a name: that of this machine's GPU, of several the earliest; else the one that setup.sh built Kokkos for; else 90.
# Exit codes: 0 printed; 2 not an architecture that Weft supports.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

check() {
  if [[ ! $1 =~ ^[1-9][0-9]+$ ]] || (($1 < 75)); then
    echo "cuda_arch.sh: \"$1\" is not a supported GPU architecture ($2; one number from 75 on, 90 for compute capability 9.0:" \
      "Volta and earlier GPUs are not supported); set WEFT_CUDA_ARCH, or build without CUDA" >&2
    exit 2
  fi
}

if [[ ${1:-} == --kokkos ]]; then
  check "${2:-}" "argument of --kokkos"
  if (($2 >= 90)); then echo "HOPPER90 90"
  elif (($2 >= 89)); then echo "ADA89 89"
  elif (($2 >= 86)); then echo "AMPERE86 86"
  elif (($2 >= 80)); then echo "AMPERE80 80"
  else echo "TURING75 75"; fi
  exit 0
fi

arch=${WEFT_CUDA_ARCH:-} why="WEFT_CUDA_ARCH"
if [[ -z $arch ]]; then
  why="the GPU of this machine"
  arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null |
    sed -n 's/^ *\([0-9]*\)\.\([0-9]\) *$/\1\2/p' | sort -n | sed -n 1p) || arch=
fi
recorded=$root/.deps/kokkos-cuda/weft_cuda_arch
if [[ -z $arch && -s $recorded ]]; then
  why="that of .deps/kokkos-cuda"
  arch=$(<"$recorded")
fi
[[ -n $arch ]] || { arch=90 why="no GPU is visible here"; }
check "$arch" "$why"
echo "$arch $why"
