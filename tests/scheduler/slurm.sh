# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
#
# What run.sh, nodes.sh and sweep.sh share; sourced with the path of weft. Starts a private Slurm with the settings of start_slurm.sh that
# the caller has exported, enters a temporary folder and prepares data, an input and the job scripts there; ends everything on exit.
# shellcheck disable=SC1091,SC2154   # tools.sh is checked by itself

source "$(dirname "${BASH_SOURCE[0]}")/tools.sh"
weft=$(realpath "${1:-$root/build/cpu-release/weft}")
scratch=$(mktemp -d /tmp/weft_scheduler.XXXXXX)   # short path: it contains Unix sockets
PATH=$(dirname "$weft"):$PATH:/usr/sbin
export PATH
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive OMPI_MCA_mpi_yield_when_idle=1

# --- Tools ----------------------------------------------------------------------------------------------------------------

queue() { squeue; }

# left: processes of this test that are still running, by their working folder.
left() {
  local pid
  for pid in $(find /proc/[0-9]* -maxdepth 1 -name cwd -lname "$scratch*" -printf '%h\n' 2>/dev/null | cut -d/ -f3); do
    if [[ $pid -ne $$ ]] && grep -qs . "/proc/$pid/cmdline"; then echo "$pid"; fi
  done
}

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

value() { scontrol --oneliner show job "$1" | grep -o " $2=[^ ]*" | head -n 1 | cut -d= -f2; }
ended() { [[ $(value "$1" JobState) =~ ^(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL)$ ]]; }
log_of() { value "$1" StdOut; }

# expect_end JOB STATE CODE RESTARTS: waits for the end of the job and checks how it ended; RESTARTS is a regular expression.
expect_end() {
  await 180 "the end of job $1" ended "$1"
  local found
  found="$(value "$1" JobState) $(value "$1" ExitCode) $(value "$1" Restarts)"
  [[ $found =~ ^"$2 $3 "$4$ ]] || fail "job $1 ($(value "$1" JobName)) ended as $found, not as $2 $3 $4" "$(log_of "$1")" "$(value "$1" StdErr)"
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

prepare

submit() { sbatch --parsable "$@"; }
