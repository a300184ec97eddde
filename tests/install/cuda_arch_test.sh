#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Which architecture of the GPU a build is for: the name, the GPU, the one of an earlier set-up, 90; and what CMake says if Kokkos is
# for a later one. Without a GPU and without a CUDA compiler: nvidia-smi is a stand-in.
#
#   bash tests/install/cuda_arch_test.sh
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$scratch/scripts" "$scratch/bin"
cp "$root/scripts/cuda_arch.sh" "$scratch/scripts/"
unset WEFT_CUDA_ARCH
failed=0

# gpus LINE...: what nvidia-smi prints of the GPUs; without a line it fails.
gpus() {
  { echo '#!/bin/sh'; if (($# > 0)); then printf 'echo "%s"\n' "$@"; else echo 'exit 9'; fi; } >"$scratch/bin/nvidia-smi"
  chmod +x "$scratch/bin/nvidia-smi"
}
# expect ANSWER ARGUMENT...
expect() {
  local wanted=$1 answer
  shift
  answer=$(PATH=$scratch/bin:$PATH bash "$scratch/scripts/cuda_arch.sh" "$@" 2>&1)
  [[ $answer == "$wanted"* ]] || { echo "cuda_arch.sh $*: \"$answer\" (expected \"$wanted\")"; failed=1; }
}

gpus
expect "90 no GPU is visible here"
gpus 9.0 12.0 8.6
expect "86 the GPU of this machine"
WEFT_CUDA_ARCH=80 expect "80 WEFT_CUDA_ARCH"
WEFT_CUDA_ARCH=70 expect 'cuda_arch.sh: "70" is not a supported GPU architecture'
WEFT_CUDA_ARCH=9.0 expect 'cuda_arch.sh: "9.0" is not a supported GPU architecture'
gpus 7.0
expect 'cuda_arch.sh: "70" is not a supported GPU architecture (the GPU of this machine'
gpus
mkdir -p "$scratch/.deps/kokkos-cuda"
echo 120 >"$scratch/.deps/kokkos-cuda/weft_cuda_arch"
expect "120 that of .deps/kokkos-cuda"
for pair in "75 TURING75 75" "80 AMPERE80 80" "87 AMPERE86 86" "89 ADA89 89" "90 HOPPER90 90" "121 HOPPER90 90"; do
  expect "${pair#* }" --kokkos "${pair%% *}"
done

# configured KOKKOS ARCHITECTURES: what CMake says of Kokkos built for one architecture and Weft for others.
cat >"$scratch/check.cmake" <<'CMAKE'
set(PROJECT_SOURCE_DIR /weft)
set(Kokkos_DIR /weft/.deps/kokkos-cuda/lib/cmake/Kokkos)
include(${MODULE})
weft_kokkos_arch(found ${PREFIX})
weft_check_cuda_arch(${found})
CMAKE
configured() {
  mkdir -p "$scratch/kokkos/lib/cmake/Kokkos"
  echo "  SET(Kokkos_CUDA_ARCHITECTURES $1)" >"$scratch/kokkos/lib/cmake/Kokkos/KokkosConfigCommon.cmake"
  cmake "-DCMAKE_CUDA_ARCHITECTURES=$2" -DMODULE="$root/cmake/WeftCudaArchitecture.cmake" -DPREFIX="$scratch/kokkos" \
    -P "$scratch/check.cmake" 2>&1 | tr -s ' \n' ' '
}
for pair in "90 90" "90 120" "80 80;90;100" "86 89-real" "90 80-virtual" "90 90a-real"; do
  answer=$(configured "${pair%% *}" "${pair#* }")
  [[ -z $answer ]] || { echo "Kokkos and Weft for $pair: $answer"; failed=1; }
done
for pair in "90 80" "90 80;90;100" "89 86-real" "120 90"; do
  answer=$(configured "${pair%% *}" "${pair#* }")
  least=${pair#* }
  least=${least:0:2}
  for part in "was built for CUDA architecture ${pair%% *}" "WEFT_CUDA_ARCH=$least bash scripts/setup.sh --cuda"; do
    [[ $answer == *"$part"* ]] || { echo "Kokkos and Weft for $pair: \"$answer\" lacks \"$part\""; failed=1; }
  done
done
exit "$failed"
