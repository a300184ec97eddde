#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# From a fresh machine to a trained cross-layer transcoder: installs what is missing, builds, writes a dataset with planted
# features, trains on it and says what was found. A finished run is kept and shown again; an interrupted one goes on.
#
#   bash scripts/quickstart.sh [--fresh]
#     --fresh   throw the last quickstart's data and run away and begin again
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
for argument in "$@"; do
  case $argument in
    --fresh) rm -rf runs/quickstart runs/quickstart_data ;;
    *) echo "quickstart.sh: unknown option $argument (known: --fresh)" >&2; exit 2 ;;
  esac
done

say() { printf '\n== %s\n' "$*"; }

say "1. What the machine needs"
bash scripts/setup.sh
echo "ready"

say "2. Build"
log=build/quickstart.log
mkdir -p build
launcher=()
command -v ccache >/dev/null && launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
if ! { cmake --preset cpu-release -DWEFT_ENABLE_TESTS=OFF "${launcher[@]}" && cmake --build build/cpu-release; } >"$log" 2>&1; then
  tail -n 30 "$log" >&2
  echo "quickstart.sh: the build failed (its last lines are above, all of it in $log)" >&2
  exit 1
fi
weft=build/cpu-release/weft
# Waiting threads sleep instead of spinning: on a machine that others use as well, spinning made this run ten times slower.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
"$weft" --version

say "3. A dataset with planted features"
data=runs/quickstart_data
if [[ -e $data/complete ]]; then
  echo "kept: $data"
else
  rm -rf "$data"   # left by an interrupted run
  "$weft" synth inputs/quickstart.toml
  touch "$data/complete"
fi

say "4. Train"
run=runs/quickstart
if [[ -e $run/complete ]]; then
  echo "kept: $run is finished (--fresh begins again)"
else
  "$weft" train inputs/quickstart.toml --output "$run"
  touch "$run/complete"
fi

say "5. Held-out data"
checkpoint=$(find "$run/checkpoints" -maxdepth 1 -name 'step_????????' | sort | tail -n 1)
"$weft" evaluate "$checkpoint" --data "$data/validation"

cat <<TEXT

The run is in $run/
  run.json         result, timings, versions and input, for programs
  metrics.jsonl    one line a logged step
  checkpoints/     $(basename "$checkpoint") is the last; h5py reads it
What to try next
  $weft train inputs/quickstart.toml --set transcoder.k=4 --output runs/fewer
  mpirun -n 2 $weft train inputs/quickstart.toml --output runs/two_ranks
  $weft inspect $checkpoint
  $weft train --defaults          every key of an input, with its meaning
TEXT
