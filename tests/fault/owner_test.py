# SPDX-License-Identifier: Apache-2.0
"""One owner per run directory: a second run is refused, a dead owner is replaced, and a run that lost its directory ends
without touching anything there. Nothing is written through a foreign link, or into a directory that is not a run's.

owner_test.py WEFT
"""
import os
import re
import signal
import time

import jobs
import program

SHORT = ("--set", "run.lease=1")


def until(condition, what, process=None):
    end = time.monotonic() + 120
    while not condition():
        assert process is None or process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, f"no {what} in two minutes"
        time.sleep(0.02)


def stopped(path):
    """Processes of the run that have stopped themselves."""
    def state(process):
        try:
            with open(f"/proc/{process}/stat", encoding="utf-8") as file:
                return file.read().rsplit(")", 1)[1].split()[0]
        except OSError:
            return ""
    return [int(process) for process in jobs.alive(path) if state(process) == "T"]


def resume(path):
    for process in stopped(path):
        os.kill(process, signal.SIGCONT)


def snapshot(run):
    """Names, bytes, inodes and times of everything in a directory."""
    entries = {}
    for path in sorted(run.rglob("*")):
        status = path.lstat()
        entries[str(path.relative_to(run))] = (status.st_ino, status.st_mtime_ns, path.read_bytes() if path.is_file() else None)
    return entries


def check_two_at_once(job):
    """Two jobs start at the same time in one directory, with the same or with other settings: one trains, undisturbed, the
    other names it and ends. The first one stops itself meanwhile, so that it is certainly alive."""
    for ranks, other in ((1, ()), (1, ("--set", "run.seed=9")), (2, ())):
        name = f"two_{ranks}_{len(other)}"
        run = job.folder / name
        fault = "step:0:25:stop"
        started = [job.start(name, *SHORT, *settings, ranks=ranks, fault=fault) for settings in ((), other)]
        until(lambda: any(process.poll() is not None for process in started), "refusal")
        refused = next(process for process in started if process.poll() is not None)
        owner = next(process for process in started if process is not refused)
        output = refused.communicate()[0]
        assert refused.returncode == 6, (refused.returncode, output)
        assert re.search(r"belongs to another run: process \d+ on \S+.*, started \S+Z, \d+:\d\d:\d\d ago", output), output
        assert "--take-over" in output and "step 1/" not in output, output
        until(lambda: stopped(run), "stop at step 25", owner)
        resume(run)
        output = owner.communicate(timeout=240)[0]
        assert owner.returncode == 0, output
        reference = f"whole_{ranks}"
        if owner is started[1] and other:
            reference = "whole_other"
            job.run(reference, *other)
        assert job.outcome(name) == job.outcome(reference)
        assert program.record(run)["exit"]["code"] == 0
        # Released: the next start does not wait.
        output = job.run(name, *(other if owner is started[1] else ()), ranks=ranks)
        assert "taken over" not in output and "waiting" not in output, output


def check_killed(job):
    """After kill -9 of the process, and of the launcher whose ranks live on for a moment, the next start takes over at once."""
    job.run("killed", fault="step:0:25:kill", code=program.KILLED)
    output = job.run("killed")
    assert re.search(r"warning: \S+killed: taken over from process \d+ on \S+.*that process does not exist any more", output), output
    assert job.outcome("killed") == job.outcome("whole_1")
    # At the points of the lease itself: an incomplete one, and two at the same time.
    for point in ("lease-created", "lease-written"):
        name = f"killed_{point}"
        job.run(name, fault="step:0:25:usr1", code=75)
        job.run(name, *SHORT, fault=f"{point}:0:0:kill", code=program.KILLED)
        job.run(name, *SHORT)
        assert job.outcome(name) == job.outcome("whole_1")
        assert len(list((job.folder / name).glob("lease.*"))) == 1
    run = job.folder / "launcher"
    launcher = job.start("launcher", "--set", "checkpoint.every=5", ranks=2, fault="step:1:25:stop")
    until(lambda: stopped(run), "stop at step 25", launcher)
    launcher.kill()
    resume(run)
    job.run("launcher", ranks=2)
    assert job.outcome("launcher") == job.outcome("whole_2")
    launcher.communicate()


def check_stopped_owner(job):
    """An owner stops itself, another run takes over and ends; the first one continues: it ends with 6, names the other one, and
    changes no byte, no time and no inode. At a step, and inside the protocol of a checkpoint."""
    points = [(1, f"{point}:0:20") for point in ("step", "mid-dataset", "before-fsync", "before-manifest", "before-rename", "before-latest")]
    points += [(1, "mid-delete:0:30"), (2, "step:1:25"), (2, "mid-dataset:1:20"), (2, "before-rename:0:20")]
    for ranks, point in points:
        name = f"lost_{ranks}_{point.split(':')[0]}"
        run = job.folder / name
        first = job.start(name, *SHORT, ranks=ranks, fault=f"{point}:stop")
        until(lambda: stopped(run), f"stop at {point}", first)
        processes = stopped(run)
        # Stop all ranks, or the others would notice at once.
        for process in jobs.alive(run):
            if int(process) != first.pid or ranks == 1:
                os.kill(int(process), signal.SIGSTOP)
        output = job.run(name, *SHORT, "--take-over", ranks=ranks)
        assert "(--take-over)" in output, output
        outcome, before = job.outcome(name), snapshot(run)
        assert outcome == job.outcome(f"whole_{ranks}"), point
        for process in {*processes, *stopped(run)}:
            os.kill(process, signal.SIGCONT)
        output = first.communicate(timeout=120)[0]
        assert first.returncode == 6, (point, first.returncode, output)
        assert re.search(r"error: \S+: taken over by another run: process \d+ on ", output), output
        assert snapshot(run) == before, point


def check_links(job):
    """Symbolic links placed in a run directory: their targets are not written."""
    victim = job.folder / "victim"
    for link in (".probe.tmp", "input.toml.tmp", "input.toml", "log.txt", "metrics.jsonl", "starts.jsonl", "heartbeat", "run.json",
                 "statistics.txt.tmp", "checkpoints/latest", "checkpoints/latest.tmp", "lease.7"):
        name = f"link_{link.replace('/', '_')}"
        run = job.folder / name
        job.run(name, fault="step:0:13:usr1", code=75)
        victim.write_text("{}")
        (run / link).unlink(missing_ok=True)
        (run / link).symlink_to(victim)
        refused = link in ("log.txt", "metrics.jsonl", "starts.jsonl", "lease.7")
        output = job.run(name, code=6 if refused else 0)
        assert victim.read_text() == "{}", link
        if refused:
            assert link in output, output
        else:
            assert job.outcome(name) == job.outcome("whole_1")


def check_other_directories(job):
    """A run is written only into a new or empty directory, or into that of a run."""
    home = job.folder / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("precious")
    before = snapshot(home)
    for output in (home, "/"):
        for more in ((), ("--dry-run",)):
            text = job.run(str(output), *more, code=2)
            assert "neither empty nor the directory of a run" in text, text
    assert snapshot(home) == before
    for arguments in (("--output", ""), ("--set", 'run.output=""')):
        for more in ((), ("--dry-run",)):
            text = job.weft.run("train", job.source, *arguments, *more, code=2)
            assert "is empty" in text, text
    # Empty, or prepared for a run.
    (job.folder / "empty").mkdir()
    job.run("empty")
    (job.folder / "prepared" / "checkpoints").mkdir(parents=True)
    job.run("prepared")


def check(weft):
    job = jobs.Jobs(weft)
    for ranks in (1, 2):
        job.run(f"whole_{ranks}", ranks=ranks)
    check_other_directories(job)
    check_links(job)
    check_two_at_once(job)
    check_killed(job)
    check_stopped_owner(job)


program.main(check)
