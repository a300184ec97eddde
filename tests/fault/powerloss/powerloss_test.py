# SPDX-License-Identifier: Apache-2.0
"""After a power failure at any moment, no published checkpoint is lost and nothing half-written is believed.

powerloss_test.py RECORDER DRIVER [WEFT] [--states N] [--runs N] [--seed S]

The record of a program (recorder.cpp) is turned into states of its disk after a power failure (states.py). In each of N
states the code that resumes runs finds the newest checkpoint and compares its bits with the known state of its step; every
checkpoint that was reported and not yet deleted must be intact; and the next one is written. With WEFT, a real run is
recorded as well, resumed from some states, and must end with the bits of the undisturbed run.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import program
import states

LAUNCH = ["mpiexec", "--oversubscribe", "--bind-to", "none", "-n"]
INPUT = program.SYNTHETIC + """\
[run]
steps = 24
[data]
train = "{folder}/data/train"
batch_tokens = 60
block_rows = 16
window_rows = 256
[transcoder]
features = 40
k = 3
[checkpoint]
every = 6
[log]
every = 1
"""


class Recording:
    """A directory, and the record of what programs do there."""

    def __init__(self, recorder, folder, name):
        self.recorder, self.log, self.root = recorder, folder / f"{name}.log", folder / name
        self.root.mkdir()

    def run(self, command, ranks=1, fault="", code=0):
        done = subprocess.run([*(LAUNCH + [str(ranks)] if ranks > 1 else []),
                               "env", f"LD_PRELOAD={self.recorder}", f"WEFT_RECORD_ROOT={self.root}",
                               f"WEFT_RECORD_LOG={self.log}", f"WEFT_FAULT={fault}", *map(str, command)],
                              text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        assert (done.returncode == 0) == (code == 0), (command, done.returncode, done.stdout)
        return done.stdout


def record_driver(recorder, driver, folder):
    """The life of four run directories."""
    plain = Recording(recorder, folder, "plain")
    plain.run([driver, plain.root, 10, 2, "small"])
    killed = Recording(recorder, folder, "killed")  # leftovers of three kinds are removed by the next start
    for point in ("mid-dataset:0:4", "before-rename:0:6", "mid-delete:0:8"):
        killed.run([driver, killed.root, 10, 2, "small"], fault=point, code=1)
    killed.run([driver, killed.root, 10, 2, "small"])
    replaced = Recording(recorder, folder, "replaced")  # checkpoints take the place of others of the same step
    replaced.run([driver, replaced.root, 6, 2, "small"])
    replaced.run([driver, replaced.root, 10, 2, "small", f"from={replaced.root}/step_00000004"])
    ranks = Recording(recorder, folder, "ranks")
    ranks.run([driver, ranks.root, 6, 2, "small"], ranks=2)
    return [plain, killed, replaced, ranks]


class Lost(Exception):
    """A state from which the program does not resume as it must."""


def check_driver(driver, recordings, folder, wanted, seed, without_sync=None):
    checker = subprocess.Popen([str(driver), "check"], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    tested = 0
    outcomes = {}
    for recording in recordings:
        for disk, state in states.crash_states(recording.log, recording.root, wanted / len(recordings), seed,
                                               without_sync):
            target = folder / f"state_{tested}"
            states.write(state, target)
            print(target, *disk.published, file=checker.stdin, flush=True)
            answer = checker.stdout.readline().strip()
            newest = max(disk.published, default=-1)
            found = re.fullmatch(r"from (-?\d+)", answer)
            if not found or int(found[1]) < newest:
                checker.kill()
                raise Lost(f"{recording.root.name}, after {disk.time} calls, published {sorted(disk.published)}: {answer}; "
                           f"the power left {sorted(state)}")
            kind = "none" if int(found[1]) < 0 else "published" if int(found[1]) == newest else "newer than published"
            outcomes[kind] = outcomes.get(kind, 0) + 1
            shutil.rmtree(target)
            tested += 1
    checker.stdin.close()
    assert checker.wait() == 0
    return tested, outcomes


def check_test(driver, recordings, folder, seed):
    """Each kind of fsync is necessary, and the test would miss it: without it, a checkpoint is lost."""
    for without in (r".*/rank_\d+\.h5", r".*/manifest\.json", r"step_\d+\.tmp", r"\."):
        try:
            check_driver(driver, recordings, folder, 300, seed, without)
        except Lost as lost:
            print(f"without fsync of {without}: {str(lost)[:150]}...")
            for state in folder.glob("state_*"):
                shutil.rmtree(state)
        else:
            sys.exit(f"not detected: no fsync of {without}")


def shards(run, step):
    return {path.name: path.read_bytes() for path in sorted((run / "checkpoints" / f"step_{step:08d}").glob("rank_*"))}


def check_runs(recorder, weft, folder, wanted, seed):
    source = folder / "input.toml"
    source.write_text(INPUT.format(folder=folder))
    subprocess.run([str(weft), "synth", str(source)], check=True, stdout=subprocess.DEVNULL)
    recording = Recording(recorder, folder, "runs")
    recording.run([weft, "train", source, "--output", recording.root / "a"])
    expected = shards(recording.root / "a", 24)
    assert expected
    tested = 0
    for disk, state in states.crash_states(recording.log, recording.root, wanted, seed):
        target = folder / f"run_{tested}"
        states.write(state, target)
        done = subprocess.run([str(weft), "train", str(source), "--output", str(target / "a")], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        resumed = re.search(r"resuming after step (\d+)|the run is finished, all (\d+) steps are done", done.stdout)
        newest = max(disk.published, default=0)
        if done.returncode != 0 or shards(target / "a", 24) != expected or int(resumed[1] or resumed[2] if resumed else 0) < newest:
            raise Lost(f"run after {disk.time} calls, published {sorted(disk.published)}: code {done.returncode}\n{done.stdout}"
                       f"\nit began with {sorted(state)}")
        shutil.rmtree(target)
        tested += 1
    return tested


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("recorder", type=Path)
    parser.add_argument("driver", type=Path)
    parser.add_argument("weft", type=Path, nargs="?")
    parser.add_argument("--states", type=int, default=300)
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--seed", type=int, default=15)
    options = parser.parse_args()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="weft_power_", dir=memory) as name:
        folder = Path(name)
        recordings = record_driver(options.recorder.resolve(), options.driver.resolve(), folder)
        tested, outcomes = check_driver(options.driver.resolve(), recordings, folder, options.states, options.seed)
        print(f"{tested} different states with seed {options.seed}; newest checkpoint found: {outcomes}")
        check_test(options.driver.resolve(), recordings[:1], folder, options.seed)
        # States are drawn at random; a shard is written by few large calls, so that some are drawn twice.
        assert tested >= 0.75 * options.states, f"only {tested} different states"
        if options.weft and options.runs:
            tested = check_runs(options.recorder.resolve(), options.weft.resolve(), folder, options.runs, options.seed)
            print(f"{tested} runs resumed after a power failure end with the bits of the undisturbed run")


main()
