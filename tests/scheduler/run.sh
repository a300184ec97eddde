#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The shipped job scripts under a real Slurm: a private one on this machine (start_slurm.sh), with a reduced quickstart input and
# two ranks per job. Every job script is edited as a user would: only the lines named in its header.
#
#   bash tests/scheduler/run.sh [WEFT]       default build/cpu-release/weft; needs scripts/setup.sh --scheduler
#
# Exit codes: 0 all cases passed; 1 a case failed, its log is shown; 77 Slurm cannot be started here.
set -euo pipefail

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

cd "$scratch"
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

# Slurm accepts every script as shipped.
for script in slurm slurm_mpirun apptainer; do
  sbatch --test-only "$root/jobscripts/$script.sbatch" quickstart.toml runs/none 2>test_only.log || fail "$script.sbatch is refused" test_only.log
done
sbatch --test-only --nodes=1 --mem=0 "$root/jobscripts/kestrel/train.sbatch" quickstart.toml runs/none 2>test_only.log ||
  fail "kestrel/train.sbatch is refused" test_only.log

# Two ranks with one core each, and a notice of 10 s: Slurm checks every 30 s, so it arrives 20 to 50 s after the start of a one-minute job.
edited() {
  sed -e 's/^#SBATCH --ntasks-per-node=.*/#SBATCH --ntasks-per-node=2/' -e 's/^#SBATCH --gpus-per-node=.*/#SBATCH --gpus-per-node=2/' \
    -e 's/^#SBATCH --cpus-per-task=.*/#SBATCH --cpus-per-task=1/' -e 's/USR1@180$/USR1@10/' \
    -e 's/^#PBS -l select=.*/#PBS -l select=1:ncpus=2:mpiprocs=2:ompthreads=1/' "$root/jobscripts/$1"
}
edited slurm.sbatch >srun.sbatch
edited slurm_mpirun.sbatch >mpirun.sbatch
submit() { sbatch --parsable "$@"; }

# --- Start of all cases: they mostly wait, so they run concurrently -----------------------------------------------------

# 1. Time limit. The ranks stop themselves at step 300 until then: the notice sends USR1 and CONT together.
limit=$(WEFT_FAULT='step:*:300:stop' submit --job-name=limit --time=1 srun.sbatch quickstart.toml runs/limit)
await 90 "step 300 of the job with a short limit" frozen limit

# 2. Undisturbed run.
whole=$(submit --job-name=whole srun.sbatch quickstart.toml runs/whole)

# 3. The same notice to a script that uses mpirun (sent by this test as --signal=B: would).
forwarded=$(WEFT_FAULT='step:*:300:stop' submit --job-name=forwarded mpirun.sbatch quickstart.toml runs/forwarded)

# 4. A rank dies.
dead=$(WEFT_FAULT=step:1:50:kill submit --job-name=dead srun.sbatch quickstart.toml runs/dead)

# 5. scancel during training.
cancelled=$(WEFT_FAULT='step:*:300:stop' submit --job-name=cancelled srun.sbatch quickstart.toml runs/cancelled)

# 6. A launcher that does not support this MPI. (Open MPI 4 would refuse --mpi=none; without these two variables it starts like
# other libraries: each process alone.)
sed -e 's/--mpi=pmix/--mpi=none/' -e 's/^weft=(weft)/weft=(env -u SLURM_STEPID -u SLURM_STEP_ID weft)/' srun.sbatch >wrong.sbatch
wrong=$(submit --job-name=wrong wrong.sbatch quickstart.toml runs/wrong)

# 7. A chain of three that finishes after two: rank 0 of the first link receives USR1 at step 50.
bash "$root/jobscripts/chain.sh" --dry-run weft_chain 3 srun.sbatch quickstart.toml runs/chain >dry_run.log
[[ $(wc -l <dry_run.log) -eq 3 && -z $(squeue -h -n weft_chain) ]] || fail "a dry run submitted jobs" dry_run.log
WEFT_FAULT=step:0:50:usr1 bash "$root/jobscripts/chain.sh" weft_chain 3 srun.sbatch quickstart.toml runs/chain >chain.log
mapfile -t chain < <(sed 's/.* //' chain.log)
code=0
bash "$root/jobscripts/chain.sh" weft_chain 1 srun.sbatch quickstart.toml runs/chain >twice.log 2>&1 || code=$?
if [[ $code -ne 2 ]] || ! grep -q "in the queue already" twice.log; then fail "a second chain of one name was not refused" twice.log; fi

# 8. A chain whose run makes no progress: two earlier starts died at their first step.
for _ in 1 2; do WEFT_FAULT=step:0:1:kill weft train quickstart.toml --output runs/stuck >stuck.out 2>&1 && fail "not killed" stuck.out; done 2>/dev/null
bash "$root/jobscripts/chain.sh" weft_stuck 3 srun.sbatch quickstart.toml runs/stuck >stuck.log
mapfile -t stuck < <(sed 's/.* //' stuck.log)

# 9. The shell logic of the PBS script under the Torque commands of Slurm. Its #PBS lines are checked by jobscripts_test.py.
# These commands do not provide the node file.
# shellcheck disable=SC2016
edited pbs.pbs | sed -e 's/^#PBS -l walltime=.*/#PBS -l walltime=00:02:00/' \
  -e '/^# --- This site/a PBS_NODEFILE=$(generate_pbs_nodefile)' >torque.pbs
pbs_began=$SECONDS
WEFT_FAULT='step:*:300:stop' WEFT_INPUT=quickstart.toml WEFT_RUN=runs/pbs WEFT_NOTICE=102 qsub torque.pbs >pbs_submit.log 2>&1 ||
  fail "qsub refused the script" pbs_submit.log
pbs=$(sed 's/\..*//' pbs_submit.log)

# --- Results --------------------------------------------------------------------------------------------------------------

await 90 "step 300 of the job to cancel" frozen cancelled
scancel "$cancelled"
await 90 "step 300 under mpirun" frozen forwarded
scancel --batch --signal=USR1 "$forwarded"
await 20 "USR1 at the ranks of mpirun" usr1_pending forwarded
thaw forwarded

expect_end "$wrong" FAILED 2:0 0
expect_line "$(log_of "$wrong")" 'SLURM_STEP_NUM_TASKS says that 2 processes were started .* start with "srun --mpi=pmix"'
held "a wrong launch is refused with code 2 and the right suggestion"

await 60 "the end of the job with a dead rank" ended "$dead"
[[ $(value "$dead" JobState) == FAILED && $(value "$dead" Restarts) -eq 0 ]] || fail "a dead rank" "$(log_of "$dead")"
[[ -z $(processes dead) ]] || fail "processes of the job with a dead rank are still running"
held "a dead rank ends the job ($(grep 'weft ended' "$(log_of "$dead")"))"

expect_end "$cancelled" CANCELLED 0:15 0
grep -q '"code": 143' runs/cancelled/run.json || fail "scancel" runs/cancelled/run.json "$(log_of "$cancelled")"
[[ $(newest cancelled) > step_00000300 ]] || fail "scancel left no checkpoint after step 300" "$(log_of "$cancelled")"
held "scancel ends a job with a checkpoint"

expect_end "$whole" COMPLETED 0:0 0

expect_end "${stuck[0]}" FAILED 93:0 0
expect_end "${stuck[1]}" CANCELLED 0:0 0
expect_end "${stuck[2]}" CANCELLED 0:0 0
expect_line "$(log_of "${stuck[0]}")" "requeueing would repeat this"
held "a chain stops on 93"

expect_end "${chain[0]}" FAILED 75:0 0
expect_end "${chain[1]}" COMPLETED 0:0 0
expect_end "${chain[2]}" CANCELLED 0:0 0
expect_line "$(log_of "${chain[1]}")" "resuming after step 52"
same_parameters runs/whole runs/chain
held "a chain resumes after 75, stops when the run is finished, and trains the same parameters"

expect_end "$forwarded" COMPLETED 0:0 1
expect_line "$(log_of "$forwarded")" "weft ended with 75"
expect_line "$(log_of "$forwarded")" "resuming after step 3[0-9][1-9]"
same_parameters runs/whole runs/forwarded
held "mpirun: USR1, checkpoint, 75, requeue, the same parameters"

# The wall limit of the program (120 s less 102 s) passes while its ranks are stopped. On a slow machine more than one job follows.
pbs_ended() {
  if ((SECONDS > pbs_began + 18)); then thaw pbs; fi
  ended "$pbs"
}
pbs_follows() {
  local next
  next=$(squeue -h -n weft -o %A -t all | sort -n | tail -n 1)
  [[ $next -gt $pbs ]] && pbs=$next
}
await 120 "the end of the PBS job" pbs_ended
[[ "$(value "$pbs" JobState) $(value "$pbs" ExitCode)" == "FAILED 75:0" ]] || fail "a PBS job at its limit" "$(log_of "$pbs")"
while [[ $(value "$pbs" ExitCode) == 75:0 ]]; do
  await 20 "the job that the PBS script submitted" pbs_follows
  await 120 "the end of the PBS job" pbs_ended
done
expect_end "$pbs" COMPLETED 0:0 0
same_parameters runs/whole runs/pbs
held "PBS: the program's wall limit, 75, a new job, the same parameters"

expect_end "$limit" COMPLETED 0:0 1
log=$(log_of "$limit")
expect_line "$log" "weft ended with 75"
expect_line "$log" "resuming after step 3[0-9][1-9]"
expect_line "$log" "starting at step 0 of 600"      # from the first start: the log was not truncated
same_parameters runs/whole runs/limit
held "Slurm's notice before the limit: checkpoint, 75, requeue, resume, finish, the same parameters"

[[ -z $(squeue -h) ]] || fail "jobs are still in the queue: $(squeue)"
