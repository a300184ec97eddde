# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
#
# What run.sh and nodes.sh share; sourced with the path of weft. Starts a private Slurm with the settings of start_slurm.sh that
# the caller has exported, enters a temporary folder and prepares data, an input and the job scripts there; ends everything on exit.
# `edited` applies the edits of a user to a job script: only the lines named in its header.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
weft=$(realpath "${1:-$root/build/cpu-release/weft}")
scratch=$(mktemp -d /tmp/weft_scheduler.XXXXXX)   # short path: it contains Unix sockets
started=$SECONDS
PATH=$(dirname "$weft"):$PATH:/usr/sbin
export PATH
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive OMPI_MCA_mpi_yield_when_idle=1

# --- Tools ----------------------------------------------------------------------------------------------------------------

# left: processes of this test that are still running, by their working folder.
left() {
  local pid
  for pid in $(find /proc/[0-9]* -maxdepth 1 -name cwd -lname "$scratch*" -printf '%h\n' 2>/dev/null | cut -d/ -f3); do
    if [[ $pid -ne $$ ]] && grep -qs . "/proc/$pid/cmdline"; then echo "$pid"; fi
  done
}

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

finish() {
  local code=$? pid
  trap - EXIT
  thaw ""
  if [[ -e $scratch/slurm/slurm.conf ]] && ! bash "$root/tests/scheduler/start_slurm.sh" stop "$scratch/slurm"; then code=1; fi
  cd /
  for _ in 1 2 3 4 5; do [[ -z $(left) ]] || sleep 0.5; done
  for pid in $(left); do
    echo "still running: $(tr '\0' ' ' <"/proc/$pid/cmdline")"
    kill -KILL "$pid" 2>/dev/null
    code=1
  done
  rm -rf "$scratch"
  if [[ $code -eq 0 ]]; then echo "all cases passed, in $((SECONDS - started)) s"; fi
  exit "$code"
}
trap finish EXIT

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

# await SECONDS WHAT COMMAND... Limit for all cases together: 8 minutes. Killing this test from outside would leave a Slurm running.
await() {
  local limit=$((SECONDS + $1)) what=$2
  shift 2
  until "$@"; do
    if ((SECONDS >= limit || SECONDS >= started + 480)); then
      squeue
      fail "timeout: $what" ./*.log
    fi
    sleep 0.2
  done
}

value() { scontrol --oneliner show job "$1" | grep -o " $2=[^ ]*" | head -n 1 | cut -d= -f2; }
ended() { [[ $(value "$1" JobState) =~ ^(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL)$ ]]; }
log_of() { value "$1" StdOut; }

# expect_end JOB STATE CODE RESTARTS: waits for the end of the job and checks how it ended.
expect_end() {
  await 120 "the end of job $1" ended "$1"
  local found
  found="$(value "$1" JobState) $(value "$1" ExitCode) $(value "$1" Restarts)"
  [[ $found == "$2 $3 $4" ]] || fail "job $1 ($(value "$1" JobName)) ended as $found, not as $2 $3 $4" "$(log_of "$1")" "$(value "$1" StdErr)"
}
expect_line() { grep -qE -- "$2" "$1" || fail "no \"$2\" in $1" "$1"; }

newest() { basename "$(printf '%s\n' "runs/$1"/checkpoints/step_???????? | tail -n 1)"; }

# Compares the bytes of the last checkpoint of two runs.
same_parameters() {
  local last=checkpoints/step_00000600 rank
  for rank in 0 1; do
    cmp "$1/$last/rank_0000$rank.h5" "$2/$last/rank_0000$rank.h5" || fail "the parameters of $1 and $2 differ"
  done
}

# --- A Slurm, data, an input ----------------------------------------------------------------------------------------------

cd "$scratch" || exit
# A port that a concurrent test is unlikely to use, and as many simulated CPUs and GPUs as all jobs together request.
export SLURM_TEST_PORT=$((20000 + $$ % 12000)) SLURM_TEST_CPUS=128 SLURM_TEST_GPUS=32
bash "$root/tests/scheduler/start_slurm.sh" start "$scratch/slurm" >slurm.log 2>&1 || {
  code=$?
  cat slurm.log
  [[ $code -eq 77 ]] || echo "skipped: Slurm cannot be started here (its log is above)"
  if [[ $code -eq 77 ]]; then echo "skipped: Slurm is not installed (scripts/setup.sh --scheduler)"; fi
  exit 77
}
# shellcheck source=/dev/null
source "$scratch/slurm/env.sh"
held "private Slurm started"

small=(--set synthetic.output=data --set synthetic.layers=2 --set synthetic.tokens=8000 --set synthetic.validation_tokens=500
  --set data.train=data/train --set data.validation=data/validation --set data.batch_tokens=256
  --set run.steps=600 --set checkpoint.every=100 --set log.every=50)
weft train "$root/inputs/quickstart.toml" "${small[@]}" --print-config >quickstart.toml
weft synth "$root/inputs/quickstart.toml" "${small[@]}" >synth.log

# edited SCRIPT [NODES [RANKS_PER_NODE]]: two ranks with one core each, and a notice of 10 s. Slurm checks every 30 s, so it arrives 20 to
# 50 s after the start of a one-minute job.
edited() {
  sed -e "s/^#SBATCH --nodes=.*/#SBATCH --nodes=${2:-1}/" -e "s/^#SBATCH --ntasks-per-node=.*/#SBATCH --ntasks-per-node=${3:-2}/" \
    -e "s/^#SBATCH --gpus-per-node=.*/#SBATCH --gpus-per-node=${3:-2}/" \
    -e 's/^#SBATCH --cpus-per-task=.*/#SBATCH --cpus-per-task=1/' -e 's/USR1@180$/USR1@10/' \
    -e 's/^#PBS -l select=.*/#PBS -l select=1:ncpus=2:mpiprocs=2:ompthreads=1/' "$root/jobscripts/$1"
}
submit() { sbatch --parsable "$@"; }
