# SPDX-License-Identifier: Apache-2.0
"""The training loop with the smallest model: interrupted runs, on 1 and 2 ranks, end with the bits of an uninterrupted one.

loop_test.py LINEAR_REGRESSION
"""
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import files
import program

STEPS = 60
INPUT = f"""
[run]
steps = {STEPS}
[optimizer]
learning_rate = 0.1
[checkpoint]
every = 10
[log]
every = 1
"""


# A rate at which the loss soon only fluctuates.
BEST = """
[run]
steps = 300
stop_after = 4
[optimizer]
learning_rate = 0.5
[checkpoint]
every = 7
keep_best = true
[log]
every = 1
evaluate_every = 3
"""


class Jobs:
    def __init__(self, binary, folder):
        self.binary, self.folder = binary, folder
        self.input = folder / "input.toml"

    def run(self, name, ranks, fault="", code=0, text=INPUT):
        """Trains into folder/name with an injected fault; returns what was printed. code: None for any but 0."""
        self.input.write_text(text)
        command = [self.binary, str(self.input), str(self.folder / name)]
        if ranks > 1:
            command = ["mpiexec", "-n", str(ranks), "--oversubscribe", "--bind-to", "none", *command]
        done = subprocess.run(command, env=dict(os.environ, WEFT_FAULT=fault) if fault else None, text=True, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120)
        assert (done.returncode != 0) if code is None else done.returncode == code, (name, done.returncode, done.stdout)
        return done.stdout

    def outcome(self, name, with_communication=True):
        """Tensors of the last checkpoint and the records without times."""
        run = self.folder / name
        records = program.metrics_without_times(run)
        for record in records:
            record.pop("examples_per_second")
            if not with_communication:
                record.pop("communication", None)
        assert [record["step"] for record in records] == list(range(1, STEPS + 1)), f"{name}: gaps or duplicates"
        tensors = files.read_tensors(run / "checkpoints" / f"step_{STEPS:08d}")
        return {key: (values.dtype, values.shape, values.tobytes()) for key, values in tensors.items()}, records


def state(run, step):
    """Tensors of a checkpoint, and what its manifest says of the lowest loss."""
    directory = run / "checkpoints" / f"step_{step:08d}"
    best = json.loads((directory / "manifest.json").read_text())["extra"]["best"]
    return {key: values.tobytes() for key, values in files.read_tensors(directory).items()}, best


def keeps_the_best(jobs, ranks):
    """The checkpoint with the lowest loss stays, the run ends when none is lower, and interruptions change neither."""
    output = jobs.run(f"best_{ranks}", ranks, text=BEST)
    whole = jobs.folder / f"best_{ranks}"
    losses = {line["step"]: line["validation.loss"] for line in program.metrics(whole) if "validation.loss" in line}
    best = min(losses, key=losses.get)
    end = best + 4 * 3
    record = program.record(whole)
    assert record["exit"]["code"] == 0 and record["result"]["step"] == end < 300 and max(losses) == end, record["result"]
    assert record["result"]["best"] == {"step": best, "loss": losses[best]}, record["result"]
    # No loss before had four evaluations without a lower one after it.
    lowest, since = float("inf"), 0
    for step, loss in losses.items():
        lowest, since = (loss, 0) if loss < lowest else (lowest, since + 1)
        assert since < 4 or step == end, (step, losses)
    assert f"of step {best}, in 4 evaluations; stopped at step {end} of 300" in record["result"]["stopped_early"], record["result"]
    assert f"at step {best}; its checkpoint is {whole}/best" in output, output
    kept = sorted(int(path.name[5:]) for path in (whole / "checkpoints").glob("step_????????"))
    others = sorted({step for step in range(7, end, 7)} | {end})
    assert kept == sorted({best, *others[-2:]}), (kept, best, end)
    assert state(whole, best)[1] == {"step": best, "loss": losses[best], "evaluations_since": 0}

    # Killed while the best checkpoint is published, before an older one is deleted, and between it and the end.
    faults = (f"before-rename:0:{best}", f"before-latest:0:{best}") if ranks == 1 else (f"step:1:{best + 5}:kill",)
    for number, fault in enumerate(faults):
        name = f"best_{ranks}_{number}"
        jobs.run(name, ranks, fault, code=None, text=BEST)
        jobs.run(name, ranks, text=BEST)
        again = jobs.folder / name
        for step in (best, end):
            assert state(again, step) == state(whole, step), (fault, step)
        for key in ("best", "stopped_early", "step"):
            assert program.record(again)["result"][key] == record["result"][key], (fault, key)

    if ranks > 1:
        return
    # It is finished; a larger limit continues it.
    output = jobs.run(f"best_{ranks}", ranks, text=BEST)
    assert "the run is finished, it stopped at step" in output, output
    assert program.record(whole)["result"]["step"] == end
    output = jobs.run(f"best_{ranks}", ranks, text=BEST.replace("stop_after = 4", "stop_after = 6"))
    assert f"resuming after step {end} of 300" in output and program.record(whole)["result"]["step"] > end, output


def keeps_the_last_that_was_written(jobs):
    """A best checkpoint that cannot be written: the one before stays, as the manifests say."""
    best = program.record(jobs.folder / "best_1_0")["result"]["best"]["step"]
    text = BEST.replace("stop_after = 4", "stop_after = 0").replace("steps = 300", f"steps = {best + 1}")
    jobs.run("unwritten", 1, f"before-manifest:0:{best}:enospc", text=text.replace("every = 7", "every = 1000"))
    run = jobs.folder / "unwritten"
    _, noted = state(run, best + 1)
    assert 0 <= noted["step"] < best and (run / "checkpoints" / f"step_{noted['step']:08d}").is_dir(), noted


def check(jobs):
    for ranks in (1, 2):
        keeps_the_best(jobs, ranks)
    keeps_the_last_that_was_written(jobs)

    for ranks in (1, 2):
        whole = f"whole_{ranks}"
        output = jobs.run(whole, ranks)
        assert "starting at step 0 of 60" in output and "trained 60 steps, 960 examples" in output, output
        assert "examples/s" in (jobs.folder / whole / "log.txt").read_text()

        # Killed at a step: the run resumes from the last checkpoint that was complete. Steps are faster than the disk.
        jobs.run("killed", ranks, f"step:{ranks - 1}:37:kill", code=None)
        output = jobs.run("killed", ranks)
        assert re.search("resuming after step [23]0 of 60", output), output
        assert jobs.outcome("killed") == jobs.outcome(whole), f"{ranks} ranks: differs after a kill"
        (jobs.folder / "killed").rename(jobs.folder / f"killed_{ranks}")

        # A request to stop that reaches one rank: all ranks stop together, two steps later.
        jobs.run(f"stopped_{ranks}", ranks, f"step:{ranks - 1}:21:usr1", code=75)
        record = program.record(jobs.folder / f"stopped_{ranks}")
        assert record["exit"]["code"] == 75 and record["result"]["step"] == 23, record
        assert "validation" not in record["result"]
        jobs.run(f"stopped_{ranks}", ranks)
        assert jobs.outcome(f"stopped_{ranks}") == jobs.outcome(whole), f"{ranks} ranks: differs after a request"

    # Begun by 2 ranks, finished by 1: the tensors are independent of the number of ranks.
    jobs.run("fewer", 2, "step:0:45:kill", code=None)
    output = jobs.run("fewer", 1)
    assert re.search("resuming after step [34]0 of 60", output), output
    for name in ("fewer", "whole_2"):
        assert jobs.outcome(name, False) == jobs.outcome("whole_1", False), f"{name} differs from one rank"

    # What the loop writes for any model.
    record = program.record(jobs.folder / "whole_2")
    result = record["result"]
    assert record["exit"]["code"] == 0 and result["step"] == STEPS and result["examples"] == 16 * STEPS, result
    assert result["examples_per_second"] > 0 and result["validation"]["loss"] < result["train"]["loss"] * 10, result
    assert set(result["train"]) == {"loss"} and set(record["timings"]) == {"gradient", "exchange", "update"}, record
    assert record["communication"]["exchanges"]["errors"]["bytes"] == 56, record["communication"]
    line = program.metrics(jobs.folder / "whole_1")[-1]
    assert list(line) == ["step", "examples", "loss", "output_loss", "first_example", "bias", "seconds", "examples_per_second",
                          "data_wait_seconds", "memory"], line
    assert 0 <= line["memory"]["device_bytes"] <= line["memory"]["device_peak_bytes"], line
    assert len(line["output_loss"]) == 7 and set(line["bias"]) == {"first", "last"}, line
    manifest = json.loads((jobs.folder / "whole_2" / "checkpoints" / f"step_{STEPS:08d}" / "manifest.json").read_text())
    assert manifest["cursor"] == {"example": 16 * STEPS} and manifest["grid"] == {"data": 2}, manifest
    # Starts that make no step are noticed: two in a row from one step end the third.
    for _ in range(2):
        jobs.run("stuck", 1, "step:0:1:kill", code=None)
    jobs.run("stuck", 1, code=93)


with tempfile.TemporaryDirectory(prefix="weft_test_") as directory:
    check(Jobs(sys.argv[1], Path(directory)))
