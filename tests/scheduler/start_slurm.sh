#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A private Slurm on this machine, to which a test can submit job scripts: munged, slurmctld and one slurmd per node, all run
# by the caller, on loopback, writing only below DIR. scripts/setup.sh --scheduler installs the programs.
#
#   start_slurm.sh start DIR     starts, waits until all nodes are idle, prints DIR/env.sh (source it)
#   start_slurm.sh stop  DIR     cancels all jobs, ends the daemons; non-zero if one had to be killed
#   start_slurm.sh status DIR
#
# Environment: SLURM_TEST_NODES=1 SLURM_TEST_CPUS=4 SLURM_TEST_GPUS=4   per node, all may be fictitious
#   SLURM_TEST_PARTITIONS=test (comma separated, the first is the default)  SLURM_TEST_FEATURES= (--constraint)
#   SLURM_TEST_PREEMPT=  seconds of grace: jobs of a later partition preempt and requeue those of an earlier one
#   SLURM_TEST_KILLWAIT=5   seconds from SIGTERM to SIGKILL (sites: 30 or more)
#   SLURM_TEST_PORT=26817   slurmctld; the slurmd of node i listens on PORT+i
#
# Exit codes: 0 done; 1 failed; 2 usage error; 77 the programs are not installed
set -euo pipefail

[ $# -eq 2 ] || { sed -n '4,19s/^# \{0,1\}//p' "$0" >&2; exit 2; }
action=$1
mkdir -p "$2"
dir=$(cd "$2" && pwd)      # the daemons change their directory: paths must be absolute

nodes=${SLURM_TEST_NODES:-1}
cpus=${SLURM_TEST_CPUS:-4}
gpus=${SLURM_TEST_GPUS:-4}
partitions=${SLURM_TEST_PARTITIONS:-test}
features=${SLURM_TEST_FEATURES:-}
preempt=${SLURM_TEST_PREEMPT:-}
killwait=${SLURM_TEST_KILLWAIT:-5}
port=${SLURM_TEST_PORT:-26817}
PATH=$PATH:/usr/sbin:/sbin

die() { echo "start_slurm.sh: $*" >&2; exit 1; }

# A daemon that init has not reaped yet (state Z) counts as ended.
running() {
  local state
  state=$(sed -n 's/^State:[[:space:]]*\(.\).*/\1/p' "/proc/$1/status" 2>/dev/null)
  [ -n "$state" ] && [ "$state" != Z ]
}
alive() { [ -s "$1" ] && running "$(cat "$1")"; }

wait_for() {   # wait_for SECONDS COMMAND...
  local limit=$((SECONDS + $1)); shift
  until "$@"; do [ $SECONDS -lt "$limit" ] || return 1; sleep 0.1; done
}

# A single node has the name of the host, so that mpirun forks its ranks as on the first node of a
# real job; several nodes are n1..nN, and mpirun starts an orted on each of them by srun.
node() { if [ "$nodes" = 1 ]; then hostname -s; else echo "n$1"; fi; }

write_config() {
  local me host mem p tier=0 default=YES i btl=self,vader,tcp
  me=$(id -un); host=$(hostname -s)
  mem=$(awk '/^MemTotal/ {print int($2 / 1024 * 0.9)}' /proc/meminfo)
  {
    cat <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$me
SlurmdUser=$me
# cred_expire is also the delay of a requeued job (default 120 s, minimum 5)
AuthType=auth/munge
AuthInfo=socket=$dir/munge.sock,cred_expire=5
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool.%n
TmpFS=$dir/tmp.%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.%n.log
PlugStackConfig=$dir/plugstack.conf

ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$dir/jobcomp.txt
MpiDefault=pmix
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
# the defaults consider a requeued or dependent job only after up to a minute
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0

JobRequeue=1
KillWait=$killwait
MinJobAge=300
ReturnToService=2
# lets a node claim more CPUs than the machine has
SlurmdParameters=config_overrides

CONF
    if [ "$gpus" -gt 0 ]; then echo "GresTypes=gpu"; fi
    for ((i = 1; i <= nodes; i++)); do
      echo "NodeName=$(node $i) NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + i)) CPUs=$cpus RealMemory=$mem" \
        "$([ "$gpus" -gt 0 ] && echo "Gres=gpu:$gpus")" "${features:+Features=$features}" "State=UNKNOWN"
    done
    if [ -n "$preempt" ]; then echo "PreemptType=preempt/partition_prio"; echo "PreemptMode=REQUEUE"; fi
    for p in ${partitions//,/ }; do
      tier=$((tier + 1))
      echo "PartitionName=$p Nodes=ALL Default=$default MaxTime=INFINITE DefaultTime=10 State=UP" \
        "${preempt:+PriorityTier=$tier GraceTime=$preempt}"
      default=NO
    done
  } >"$dir/slurm.conf"

  # PBS_JOBID, PBS_O_WORKDIR, ... for scripts with #PBS lines
  echo "optional spank_pbs.so" >"$dir/plugstack.conf"

  : >"$dir/gres.conf"
  if [ "$gpus" -gt 0 ]; then   # slurmd needs device files but follows links: no GPU and no mknod needed
    mkdir -p "$dir/dev"
    for ((i = 0; i < gpus; i++)); do ln -sfn /dev/null "$dir/dev/nvidia$i"; done
    echo "Name=gpu File=$dir/dev/nvidia[0-$((gpus - 1))]" >"$dir/gres.conf"
  fi

  # Fictitious nodes share one /dev/shm and one host name: Open MPI's shared memory files would collide.
  if [ "$nodes" -gt 1 ]; then btl=self,tcp; fi
  cat >"$dir/env.sh" <<ENV
export SLURM_CONF=$dir/slurm.conf
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_MCA_btl=$btl OMPI_MCA_btl_tcp_if_include=lo OMPI_MCA_oob_tcp_if_include=lo
ENV
}

all_idle() { [ "$(sinfo -h -o '%T %D' -p "${partitions%%,*}" 2>/dev/null)" = "idle $nodes" ]; }

start() {
  local program
  for program in munged slurmctld slurmd sbatch; do
    command -v "$program" >/dev/null || { echo "start_slurm.sh: no $program (scripts/setup.sh --scheduler installs it)" >&2; exit 77; }
  done
  ! alive "$dir/slurmctld.pid" || die "already running in $dir"
  [ ${#dir} -le 90 ] || die "$dir is too long for a Unix socket"
  rm -f "$dir"/*.log "$dir"/jobcomp.txt
  mkdir -p "$dir/state"
  write_config
  export SLURM_CONF=$dir/slurm.conf
  local i
  for ((i = 1; i <= nodes; i++)); do mkdir -p "$dir/tmp.$(node $i)" "$dir/spool.$(node $i)"; done
  (umask 077; [ -s "$dir/munge.key" ] || head -c 128 /dev/urandom >"$dir/munge.key")

  trap 'echo "start_slurm.sh: failed; the logs end with:" >&2; tail -n 5 "$dir"/*.log >&2; stop' EXIT
  munged --force --num-threads 2 --key-file "$dir/munge.key" --socket "$dir/munge.sock" \
    --pid-file "$dir/munged.pid" --log-file "$dir/munged.log" --seed-file "$dir/munged.seed"
  slurmctld -c -f "$dir/slurm.conf"
  for ((i = 1; i <= nodes; i++)); do slurmd -N "$(node $i)" -f "$dir/slurm.conf"; done
  wait_for 15 all_idle
  trap - EXIT
  cat "$dir/env.sh"
}

# Cancels repeatedly: otherwise a job script that requeues itself on SIGTERM returns.
no_jobs() { [ -z "$(squeue -h 2>/dev/null)" ] || { scancel --quiet --user="$(id -un)" 2>/dev/null; false; }; }

stop() {
  export SLURM_CONF=$dir/slurm.conf
  local rc=0 f p
  if alive "$dir/slurmctld.pid"; then
    wait_for $((2 * killwait + 10)) no_jobs || { echo "start_slurm.sh: jobs are still running" >&2; rc=1; }
  fi
  for f in "$dir"/slurmd.*.pid "$dir/slurmctld.pid" "$dir/munged.pid"; do
    alive "$f" || continue
    p=$(cat "$f")
    kill -TERM "$p"
    if ! wait_for 10 eval "! running $p"; then
      echo "start_slurm.sh: pid $p of $f had to be killed" >&2
      kill -KILL "$p"; rc=1
    fi
  done
  return $rc
}

case $action in
  start) start ;;
  stop) stop ;;
  status) SLURM_CONF=$dir/slurm.conf sinfo -N -o '%N %T %c %m %G' ;;
  *) die "unknown action '$action' (start, stop, status)" ;;
esac
