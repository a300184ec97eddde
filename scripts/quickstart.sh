#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# From a fresh machine to a language model and its cross-layer transcoder: installs missing packages, builds, trains a character-level
# language model (a minute on two cores), records its MLPs on its text, trains a transcoder on that, shows what the features respond to,
# measures what the model loses with the transcoder in place of its MLPs, and exports the transcoder for circuit-tracer.
# Finished stages are kept; an interrupted one is resumed.
#
#   bash scripts/quickstart.sh [--fresh]
#     --fresh   delete the data and runs of the last quickstart and start again
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
for argument in "$@"; do
  case $argument in
    --fresh) rm -rf runs/character_model runs/character_data runs/character_transcoder ;;
    *) echo "quickstart.sh: unknown option $argument (known: --fresh)" >&2; exit 2 ;;
  esac
done

say() { printf '\n== %s (after %d s)\n' "$*" "$SECONDS"; }

say "1. Required packages"
bash scripts/setup.sh --tools
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
bash scripts/python.sh   # reports and other pages
PATH=$PATH:$PWD/.deps/python/bin
# Waiting threads sleep instead of spinning: on a shared machine, spinning made this run ten times slower.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
"$weft" --version

model=runs/character_model data=runs/character_data run=runs/character_transcoder
say "3. A character-level language model: $model"
# 600 of the 900 steps of the input: validation loss 1.547 instead of 1.430. With the input's schedule it would be 1.616.
"$weft" lm train inputs/lm_character.toml --output "$model" --set run.steps=600 --set optimizer.schedule=linear \
  --set optimizer.decay_begin=0.5 --set optimizer.final_fraction=0

say "4. Its MLP inputs and outputs on its text: $data"
"$weft" lm harvest "$model" --tokens 100000 --type bf16 --output "$data/train"
"$weft" lm harvest "$model" --split validation --tokens 8192 --type bf16 --output "$data/validation"

say "5. A cross-layer transcoder of the MLPs: $run"
"$weft" train inputs/character_transcoder.toml --output "$run"

say "6. What the features respond to: $run/features/features.html, to be opened in a browser"
"$weft" features "$run" --model "$model" --output "$run/features"
"$weft" serve "$run/features" --export "$run/features/features.html"

say "7. The language model with the transcoder in place of its MLPs, on text that neither has seen, and the pages of both runs"
tail -c 16384 inputs/text/genesis_to_ruth.txt >"$data/held_out.txt"
"$weft" lm evaluate "$model" --text "$data/held_out.txt" --transcoder "$run" --output "$run"
"$weft" report "$run"
"$weft" report "$model"

say "8. The transcoder in the files of circuit-tracer: $run/circuit-tracer"
rm -rf "$run/thresholds" "$run/circuit-tracer"   # of an earlier start
# circuit-tracer knows thresholds, not the k largest; 500 steps of training adapt the transcoder to them
"$weft" convert "$run" --output "$run/thresholds" --finetune 500
"$weft" export "$run/thresholds" "$run/circuit-tracer" --to circuit-tracer --model lm_character --input-hook mlp.hook_in --output-hook mlp.hook_out

as_root=''
[[ $(id -u) -ne 0 ]] || as_root='--allow-run-as-root '   # Open MPI refuses to start as root without it
cat <<TEXT

Everything is in $model/ and $run/
  report.html                the run: curves, result, timings
  features/features.html     features of the transcoder that fire most, with the text that they respond to
  evaluation.json            losses with replaced MLPs, per layer and together
  run.json, metrics.jsonl    result, timings, versions and input; one line per logged step
  checkpoints/               can be read with h5py, or: import weft, in .deps/python/bin/python
Next steps
  source build/cpu-release/env.sh          then the program is found as weft
  weft serve $run/features     all features, in a browser
  weft synth inputs/quickstart.toml        planted features: how many does a transcoder find?
  weft train inputs/quickstart.toml
  weft train inputs/character_transcoder.toml --set transcoder.k=16 --output runs/fewer
  mpirun ${as_root}-n 2 --oversubscribe weft train inputs/character_transcoder.toml --output runs/two_ranks
  weft train --defaults                    every key of an input, with its meaning
TEXT
