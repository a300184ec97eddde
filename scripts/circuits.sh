#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# From a language model to the graphs of prompts: trains a transcoder while the model runs over a text, evaluates the model with it in place of
# its MLPs, and writes pages of the features and of the graph of each prompt. Finished stages are kept; an interrupted training is resumed.
#
#   bash scripts/circuits.sh MODEL TEXT HELD_OUT_TEXT DIR [OPTION…]
#   bash scripts/circuits.sh --small DIR
#     MODEL    a directory of Hugging Face, or a run; HELD_OUT_TEXT has at least 8,192 tokens
#     DIR      receives everything: transcoder.toml, transcoder, evaluation, features, graphs, pages and pictures
#     OPTION   of weft train, as --set run.steps=500
#     --small  with a model of three layers, trained for seconds on a text of the repository: shows the commands, not what features mean
#   PROMPTS=FILE NODES=30    one prompt per line in place of those below; features in a picture
set -euo pipefail

small='' tokens=8192
if [[ $# -eq 2 && $1 == --small ]]; then
  small=$2 tokens=1024
  mkdir -p "$small"
  book=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/inputs/text/genesis_to_ruth.txt
  head -c 40000 "$book" >"$small/text.txt"
  tail -c 3000 "$book" >"$small/held_out.txt"
  cat >"$small/model.toml" <<TOML
[run]
output = "$small/model_run"
steps  = 30
[data]
train        = "$small/tokens"
batch_tokens = 512
sequence     = 64
[language_model]
layers  = 3
heads   = 2
d_model = 32
[optimizer]
learning_rate = 1e-2
warmup_steps  = 5
TOML
  [[ -d $small/tokens ]] || weft lm tokenize "$small/text.txt" --train-bpe 400 --output "$small/tokens"
  weft lm train "$small/model.toml"
  [[ -d $small/model ]] || weft lm export "$small/model_run" --output "$small/model"
  set -- "$small/model" "$small/text.txt" "$small/held_out.txt" "$small" --set run.steps=60 --set data.batch_tokens=512 \
    --set data.window_rows=4096 --set transcoder.features=64 --set transcoder.k=4 --set optimizer.learning_rate=4e-3
fi
[[ $# -ge 4 && $1 != -* ]] || { echo "circuits.sh: takes MODEL TEXT HELD_OUT_TEXT DIR, or --small DIR" >&2; exit 2; }
model=$1 text=$2 held_out=$3 place=$4
shift 4
mkdir -p "$place/graphs"
prompts=${PROMPTS:-$place/prompts.txt}
[[ -n ${PROMPTS:-} ]] || cat >"$prompts" <<'TEXT'
In the beginning God created the heaven and the
And the LORD said unto Moses, Stretch out thine
The children of Israel went out of the land of
TEXT

weft lm harvest "$model" --text "$held_out" --tokens "$tokens" --type bf16 --output "$place/validation"
weft init --model "$model" --text "$text" --validation "$place/validation" >"$place/transcoder.toml"
weft train "$place/transcoder.toml" --output "$place/transcoder" "$@"
# A selection over a batch depends on other tokens; thresholds depend on the token alone.
[[ -d $place/thresholds ]] || weft convert "$place/transcoder" --output "$place/thresholds"
# On a GPU weft init takes bf16, for all commands.
precision=$(sed -n 's/^precision = "\([a-z0-9]*\)".*/\1/p' "$place/transcoder.toml")
of_model=(--set "device.precision=${precision:-fp32}")
weft lm evaluate "$model" --transcoder "$place/thresholds" --text "$held_out" --output "$place/evaluation" "${of_model[@]}"
weft features "$place/thresholds" --model "$model" --downstream 5 --coactive 5 --output "$place/features"
weft attribute "$model" --transcoder "$place/thresholds" --prompts "$prompts" --output "$place/graphs/graph.json" "${of_model[@]}"
weft serve "$place/features" --export "$place/features.html"
for graph in "$place"/graphs/*.json; do
  for page in html svg; do
    name=$(basename "$graph" .json)
    weft serve "$graph" "$place/features" --export "$place/$name.$page" --graph "$name.json" --nodes "${NODES:-30}"
  done
done
echo "next: weft serve $place/features $place/graphs"
