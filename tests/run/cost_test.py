# SPDX-License-Identifier: Apache-2.0
"""What a run does with the cost of its checkpoints: the margin before the wall-time limit, checkpoint.every = "auto",
checkpoint.local and checkpoint.scrub, with the smallest model.

cost_test.py LINEAR_REGRESSION
"""
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import files
import program

INPUT = """
[run]
steps = {steps}
{run}
[optimizer]
learning_rate = 0.1
[checkpoint]
{checkpoint}
[log]
every = {log}
"""
ENDLESS = 10 ** 9


class Jobs:
    def __init__(self, binary, folder):
        self.binary, self.folder = binary, folder

    def start(self, name, ranks=1, fault="", steps=60, run="", checkpoint="every = 10", log=1):
        source = self.folder / f"{name}.toml"
        source.write_text(INPUT.format(steps=steps, run=run, checkpoint=checkpoint, log=log))
        command = [self.binary, str(source), str(self.folder / name)]
        if ranks > 1:
            command = ["mpiexec", "-n", str(ranks), "--oversubscribe", "--bind-to", "none", *command]
        return subprocess.Popen(command, env=dict(os.environ, WEFT_FAULT=fault), text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT)

    def run(self, name, code=0, **options):
        """Returns the output. Fails unless the exit code is `code` (None: any but 0)."""
        process = self.start(name, **options)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == code if code is not None else process.returncode != 0, (name, process.returncode, output)
        return output

    def tensors(self, name, step=60):
        tensors = files.read_tensors(self.folder / name / "checkpoints" / f"step_{step:08d}")
        return {key: values.tobytes() for key, values in tensors.items()}

    def wait(self, process, name, text, what):
        """Until the log of the run contains the text."""
        end = time.monotonic() + 60
        while not ((self.folder / name / "log.txt").exists() and text in (self.folder / name / "log.txt").read_text()):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < end, f"no {what} within a minute"
            time.sleep(0.02)


def check_walltime(jobs):
    """The duration of a checkpoint that an earlier start has measured is the margin before the limit, before this start has
    written one; without one, an estimate is."""
    jobs.run("walltime", steps=20)
    starts = jobs.folder / "walltime" / "starts.jsonl"
    recorded = [line for line in map(json.loads, starts.read_text().splitlines()) if "checkpoint" in line]
    assert [line["checkpoint"] for line in recorded][-1] == 20 and all(line["seconds"] > 0 for line in recorded), recorded
    with starts.open("a") as file:  # as on a slow disk
        file.write('{"checkpoint": 20, "seconds": 3600.0, "delay": 1.0}\n')
    begin = time.monotonic()
    output = jobs.run("walltime", code=75, steps=ENDLESS, run='walltime = "02:00:01"', checkpoint="every = 0", log=1000)
    assert 'run.walltime = "02:00:01" leaves little time to train' in output, output
    assert time.monotonic() - begin < 60, "the margin was not twice the recorded duration"
    record = program.record(jobs.folder / "walltime")["checkpoint"]
    assert record["measured"] and 0 < record["duration_seconds"] < 3600, record

    output = jobs.run("estimate", code=75, steps=ENDLESS, run='walltime = "00:00:02"', checkpoint="every = 0", log=1000)
    assert "a checkpoint is estimated to take" in output, output


def check_auto(jobs):
    """Checkpoints at times that follow from their cost; the ranks agree on the steps; the results do not depend on them."""
    jobs.run("whole", checkpoint="every = 0", steps=2000, log=1000)
    # Failures every 0.4 s: several checkpoints in any run, and the interval is short on any disk.
    auto = 'every = "auto"\nmean_time_between_failures = 1e-4'
    for ranks in (1, 2):
        name = f"auto_{ranks}"
        output = jobs.run(name, ranks=ranks, checkpoint=auto, steps=2000, log=1000)
        assert re.search(r'checkpoint.every = "auto": one every \d+\.\d s \(each takes .* estimated from the write speed', output), output
        assert jobs.tensors(name, 2000) == jobs.tensors("whole", 2000), "the interval changed the results"
        record = program.record(jobs.folder / name)["checkpoint"]
        assert record["measured"] and record["interval_seconds"] >= record["delay_seconds"] > 0, record
    # Stopped and resumed: the measured cost is known from the first step on.
    jobs.run("killed", ranks=2, checkpoint=auto, steps=2000, log=1000, fault="step:1:1700:kill", code=None)
    output = jobs.run("killed", ranks=2, checkpoint=auto, steps=2000, log=1000)
    if "resuming after" in output and '"checkpoint"' in (jobs.folder / "killed" / "starts.jsonl").read_text().split("\n")[1]:
        assert "estimated" not in output, output
    assert jobs.tensors("killed", 2000) == jobs.tensors("whole", 2000)
    refused = jobs.run("word", checkpoint='every = "often"', code=2)
    assert 'checkpoint.every must be an integer or "auto", not the string "often"' in refused, refused


def check_local(jobs):
    """Through the nodes: the same results; what a killed job has left on its nodes is used."""
    local = f'every = 10\nlocal = "{jobs.folder}/disk"'
    jobs.run("plain")
    for ranks in (1, 2):
        name = f"local_{ranks}"
        output = jobs.run(name, ranks=ranks, checkpoint=local)
        assert "on the nodes, not in the run directory yet" in output and "copied to the run directory" in output, output
        assert jobs.tensors(name) == jobs.tensors("plain")
        assert not list((jobs.folder / "disk").iterdir()), "files are left on the nodes"
        # Killed while the checkpoint of step 30 is being copied, if it is; at step 45 otherwise.
        name = f"local_killed_{ranks}"
        jobs.run(name, ranks=ranks, checkpoint=local, fault=f"before-copy-fsync:{ranks - 1}:60:kill", code=None)
        assert not (jobs.folder / name / "checkpoints" / "step_00000060").exists()
        output = jobs.run(name, ranks=ranks, checkpoint=local)
        assert "step_00000060 was only in checkpoint.local" in output and "resuming after step 60" in output, output
        assert jobs.tensors(name) == jobs.tensors("plain")
        assert not list((jobs.folder / "disk").iterdir()), "files are left on the nodes"
    (jobs.folder / "file").write_text("")
    refused = jobs.run("refused", checkpoint=f'local = "{jobs.folder}/file/disk"', code=6)
    assert "checkpoint.local" in refused and "cannot be written" in refused, refused


def check_scrub(jobs):
    """A byte that changes in a kept checkpoint is reported while the run trains."""
    jobs.run("scrub", steps=20)
    process = jobs.start("scrub", steps=ENDLESS, checkpoint="every = 0\nscrub = 1e-5", log=1000)
    jobs.wait(process, "scrub", "checkpoint.scrub: 2 checkpoints verified", "verification")
    shard = jobs.folder / "scrub" / "checkpoints" / "step_00000010" / "rank_00000.h5"
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    jobs.wait(process, "scrub", "is damaged, shard rank_00000.h5 differs from its sha256", "report of the damage")
    assert shard.exists()
    (jobs.folder / "scrub" / "STOP").touch()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    record = program.record(jobs.folder / "scrub")["checkpoint"]["scrub"]
    assert record["passes"] > 0 and len(record["damaged"]) == 1 and not record["unreadable"], record


with tempfile.TemporaryDirectory(prefix="weft_test_") as directory:
    everything = Jobs(sys.argv[1], Path(directory))
    for check in (check_walltime, check_auto, check_local, check_scrub):
        check(everything)
