#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Prints the size of the program: lines per module of C++ and CUDA, of tests and Python, and keys per table of an input.
#
#   bash scripts/lines.sh [WEFT]    WEFT: the program that lists its keys (build/cpu-release/weft; without it keys are left out)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# lines FOLDER SUFFIX...: of all files below it
lines() {
  local folder=$1
  shift
  local names=()
  for suffix in "$@"; do names+=(-o -name "*.$suffix"); done
  find "$folder" -type f \( "${names[@]:1}" \) -print0 | xargs -0 -r cat | wc -l
}

echo "| module | lines |"
echo "|---|---:|"
total=0
for folder in src/*/ kernels/*/; do
  n=$(lines "$folder" cpp hpp cu cuh)
  echo "| \`${folder%/}\` | $n |"
done
for top in src kernels; do total=$((total + $(lines $top cpp hpp cu cuh))); done
echo "| **C++ and CUDA** | **$total** |"
echo "| \`tests\`: C++ and CUDA | $(lines tests cpp hpp cu cuh) |"
echo "| \`tests\`: Python and shell | $(lines tests py sh) |"
echo "| \`python\` | $(lines python py) |"
echo "| \`scripts\`, \`jobscripts\` | $(($(lines scripts py sh) + $(lines jobscripts sh sbatch pbs))) |"
weft=${1:-build/cpu-release/weft}
[[ -x $weft ]] || exit 0
echo
echo "| table | keys |"
echo "|---|---:|"
"$weft" --reference | awk '/^## /{table = $0; sub(/^## /, "", table)} /^\| `/{keys[table]++; all++} END {for (t in keys) print "| " t " | " keys[t] " |" | "sort"; close("sort"); print "| **all** | **" all "** |"}'
