# SPDX-License-Identifier: Apache-2.0
"""Kills a rank at every point of the checkpoint protocol, restarts, and checks where the run resumes: from the previous checkpoint or
from the new one. With `local` checkpoints go through the nodes: from the new one once it is complete there, and with the disk of a
node lost in between from the previous one.

kill_test.py DRIVER RANKS [local]
"""
import shutil
import sys
import tempfile
from pathlib import Path

import program

# Point, and the steps from which the restart may resume. Checkpoints 2 and 4 exist; 6 is being written. The second pass of a
# point that rank 0 alone passes once is that of the copy.
BEFORE, EITHER, AFTER = {4}, {4, 6}, {6}
POINTS = [(point, EITHER) for point in ("after-open", "mid-dataset", "mid-dataset@5", "before-close", "before-fsync", "before-manifest",
                                        "before-rename", "after-rename", "before-latest", "mid-delete")]
LOCAL = [("after-open", BEFORE), ("mid-dataset", BEFORE), ("before-close", BEFORE), ("before-fsync", BEFORE),
         ("before-manifest", EITHER), ("before-rename", EITHER), ("after-rename", EITHER), ("mid-delete", EITHER),
         ("mid-copy", AFTER), ("before-copy-fsync", AFTER), ("before-manifest@2", AFTER), ("before-rename@2", AFTER),
         ("after-rename@2", AFTER), ("before-latest@2", AFTER), ("mid-delete@2", AFTER)]


class Driver:
    """Runs up to STEPS with a checkpoint every two steps, in a folder of its own."""

    def __init__(self, binary, ranks, local, folder):
        self.program, self.ranks, self.local = program.Program(binary, folder), ranks, local
        self.disks, self.checkpoints = folder / "disks", folder / "run" / "checkpoints" if local else folder / "run"

    def run(self, steps, *arguments, **options):
        places = ["run", "disks"] if self.local else ["run"]
        return self.program.run(*places, steps, 2, *arguments, ranks=self.ranks, timeout=120, **options)

    def begin(self, steps):
        """The step from which a start resumes."""
        return int(next(line for line in self.run(steps).splitlines() if line.startswith("from ")).split()[1])


def check_one(driver, point, rank, allowed, lose):
    driver.run(8, fault=f"{point}:{rank}:6:kill", code=program.KILLED)
    if lose:
        shutil.rmtree(driver.disks / str(rank))
        allowed = BEFORE
    begin = driver.begin(10)
    assert begin in allowed, f"{point} on rank {rank}: resumed from {begin}"
    kept = sorted(path.name for path in driver.checkpoints.iterdir())
    assert kept == ["latest", *(["local_id"] if driver.local else []), "step_00000008", "step_00000010"], kept
    assert not any(path.is_file() for path in driver.disks.rglob("*")), "files are left on the nodes"
    print(f"{point} on rank {rank}{', its disk lost' if lose else ''}: from {begin}")


def check_replaced(driver):
    """Killed between the two renames that replace a checkpoint of the same step: the old one returns."""
    driver.run(6)
    driver.run(6, f"from={driver.checkpoints}/step_00000004", fault="mid-replace:0:6:kill", code=program.KILLED)
    assert driver.begin(10) == 6


def main():
    binary, ranks, local = sys.argv[1], int(sys.argv[2]), sys.argv[3:] == ["local"]

    def in_folder(check, *arguments):
        with tempfile.TemporaryDirectory(prefix="weft_test_") as folder:
            check(Driver(binary, ranks, local, Path(folder)), *arguments)

    for point, allowed in LOCAL if local else POINTS:
        # The second pass of a point: only rank 0 publishes in the run directory, every rank on its own node.
        for rank in [0] if "@2" in point else range(ranks):
            for lose in (False, True) if point in ("mid-copy", "before-manifest@2") else (False,):
                in_folder(check_one, point, rank, allowed, lose)
    if not local:
        in_folder(check_replaced)


main()
