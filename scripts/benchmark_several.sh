#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Everything that is measured on several GPUs of one machine, on 1, 2 and 4 of them in one go: transcoders of three sizes
# (scripts/benchmark_ranks.sh), a language model with its batch divided, one with its matrices divided, private training, and
# device.affinity. Prints the tables and writes runs/benchmark_several/: tables.md, benchmark.json of every run, and
# affinity_auto.json and affinity_none.json for docs/experiments/. The program must be built. About four minutes on four GPUs.
#
#   bash scripts/benchmark_several.sh [transcoder] [language] [tensor] [private] [affinity]     which parts; none: all
#   WEFT=PATH                        the program (build/cuda-release/weft)
#   WEFT_RANKS="1 2 4"               numbers of processes (default: 1 2 4, limited by the number of GPUs)
#   WEFT_SET="KEY=VALUE …"           settings for every run of transcoders
#   WEFT_LANGUAGE_SET="KEY=VALUE …"  settings for every run of language models: device.attention=cudnn
#   WEFT_RUN_SECONDS=100             a run that takes longer is stopped and omitted
#
# Exit codes: 0 measured; 1 a run failed (the tables contain the others); 2 nothing could be started.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
weft=${WEFT:-build/cuda-release/weft}
if [[ ! -x $weft ]]; then
  echo "benchmark_several.sh: $weft does not exist; build it (bash scripts/benchmark_gpu.sh gpt2_small), or set WEFT" >&2
  exit 2
fi
if [[ -z ${WEFT_RANKS:-} ]]; then
  gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
  if [[ $gpus -eq 0 ]]; then
    echo "benchmark_several.sh: nvidia-smi finds no GPU here; run it on a machine with GPUs, or set WEFT_RANKS" >&2
    exit 2
  fi
  for n in 1 2 4; do [[ $n -le $gpus ]] && WEFT_RANKS+=" $n"; done
fi
export WEFT_RANKS
# Open MPI starts as root only with both variables set; containers often run as root.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

parts=("$@")
[[ ${#parts[@]} -gt 0 ]] || parts=(transcoder language tensor private affinity)
output=runs/benchmark_several
rm -rf "$output"
mkdir -p "$output"
failed=0

# run NAME RANKS INPUT CASES [KEY=VALUE...]
run() {
  local folder=$output/$1_$2 ranks=$2 input=$3 settings=(--set "benchmark.cases=$4") code=0
  shift 4
  for setting in benchmark.warmup=4 benchmark.steps=5 benchmark.batches=1 "$@" ${WEFT_LANGUAGE_SET:-}; do
    settings+=(--set "$setting")
  done
  echo "${folder##*/}"
  timeout --kill-after=10 "${WEFT_RUN_SECONDS:-100}" mpiexec -n "$ranks" --oversubscribe --bind-to none "$weft" benchmark "$input" \
    --output "$folder" "${settings[@]}" >"$folder.log" 2>&1 || code=$?
  if [[ $code -ne 0 ]]; then
    failed=1
    echo "  failed with $code (124: time limit); last lines of $folder.log:" >&2
    tail -n 4 "$folder.log" >&2
  fi
}

# Sizes of steps; WEFT_TOKENS is for tests.
large=${WEFT_TOKENS:-262144} medium=${WEFT_TOKENS:-65536} small=${WEFT_TOKENS:-8192}
private="privacy.enabled=true, privacy.epsilon=8, privacy.delta=1e-6"
most=0
for ranks in $WEFT_RANKS; do most=$((ranks > most ? ranks : most)); done
for part in "${parts[@]}"; do
  case $part in
    transcoder)
      bash scripts/benchmark_ranks.sh gpt2_small llama_3_2_1b >"$output/transcoder.log" 2>&1 || failed=1
      grep -v '^|' "$output/transcoder.log"
      for folder in runs/benchmark_ranks/*/; do cp -r "$folder" "$output/transcoder_$(basename "$folder")"; done ;;
    language)
      for ranks in $WEFT_RANKS; do
        run language "$ranks" inputs/lm_gpt2_small.toml \
          "[\"124M, $large tokens: data.batch_tokens=$large\", \"124M, $medium tokens: data.batch_tokens=$medium\"]"
      done ;;
    tensor)
      for ranks in $WEFT_RANKS; do
        cases="\"Llama 1B, $medium tokens: data.batch_tokens=$medium\""
        for ((tensor = 2; tensor <= ranks; tensor *= 2)); do
          cases+=", \"Llama 1B, $medium tokens [tensor $tensor]: data.batch_tokens=$medium, parallel.tensor=$tensor\""
        done
        run tensor "$ranks" inputs/lm_llama_1b.toml "[$cases]" benchmark.steps=3
      done ;;
    private)
      for ranks in $WEFT_RANKS; do
        run private "$ranks" inputs/lm_gpt2_small.toml "[\"124M private, $medium tokens: data.batch_tokens=$medium, $private\", \
\"124M private, $medium tokens, no overlap: data.batch_tokens=$medium, $private, benchmark.private_overlap=false\"]" data.micro_tokens="$((medium / 4))"
      done ;;
    affinity)
      for affinity in auto none; do
        run "affinity_$affinity" "$most" inputs/lm_gpt2_small.toml "[\"124M, $small tokens: data.batch_tokens=$small\"]" \
          "device.affinity=$affinity" benchmark.steps=20
        mv "$output/affinity_${affinity}_$most/benchmark.json" "$output/affinity_$affinity.json" 2>/dev/null
      done ;;
    *) echo "benchmark_several.sh: unknown part: $part (known: transcoder, language, tensor, private, affinity)" >&2; exit 2 ;;
  esac
done
python3 scripts/ranks_tables.py "$output" >"$output/tables.md" || exit 1
if [[ -f $output/affinity_auto.json && -f $output/affinity_none.json ]]; then
  python3 - "$output" >>"$output/tables.md" <<'PYTHON'
import json
import sys
rates = [json.load(open(f"{sys.argv[1]}/affinity_{name}.json"))["cases"][0]["tokens_per_second"] for name in ("auto", "none")]
print(f"\ndevice.affinity: {rates[0]:,.0f} tokens/s with \"auto\", {rates[1]:,.0f} with \"none\"")
PYTHON
fi
cat "$output/tables.md"
exit "$failed"
