#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The steps inside a container, from copied sources to an installed program; afterwards it deletes the sources.
# container/weft.def and container/debian.sh run it, as root.
#
#   bash container/install.sh cpu-release|cuda-release      in /opt/weft
set -euo pipefail

preset=${1:?usage: install.sh cpu-release|cuda-release}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
setup=(--tools)
[[ $preset != cuda-* ]] || setup+=(--cuda)
bash scripts/setup.sh "${setup[@]}"

# A fixed target processor instead of that of the build machine: the image runs on other machines.
target=
[[ $(uname -m) != x86_64 ]] || target=x86-64-v3
cmake --preset "$preset" -DWEFT_ENABLE_TESTS=OFF -DWEFT_CPU_TARGET="$target" -DCMAKE_INSTALL_PREFIX=/usr/local
cmake --build "build/$preset"
cmake --install "build/$preset"
bash scripts/python.sh /usr/local/lib/weft
ln -sf /usr/local/lib/weft/bin/weft-* /usr/local/bin

rm -rf build .deps src kernels python
apt-get clean
rm -rf /var/lib/apt/lists/*
