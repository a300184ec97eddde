# SPDX-License-Identifier: Apache-2.0
"""Disks that are full, limited, read-only or missing: the last valid checkpoint remains, training continues up to the limit of
failures, and impossible configurations are refused before the first step.

disk_test.py WEFT         Cases that need a mount (a small tmpfs, a read-only one) run if this process may mount in a
                          separate namespace; otherwise they count as skipped.
"""
import os
import re
import shutil

import disks
import jobs
import program

# The limit allows the files of MPI (4 MiB of shared memory), but no shard: 19 MB for one rank, or for two together.
FEATURES = 20_000
LIMITED = ("prlimit", "--fsize=8000000:")


def check_limit(job):
    """RLIMIT_FSIZE: every shard fails and the run ends with 6 after too many failures; without the limit it completes with the
    same result."""
    for ranks in (1, 2):
        name = f"limited_{ranks}"
        output = job.run(name, ranks=ranks, code=6, wrapper=LIMITED)
        assert "File too large" in output and "training continues" in output and "failure 1 of 3" in output, output
        assert "3 checkpoints in a row could not be written" in output and "bytes free" in output, output
        assert job.steps_of(name) == [] and not list((job.folder / name / "checkpoints").glob("*.tmp"))
        assert program.record(job.folder / name)["exit"]["code"] == 6
        job.run(name, ranks=ranks)
        # The limit is set during a run, between two checkpoints, and removed again.
        name = f"pinched_{ranks}"
        job.run(name, ranks=ranks, fault="step:0:22:usr1", code=75)
        output = job.run(name, "--set", "checkpoint.failures_allowed=100", ranks=ranks, code=6, wrapper=LIMITED)
        assert "the last step, 60, is in no checkpoint" in output, output
        assert job.steps_of(name) == [20, 24], job.steps_of(name)
        job.run(name, ranks=ranks)
        assert job.outcome(name) == job.outcome(f"whole_{ranks}")


def check_small_disk(job):
    """checkpoints/ on a small disk with other files, with space for one checkpoint left."""
    name = "small"
    place = job.folder / name / "checkpoints"
    place.mkdir(parents=True)
    # Copy the files out before the namespace ends.
    script = f'mount -t tmpfs -o size=70m tmpfs "{place}" && "$@"; code=$?; cp -a "{place}" "{job.folder}/rescued"; exit $code'
    wrapper = ("unshare", "--mount", "sh", "-c", script, "sh")
    output = job.run(name, wrapper=wrapper)
    assert "No space left" not in output, output  # space for the three that exist at the same time
    shutil.rmtree(job.folder / name)
    shutil.rmtree(job.folder / "rescued")
    place.mkdir(parents=True)
    script = script.replace('&& "$@"', f'&& head -c 40m /dev/zero > "{place}/others" && "$@"')
    wrapper = ("unshare", "--mount", "sh", "-c", script, "sh")
    output = job.run(name, wrapper=wrapper, code=6)
    assert "No space left on device" in output and "training continues" in output, output
    rescued = job.folder / "rescued"
    kept = sorted(path.name for path in rescued.glob("step_*"))
    assert kept and not any(path.endswith(".tmp") for path in kept), (kept, output)
    # The kept checkpoints are intact: on a larger disk, the run completes with the same result.
    shutil.rmtree(place)
    shutil.copytree(rescued, place)
    output = job.run(name)
    assert "rejected" not in output and f"resuming after step {int(kept[-1][5:])} " in output, output
    assert job.outcome(name) == job.outcome("whole_1")


def check_full_run_directory(job):
    """The whole run directory on a full disk: the metrics cannot be written either. The run ends with an I/O error."""
    place = job.folder / "full"
    place.mkdir()
    wrapper = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size=48k tmpfs "{place}" && exec "$@"', "sh")
    output = job.run("full", wrapper=wrapper, code=6)
    assert re.search(r"full\S*: .*(No space left|cannot be written|could not be written)", output), output


def check_refusals(job):
    """If nothing can be written: 6 before the first step, also with --dry-run."""
    (job.folder / "a_file").touch()
    places = [job.folder / "a_file" / "run"]
    wrappers = [()]
    if os.geteuid() != 0:
        closed = job.folder / "closed"
        closed.mkdir(mode=0o555)
        places.append(closed / "run")
        wrappers.append(())
    if disks.mounts_are_possible(job.folder):
        sealed = job.folder / "sealed"
        sealed.mkdir()
        places.append(sealed / "run")
        wrappers.append(disks.inside("-t tmpfs -o ro,size=64k", sealed))
    for place, wrapper in zip(places, wrappers):
        for arguments in ((), ("--dry-run",)):
            output = job.run(str(place), *arguments, code=6, wrapper=wrapper)
            assert "step " not in output.replace("steps", "") and str(place) in output, output
    # A removed checkpoint directory is created again.
    name = "taken"
    job.run(name, fault="step:0:22:usr1", code=75)
    shutil.rmtree(job.folder / name / "checkpoints")
    output = job.run(name)
    assert "starting at step 0" in output and job.outcome(name) == job.outcome("whole_1"), output


def check(weft):
    job = jobs.Jobs(weft, features=FEATURES)
    for ranks in (1, 2):
        job.run(f"whole_{ranks}", ranks=ranks)
    check_limit(job)
    check_refusals(job)
    if not disks.mounts_are_possible(weft.folder / "data"):
        program.skip("a small tmpfs (this process may not mount); limits and refusals were tested")
    check_small_disk(job)
    check_full_run_directory(job)


program.main(check)
