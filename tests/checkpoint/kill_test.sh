#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# kill_test.sh DRIVER RANKS MPIEXEC FLAGS...: kills each rank at every point of the checkpoint protocol and restarts. The second start must
# resume from an intact checkpoint, the previous or the new one, and finish.
set -u
driver=$1 ranks=$2
shift 2
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failures=0

run() { "$@" >"$scratch/out" 2>"$scratch/err"; }

for point in after-open mid-dataset mid-dataset@5 before-close before-fsync before-manifest before-rename after-rename before-latest mid-delete; do
  for ((rank = 0; rank < ranks; rank++)); do
    directory=$scratch/$point-$rank
    WEFT_FAULT=$point:$rank:6:kill run "$@" -n "$ranks" "$driver" "$directory" 8 2
    status=$?
    if [ $status -eq 0 ]; then
      echo "$point on rank $rank: was not killed"
      failures=$((failures + 1))
      continue
    fi
    # Killed while writing step 6: steps 2 and 4 exist, and 6 if it was renamed.
    if ! run "$@" -n "$ranks" "$driver" "$directory" 10 2; then
      echo "$point on rank $rank: the second start failed"
      cat "$scratch/out" "$scratch/err"
      failures=$((failures + 1))
    elif ! grep -qE '^from (4|6)$' "$scratch/out"; then
      echo "$point on rank $rank: began $(head -1 "$scratch/out"), not from 4 or 6"
      failures=$((failures + 1))
    elif [ -n "$(find "$directory" -mindepth 1 -maxdepth 1 -name '*tmp*')" ] ||
      [ "$(find "$directory" -mindepth 1 -maxdepth 1 -name 'step_*' | wc -l)" -ne 2 ]; then
      echo "$point on rank $rank: the directory holds $(find "$directory" -mindepth 1 -maxdepth 1 -printf '%f ')"
      failures=$((failures + 1))
    else
      echo "$point on rank $rank: $(head -1 "$scratch/out")"
    fi
    rm -rf "$directory"
  done
done

# Killed between the two renames that replace a checkpoint of the same step: the old one returns.
directory=$scratch/replaced
run "$@" -n "$ranks" "$driver" "$directory" 6 2
if WEFT_FAULT=mid-replace:0:6:kill run "$@" -n "$ranks" "$driver" "$directory" 6 2 "from=$directory/step_00000004"; then
  echo "mid-replace: was not killed"
  failures=$((failures + 1))
elif ! run "$@" -n "$ranks" "$driver" "$directory" 10 2 || ! grep -q '^from 6$' "$scratch/out"; then
  echo "mid-replace: the next start did not resume from step 6"
  cat "$scratch/out" "$scratch/err"
  failures=$((failures + 1))
else
  echo "mid-replace: $(head -1 "$scratch/out")"
fi
exit $((failures > 0))
