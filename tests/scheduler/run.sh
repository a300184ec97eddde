#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The shipped job scripts under a real Slurm: a private one on this machine (start_slurm.sh), with a reduced quickstart input and
# two ranks per job. Every job script is edited as a user would: only the lines named in its header. nodes.sh: several nodes.
#
#   bash tests/scheduler/run.sh [WEFT]       default build/cpu-release/weft; needs scripts/setup.sh --scheduler
#
# Exit codes: 0 all cases passed; 1 a case failed, its log is shown; 77 Slurm cannot be started here.
# shellcheck disable=SC1091,SC2154   # slurm.sh is checked by itself
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/slurm.sh"

# Slurm accepts every script as shipped.
for script in slurm slurm_mpirun apptainer; do
  sbatch --test-only "$root/jobscripts/$script.sbatch" quickstart.toml runs/none 2>test_only.log || fail "$script.sbatch is refused" test_only.log
done
sbatch --test-only --nodes=1 --mem=0 "$root/jobscripts/kestrel/train.sbatch" quickstart.toml runs/none 2>test_only.log ||
  fail "kestrel/train.sbatch is refused" test_only.log

edited slurm.sbatch >srun.sbatch
edited slurm_mpirun.sbatch >mpirun.sbatch

# --- Start of all cases: they mostly wait, so they run concurrently -----------------------------------------------------

# 1. Time limit. The ranks stop themselves at step 60, which a busy machine also reaches in a minute. The notice is CONT and then USR1, so
# they train on for a moment: 0.1 s have been seen, and the run is to last longer.
limit=$(WEFT_FAULT='step:*:60:stop' submit --job-name=limit --time=1 srun.sbatch quickstart.toml runs/limit)
await 90 "step 60 of the job with a short limit" frozen limit

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

# 9. --resume never holds for the first start of a job: the requeued one continues it. The directory holds another run.
weft train quickstart.toml --output runs/never --set run.steps=30 >never.log
never=$(WEFT_FAULT=step:0:50:usr1 submit --job-name=never srun.sbatch quickstart.toml runs/never --resume never)

# 10. The shell logic of the PBS script under the Torque commands of Slurm. Its #PBS lines are checked by jobscripts_test.py.
# These commands do not provide the node file. As under PBS, a job has the environment of a login, and the variables of -v: the fault is
# one of the first job alone, input and run are handed on by the script. (The bits depend on the kernels that OpenBLAS takes.)
# shellcheck disable=SC2016   # expanded in the job
site=$(printf '%s; ' "source $scratch/slurm/env.sh" "export PATH=$PATH OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive OMPI_MCA_mpi_yield_when_idle=1" \
  "export SHLVL ${OPENBLAS_CORETYPE:+OPENBLAS_CORETYPE=$OPENBLAS_CORETYPE}" 'PBS_NODEFILE=$(generate_pbs_nodefile)')
edited pbs.pbs | sed -e 's/^#PBS -l walltime=.*/#PBS -l walltime=00:02:00/' -e "/^# --- This site/a $site" >torque.pbs
pbs_began=$SECONDS
qsub -v "WEFT_FAULT=step:*:300:stop,WEFT_INPUT=quickstart.toml,WEFT_RUN=runs/pbs,WEFT_NOTICE=102" torque.pbs >pbs_submit.log 2>&1 ||
  fail "qsub refused the script" pbs_submit.log
pbs=$(sed 's/\..*//' pbs_submit.log)

# --- Results --------------------------------------------------------------------------------------------------------------

await 240 "step 300 of the job to cancel" frozen cancelled
scancel "$cancelled"
await 240 "step 300 under mpirun" frozen forwarded
# On TERM mpirun would continue the ranks, and kill them two seconds later.
for pid in $(processes forwarded); do [[ $(readlink "/proc/$pid/exe") != */orterun ]] || kill -TERM "$pid"; done
sleep 3
frozen forwarded || fail "mpirun does not leave the ranks to themselves on TERM" "$(log_of "$forwarded")"
scancel --batch --signal=USR1 "$forwarded"
await 20 "USR1 at the ranks of mpirun" usr1_pending forwarded
thaw forwarded

expect_end "$wrong" FAILED 2:0 0
expect_line "$(log_of "$wrong")" 'SLURM_STEP_NUM_TASKS says that 2 processes were started .* start with "srun --mpi=pmix"'
held "a wrong launch is refused with code 2 and the right suggestion"

await 120 "the end of the job with a dead rank" ended "$dead"   # the script waits half a minute for a record
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

expect_end "$limit" COMPLETED 0:0 '[1-9]'      # each job has a minute: on a busy machine more than one ends at its limit
log=$(log_of "$limit")
expect_line "$log" "weft ended with 75"
expect_line "$log" "resuming after step ([6-9][0-9]|[1-9][0-9]{2,})\b"
expect_line "$log" "starting at step 0 of $steps"      # from the first start: the log was not truncated
same_parameters runs/whole runs/limit
held "Slurm's notice before the limit: checkpoint, 75, requeue, resume, finish, the same parameters"

expect_end "$never" COMPLETED 0:0 1
expect_line "$(log_of "$never")" "starting at step 0 of $steps"
expect_line "$(log_of "$never")" "resuming after step 52"
same_parameters runs/whole runs/never
[[ -z $(find runs -name '.*') ]] || fail "the scripts left files: $(find runs -name '.*')"
held "--resume never: the first start of the job only"

[[ -z $(squeue -h) ]] || fail "jobs are still in the queue: $(squeue)"
