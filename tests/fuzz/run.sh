#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the fuzz targets with clang and runs them one after the other.
#
#   bash tests/fuzz/run.sh [--seconds N] [TARGET...]     N seconds each (60); all targets without names
#
# New inputs are stored in build/fuzz/corpus/TARGET, findings in build/fuzz/findings/TARGET. Crashes inside HDF5, caused by
# its own defects on damaged bytes, are counted separately, by the library in which the process ended.
#
# Exit codes: 0 no finding in Weft; 1 a finding or another failure; 2 usage, or clang is missing.
set -euo pipefail

seconds=60
targets=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --seconds) seconds=${2:?--seconds requires a number}; shift 2 ;;
    -*) echo "run.sh: unknown option $1 (valid: --seconds N)" >&2; exit 2 ;;
    *) targets+=("$1"); shift ;;
  esac
done
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
if ! command -v clang++ >/dev/null; then
  echo "run.sh: clang++ is missing (it provides libFuzzer); install the packages clang and libomp-dev" >&2
  exit 2
fi
[[ ${#targets[@]} -gt 0 ]] || targets=(input index metadata vocabulary statistics manifest activation_layout shard activation_bytes tokenizer json_rows
  foreign_tokens token_bytes safetensors weights_config huggingface)

cmake --preset fuzz -DWEFT_ENABLE_TESTS=ON >/dev/null
cmake --build build/fuzz --target "${targets[@]/#/fuzz_}"

# Temporary files in memory, if possible.
[[ -w /dev/shm ]] && export TMPDIR=/dev/shm
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=0 UBSAN_OPTIONS=print_stacktrace=1

# crash_place LOG: the object file of the innermost stack frame outside the sanitizer and the C and C++ libraries.
crash_place() {
  awk '/^ *#[0-9]+ 0x/ {
    if (/asan|sanitizer|fuzzer::|libc\.so|libstdc\+\+|ld-linux|__interceptor|operator new/) next
    if (match($0, /\([^()]*\+0x[0-9a-f]+\)/)) { frame = substr($0, RSTART + 1); sub(/\+0x.*/, "", frame); print frame; exit }
    print "weft"; exit
  }' "$1"
}

failed=0
for target in "${targets[@]}"; do
  program=$PWD/build/fuzz/tests/fuzz/fuzz_$target
  learned=build/fuzz/corpus/$target findings=build/fuzz/findings/$target log=build/fuzz/$target.log
  mkdir -p "$learned" "$findings"
  seeds=("tests/fuzz/corpus/$target")
  [[ $target == input ]] && seeds+=(inputs)
  limits=(-rss_limit_mb=2048 -malloc_limit_mb=2048 -timeout=10)
  case $target in
    # Continue after crashes inside HDF5.
    activation_* | shard | token_bytes) how=(-max_len=65536 -fork=1 -ignore_crashes=1 -ignore_ooms=1 -ignore_timeouts=1) ;;
    *) how=(-max_len=4096) ;;
  esac
  "$program" "${limits[@]}" "${how[@]}" -max_total_time="$seconds" -print_final_stats=1 -artifact_prefix="$PWD/$findings/" \
    "$learned" "${seeds[@]}" >"$log" 2>&1 || true

  own=0 foreign=0
  for found in "$findings"/*; do
    [[ -f $found && $found != *.txt && $found != */slow-unit-* ]] || continue
    "$program" "${limits[@]}" "$found" >"$found.txt" 2>&1 && continue   # not reproducible, such as a timeout on a busy machine
    place=$(crash_place "$found.txt")
    if [[ $place == *libhdf5* ]]; then foreign=$((foreign + 1)); else own=$((own + 1)); echo "  $found: ${place:-?}"; fi
  done
  [[ $own -gt 0 ]] && failed=1
  executed=$(sed -n 's/^stat::number_of_executed_units: *//p; s/^#\([0-9]*\): cov:.*/\1/p' "$log" | tail -n 1)
  echo "$target: ${executed:-?} executions in $seconds s, $own findings, $foreign inside HDF5"
done
exit "$failed"
