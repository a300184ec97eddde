#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The shipped PBS script under a real OpenPBS: a private one on this machine with two hosts (start_pbs.sh), a reduced quickstart input
# and two ranks per job. Jobs are those of an ordinary user; the script is edited as a user would: only the lines named in its header.
#
#   WEFT_PBS=PREFIX bash tests/scheduler/pbs.sh [WEFT]     default build/cpu-release/weft; PREFIX: where OpenPBS is installed
#
# Exit codes: 0 all cases passed; 1 a case failed, its log is shown; 77 OpenPBS cannot be started here.
# shellcheck disable=SC1091,SC2016,SC2154   # tools.sh is checked by itself; scripts in single quotes
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/tools.sh"
if [[ -z ${PBS_TEST_SCRATCH:-} ]]; then
  [[ -n ${WEFT_PBS:-} ]] || { echo "skipped: WEFT_PBS does not name an installation of OpenPBS"; exit 77; }
  PBS_TEST_SCRATCH=$(mktemp -d /tmp/weft_pbs.XXXXXX)
  export PBS_TEST_SCRATCH
  chmod 755 "$PBS_TEST_SCRATCH"
  trap 'rm -rf "$PBS_TEST_SCRATCH"' EXIT
  code=0
  bash "$root/tests/scheduler/start_pbs.sh" "$PBS_TEST_SCRATCH" bash "$0" "${1:-$root/build/cpu-release/weft}" || code=$?
  if [[ $code -eq 0 ]]; then echo "all cases passed, in $((SECONDS - started)) s"; fi
  exit "$code"
fi
held "two hosts of a private OpenPBS are free: $(qstat --version | sed 's/.*= //')"

export steps=200   # fewer: two hosts exchange over TCP

# --- Tools ----------------------------------------------------------------------------------------------------------------

home=$PBS_TEST_SCRATCH/home bin=$PBS_TEST_SCRATCH/home/bin
weft=$bin/weft
user() { runuser -u tester -- env HOME="$home" "$@"; }   # in this folder, without a login
queue() { qstat -x; tail -n 20 "$PBS_TEST_SCRATCH"/spool?/pbs/spool/*.OU 2>/dev/null || true; }   # and the logs of running jobs
value() { qstat -x -f "$1" | sed -n "s/^ *$2 = //p"; }
ended() { [[ $(value "$1" job_state) == F ]]; }
# All jobs of a name, and the log of one. A job that is submitted again keeps the name that the script has.
jobs_of() { qselect -x -N "$1" | sort -n; }
log_of() { echo "$(value "$1" Job_Name).o${1%%.*}"; }

# script NAME [SED OPTIONS]: pbs.pbs for two ranks with one core each, as job NAME.
script() {
  edited pbs.pbs | sed -e "s/^#PBS -N weft/#PBS -N $1/" -e "/^# --- This site/a $site" "${@:2}" >"$1.pbs"
}
# submit NAME [VARIABLE=VALUE...]: the number of the job.
submit() {
  local variable names=WEFT_INPUT,WEFT_RUN
  for variable in "${@:2}"; do names+=,${variable%%=*}; done
  user env "WEFT_INPUT=quickstart.toml" "WEFT_RUN=runs/$1" "${@:2}" qsub -v "$names" "$1.pbs"
}
# expect_end JOB STATUS: waits for the end of the job and checks its Exit_status.
expect_end() {
  await 120 "the end of job $1" ended "$1"
  [[ $(value "$1" Exit_status) == "$2" ]] || fail "job $1 ended with $(value "$1" Exit_status), not with $2" "$(log_of "$1")"
}
# expect_jobs NAME: waits until no job of this name is left. Two or more: all but the last ended with 75, the last with 0.
none_left() { [[ -z $(qselect -N "$1") ]]; }
expect_jobs() {
  local jobs job
  await 200 "the end of the jobs $1" none_left "$1"
  mapfile -t jobs < <(jobs_of "$1")
  ((${#jobs[@]} >= 2)) || fail "$1: no next job" "$(log_of "${jobs[0]}")"
  for job in "${jobs[@]::${#jobs[@]}-1}"; do expect_end "$job" 75; done
  expect_end "${jobs[-1]}" 0
  expect_line "$(log_of "${jobs[1]}")" "resuming after step"
}
alone() { [[ $(jobs_of "$1" | wc -l) -eq 1 ]] || fail "$1 was submitted again: $(jobs_of "$1")"; }

# Copies, because the user of the jobs may not be able to read the repository.
mkdir -p "$bin" "$home/shipped" "$home/work"
cp "$1" "$weft"
cp -r "$root"/{inputs,jobscripts,python} "$home/shipped"
root=$home/shipped
# Starts the ranks of other hosts: pbs_tmrsh takes a program and its arguments, not a line of the shell.
printf '#!/bin/sh\nhost=$1; shift\nexec %s/bin/pbs_tmrsh "$host" /bin/bash -c "$*"\n' "$WEFT_PBS" >"$bin/agent"
chmod 755 "$bin/agent"
chown -R tester: "$home"
cd "$home/work"
export PATH=$bin:$PATH OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive OMPI_MCA_mpi_yield_when_idle=1
# What a site's module would set. (The bits depend on the kernels that OpenBLAS takes.)
site="export PATH=$bin:$WEFT_PBS/bin:\$PATH OMP_WAIT_POLICY=passive OMPI_MCA_mpi_yield_when_idle=1"
site+=${OPENBLAS_CORETYPE:+ OPENBLAS_CORETYPE=$OPENBLAS_CORETYPE}
prepare user

# --- Start of all cases: they mostly wait, so they run concurrently -----------------------------------------------------

# 1. Undisturbed run.
script whole
whole=$(submit whole)

# 2. The program's wall limit (120 s less 100 s) passes while its ranks are stopped, from step 60 until 60 s after the submission. Input
# and run have names that need quotes.
script limit -e 's/^#PBS -l walltime=.*/#PBS -l walltime=00:02:00/'
user cp quickstart.toml "in put,1.toml"
submit limit 'WEFT_FAULT=step:*:60:stop' WEFT_NOTICE=100 "WEFT_INPUT=in put,1.toml" "WEFT_RUN=runs/limit, one" >limit.log
submitted=$SECONDS

# 3. qsig, qdel, and qrerun on two hosts with one rank each, at step 60.
script signalled
script deleted
two_hosts=(-e 's/^#PBS -l select=.*/#PBS -l select=2:ncpus=1:mpiprocs=1:ompthreads=1/'
  -e "s|=TERM ssh\")|=TERM $bin/agent\" \${WEFT_FAULT:+-x WEFT_FAULT})|")
script rerun "${two_hosts[@]}"
signalled=$(submit signalled 'WEFT_FAULT=step:*:60:stop')
deleted=$(submit deleted 'WEFT_FAULT=step:*:60:stop')
rerun=$(submit rerun 'WEFT_FAULT=step:*:60:stop')

# 4. Two hosts, one rank each.
script hosts "${two_hosts[@]}"
hosts=$(submit hosts)

# 5. What ends before training: wrong input, no program, a limit shorter than the notice.
script wrong
wrong=$(submit wrong WEFT_INPUT=none.toml)
script missing -e 's/^weft=(weft)/weft=(weft-missing)/'
missing=$(submit missing)
script short -e 's/^#PBS -l walltime=.*/#PBS -l walltime=00:01:00/'
short=$(submit short)

# 6. A chain of three that finishes after two: rank 0 of the first link receives USR1 at step 50.
script chain -e 's/^\(run=.*\)/\1\n[[ -e $run ]] || export WEFT_FAULT=step:0:50:usr1/'
user bash "$root/jobscripts/chain.sh" --dry-run weft_chain 3 chain.pbs quickstart.toml runs/chain >dry_run.log
[[ $(wc -l <dry_run.log) -eq 3 && -z $(qselect -N weft_chain) ]] || fail "a dry run submitted jobs" dry_run.log
user bash "$root/jobscripts/chain.sh" weft_chain 3 chain.pbs quickstart.toml runs/chain >chain.log
mapfile -t chain <chain.log
code=0
user bash "$root/jobscripts/chain.sh" weft_chain 1 chain.pbs quickstart.toml runs/chain >twice.log 2>&1 || code=$?
if [[ $code -ne 2 ]] || ! grep -q "in the queue already" twice.log; then fail "a second chain of one name was not refused" twice.log; fi

# 7. The scripts as shipped are accepted.
qmgr -c "create queue rt_HF queue_type=execution, enabled=true"
for shipped in pbs.pbs abci/train.pbs; do
  job=$(user qsub -h "$root/jobscripts/$shipped") || fail "$shipped is refused"
  qdel "$job"
done
held "the scripts as shipped are accepted"

# --- Results --------------------------------------------------------------------------------------------------------------

expect_end "$wrong" 2
expect_line "$(log_of "$wrong")" "none.toml"
expect_end "$missing" 2
expect_line "$(log_of "$missing")" "weft-missing: not found; a job has the environment of a login"
expect_end "$short" 2
expect_line "$(log_of "$short")" "the wall time 00:01:00 is not longer than the notice of 120 s"
for name in wrong missing short; do alone "$name"; done
held "wrong input, no program, a limit shorter than the notice: code 2 with the reason, no next job"

await 120 "step 60 of the job for qsig" frozen signalled
user qsig -s URG "$signalled"
await 20 "USR1 at the ranks" usr1_pending signalled
thaw signalled

# The ranks have more time than mpirun would leave them (2 s), up to the kill_delay of PBS (10 s).
await 120 "step 60 of the job to delete" frozen deleted
await 120 "step 60 of the job to run again" frozen rerun
user qdel "$deleted"
qrerun "$rerun" &   # needs an operator, and returns when the job has ended
sleep 5
for name in deleted rerun; do frozen "$name" || fail "$name: mpirun does not leave the ranks to themselves on TERM"; done
thaw deleted
thaw rerun
wait $!
expect_end "$deleted" 271
expect_line runs/deleted/run.json '"code": 143'
expect_line runs/deleted/lease.* '"released":true'
[[ $(newest deleted) > step_00000060 ]] || fail "qdel left no checkpoint after step 60" "$(log_of "$deleted")"
[[ -z $(processes deleted) ]] || fail "processes of the deleted job are still running"
alone deleted
held "qdel ends a job with a checkpoint that takes 5 s, and there is no next job"

expect_end "$whole" 0
expect_end "$hosts" 0
for name in pbs1 pbs2; do expect_line runs/hosts/run.json "\"$name\""; done
same_parameters runs/whole runs/hosts
held "one chunk, and two chunks on two hosts with one rank each: the same parameters"

expect_end "$rerun" 0
[[ $(value "$rerun" run_count) -eq 2 ]] || fail "qrerun: $(value "$rerun" run_count) runs" "$(log_of "$rerun")"
expect_line "$(log_of "$rerun")" "resuming after step 6[0-9]"
same_parameters runs/whole runs/rerun
alone rerun
held "qrerun on two hosts: checkpoint, the same job again, the same parameters"

expect_jobs signalled
expect_line "$(log_of "$signalled")" "weft ended with 75"
same_parameters runs/whole runs/signalled
held "qsig -s URG: checkpoint, 75, a next job, the same parameters"

expect_end "${chain[0]}" 75
expect_end "${chain[1]}" 0
await 60 "the end of the chain" none_left weft_chain
[[ -z $(value "${chain[2]}" Exit_status) ]] || fail "the third link of a chain has run" "$(log_of "${chain[2]}")"
[[ $(qselect -x -N weft_chain | wc -l) -eq 3 ]] || fail "a link of a chain submitted another job" "$(log_of "${chain[0]}")"
same_parameters runs/whole runs/chain
held "a chain resumes after 75 and stops when the run is finished, with the same parameters"

limit_passed() {
  if ((SECONDS > submitted + 60)); then thaw limit; fi
  none_left limit
}
await 200 "the end of the jobs with a short limit" limit_passed
expect_jobs limit
same_parameters runs/whole "runs/limit, one"
held "the program's wall limit: checkpoint, 75, a next job with the same variables, the same parameters"

python=${WEFT_PYTHON:-/usr/bin/python3}
if "$python" -c 'import numpy, h5py, matplotlib' 2>/dev/null; then
  printf '#!/bin/sh\nPYTHONPATH="%s/python" exec "%s" -B -m weft.sweep.command "$@"\n' "$root" "$python" >"$bin/weft-sweep"
  chmod 755 "$bin/weft-sweep"
  script sweep -e 's/^#PBS -l select=.*/#PBS -l select=1:ncpus=1:mpiprocs=1/'
  sweep=(user weft sweep quickstart.toml --grid "optimizer.learning_rate=1e-3,3e-3" --grid "transcoder.k=4,8" --output sweep --set run.steps=60)
  "${sweep[@]}" --pbs --script sweep.pbs >sweep.log 2>&1 || fail "the sweep was not submitted" sweep.log
  expect_line sweep.log "4 points submitted"
  await 120 "the end of the array" none_left sweep
  "${sweep[@]}" --pbs --script sweep.pbs >table.log 2>&1 || fail "the table was not written" table.log ./sweep.o*
  expect_line table.log "4 points, 4 finished"
  [[ $(wc -l <sweep/sweep.csv) -eq 5 ]] || fail "not one row per point" sweep/sweep.csv
  # Jobs that share a host are not bound to its first core.
  cpus=$(sed -n '/"cpus": \[/{n;s/^ *"\(.*\)".*/\1/p}' sweep/*/run.json | sort -u)
  [[ $cpus == "0-$(($(nproc) - 1))" || $(nproc) -eq 1 ]] || fail "the points ran on CPUs $cpus" sweep/*/run.json
  held "a sweep of four points as an array of jobs, on CPUs $cpus; the same command then writes the table"
else
  echo "not run: a sweep, because $python has no NumPy, h5py and matplotlib (scripts/setup.sh --tests)"
fi
none_left_at_all() { [[ -z $(qselect) ]]; }
none_left_at_all || fail "jobs are still in the queue: $(qstat)"
