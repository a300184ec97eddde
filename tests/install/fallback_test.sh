#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# fallback_test.sh CUDA_PROGRAM CPU_PROGRAM: a CUDA build that sees no GPU is replaced by the program without CUDA, installed as
# weft-cpu or in the neighbouring build folder, with a warning in the log and the reason in run.json. device.backend = "cuda", and no
# such program, end with code 2. GPUs of this machine are hidden.
set -euo pipefail
cuda=$(realpath "$1") cpu=$(realpath "$2")
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
input=$root/inputs/quickstart.toml
export CUDA_VISIBLE_DEVICES=-1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

fail() { echo "$*" >&2; exit 1; }
small=(--set synthetic.tokens=3000 --set synthetic.validation_tokens=600)
short=(--set run.steps=3 --set data.batch_tokens=256 --set checkpoint.every=0)

# run NAME COMMAND...: code and messages in NAME.code and NAME.err
run() {
  local name=$1
  shift
  if "$@" >"$name.out" 2>"$name.err"; then echo 0 >"$name.code"; else echo $? >"$name.code"; fi
}
# train PROGRAM NAME OPTION...
train() { run "$2" "$1" train "$input" "${short[@]}" --output "$2" "${@:3}"; }
# expect NAME CODE TEXT
expect() {
  [[ $(<"$1.code") == "$2" ]] || fail "$1 ended with code $(<"$1.code"), not $2: $(<"$1.err")"
  grep -qF -- "$3" "$1.err" || fail "$1 lacks \"$3\": $(<"$1.err")"
}
# once NAME
once() { [[ $(grep -c "warning: no GPU" "$1.err") == 1 ]] || fail "$1: several warnings: $(<"$1.err")"; }

# Neither of these commands computes on a device: the CUDA program does them.
"$cuda" synth "$input" "${small[@]}" >synth.out 2>&1 || fail "synth: $(<synth.out)"
"$cuda" train "$input" "${short[@]}" --dry-run >dry.out 2>&1 || fail "dry run: $(<dry.out)"
if grep -q "no GPU is visible" synth.out dry.out; then fail "replaced for no reason"; fi

# Installed: the program alone, and with weft-cpu.
mkdir bin
cp "$cuda" bin/weft
train bin/weft alone
expect alone 2 "no GPU is visible"
cp "$cpu" bin/weft-cpu
train bin/weft installed
expect installed 0 "warning: no GPU is visible"
grep -q "warning: no GPU is visible .*the program without CUDA computes on the host" installed/log.txt || fail "log.txt: $(<installed/log.txt)"
grep -q '"device": "portable (Kokkos .*in place of the program with CUDA: no GPU is visible' installed/run.json || fail "run.json: $(<installed/run.json)"
once installed

# In the build folders.
train "$cuda" built
expect built 0 "warning: no GPU is visible"
train "$cuda" required --set 'device.backend="cuda"' --set 'device.precision="bf16"'
expect required 2 'device.backend = "cuda" is not available (no GPU is visible'

# Two ranks: one warning. One rank with each program (the variable keeps the first from being replaced): an error that names both.
run two mpirun --oversubscribe --bind-to none -n 2 "$cuda" train "$input" "${short[@]}" --output two
expect two 0 "warning: no GPU is visible"
once two
run mixed mpirun --oversubscribe --bind-to none -n 1 env WEFT_WITHOUT_GPU=here "$cuda" train "$input" "${short[@]}" --output mixed \
  : -n 1 "$cpu" train "$input" "${short[@]}" --output mixed
expect mixed 2 "rank 0 on "
expect mixed 2 "runs the program with CUDA, rank 1 on "
