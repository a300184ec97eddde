# SPDX-License-Identifier: Apache-2.0
"""Driver of soak.sh. A round is one run with two injected faults that is restarted after each; its last checkpoint must then
have the bytes, and its metrics the records, of an undisturbed run. Besides the faults of WEFT_FAULT and SIGKILL from outside:

  rival     a second job starts in the same directory while the first one runs: one of them trains, the other one is refused
  node      all processes of the job and its launcher are killed at once, except one rank, which is stopped and wakes up after
            the next job has started
  disk      one read, write or fsync below checkpoints/ fails with EIO (failing_disk.c)

The seed determines the faults before the first round: every point of the checkpoint protocol is killed at least three times
(if there are enough rounds), and at least half of the faults are inside the protocol. Only the time of a kill from outside,
and the step at which a fault occurs, depend on the progress of the runs.
"""
import argparse
import collections
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import files
import program

PROTOCOL = ("after-open", "mid-dataset", "before-close", "before-fsync", "before-manifest", "before-rename", "after-rename",
            "before-latest", "mid-delete")
ELSEWHERE = ("step", "data-wait", "data-read", "collective", "outside", "rival", "node", "disk")
# The only kind of fault at these points.
KIND_AT = {"outside": "kill", "rival": "rival", "node": "node down", "disk": "eio"}
EACH_POINT, PROTOCOL_SHARE = 3, 0.5
# Kinds of faults and their relative frequency, after the kills at every protocol point.
KINDS = {"kill": 60, "segfault": 8, "exit": 8, "throw": 8, "enospc": 6, "term": 5, "usr1": 5}
OWNED = "belongs to another run"    # part of the message that refuses a second job
STEPS, EVERY, LAYERS = 40, 5, 2
# ranks -> (data axis, optimizer state, precision): all storage types and both axes.
GRIDS = {1: (1, "fp32", "fp32"), 2: (2, "8bit", "bf16"), 3: (1, "bf16", "fp32"), 4: (2, "8bit", "fp32")}
INPUT = """
[synthetic]
output = "{folder}/data"
layers = {layers}
d_model = 16
features = 32
k = 3
tokens = 2000
validation_tokens = 100
[run]
steps = {steps}
[data]
train = "{folder}/data/train"
batch_tokens = 64
block_rows = 16
window_rows = 256
[transcoder]
features = 40
k = 3
[optimizer]
clip_norm = 0.05
clip_mode = "previous"
state = "{state}"
[parallel]
data = {data}
timeout = 60
[device]
precision = "{precision}"
[checkpoint]
every = {every}
[resume]
ignore_no_progress = true     # both faults may occur before the first checkpoint
[log]
every = 1
"""

Fault = collections.namedtuple("Fault", "point kind")
Result = collections.namedtuple("Result", "point kind ranks outcome")


def survived(fault):
    return fault.kind == "enospc" or fault.point in ("rival", "node", "disk")


def plan(rounds, rng):
    """Two faults per round."""
    faults = [Fault(point, "kill") for point in PROTOCOL for _ in range(EACH_POINT)]
    faults += [Fault(point, KIND_AT[point]) for point in ("rival", "node", "disk") for _ in range(EACH_POINT)]
    del faults[2 * rounds:]
    while len(faults) < 2 * rounds:
        inside = rng.random() < PROTOCOL_SHARE
        point = rng.choice(PROTOCOL if inside else ELSEWHERE)
        kind = KIND_AT.get(point) or rng.choices(*zip(*KINDS.items()))[0]
        if kind == "enospc" and not inside:
            kind = "kill"  # a full disk affects checkpoints only
        faults.append(Fault(point, kind))
    rng.shuffle(faults)
    pairs = []
    for pair in zip(faults[::2], faults[1::2]):
        # A run may complete in spite of some faults: they come last.
        first, second = sorted(pair, key=survived)
        pairs.append((Fault(rng.choice(PROTOCOL), "kill") if survived(first) else first, second))
    return pairs


def newest(run):
    return max(files.checkpoints(run), default=0)


class Soak:
    def __init__(self, binary, folder, rng):
        self.binary, self.folder, self.rng = binary, Path(folder), rng
        self.references, self.seconds = {}, {}

    def source(self, ranks):
        path = self.folder / f"input_{ranks}.toml"
        if not path.exists():
            data, state, precision = GRIDS[ranks]
            path.write_text(INPUT.format(folder=self.folder, layers=LAYERS, steps=STEPS, every=EVERY, data=data,
                                         state=state, precision=precision))
        return path

    def start(self, ranks, run, fault="", **variables):
        command = [self.binary, "train", str(self.source(ranks)), "--output", str(run)]
        if ranks > 1:
            command = ["mpiexec", "-n", str(ranks), "--oversubscribe", "--bind-to", "none", *command]
        environment = dict(os.environ, WEFT_FAULT=fault, **variables)
        return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def reference(self, ranks):
        if ranks not in self.references:
            if not (self.folder / "data").exists():
                subprocess.run([self.binary, "synth", str(self.source(ranks))], check=True, stdout=subprocess.DEVNULL)
            run = self.folder / f"whole_{ranks}"
            begin = time.monotonic()
            process = self.start(ranks, run)
            output, _ = process.communicate()
            assert process.returncode == 0, output
            self.seconds[ranks] = time.monotonic() - begin
            self.references[ranks] = self.outcome(run)
        return self.references[ranks]

    @staticmethod
    def outcome(run):
        """Bytes of the last checkpoint's shards, and the metrics without their times."""
        last = files.checkpoints(run).get(STEPS)
        assert last, f"no checkpoint of step {STEPS}"
        shards = {path.name: path.read_bytes() for path in sorted(last.glob("rank_*.h5"))}
        records = program.metrics_without_times(run)
        return shards, records

    def order(self, injected, ranks, run, is_last):
        """The value of WEFT_FAULT: a step that this start will reach, early enough for the next fault."""
        rng, rank, done = self.rng, self.rng.randrange(ranks), newest(run)
        limit = STEPS if is_last else STEPS // 2
        if injected.point in PROTOCOL:
            first = max(done - done % EVERY + EVERY, 3 * EVERY if injected.point == "mid-delete" else 0)
            step = rng.randrange(first, max(first, limit) + 1, EVERY)
            times = f"@{rng.randint(1, 10)}" if injected.point == "mid-dataset" else ""
            if injected.kind == "enospc" and injected.point in PROTOCOL[4:]:
                rank = 0  # other ranks write nothing there
            return f"{injected.point}{times}:{rank}:{step}:{injected.kind}"
        step = rng.randint(done + 1, max(done + 1, limit))
        if injected.point == "data-read":  # counts the batches of this start
            step = rng.randint(1, max(1, limit - done))
        times = f"@{rng.randint(1, 4 if ranks > 1 else 1)}" if injected.point == "collective" else ""
        return f"{injected.point}{times}:{rank}:{step}:{injected.kind}"

    def kill_from_outside(self, process, ranks):
        """SIGKILL to a random process of the job at a random time."""
        time.sleep(self.rng.uniform(0, 0.9 * self.seconds[ranks]))
        victims = [process.pid] if ranks == 1 else children(process.pid)
        if process.poll() is None and victims:
            send(self.rng.choice(victims), signal.SIGKILL)

    def end_of(self, process):
        """Exit code and output of a job; a job that hangs is ended with all its ranks."""
        try:
            output, _ = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            for victim in [*children(process.pid), process.pid]:
                send(victim, signal.SIGKILL)
            raise
        return process.returncode, output

    def rival(self, ranks, run, before):
        """Two jobs in one directory."""
        first = self.start(ranks, run)
        time.sleep(self.rng.uniform(0, self.seconds[ranks]))
        second = self.start(ranks, run)
        ends = [self.end_of(job) for job in (first, second)]
        trained = [output for code, output in ends if code == 0]
        refused = [output for code, output in ends if code == 6 and OWNED in output]
        assert trained and len(trained) + len(refused) == 2, ends
        for _, output in ends:
            self.check_start(output, before, newest(run))
        return "refused" if refused else "one after the other"

    def node_down(self, ranks, run):
        """The node of the launcher and of all ranks but one goes down; the last rank does not know it yet when the next job starts."""
        process = self.start(ranks, run)
        time.sleep(self.rng.uniform(0, 0.9 * self.seconds[ranks]))
        if process.poll() is not None:
            return "missed"
        of_job = [process.pid] if ranks == 1 else children(process.pid)
        survivor = self.rng.choice(of_job) if of_job and ranks > 1 else None
        if survivor:
            send(survivor, signal.SIGSTOP)
        for victim in [process.pid, *of_job]:
            if victim != survivor:
                send(victim, signal.SIGKILL)
        process.communicate(timeout=300)
        successor = self.start(ranks, run)
        time.sleep(self.rng.uniform(0, 2))
        if survivor:
            send(survivor, signal.SIGCONT)
        code, output = self.end_of(successor)
        # Rank 0 of the dead job may have been the survivor: then its lease is held until it wakes up.
        assert code == 0 or (code == 6 and OWNED in output), (code, output)
        return "taken over" if code == 0 else "refused, then taken over"

    def failing_disk(self, ranks, run):
        mark = self.folder / "failed"
        mark.unlink(missing_ok=True)
        order = f"{self.rng.randrange(ranks)}:{self.rng.randint(1, 100)}:{mark}"
        code, output = self.end_of(self.start(ranks, run, WEFT_EIO=order, LD_PRELOAD=str(self.disk())))
        if not mark.exists():
            return "missed"
        # A read is repeated; a checkpoint that was not written ends the run only if it is the last one.
        assert code in (0, 6) and "rejected" not in output, (order, code, output)
        return "continued" if code == 0 else "previous one"

    def disk(self):
        library = self.folder / "failing_disk.so"
        if not library.exists():
            source = Path(__file__).with_name("failing_disk.c")
            subprocess.run(["cc", "-O1", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"], check=True)
        return library

    def inject(self, injected, ranks, run, is_last):
        before = newest(run)
        if injected.point == "rival":
            return self.rival(ranks, run, before)
        if injected.point == "node":
            return self.node_down(ranks, run)
        if injected.point == "disk":
            return self.failing_disk(ranks, run)
        fault = "" if injected.point == "outside" else self.order(injected, ranks, run, is_last)
        process = self.start(ranks, run, fault)
        if injected.point == "outside":
            self.kill_from_outside(process, ranks)
        code, output = self.end_of(process)
        self.check_start(output, before)
        if code == 0:
            # One failed write costs a checkpoint, not the run. A kill from outside may come too late.
            continued = injected.kind == "enospc" and ("not written" in output or "the checkpoint itself is durable" in output)
            # Or the run ended before the ranks agreed on the request.
            continued = continued or (injected.kind in ("term", "usr1") and is_last)
            assert continued or injected.point == "outside", f"{fault} did not occur:\n{output}"
            return "continued" if continued else "missed"
        if injected.point == "outside" and not is_last and newest(run) == STEPS:
            return "missed"  # no steps are left for the next fault
        if injected.kind in ("term", "usr1"):
            assert ranks > 1 or code == {"term": 143, "usr1": 75}[injected.kind], (fault, code, output)
            return "stopped"
        if injected.point in PROTOCOL and fault:
            step = int(fault.split(":")[2])
            return "new one" if step in files.checkpoints(run) else "previous one"
        return "previous one"

    @staticmethod
    def check_start(output, before, after=None):
        """After any fault all checkpoints are valid, and the run resumes from the newest: of step `before`, or of one up to `after`
        if another job may have written it."""
        assert "rejected" not in output, output
        begun = re.search(r"(resuming after|starting at) step (\d+) of", output)
        assert not begun or before <= int(begun.group(2)) <= (before if after is None else after), (before, after, output)

    def round(self, number, faults, ranks, log):
        whole = self.reference(ranks)
        run = self.folder / f"round_{number}"
        results = []
        for i, injected in enumerate(faults):
            before, outcome = self.folder / "before", "missed"
            shutil.rmtree(before, ignore_errors=True)
            if run.exists():
                shutil.copytree(run, before)
            # A kill from outside can come too late, or before the process exists: repeat from the same state.
            while outcome == "missed":
                outcome = self.inject(injected, ranks, run, i + 1 == len(faults))
                if outcome == "missed":
                    shutil.rmtree(run, ignore_errors=True)
                    if before.exists():
                        shutil.copytree(before, run)
            results.append(Result(injected.point, injected.kind, ranks, outcome))
        # A survivor of a node that is down may hold the directory for some seconds more.
        for _ in range(10):
            before = newest(run)
            code, output = self.end_of(self.start(ranks, run))
            self.check_start(output, before)
            if code != 6 or OWNED not in output:
                break
            time.sleep(1)
        assert code == 0, output
        shards, records = self.outcome(run)
        assert shards == whole[0], "the last checkpoint differs: " + ", ".join(
            name for name in whole[0] if shards.get(name) != whole[0][name])
        assert records == whole[1], "the metrics differ"
        left = [path.name for path in (run / "checkpoints").iterdir() if path.name.endswith(".tmp")]
        assert not left, f"remaining files: {left}"
        shutil.rmtree(run)
        log.extend(results)


def send(pid, number):
    """A signal to a process that may have ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def children(pid):
    """Processes that mpiexec started directly."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                found.append(int(entry))
    return found


def table(log):
    counts = collections.Counter((injected.point, injected.kind, injected.outcome) for injected in log)
    order = {point: i for i, point in enumerate(PROTOCOL + ELSEWHERE)}
    lines = ["| point | kind | faults | found afterwards |", "|---|---|---:|---|"]
    for (point, kind), total in sorted(collections.Counter((b.point, b.kind) for b in log).items(),
                                       key=lambda item: (order[item[0][0]], [*KINDS, *KIND_AT.values()].index(item[0][1]))):
        found = ", ".join(f"{n} {outcome}" for (p, k, outcome), n in sorted(counts.items()) if (p, k) == (point, kind))
        lines.append(f"| {point} | {kind} | {total} | {found} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--ranks", type=int, choices=sorted(GRIDS), default=None)
    parser.add_argument("--weft", default="build/cpu-release/weft")
    parser.add_argument("--table", default=None)
    options = parser.parse_args()
    if not Path(options.weft).is_file() or options.rounds < 1:
        parser.error(f"{options.weft} is not a program; build it, or give --weft PATH" if options.rounds > 0 else "--rounds")
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    rng = random.Random(seed)
    print(f"soak: {options.rounds} rounds, seed {seed}", flush=True)

    folder = tempfile.mkdtemp(prefix="weft_soak_")
    soak, log, begin = Soak(str(Path(options.weft).resolve()), folder, rng), [], time.monotonic()
    rounds = plan(options.rounds, rng)
    for number, faults in enumerate(rounds, 1):
        ranks = options.ranks or rng.randint(1, 3)
        try:
            soak.round(number, faults, ranks, log)
        except (AssertionError, subprocess.TimeoutExpired) as failure:
            print(f"round {number} on {ranks} ranks, {faults}: {failure}\nkept: {folder}/round_{number}")
            return 1
        if number % 25 == 0:
            print(f"{number} rounds, {len(log)} faults, {time.monotonic() - begin:.0f} s", flush=True)
    shutil.rmtree(folder)

    deaths = [injected for injected in log if injected.outcome != "continued"]
    inside = [injected for injected in deaths if injected.point in PROTOCOL]
    text = table(log) + (f"\n\nseed {seed}: {len(rounds)} rounds, {len(deaths)} interruptions ({len(log)} faults), "
                         f"{100 * len(inside) / len(deaths):.0f} % of them inside the checkpoint protocol, on "
                         f"{', '.join(map(str, sorted({b.ranks for b in log})))} ranks.\n"
                         "Each run ended with the bits of the undisturbed run.")
    print(text)
    if options.table:
        Path(options.table).write_text(text + "\n")
    kills = collections.Counter(injected.point for injected in log if injected.kind == "kill")
    wanted = min(EACH_POINT, 2 * options.rounds // len(PROTOCOL))
    too_few = [point for point in PROTOCOL if kills[point] < wanted]
    if too_few or len(inside) < 0.3 * len(deaths):
        print(f"too few faults occurred: {too_few or 'inside the protocol'}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
