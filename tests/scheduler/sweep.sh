#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# weft sweep --slurm under a real Slurm: a private one on this machine (start_slurm.sh). The points run as an array of jobs of the
# shipped script, edited as a user would; one of them is stopped and requeues itself.
#
#   bash tests/scheduler/sweep.sh [WEFT]     default build/cpu-release/weft; needs scripts/setup.sh --scheduler
#
# Exit codes: 0 all cases passed; 1 a case failed, its log is shown; 77 Slurm cannot be started here.
# shellcheck disable=SC1091,SC2154   # slurm.sh is checked by itself
set -euo pipefail

python=${WEFT_PYTHON:-/usr/bin/python3}
"$python" -c 'import numpy, h5py, matplotlib' 2>/dev/null || { echo "skipped: $python has no NumPy, h5py and matplotlib (scripts/setup.sh --tests)"; exit 77; }
package=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../python" && pwd)
source "$(dirname "${BASH_SOURCE[0]}")/slurm.sh"

mkdir programs
printf '#!/bin/sh\nPYTHONPATH="%s" exec "%s" -m weft.sweep.command "$@"\n' "$package" "$python" >programs/weft-sweep
chmod +x programs/weft-sweep
PATH=$PATH:$PWD/programs

edited slurm.sbatch >site.sbatch
sweep=(weft sweep quickstart.toml --grid "optimizer.learning_rate=1e-3,3e-3" --grid "transcoder.k=4,8" --output runs
  --set run.steps=60 --set checkpoint.every=20)
all_finished() { [[ $(grep -ls '"code": 0' runs/*/run.json | wc -l) -eq 4 && -z $(squeue -h) ]]; }

WEFT_FAULT=step:0:30:usr1 "${sweep[@]}" --slurm --script site.sbatch --jobs 2 >submit.log 2>&1 || fail "the sweep was not submitted" submit.log
expect_line submit.log "Submitted batch job"
expect_line submit.log "4 points submitted"
[[ $(squeue -h --array | wc -l) -eq 4 ]] || fail "$(squeue)" submit.log
await 240 "the end of the array" all_finished
for name in runs/*/; do
  grep -q '"code": 0' "$name/run.json" || fail "$name has not finished" "$name/run.json" ./*.log
  grep -q '"start_number": 2' "$name/run.json" || fail "$name was not requeued" "$name/run.json" ./*.log
done
held "four points as an array of jobs, each stopped once and requeued"

"${sweep[@]}" --slurm --script site.sbatch >table.log 2>&1 || fail "the table was not written" table.log
expect_line table.log "4 points, 4 finished"
[[ $(wc -l <runs/sweep.csv) -eq 5 && -s runs/sweep.html && -z $(squeue -h) ]] || fail "not one row per point" runs/sweep.csv table.log
held "the same command then writes the table, and submits nothing"
