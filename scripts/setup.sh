#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Prepares a Debian 12+ or Ubuntu 24.04+ machine to build Weft: installs missing packages, and builds Kokkos once into .deps/
# if none is installed. Running it again changes nothing; an interruption leaves no partial results.
#
#   bash scripts/setup.sh [--tools] [--tests] [--cuda] [--scheduler]
#     --tools      also what the Python package needs (NumPy, h5py, matplotlib, Jinja2; scripts/python.sh installs it)
#     --tests      also the dependencies of the tests (doctest, shellcheck, PyYAML, those of --tools)
#     --cuda       also Kokkos for CUDA, if nvcc is found, and the headers for attention by cuDNN (without network: left out)
#                  Kokkos is built again if it is for another GPU than WEFT_CUDA_ARCH names, or than this machine has
#     --scheduler  also Slurm and its Torque commands, for tests/scheduler/run.sh; no service is started
#   WEFT_BUNDLE=DIR            for machines without network access: Kokkos from a bundle made elsewhere (scripts/bundle.sh); no
#                              package is installed, and CMake reports what is missing
#   WEFT_CUDA_ARCH=80          architecture of the GPU (90 for compute capability 9.0) instead of that of this machine's GPU; 90 without
#                              a GPU (scripts/cuda_arch.sh); of several the least
#   WEFT_KOKKOS_ARCHIVE=FILE   the pinned archive of Kokkos, downloaded elsewhere (cmake/kokkos_archive.txt)
#
# Exit codes: 0 ready; 2 packages are missing that only an administrator can install (they are listed); 1 any other failure.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
want_tools=no
want_tests=no
want_cuda=no
want_scheduler=no
for argument in "$@"; do
  case $argument in
    --tools) want_tools=yes ;;
    --tests) want_tests=yes want_tools=yes ;;
    --cuda) want_cuda=yes ;;
    --scheduler) want_scheduler=yes ;;
    *) echo "setup.sh: unknown option $argument (known: --tools --tests --cuda --scheduler)" >&2; exit 2 ;;
  esac
done

# --- Packages -------------------------------------------------------------------------------------------------------------

# have PACKAGE|ALTERNATIVE...: is one of them installed?
have() {
  local name
  for name in ${1//|/ }; do
    [[ $(dpkg-query -W -f '${Status}' "$name" 2>/dev/null) == "install ok installed" ]] && return 0
  done
  return 1
}

# The first name is installed if none of the alternatives is present.
packages=(
  "g++" "cmake" "ninja-build" "pkg-config|pkgconf"
  "openmpi-bin|mpich" "libopenmpi-dev|libmpich-dev"
  "libhdf5-dev|libhdf5-openmpi-dev|libhdf5-mpich-dev"
  "libopenblas-openmp-dev|libopenblas-pthread-dev|libopenblas-serial-dev"
  "libtomlplusplus-dev" "libcli11-dev" "libspdlog-dev" "libfmt-dev" "nlohmann-json3-dev" "libssl-dev"
  "libpcre2-dev" "libutf8proc-dev" "libkissfft-dev" "libzstd-dev" "liblz4-dev"
)
[[ $want_tools == yes ]] &&
  packages+=("python3-numpy" "python3-h5py" "python3-matplotlib" "python3-jinja2" "python3-venv" "python3-pip" "python3-setuptools" "python3-wheel")
[[ $want_tests == yes ]] && packages+=("doctest-dev" "python3-yaml" "shellcheck")
[[ $want_scheduler == yes ]] && packages+=("slurm-wlm" "munge" "slurm-wlm-torque")
bundle=${WEFT_BUNDLE:-}
if [[ -n $bundle ]]; then
  packages=()
  bundle=$(cd "$bundle" && pwd)
fi

missing_packages() {
  local entry
  for entry in "${packages[@]}"; do
    # Commands installed by other means (for example a newer CMake) count as well.
    case $entry in
      g++) command -v g++ >/dev/null && continue ;;
      cmake) command -v cmake >/dev/null && continue ;;
      ninja-build) command -v ninja >/dev/null && continue ;;
      pkg-config*) command -v pkg-config >/dev/null && continue ;;
    esac
    have "$entry" || echo "${entry%%|*}"
  done
}

as_root() {
  if [[ $(id -u) -eq 0 ]]; then "$@"; else sudo "$@"; fi
}

can_be_root() {
  [[ $(id -u) -eq 0 ]] && return 0
  command -v sudo >/dev/null || return 1
  sudo -n true 2>/dev/null && return 0
  [[ -t 0 ]] && sudo -v   # asks for the password on a terminal
}

install_packages() {
  local names=("$@")
  if ! command -v apt-get >/dev/null || ! can_be_root; then
    echo "setup.sh: ${#names[@]} packages are missing and cannot be installed here (neither root nor sudo); ask an administrator to run:" >&2
    echo "  apt-get update && apt-get install --no-install-recommends ${names[*]}" >&2
    exit 2
  fi
  echo "Installing: ${names[*]}"
  local install=(env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${names[@]}")
  # Package lists may be absent (a fresh container) or stale: update them only if the first attempt fails.
  local log
  log=$(mktemp)
  if ! as_root "${install[@]}" >"$log" 2>&1; then
    if ! { as_root apt-get update -q && as_root "${install[@]}"; } >"$log" 2>&1; then
      tail -n 20 "$log" >&2
      rm -f "$log"
      echo "setup.sh: apt-get could not install ${names[*]} (its last lines are above)" >&2
      exit 1
    fi
  fi
  rm -f "$log"
}

if [[ -z $bundle ]] && ! command -v dpkg-query >/dev/null; then
  echo "setup.sh: this is neither Debian nor Ubuntu (no dpkg); install the libraries listed in docs/dependencies.md by other means" >&2
  exit 2
fi
mapfile -t missing < <(missing_packages)
[[ ${#missing[@]} -gt 0 ]] && install_packages "${missing[@]}"

required_cmake=3.25
command -v cmake >/dev/null || { echo "setup.sh: cmake is missing; install $required_cmake or later" >&2; exit 2; }
found_cmake=$(cmake --version | sed -n '1s/[^0-9]*//p')
if [[ $(printf '%s\n' "$required_cmake" "$found_cmake" | sort -V | head -n 1) != "$required_cmake" ]]; then
  echo "setup.sh: $(command -v cmake) is $found_cmake (Weft needs $required_cmake or later); install a newer one or put it first in PATH" >&2
  exit 2
fi

# --- Kokkos ---------------------------------------------------------------------------------------------------------------

deps=$root/.deps
mkdir -p "$deps"
# Of two concurrent set-ups the second waits and then finds Kokkos built.
exec {lock}>"$deps/.lock"
flock "$lock"
scratch=$(mktemp -d "$deps/.scratch.XXXXXX")
trap 'rm -rf "$scratch"' EXIT

# installed_kokkos cpu|cuda: does CMake find a Kokkos >= 4.5 that was not built by this script?
installed_kokkos() {
  mkdir -p "$scratch/find"
  cat >"$scratch/find/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.25)
project(find_kokkos LANGUAGES CXX)
find_package(Kokkos 4.5 CONFIG REQUIRED COMPONENTS separable_compilation)
if(WANT STREQUAL "cuda" AND NOT Kokkos_COMPILE_LANGUAGE STREQUAL "CUDA")
  message(FATAL_ERROR "not a CUDA Kokkos")
endif()
CMAKE
  rm -rf "$scratch/find/build"
  cmake -S "$scratch/find" -B "$scratch/find/build" -DWANT="$1" >/dev/null 2>&1
}

# The pinned archive: from the bundle, from WEFT_KOKKOS_ARCHIVE, or through pip.
fetch_kokkos() {
  [[ -d $scratch/kokkos ]] && return 0
  local archive code=0
  if [[ -n $bundle ]]; then
    WEFT_KOKKOS_ARCHIVE=$(find "$bundle/archive" -name 'pycompadre-*.tar.gz')
    export WEFT_KOKKOS_ARCHIVE
  fi
  archive=$(bash "$root/scripts/kokkos_archive.sh" "$scratch/download") || code=$?
  if [[ $code -eq 3 ]]; then
    install_packages python3-pip
    archive=$(bash "$root/scripts/kokkos_archive.sh" "$scratch/download") || exit 1
  elif [[ $code -ne 0 ]]; then
    exit 1
  fi
  mkdir -p "$scratch/archive"
  tar -xzf "$archive" -C "$scratch/archive" --strip-components=1 --wildcards '*/kokkos'
  mv "$scratch/archive/kokkos" "$scratch/kokkos"
}

# build_kokkos NAME OPTION...: into .deps/NAME, which is created complete or not at all.
build_kokkos() {
  local name=$1 prefix=$deps/$1
  shift
  fetch_kokkos
  echo "Building $name (once; about a minute)"
  local options=()
  command -v ccache >/dev/null && options=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
  command -v ninja >/dev/null && options+=(-G Ninja)
  if ! { cmake -S "$scratch/kokkos" -B "$scratch/$name" -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_STANDARD=20 \
           -DCMAKE_INSTALL_PREFIX="$prefix" -DCMAKE_INSTALL_LIBDIR=lib -DCMAKE_POSITION_INDEPENDENT_CODE=ON \
           -DKokkos_ENABLE_SERIAL=ON -DKokkos_ENABLE_IMPL_MDSPAN=OFF "${options[@]}" "$@" &&
         cmake --build "$scratch/$name" --parallel "$(nproc)" &&
         DESTDIR=$scratch/stage cmake --install "$scratch/$name"; } >"$deps/$name.log" 2>&1; then
    tail -n 20 "$deps/$name.log" >&2
    echo "setup.sh: Kokkos could not be built (the last lines of $deps/$name.log are above)" >&2
    exit 1
  fi
  rm -rf "$prefix"
  mv "$scratch/stage$prefix" "$prefix"
}

complete() { [[ -e $deps/$1/lib/cmake/Kokkos/KokkosConfig.cmake ]]; }

if ! complete kokkos-cpu && ! installed_kokkos cpu; then
  build_kokkos kokkos-cpu -DKokkos_ENABLE_OPENMP=ON -DCMAKE_UNITY_BUILD=ON   # in groups: most of the time is that of its headers
fi
if [[ $want_cuda == yes ]] && command -v nvcc >/dev/null; then
  answer=$(bash "$root/scripts/cuda_arch.sh") || exit 2
  read -r cuda_arch why <<<"$answer"
  read -r kokkos_option kokkos_arch < <(bash "$root/scripts/cuda_arch.sh" --kokkos "$cuda_arch")
  built=$(sed -n 's/.*Kokkos_CUDA_ARCHITECTURES \([0-9]*\).*/\1/p' "$deps/kokkos-cuda/lib/cmake/Kokkos/KokkosConfigCommon.cmake" 2>/dev/null) ||
    built=
  wanted=no
  if ! complete kokkos-cuda; then
    installed_kokkos cuda || wanted=yes
  elif [[ $built != "$kokkos_arch" && $why != "no GPU is visible here" ]]; then
    wanted=yes
  fi
  if [[ $wanted == yes ]]; then
    echo "Kokkos for CUDA architecture $kokkos_arch: the GPU's is $cuda_arch ($why)"
    build_kokkos kokkos-cuda -DKokkos_ENABLE_CUDA=ON "-DKokkos_ARCH_$kokkos_option=ON" -DKokkos_ENABLE_COMPILE_AS_CMAKE_LANGUAGE=ON \
      "-DCMAKE_CUDA_FLAGS=-std=c++20 -include $root/cmake/cuda13_compatibility.hpp"
  fi
  # CMake takes it where no GPU is visible and none is named.
  if complete kokkos-cuda && [[ $why != "no GPU is visible here" ]]; then echo "$cuda_arch" >"$deps/kokkos-cuda/weft_cuda_arch"; fi
fi
# A bundle has them already. Without them Weft is built without cuDNN.
if [[ $want_cuda == yes && -z $bundle && ! -d $deps/cudnn ]] && command -v nvcc >/dev/null; then
  bash "$root/scripts/cudnn_headers.sh" "$deps/cudnn" || echo "setup.sh: attention by cuDNN is left out (its headers are not there)" >&2
fi
