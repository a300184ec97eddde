# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
#
# What the tests of the job scripts share, whatever the scheduler. The caller defines `weft`, the path of the program, and `queue`, which
# prints the jobs. `edited` applies the edits of a user to a job script: only the lines named in its header.
# shellcheck disable=SC2154

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
started=$SECONDS
steps=1500   # of a run

# processes RUN: processes with this run on their command line: programs, launchers and job scripts.
processes() { { grep -la -- "[r]uns/$1" /proc/[0-9]*/cmdline 2>/dev/null || true; } | cut -d/ -f3; }

# stopped RUN: ranks of weft that have stopped themselves (fault "stop"). thaw RUN continues them.
stopped() {
  local pid
  for pid in $(processes "$1"); do
    if [[ $(readlink "/proc/$pid/exe") == "$weft" ]] && grep -qs "^State:.T" "/proc/$pid/status"; then echo "$pid"; fi
  done
}
frozen() { [[ $(stopped "$1" | wc -l) -eq 2 ]]; }
usr1_pending() {   # True if USR1 is pending for all of them
  local pid
  for pid in $(stopped "$1"); do
    ((0x$(sed -n 's/^ShdPnd:[[:space:]]*//p' "/proc/$pid/status") & 1 << 9)) || return 1
  done
}
thaw() { stopped "$1" | xargs -r kill -CONT; }

# fail WHAT [FILE...]: ends this test and shows the files.
fail() {
  local file
  echo "FAILED: $1"
  shift
  for file in "$@"; do
    echo "--- $file"
    tail -n 40 "$file"
  done
  exit 1
}

held() { echo "passed, $((SECONDS - started)) s: $*"; }

# await SECONDS WHAT COMMAND... Limit for all cases together: 8 minutes. Killing this test from outside would leave daemons running.
await() {
  local limit=$((SECONDS + $1)) what=$2
  shift 2
  until "$@"; do
    if ((SECONDS >= limit || SECONDS >= started + 480)); then
      queue
      fail "timeout: $what" ./*.log
    fi
    sleep 0.2
  done
}

expect_line() { grep -qE -- "$2" "$1" || fail "no \"$2\" in $1" "$1"; }

newest() { basename "$(printf '%s\n' "runs/$1"/checkpoints/step_???????? | tail -n 1)"; }

# Compares the bytes of the last checkpoint of two runs.
same_parameters() {
  local last rank
  last=checkpoints/step_$(printf %08d "$steps")
  for rank in 0 1; do
    cmp "$1/$last/rank_0000$rank.h5" "$2/$last/rank_0000$rank.h5" || fail "the parameters of $1 and $2 differ"
  done
}

# prepare [COMMAND...]: an input and its data, made by weft; COMMAND starts it.
prepare() {
  local small=(--set synthetic.output=data --set synthetic.layers=2 --set synthetic.tokens=8000 --set synthetic.validation_tokens=500
    --set data.train=data/train --set data.validation=data/validation --set data.batch_tokens=256
    --set "run.steps=$steps" --set checkpoint.every=100 --set log.every=50)
  "$@" weft train "$root/inputs/quickstart.toml" "${small[@]}" --print-config >quickstart.toml
  "$@" weft synth "$root/inputs/quickstart.toml" "${small[@]}" >synth.log
}

# edited SCRIPT [NODES [RANKS_PER_NODE]]: two ranks with one core each, and a notice of 10 s. Slurm checks every 30 s, so it arrives 20 to
# 50 s after the start of a one-minute job.
edited() {
  sed -e "s/^#SBATCH --nodes=.*/#SBATCH --nodes=${2:-1}/" -e "s/^#SBATCH --ntasks-per-node=.*/#SBATCH --ntasks-per-node=${3:-2}/" \
    -e "s/^#SBATCH --gpus-per-node=.*/#SBATCH --gpus-per-node=${3:-2}/" \
    -e 's/^#SBATCH --cpus-per-task=.*/#SBATCH --cpus-per-task=1/' -e 's/USR1@180$/USR1@10/' \
    -e 's/^#PBS -l select=.*/#PBS -l select=1:ncpus=2:mpiprocs=2:ompthreads=1/' "$root/jobscripts/$1"
}
