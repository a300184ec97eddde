#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Strong scaling on the GPUs of this machine: the same step on 1, 2, 4 and 8 of them, with the cost of communication.
# Prints the tables of docs/performance.md, "Several GPUs", and writes runs/benchmark_ranks/: tables.md and benchmark.json of every run.
# The program must be built (scripts/benchmark_gpu.sh does this). About three minutes on four H200.
#
#   bash scripts/benchmark_ranks.sh [gpt2_small] [llama_3_2_1b] [olmo2_1b]     which sizes; none: all
#   WEFT=PATH                 the program (build/cuda-release/weft)
#   WEFT_RANKS="1 2 4"        numbers of processes (default: 1 2 4 8, limited by the number of GPUs)
#   WEFT_DATA="1 2"           sizes of the data axis to measure (default 1: all ranks share the features)
#   WEFT_SET="KEY=VALUE …"    settings for every run
#   WEFT_RUN_SECONDS=100      a run that takes longer is stopped and omitted
#
# Exit codes: 0 measured; 1 a run failed (the tables contain the others); 2 nothing could be started.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
weft=${WEFT:-build/cuda-release/weft}
if [[ ! -x $weft ]]; then
  echo "benchmark_ranks.sh: $weft does not exist; build it (bash scripts/benchmark_gpu.sh gpt2_small), or set WEFT" >&2
  exit 2
fi
if [[ -z ${WEFT_RANKS:-} ]]; then
  gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
  if [[ $gpus -eq 0 ]]; then
    echo "benchmark_ranks.sh: nvidia-smi finds no GPU here; run it on a machine with GPUs, or set WEFT_RANKS" >&2
    exit 2
  fi
  for n in 1 2 4 8; do [[ $n -le $gpus ]] && WEFT_RANKS+=" $n"; done
fi
# Open MPI starts as root only with both variables set; containers often run as root.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

settings=(--set benchmark.warmup=20 --set benchmark.steps=20 --set benchmark.batches=2)
for setting in ${WEFT_SET:-}; do settings+=(--set "$setting"); done
names=("$@")
[[ ${#names[@]} -gt 0 ]] || names=(gpt2_small llama_3_2_1b olmo2_1b)
output=runs/benchmark_ranks
rm -rf "$output"
mkdir -p "$output"
failed=0
for name in "${names[@]}"; do
  input=inputs/benchmark_$name.toml own=()
  case $name in
    gpt2_small) cases='["GPT-2 small, N=4096", "GPT-2 small, N=16384: data.batch_tokens=16384"]' ;;
    llama_3_2_1b) cases='["Llama-3.2-1B, N=16384: data.batch_tokens=16384"]' ;;
    olmo2_1b) # inputs/olmo2_1b.toml has the layers and the d_model of Llama-3.2-1B
      input=inputs/benchmark_llama_3_2_1b.toml
      cases='["OLMo-2-1B, F=100000, N=16384: data.batch_tokens=16384"]'
      own=(--set transcoder.features=100000 --set transcoder.k=12.5) ;;
    *) echo "benchmark_ranks.sh: unknown size: $name (known: gpt2_small, llama_3_2_1b, olmo2_1b)" >&2; exit 2 ;;
  esac
  for ranks in $WEFT_RANKS; do
    for data in ${WEFT_DATA:-1}; do
      [[ $((ranks % data)) -eq 0 ]] || continue
      if [[ $name == olmo2_1b ]] && ! plan=$("$weft" train inputs/olmo2_1b.toml --dry-run --set "parallel.world=$ranks" \
        --set "parallel.data=$data" 2>&1); then
        echo "$name on $ranks is skipped: ${plan##*$'\n'}"
        continue
      fi
      run=$output/${name}_${data}x$((ranks / data))
      echo "$name on $ranks, grid $data x $((ranks / data)) (data x feature)"
      timeout --kill-after=10 "${WEFT_RUN_SECONDS:-100}" mpiexec -n "$ranks" --oversubscribe --bind-to none "$weft" benchmark \
        "$input" --set "benchmark.cases=$cases" --set "run.output=$run" --set "parallel.data=$data" \
        ${own[@]+"${own[@]}"} "${settings[@]}" >"$run.log" 2>&1
      code=$?
      if [[ $code -ne 0 ]]; then
        failed=1
        echo "  failed with $code (124: time limit); last lines of $run.log:" >&2
        tail -n 4 "$run.log" >&2
      fi
    done
  done
done
python3 scripts/ranks_tables.py "$output" | tee "$output/tables.md" || exit 1
exit "$failed"
