#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The shipped job scripts on two nodes of a private Slurm (two slurmd on this machine, one rank on each), with two partitions, of which
# the second preempts jobs of the first after 20 s of grace. Edited as in run.sh.
#
#   bash tests/scheduler/nodes.sh [WEFT]       default build/cpu-release/weft; needs scripts/setup.sh --scheduler
#
# Exit codes: 0 all cases passed; 1 a case failed, its log is shown; 77 Slurm cannot be started here.
# shellcheck disable=SC1091,SC2154   # slurm.sh is checked by itself
set -euo pipefail

export SLURM_TEST_NODES=2 SLURM_TEST_PARTITIONS=low,high SLURM_TEST_PREEMPT=20
source "$(dirname "${BASH_SOURCE[0]}")/slurm.sh"
edited slurm.sbatch 2 1 >srun.sbatch
edited slurm_mpirun.sbatch 2 1 >mpirun.sbatch

restarts() { [[ $(value "$1" Restarts) -ge $2 ]]; }

# 1. Preemption: TERM reaches the ranks, which are stopped at step 300, and the job ends by itself within the grace.
preempted=$(WEFT_FAULT='step:*:300:stop' submit --job-name=preempted srun.sbatch quickstart.toml runs/preempted)
await 240 "step 300 of the job to preempt" frozen preempted
urgent=$(submit --job-name=urgent --partition=high --nodes=2 --exclusive --output=urgent.log --wrap true)
expect_end "$urgent" COMPLETED 0:0 0
await 60 "the requeue of the preempted job" restarts "$preempted" 1

# 2. An undisturbed run, and one whose ranks mpirun starts on both nodes. TERM to its steps, as before a preemption, does not end orted.
whole=$(submit --job-name=whole srun.sbatch quickstart.toml runs/whole)
across=$(WEFT_FAULT='step:*:100:stop' submit --job-name=across mpirun.sbatch quickstart.toml runs/across)
await 240 "step 100 under mpirun" frozen across
scancel --signal=TERM "$across"
sleep 3
frozen across || fail "orted does not leave the ranks to themselves on TERM" "$(log_of "$across")"
thaw across
await 60 "the requeue of the job under mpirun" restarts "$across" 1
for job in "$preempted" "$whole" "$across"; do await 120 "the end of job $job" ended "$job"; done
expect_end "$whole" COMPLETED 0:0 0
expect_end "$across" COMPLETED 0:0 1
expect_line "$(log_of "$across")" "weft ended with 143"
expect_line "$(log_of "$across")" "resuming after step 10[0-9]"
same_parameters runs/whole runs/across
held "two nodes, under srun, and under mpirun with TERM, checkpoint and requeue: the same parameters"

expect_end "$preempted" COMPLETED 0:0 1
expect_line "$(log_of "$preempted")" "weft ended with 143"
expect_line "$(log_of "$preempted")" "resuming after step ([3-9][0-9]{2}|1[0-9]{3})\b"      # CONT comes before TERM, and they train on until then
same_parameters runs/whole runs/preempted
held "preemption: checkpoint within the grace, requeue, resume, the same parameters"

# 3. A node goes down during a step: of a job that Slurm requeues, and of the first link of a chain.
down=$(WEFT_FAULT='step:*:300:stop' submit --job-name=down srun.sbatch quickstart.toml runs/down)
WEFT_FAULT='step:*:300:stop' bash "$root/jobscripts/chain.sh" weft_chain 3 srun.sbatch quickstart.toml runs/chain >chain.log
mapfile -t chain < <(sed 's/.* //' chain.log)
await 240 "step 300 of the job that loses a node" frozen down
await 240 "step 300 of the chain that loses a node" frozen chain
scontrol update NodeName=n2 State=DOWN Reason=test
await 60 "the end of the first link" ended "${chain[0]}"
# The later starts run without the stop at step 300: they resume before it if the ranks had no time for a checkpoint.
await 60 "the requeue after the loss of a node" restarts "$down" 1
for job in "$down" "${chain[1]}"; do scontrol update JobId="$job" Priority=1 >priority.log 2>&1 || true; done
up() { scontrol update NodeName=n2 State=RESUME 2>/dev/null || scontrol update NodeName=n2 State=IDLE 2>/dev/null || [[ $(sinfo -h -n n2 -o %T) != down* ]]; }
await 30 "the node to be up again" up
nodes_continue() { thaw down; thaw chain; ended "$down" && ended "${chain[1]}"; }
await 180 "the end of the runs that lost a node" nodes_continue
expect_end "$down" COMPLETED 0:0 1
same_parameters runs/whole runs/down
held "a node goes down: the job is requeued and ends with the same parameters"
[[ $(value "${chain[0]}" JobState) == NODE_FAIL ]] || fail "the first link" "$(log_of "${chain[0]}")"
expect_end "${chain[1]}" COMPLETED 0:0 0
expect_end "${chain[2]}" CANCELLED 0:0 0
same_parameters runs/whole runs/chain
held "a node goes down in a chain: the next link resumes, the run ends with the same parameters, the rest is cancelled"

[[ -z $(squeue -h) ]] || fail "jobs are still in the queue: $(squeue)"
