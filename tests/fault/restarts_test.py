# SPDX-License-Identifier: Apache-2.0
"""What the second and later starts of a run do: options of the first start, finished runs, longer runs, another selection,
damaged metrics, deaths and messages. Evaluation beside a run.

restarts_test.py WEFT
"""
import itertools
import shutil
import signal
import time

import files
import jobs
import program


def names(job, name):
    return sorted(path.name for path in (job.folder / name / "checkpoints").iterdir())


def step_path(job, name, step):
    return job.folder / name / "checkpoints" / f"step_{step:08d}"


def tree(path):
    """Bytes and modification time of every file."""
    return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.rglob("*") if file.is_file()}


def check_resume_never(job):
    """--resume never begins a new run once; the same command then continues it. Replaced checkpoints are deleted."""
    name, never = "never", ("--resume", "never")
    job.run(name)
    output = job.run(name, *never, fault="step:0:12:usr1", code=75)
    assert "starting at step 0 " in output, output
    assert "stopped by SIGUSR1 after step 14 of 30" in output and "step_00000014; the same command" in output, output
    output = job.run(name, *never)
    assert "resuming after step 14 " in output and "--resume never: applied by an earlier start" in output, output
    assert job.outcome(name) == job.outcome("whole")
    assert not [entry for entry in names(job, name) if "abandoned" in entry], names(job, name)
    assert "abandoned: deleted, the run has newer checkpoints" in (job.folder / name / "log.txt").read_text()
    assert "the run is finished" in job.run(name, *never)
    # After a start without the option it is a new request.
    job.run(name, "--set", "run.steps=31")
    assert "starting at step 0 " in job.run(name, *never)


def check_resume_path(job):
    """--resume PATH goes back once; the named checkpoint stays, although newer ones expire."""
    name = "path"
    job.run(name, "--set", "checkpoint.keep=5")
    back = ("--resume", str(step_path(job, name, 10)))
    job.run(name, *back, fault="after-rename:0:20:kill", code=None)
    output = job.run(name, *back)
    assert "resuming after step 20 " in output and "applied by an earlier start" in output, output
    assert job.outcome(name) == job.outcome("whole")
    assert names(job, name) == ["latest", "step_00000010", "step_00000020", "step_00000030"], names(job, name)
    # From another run: applied until the run has a checkpoint of its own.
    other = ("--resume", str(step_path(job, name, 10)) + "/")
    job.run("other", *other, fault="step:0:13:kill", code=None)
    output = job.run("other", *other, fault="after-rename:0:20:kill", code=None)
    assert "resuming after step 10 " in output, output
    output = job.run("other", *other)
    assert "resuming after step 20 " in output, output
    assert job.outcome("other")[0] == job.outcome("whole")[0]


def check_finished(job):
    """A finished run is left as it is, whatever it is started with: same steps, fewer steps, a key that may not change."""
    run = job.folder / "whole"
    before = tree(run)

    def unchanged():
        now = tree(run)
        of_starts = ("log.txt", "heartbeat", "lease.")  # what every start writes
        return all(now.get(path) == before[path] for path in before if not path.name.startswith(of_starts))

    for ranks in (1, 2):
        output = job.run("whole", ranks=ranks)
        assert "the run is finished, all 30 steps are done" in output and "trained" not in output, output
        assert unchanged()
    output = job.run("whole", "--set", "run.steps=20")
    assert "30 steps are done and run.steps = 20 asks for fewer" in output and unchanged(), output
    assert "run.seed was 1" in job.run("whole", "--set", "run.seed=2", code=2) and unchanged()
    assert "no such directory" in job.run("whole", "--resume", "nowhere", code=2) and unchanged()
    # A stopped run, too, has nothing to do if fewer steps are asked for.
    job.run("stopped", fault="step:0:12:usr1", code=75)
    record = (job.folder / "stopped" / "run.json").read_bytes()
    assert "14 steps are done" in job.run("stopped", "--set", "run.steps=10")
    assert (job.folder / "stopped" / "run.json").read_bytes() == record
    # Killed after the last step: the results are completed.
    job.run("last", fault="after-rename:0:30:kill", code=None)
    assert program.record(job.folder / "last")["exit"]["code"] is None
    job.run("last")
    assert program.record(job.folder / "last")["exit"]["code"] == 0 and job.outcome("last")[0] == job.outcome("whole")[0]


def check_longer(job):
    """More steps stretch the schedule of the learning rate: said before it happens; schedule_steps keeps it."""
    job.run("longer")
    shutil.copytree(job.folder / "longer", job.folder / "longer_kept")
    output = job.run("longer", "--set", "run.steps=60")
    warning = output.find("the learning rate was ")
    assert 0 < warning < output.find("resuming after step 30 "), output
    assert "schedule extended over 30 steps, now over 60" in output and "optimizer.schedule_steps = 30" in output, output
    rates = [line["learning_rate"] for line in program.metrics(job.folder / "longer")]
    assert rates[30] > 10 * rates[29], rates
    kept = ("--set", "optimizer.schedule_steps=30", "--set", "optimizer.final_fraction=0.1",
            "--set", "resume.accept_changed=true")
    output = job.run("longer_kept", "--set", "run.steps=60", *kept)
    rates = [line["learning_rate"] for line in program.metrics(job.folder / "longer_kept")]
    assert "the learning rate was" not in output and len(set(rates[30:])) == 1, output


def check_selections(job):
    """resume.accept_changed: from every activation and scope to every other one."""
    selections = list(itertools.product(("batch_topk", "topk", "relu"), ("layer", "all_layers")))
    arguments = {one: ("--set", f"transcoder.activation={one[0]}", "--set", f"transcoder.scope={one[1]}") for one in selections}
    assert "transcoder.activation was" in job.run("whole", *arguments["relu", "layer"], code=2)
    for before in selections:
        first = "_".join(("from", *before))
        job.run(first, "--set", "run.steps=6", *arguments[before])
        for after in selections:
            if before == after:
                continue
            shutil.copytree(job.folder / first, job.folder / "changed")
            output = job.run("changed", "--set", "run.steps=8", "--set", "resume.accept_changed=true", *arguments[after])
            assert "resuming after step 6 of 8" in output, output
            # Only batch_topk keeps thresholds from step to step; they depend on the scope.
            assert ("selection/threshold starts afresh" in output) == (after[0] == "batch_topk"), (before, after, output)
            shutil.rmtree(job.folder / "changed")


def check_deaths(job):
    """Starts that ended with a message, and kills at different steps, do not add up to exit code 93."""
    for ranks, faults in ((1, ("step:0:8:throw", "step:0:8:throw")), (2, ("step:1:8:throw", "step:1:8:throw")),
                          (1, ("step:0:8:kill", "step:0:7:kill")), (1, ("step:0:8:kill", "step:0:8:throw"))):
        shutil.rmtree(job.folder / "deaths", ignore_errors=True)
        for fault in faults:
            job.run("deaths", ranks=ranks, fault=fault, code=None)
        job.run("deaths", ranks=ranks)
    # A death after a new checkpoint, and one since: only one at this checkpoint.
    job.run("moving", fault="after-rename:0:20:kill", code=None)
    job.run("moving", fault="step:0:25:kill", code=None)
    assert "resuming after step 20 " in job.run("moving")


def check_damaged_metrics(job):
    """A damaged line of metrics.jsonl costs its record only."""
    job.run("metrics", fault="step:0:26:kill", code=None)
    path = job.folder / "metrics" / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[4] = bytes(len(lines[4]) - 1) + b"\n"
    path.write_bytes(b"".join(lines))
    assert "1 damaged line removed, the first is line 5" in job.run("metrics")
    whole = program.metrics_without_times(job.folder / "whole")
    assert program.metrics_without_times(job.folder / "metrics") == whole[:4] + whole[5:]


def check_requests(job):
    """Each request ends with a line that says what stopped the run, how far it came, and how it continues."""
    endless = ("--set", "run.steps=1000000", "--set", "log.every=1000")
    run = job.folder / "requests"
    for cause, code, begin in (("SIGINT", 130, lambda process: process.send_signal(signal.SIGINT)),
                               ("the file STOP", 75, lambda process: (run / "STOP").touch()),
                               ("run.walltime", 75, None)):
        shutil.rmtree(run, ignore_errors=True)
        process = job.start("requests", *endless, *(() if begin else ("--walltime", "00:00:02")))
        if begin:
            while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").stat().st_size == 0:
                assert process.poll() is None
                time.sleep(0.02)
            begin(process)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == code, output
        last = output.strip().splitlines()[-1]
        step = program.record(run)["result"]["step"]
        assert last.startswith(f"stopped by {cause} after step {step} of 1000000; its state is in ") and f"step_{step:08d}" in last, last
        assert last.endswith(f"the same command continues the run (exit code {code})"), last


def check_evaluation(job):
    """weft evaluate leaves a run as it is, also one that writes a checkpoint, and refuses keys that define the run."""
    run = job.folder / "whole"
    (run / "checkpoints" / "step_00000099.tmp").mkdir()
    (run / "checkpoints" / "step_00000099.tmp" / "rank_00000.h5").write_bytes(b"in progress")
    before, data = tree(run), job.folder / "data" / "validation"
    for ranks in (1, 2):
        job.weft.run("evaluate", run, "--data", data, ranks=ranks)
    for key in ("data.normalise=none", "run.seed=7", "transcoder.features=41"):
        output = job.weft.run("evaluate", run, "--data", data, "--set", key, code=2)
        assert key.split("=")[0] in output and "trained with other values" in output, output
    job.weft.run("evaluate", run, "--data", data, "--set", "data.batch_tokens=50", "--set", "transcoder.k=2")
    assert tree(run) == before


def check_dead_features(job):
    """No feature of a run that is shorter than the window can be dead: not known, not 0 %."""
    job.run("window", "--set", "transcoder.dead_window=600")  # 10 steps of 60 tokens
    fractions = [line["dead_fraction"] for line in program.metrics(job.folder / "window")]
    assert all(value is None for value in fractions[:9]) and all(value is not None for value in fractions[9:]), fractions
    assert all(line["dead_fraction"] is None for line in program.metrics(job.folder / "whole"))


def check(weft):
    job = jobs.Jobs(weft, steps=30)
    job.run("whole")
    check_resume_never(job)
    check_resume_path(job)
    check_finished(job)
    check_evaluation(job)
    check_longer(job)
    check_selections(job)
    check_deaths(job)
    check_damaged_metrics(job)
    check_requests(job)
    check_dead_features(job)


program.main(check)
