# SPDX-License-Identifier: Apache-2.0
"""Kills a rank at every point of a checkpoint that goes through the nodes, restarts, and checks where the run resumes: from
the previous checkpoint, from the new one, and in any case from the new one once it is complete on the nodes. With the disk
of a node lost in between, from the previous one.

local_kill_test.py LOCAL_DRIVER RANKS
"""
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Point, and the steps from which the restart may resume. Checkpoints 2 and 4 exist; 6 is being written. The second pass of a
# point that rank 0 alone passes once is that of the copy.
BEFORE, EITHER, AFTER = {4}, {4, 6}, {6}
POINTS = [("after-open", BEFORE), ("mid-dataset", BEFORE), ("before-close", BEFORE), ("before-fsync", BEFORE),
          ("before-manifest", EITHER), ("before-rename", EITHER), ("after-rename", EITHER), ("mid-delete", EITHER),
          ("mid-copy", AFTER), ("before-copy-fsync", AFTER), ("before-manifest@2", AFTER), ("before-rename@2", AFTER),
          ("after-rename@2", AFTER), ("before-latest@2", AFTER), ("mid-delete@2", AFTER)]


def run(driver, ranks, folder, steps, fault=""):
    command = ["mpiexec", "-n", str(ranks), "--oversubscribe", "--bind-to", "none", driver, str(folder / "run"), str(folder / "disks"),
               str(steps), "2"]
    return subprocess.run(command, env=dict(os.environ, WEFT_FAULT=fault), text=True, check=False, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=120)


def begin_of(done):
    assert done.returncode == 0, done.stdout
    return int([line for line in done.stdout.splitlines() if line.startswith("from ")][0].split()[1])


def check_one(driver, ranks, folder, point, rank, allowed, lose):
    killed = run(driver, ranks, folder, 8, f"{point}:{rank}:6:kill")
    assert killed.returncode != 0, f"{point} on rank {rank}: was not killed"
    if lose:
        shutil.rmtree(folder / "disks" / str(rank))
        allowed = BEFORE
    again = run(driver, ranks, folder, 10)
    begin = begin_of(again)
    assert begin in allowed, f"{point} on rank {rank}: resumed from {begin}\n{again.stdout}"
    kept = sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())
    assert kept == ["latest", "local_id", "step_00000008", "step_00000010"], kept
    assert not any(files for _, _, files in os.walk(folder / "disks")), "files are left on the nodes"
    print(f"{point} on rank {rank}{', its disk lost' if lose else ''}: from {begin}")


def check(driver, ranks):
    for point, allowed in POINTS:
        # The second pass of a point: only rank 0 publishes in the run directory, every rank on its own node.
        for rank in [0] if "@2" in point else range(ranks):
            for lose in (False, True) if point in ("mid-copy", "before-manifest@2") else (False,):
                with tempfile.TemporaryDirectory(prefix="weft_test_") as folder:
                    check_one(driver, ranks, Path(folder), point, rank, allowed, lose)


check(sys.argv[1], int(sys.argv[2]))
