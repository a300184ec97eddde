# SPDX-License-Identifier: Apache-2.0
"""What the second and later starts of a run do: options of the first start, finished runs, another selection. Evaluation beside a run.

restarts_test.py WEFT
"""

import covering
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
    job.run(name, *back, fault="after-rename:0:20:kill", code=program.KILLED)
    output = job.run(name, *back)
    assert "resuming after step 20 " in output and "applied by an earlier start" in output, output
    assert job.outcome(name) == job.outcome("whole")
    assert names(job, name) == ["latest", "step_00000010", "step_00000020", "step_00000030"], names(job, name)
    # From another run: applied until the run has a checkpoint of its own.
    other = ("--resume", str(step_path(job, name, 10)) + "/")
    job.run("other", *other, fault="step:0:13:kill", code=program.KILLED)
    output = job.run("other", *other, fault="after-rename:0:20:kill", code=program.KILLED)
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
    job.run("last", fault="after-rename:0:30:kill", code=program.KILLED)
    assert program.record(job.folder / "last")["exit"]["code"] is None
    job.run("last")
    assert program.record(job.folder / "last")["exit"]["code"] == 0 and job.outcome("last")[0] == job.outcome("whole")[0]


def check_selections(job):
    """resume.accept_changed: to another activation and scope. All pairs of what was and what is occur."""
    levels = {"activation": ("batch_topk", "topk", "relu"), "scope": ("layer", "all_layers")}
    factors = {(when, key): values for when in ("before", "after") for key, values in levels.items()}
    arguments = lambda row, when: program.sets(*(f"transcoder.{key}={row[when, key]}" for key in levels))
    assert "transcoder.activation was" in job.run("whole", "--set", "transcoder.activation=relu", code=2)
    for number, row in enumerate(covering.pairs(factors, lambda row: any(row["before", key] != row["after", key] for key in levels))):
        name = f"changed_{number}"
        job.run(name, "--set", "run.steps=6", *arguments(row, "before"))
        output = job.run(name, "--set", "run.steps=8", "--set", "resume.accept_changed=true", *arguments(row, "after"))
        assert "resuming after step 6 of 8" in output, output
        # Only batch_topk keeps thresholds from step to step; they depend on the scope.
        assert ("selection/threshold starts afresh" in output) == (row["after", "activation"] == "batch_topk"), (row, output)


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
    check_selections(job)
    check_dead_features(job)


program.main(check)
