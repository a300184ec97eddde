#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A picture like docs/figures/graph.svg (docs/attribution.md says how that one was made): a small transcoder of a language model is trained on
# a text on the CPU, and the graph of a prompt is drawn. Finished stages are kept.
#
#   bash scripts/graph_picture.sh MODEL TEXT HELD_OUT_TEXT DIR
#     MODEL   a directory of Hugging Face
#     DIR     receives activations (3.8 GB), transcoder, features, graph.json, graph.html and graph.svg
#   STEPS=288 PROMPT=TEXT NODES=26    steps of training, the prompt, features in the picture
set -euo pipefail

[[ $# -eq 4 ]] || { echo "graph_picture.sh: takes MODEL TEXT HELD_OUT_TEXT DIR" >&2; exit 2; }
model=$1 text=$2 held_out=$3 place=$4
prompt=${PROMPT:-In the beginning God created the heaven and the}
mkdir -p "$place"

weft lm harvest "$model" --text "$text" --tokens 49152 --type bf16 --output "$place/activations"
weft lm harvest "$model" --text "$held_out" --tokens 6144 --type bf16 --output "$place/validation"
cat >"$place/transcoder.toml" <<TOML
[run]
output = "$place/transcoder"
steps  = ${STEPS:-288}

[data]
train        = "$place/activations"
validation   = "$place/validation"
batch_tokens = 1024
window_rows  = 16384

[transcoder]
features   = 2048
decoder    = "per_layer"
activation = "batch_topk"
k          = 16

[optimizer]
learning_rate = 1e-3
TOML
weft train "$place/transcoder.toml"
[[ -d $place/thresholds ]] || weft convert "$place/transcoder" --output "$place/thresholds"
weft evaluate "$place/thresholds" --data "$place/validation"
weft features "$place/thresholds" --data "$place/activations" --output "$place/features"
weft attribute "$model" --transcoder "$place/thresholds" --prompt "$prompt" --output "$place/graph.json"
for page in graph.html graph.svg; do
  weft serve "$place/graph.json" "$place/features" --export "$place/$page" --graph graph.json --nodes "${NODES:-26}"
done
