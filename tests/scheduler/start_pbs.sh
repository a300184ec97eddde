#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs a command beside an OpenPBS of its own: two hosts, pbs1 (server, scheduler, comm, MOM) and pbs2 (MOM), as namespaces of this
# machine. They have their own network, because PBS refuses a server whose name means 127.0.0.1, their own host names and process ids, and
# their own /etc, /var/spool and installation (overlays): nothing outside DIR changes, and the end of the command ends every process.
#
#   WEFT_PBS=PREFIX start_pbs.sh DIR COMMAND...     as root; the command runs on pbs1 as root
#
# PREFIX is where OpenPBS is installed. Jobs belong to the user `tester`, whose home is DIR/home; PBS_TEST_CPUS=16 is what each host offers.
# Exit codes: that of COMMAND; 77 OpenPBS cannot be started here
set -euo pipefail

dir=$1 prefix=${WEFT_PBS:?is not set}
shift

skip() {
  echo "skipped: $*"
  exit 77
}
host() {   # host NAME COMMAND...: continues below as the first process of new namespaces
  PBS_TEST_STAGE=$1 exec unshare --net --mount --uts --ipc --pid --fork --kill-child --mount-proc bash "$0" "$dir" "${@:2}"
}
overlay() {   # overlay FOLDER: changes below it remain in these namespaces
  local changes=$dir/changes$1
  mkdir -p "$changes"/{upper,work}
  mount -t overlay overlay -o "lowerdir=$1,upperdir=$changes/upper,workdir=$changes/work" "$1"
}

server() {   # configures and starts everything on pbs1
  overlay /etc
  overlay "$prefix"
  mkdir -p "$dir/spool1"
  mount --bind "$dir/spool1" /var/spool
  [[ ! -d /lib/systemd/system ]] || mount -t tmpfs tmpfs /lib/systemd/system   # pbs_postinstall registers no service
  printf '127.0.0.1 localhost\n10.77.0.1 pbs1\n10.77.0.2 pbs2\n' >/etc/hosts
  useradd --home-dir "$dir/home" --create-home --shell /bin/bash tester
  ip link add bridge0 type bridge
  ip addr add 10.77.0.1/24 dev bridge0
  ip link set bridge0 up

  PBS_SERVER=pbs1 "$prefix/libexec/pbs_postinstall"
  sed -i -e '/^PBS_SERVER=/d' -e 's/^PBS_START_MOM=.*/PBS_START_MOM=1/' /etc/pbs.conf
  echo PBS_SERVER=pbs1 >>/etc/pbs.conf
  chmod 4755 "$prefix/sbin/pbs_iff" "$prefix/sbin/pbs_rcp"
  echo "\$usecp *:/ /" >>/var/spool/pbs/mom_priv/config   # the hosts see the same files
  timeout 120 /etc/init.d/pbs start </dev/null
  until qmgr -c "list server" >/dev/null 2>&1; do ((SECONDS < 150)) || return 1; sleep 0.5; done
  local line
  for line in "set server job_history_enable=true" "set server flatuid=true" "set server scheduler_iteration=5" "create node pbs2" \
    "create resource ngpus type=long, flag=nh"; do
    qmgr -c "$line"
  done
}

case ${PBS_TEST_STAGE:-} in
  "")
    [[ -x $prefix/sbin/pbs_server ]] || { echo "start_pbs.sh: WEFT_PBS=$prefix has no sbin/pbs_server"; exit 1; }
    [[ $EUID -eq 0 ]] || skip "the hosts of the test are namespaces, which need root"
    unshare --net --mount --pid --fork true 2>/dev/null || skip "this machine does not allow namespaces"
    mkdir -p "$dir"
    host pbs1 "$@"
    ;;
  pbs1)
    hostname pbs1
    ip link set lo up
    export PATH=$prefix/bin:$prefix/sbin:$PATH:/usr/sbin   # Slurm has commands of the same names
    PBS_TEST_STAGE=server bash "$0" "$dir" >"$dir/server.log" 2>&1 ||
      { tail -n 30 "$dir/server.log"; skip "the PBS server cannot be started (its log is above)"; }
    host pbs2 >"$dir/pbs2.log" 2>&1 &
    ip link add port2 type veth peer name eth0
    until [[ $(readlink "/proc/$!/ns/net") != $(readlink /proc/self/ns/net) ]]; do sleep 0.1; done
    ip link set eth0 netns $!
    ip link set port2 master bridge0 up
    until [[ $(pbsnodes -a | grep -c "state = free") -eq 2 ]]; do
      ((SECONDS < 120)) || { pbsnodes -a; cat "$dir/pbs2.log"; skip "the PBS hosts are not free"; }
      sleep 0.5
    done
    for name in pbs1 pbs2; do qmgr -c "set node $name resources_available.ncpus=${PBS_TEST_CPUS:-16}"; done
    unset PBS_TEST_STAGE
    code=0
    "$@" || code=$?
    exit "$code"
    ;;
  server) server ;;
  pbs2)
    hostname pbs2
    ip link set lo up
    mkdir -p "$dir/spool2/pbs"
    mount --bind "$dir/spool2" /var/spool
    until ip link show eth0 >/dev/null 2>&1; do sleep 0.1; done
    ip addr add 10.77.0.2/24 dev eth0
    ip link set eth0 up
    cd /var/spool/pbs
    while read -r mode name; do mkdir -p "$name"; chmod "$mode" "$name"; done <<'LIST'
0755 aux
0700 checkpoint
0755 mom_logs
0751 mom_priv
0751 mom_priv/jobs
0750 mom_priv/hooks
0750 mom_priv/hooks/tmp
1777 spool
1777 undelivered
LIST
    printf "\$clienthost pbs1\n\$usecp *:/ /\n" >mom_priv/config
    printf 'TZ=UTC\nPATH=/bin:/usr/bin\n' >pbs_environment
    "$prefix/sbin/pbs_mom"
    sleep infinity & wait $!
    ;;
esac
