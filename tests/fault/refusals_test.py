# SPDX-License-Identifier: Apache-2.0
"""A run must not continue with numbers that are not finite, die repeatedly at the same step, or modify a checkpoint of a
newer format. Each case ends with its own exit code and a message that names the cause, and damages nothing.

refusals_test.py WEFT
"""
import hashlib
import re

import numpy as np

import files
import jobs
import program


def check_nonfinite(job):
    """A NaN in a batch is detected before any update: the run stops with 4 and names the rows, or skips the step."""
    for ranks, grid in ((1, ()), (2, ("--set", "parallel.data=2")), (3, ())):
        name = f"nan_{ranks}"
        fault = f"data-read:{ranks - 1}:15:nan"
        output = job.run(name, *grid, ranks=ranks, fault=fault, code=4)
        assert re.search(r"not finite at step 15, batch of 60 tokens: .*chunk_0.*rows? \d+", output, re.S), output
        assert "parameters are those of step 14, unharmed" in output, output
        assert program.record(job.folder / name)["exit"]["code"] == 4
        for step in files.checkpoints(job.folder / name).values():
            for tensor, values in files.read_tensors(step).items():
                assert values.dtype.kind != "f" or np.isfinite(values).all(), tensor
        # The fault was injected into this start only: the restarted run ends like an undisturbed one.
        job.run(name, *grid, ranks=ranks)
        job.run(f"whole_{ranks}", *grid, ranks=ranks)
        assert job.outcome(name) == job.outcome(f"whole_{ranks}")
        # skip: one step is skipped and counted; a second one exceeds the limit.
        skip = ("--set", "run.nonfinite=skip", "--set", "run.skip_at_most=1")
        output = job.run(f"skip_{ranks}", *grid, *skip, ranks=ranks, fault=fault)
        assert "skipped" in output and program.metrics(job.folder / f"skip_{ranks}")[-1]["skipped_steps"] == 1, output
        output = job.run(f"too_many_{ranks}", *grid, *skip[:2], "--set", "run.skip_at_most=0", ranks=ranks, fault=fault, code=4)
        assert "run.skip_at_most = 0" in output, output
    # Divergence of the parameters stops the run, whatever is done with batches that are not finite.
    output = job.run("away", "--set", "optimizer.learning_rate=1e38", "--set", "run.nonfinite=skip", "--set", "run.skip_at_most=3",
                     code=4)
    assert "not finite" in output, output
    assert job.steps_of("away") == [], output


def check_crash_loop(job):
    """After two starts that died at the same step without a message the third refuses with 93, unless overridden."""
    for ranks in (1, 2):
        name = f"loop_{ranks}"
        job.run(name, ranks=ranks, fault="step:0:13:usr1", code=75)
        for _ in range(2):
            job.run(name, ranks=ranks, fault=f"step:{ranks - 1}:18:kill", code=program.KILLED)
        output = job.run(name, ranks=ranks, code=93)
        assert "the last 2 starts of this run began at step 15" in output and "resume.ignore_no_progress=true" in output, output
        assert program.record(job.folder / name)["exit"]["code"] == 93
        job.run(name, "--set", "resume.ignore_no_progress=true", ranks=ranks)
        assert job.steps_of(name)[-1] == job.steps
    # Starts that made progress in between are not a loop.
    for step in (10, 20, 30):
        job.run("moving", fault=f"after-rename:0:{step}:kill", code=program.KILLED)
    job.run("moving")


def check_newer_format(job):
    """A checkpoint of a newer format is refused, not skipped in favour of an older one, and remains unchanged."""
    name = "newer"
    job.run(name)
    path = files.checkpoints(job.folder / name)[job.steps] / "manifest.json"
    text = path.read_text()
    zeros = re.sub(r'"sha256": "[0-9a-f]{64}"', f'"sha256": "{"0" * 64}"', text, count=1).replace('"format_version": 2', '"format_version": 3')
    digest = hashlib.sha256(zeros.encode()).hexdigest()
    newer = zeros.replace("0" * 64, digest, 1)
    path.write_text(newer)
    for arguments in ((), ("--resume", str(path.parent))):
        output = job.run(name, *arguments, code=6)
        assert "has checkpoint format 3 (this program reads up to 2)" in output and str(path.parent) in output, output
    assert path.read_text() == newer
    # With a wrong digest it is a damaged manifest: rejected, and the previous checkpoint is used.
    path.write_text(newer.replace(digest, digest[::-1]))
    output = job.run(name)
    assert "rejected, manifest.json" in output and f"resuming after step {job.steps - 10} " in output, output


def check_no_silent_start(job):
    """If all checkpoints are damaged the run stops; it does not start again from step 0."""
    name = "damaged"
    job.run(name, ranks=2)
    for step in files.checkpoints(job.folder / name).values():
        with open(step / "rank_00001.h5", "r+b") as file:
            file.truncate(5000)
    output = job.run(name, ranks=2, code=6)
    assert output.count("torn write") == 2 and "2 checkpoints and none is valid" in output and "--resume never" in output, output


def check_changed_data(job):
    """Different training data are refused with 2, unless accepted."""
    name, other = "changed", job.folder / "other"
    job.run(name, fault="step:0:12:usr1", code=75)
    job.weft.run("synth", job.source, "--set", f"synthetic.output={other}", "--set", "synthetic.seed=2")
    now = ("--set", f"data.train={other}/train")
    output = job.run(name, *now, code=2)
    assert "not those of the interrupted run" in output and "data.accept_changed=true" in output, output
    output = job.run(name, *now, "--set", "data.accept_changed=true")
    assert "resuming with changed training data" in output and "resuming after step 14 " in output, output


def check(weft):
    job = jobs.Jobs(weft, steps=40)
    check_nonfinite(job)
    check_crash_loop(job)
    check_changed_data(job)
    check_newer_format(job)
    check_no_silent_start(job)


program.main(check)
