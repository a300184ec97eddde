#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# From a fresh machine to a trained cross-layer transcoder and a trained language model: installs missing packages, builds, writes a
# dataset with planted features, trains on it and reports how many were recovered; then trains a character-level language model (two
# minutes on two cores). Finished runs are kept; an interrupted one is resumed.
#
#   bash scripts/quickstart.sh [--fresh]
#     --fresh   delete the data and runs of the last quickstart and start again
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
for argument in "$@"; do
  case $argument in
    --fresh) rm -rf runs/quickstart runs/quickstart_data runs/lm_character ;;
    *) echo "quickstart.sh: unknown option $argument (known: --fresh)" >&2; exit 2 ;;
  esac
done

say() { printf '\n== %s\n' "$*"; }

say "1. Required packages"
bash scripts/setup.sh
echo "ready"

say "2. Build"
log=build/quickstart.log
mkdir -p build
launcher=()
command -v ccache >/dev/null && launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
if ! { cmake --preset cpu-release -DWEFT_ENABLE_TESTS=OFF "${launcher[@]}" && cmake --build build/cpu-release; } >"$log" 2>&1; then
  tail -n 30 "$log" >&2
  echo "quickstart.sh: the build failed (its last lines are above, the complete log is $log)" >&2
  exit 1
fi
weft=build/cpu-release/weft
# Waiting threads sleep instead of spinning: on a shared machine, spinning made this run ten times slower.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
"$weft" --version

say "3. A dataset with planted features"
data=runs/quickstart_data
if [[ -e $data/complete ]]; then
  echo "kept: $data"
else
  rm -rf "$data"   # from an interrupted run
  "$weft" synth inputs/quickstart.toml
  touch "$data/complete"
fi

say "4. Train"
run=runs/quickstart
if [[ -e $run/complete ]]; then
  echo "kept: $run is finished (--fresh starts again)"
else
  "$weft" train inputs/quickstart.toml --output "$run"
  touch "$run/complete"
fi

say "5. Evaluate on the validation set"
checkpoint=$(find "$run/checkpoints" -maxdepth 1 -name 'step_????????' | sort | tail -n 1)
"$weft" evaluate "$checkpoint" --data "$data/validation"

say "6. A character-level language model"
"$weft" lm train inputs/lm_character.toml

as_root=''
[[ $(id -u) -ne 0 ]] || as_root='--allow-run-as-root '   # Open MPI refuses to start as root without it
cat <<TEXT

The transcoder is in $run/, the language model in runs/lm_character/
  run.json         result, timings, versions and input, for programs
  metrics.jsonl    one line per logged step
  checkpoints/     $(basename "$checkpoint") is the newest; can be read with h5py (bash scripts/setup.sh --tools installs it)
Next steps
  source build/cpu-release/env.sh          then the program is found as weft
  weft train inputs/quickstart.toml --set transcoder.k=4 --output runs/fewer
  mpirun ${as_root}-n 2 --oversubscribe weft train inputs/quickstart.toml --output runs/two_ranks
  weft inspect $checkpoint
  weft lm evaluate runs/lm_character
  weft train --defaults                    every key of an input, with its meaning
TEXT
