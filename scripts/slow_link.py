#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Steps of a transcoder on two nodes with a link of limited rate: time per step and of each exchange, for several divisions of the work.

slow_link.py WEFT DIR [--rates none 10gbit 4gbit 1gbit 300mbit] [--features 1024 8192] [--per-node 1] [--repeat 3]
             [--set KEY=VALUE]... [--mca "NAME VALUE"]...

The nodes are two network namespaces of this machine, connected by a pair of virtual interfaces whose rate is limited in each direction
(tc tbf). mpirun starts --per-node ranks of one thread on each; Open MPI takes them for two hosts. Run as root on Linux with iproute2
and Open MPI, with a core per rank, on an otherwise idle machine. All namespaces end with the script.

Runs weft benchmark (12 layers, d_model 256, 1,024 tokens per step, k = 16, fp32; other values with --set) for every rate and number of
features, and writes DIR/RATE-FEATURES-REPEAT/benchmark.json. Divisions: features over all ranks, tokens over all ranks, and with several
ranks per node tokens over nodes and features within them. The table has medians over the repeats, and the range of ms/step.
--mca "coll_han_priority 100" --mca "coll_han_use_simple_allreduce 1": collectives of Open MPI that send each piece to a node once.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

INPUT = Path(__file__).resolve().parent.parent / "inputs" / "benchmark_ranks_cpu.toml"
INSIDE = "WEFT_SLOW_LINK"    # set in the namespace of the first node
SIZES = ["benchmark.layers=12", "benchmark.d_model=256", "transcoder.scope=all_layers", "benchmark.warmup=2", "benchmark.steps=5"]
# Two connections (btl_tcp_links): on one, the acknowledgement of a message waits behind the data of the other direction.
MCA = ["plm rsh", "plm_rsh_agent /run/agent", "pml ob1", "btl tcp,self,vader", "btl_tcp_if_include eth0", "oob_tcp_if_include eth0",
       "btl_tcp_links 2", "mpi_yield_when_idle 1"]
# Open MPI starts its daemon of the second node by this: AGENT node2 COMMAND...
AGENT = '#!/bin/sh\nshift\nexec nsenter --net=/run/netns/node2 unshare --uts sh -c "hostname node2; $*"\n'


def sh(*command):
    subprocess.run(command, check=True)


def make_nodes():
    """Makes this process node1 and creates node2. /run and /etc/hosts change in this mount namespace only."""
    sh("hostname", "node1")
    sh("mount", "-t", "tmpfs", "none", "/run")
    Path("/run/hosts").write_text("127.0.0.1 localhost\n10.77.0.1 node1\n10.77.0.2 node2\n")
    sh("mount", "--bind", "/run/hosts", "/etc/hosts")
    Path("/run/agent").write_text(AGENT)
    os.chmod("/run/agent", 0o755)
    sh("ip", "netns", "add", "node2")
    sh("ip", "link", "add", "eth0", "mtu", "9000", "type", "veth", "peer", "name", "eth0", "mtu", "9000", "netns", "node2")
    for number, ip in enumerate((["ip"], ["ip", "-n", "node2"]), 1):
        sh(*ip, "address", "add", f"10.77.0.{number}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            sh(*ip, "link", "set", device, "up")


def limit(rate):
    """The queue holds all messages of a step: a packet that it dropped would wait for TCP's timer of 200 ms."""
    for tc in (["tc"], ["tc", "-n", "node2"]):
        subprocess.run([*tc, "qdisc", "del", "dev", "eth0", "root"], check=False, stderr=subprocess.DEVNULL)    # there may be none
        if rate != "none":
            sh(*tc, "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "256kb", "limit", "64mb")


def divisions(per_node):
    cases = ["features", f"tokens: parallel.data={2 * per_node}"]
    return cases + ["tokens between nodes: parallel.data=2"] if per_node > 1 else cases


def measure(args, rate, features, repeat):
    """The cases of one call of weft benchmark."""
    folder = args.directory / f"{rate}-{features}-{repeat}"
    command = ["mpirun", "--allow-run-as-root", "--host", f"node1:{args.per_node},node2:{args.per_node}", "--bind-to", "none"]
    for setting in [*MCA, *args.mca]:
        command += ["--mca", *setting.split(maxsplit=1)]
    command += [args.weft, "benchmark", INPUT, "--output", folder]
    for setting in [*SIZES, f"transcoder.features={features}", f"benchmark.cases={json.dumps(divisions(args.per_node))}", *args.set]:
        command += ["--set", setting]
    log = folder.with_suffix(".log")
    with open(log, "w") as out:
        code = subprocess.run(command, check=False, stdout=out, stderr=subprocess.STDOUT).returncode
    if code != 0:
        sys.exit(f"slow_link.py: weft ended with code {code}; see {log}")
    return json.loads((folder / "benchmark.json").read_text())["cases"]


def row(rate, features, runs):
    """A line of the table from the same case of several runs."""
    times = [run["ms_per_step"] for run in runs]
    exchanges = ", ".join(f"{one['name']} {statistics.median(run['communication']['exchanges'][i]['ms'] for run in runs):.1f}"
                          for i, one in enumerate(runs[0]["communication"]["exchanges"]))
    return (f"| {rate} | {features} | {runs[0]['name']} | {statistics.median(times):.0f} ({min(times):.0f} to {max(times):.0f}) "
            f"| {1e-6 * runs[0]['communication']['bytes_per_step']:.1f} "
            f"| {statistics.median(run['communication']['exposed_ms'] for run in runs):.0f} | {exchanges} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weft", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rates", nargs="+", default=["none", "10gbit", "4gbit", "1gbit", "300mbit"])
    parser.add_argument("--features", nargs="+", type=int, default=[1024, 8192])
    parser.add_argument("--per-node", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--mca", action="append", default=[])
    args = parser.parse_args()
    if INSIDE not in os.environ:
        os.environ[INSIDE] = "1"
        os.execvp("unshare", ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable,
                              *sys.argv])
    make_nodes()
    args.weft = args.weft.resolve()
    args.directory.mkdir(parents=True, exist_ok=True)
    print("| link, each direction | features | division | ms/step (range) | MB sent by a rank | exposed, ms | exchanges, ms |")
    print("|---|---:|---|---:|---:|---:|---|", flush=True)
    for rate in args.rates:
        limit(rate)
        for features in args.features:
            for runs in zip(*(measure(args, rate, features, repeat) for repeat in range(args.repeat))):
                print(row(rate, features, runs), flush=True)
    load = Path("/proc/loadavg").read_text().split()[0]
    print(f"load of the machine at the end: {load}", file=sys.stderr)


if __name__ == "__main__":
    main()
