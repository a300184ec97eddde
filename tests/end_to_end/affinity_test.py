# SPDX-License-Identifier: Apache-2.0
"""CPUs of two ranks in run.json: parts of the launcher's mask where both have the same; as they were where the launcher
gave disjoint ones, where one thread per rank would not be enough, and with device.affinity = "none". OMP_NUM_THREADS.

affinity_test.py WEFT
"""
import os
import shutil
import subprocess

import program

INPUT = """
[run]
steps = 2
[data]
train = "text.txt"
batch_tokens = 32
sequence = 8
[language_model]
layers = 1
heads = 1
d_model = 8
[optimizer]
warmup_steps = 1
"""


def cpus(weft, name, first_rank, second_rank, *arguments):
    """hosts[].cpus in the order of the ranks; each rank is started by its own prefix of words."""
    command = [str(weft.binary), "lm", "train", "input.toml", "--output", name, *arguments]
    done = subprocess.run(["mpiexec", "--oversubscribe", "--bind-to", "none", "-n", "1", *first_rank, *command, ":", "-n", "1",
                           *second_rank, *command], cwd=weft.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          check=False)
    assert done.returncode == 0, done.stdout
    of_rank = {}
    for host in program.record(weft.folder / name)["hosts"]:
        of_rank.update(zip(host["ranks"], host["cpus"]))
        assert f"CPUs {' | '.join(host['cpus'])}\n" in done.stdout, done.stdout
        if all(part.isdigit() for part in host["cpus"]):  # a thread for the only CPU
            assert "1 thread)" in done.stdout, done.stdout
    return [of_rank[0], of_rank[1]]


def test(weft):
    os.environ.pop("OMP_NUM_THREADS", None)
    mask = sorted(os.sched_getaffinity(0))
    if len(mask) < 2 or not shutil.which("taskset"):
        program.skip("needs two CPUs and taskset")
    (weft.folder / "text.txt").write_text("A small text for a small model. " * 20)
    (weft.folder / "input.toml").write_text(INPUT)
    one, other = str(mask[0]), str(mask[1])
    both = ["taskset", "-c", f"{one},{other}"]
    assert cpus(weft, "divided", both, both) == [one, other]
    # Disjoint masks stay, also in the other order.
    assert cpus(weft, "disjoint", ["taskset", "-c", other], ["taskset", "-c", one]) == [other, one]
    unchanged = cpus(weft, "none", both, both, "--set", "device.affinity=none")
    assert unchanged[0] == unchanged[1] and one in unchanged[0] and other in unchanged[0], unchanged
    # OMP_NUM_THREADS holds unless the input names a number; beyond the CPUs it is that of the CPUs.
    for number, arguments, wanted in (("1", (), "1 thread)"), ("1", ("--set", "device.threads=2"), "2 threads)"), ("99", (), f"{len(mask)} threads)")):
        done = subprocess.run([str(weft.binary), "lm", "train", "input.toml", "--output", f"omp_{number}_{len(arguments)}", *arguments], check=False,
                              cwd=weft.folder, env={**os.environ, "OMP_NUM_THREADS": number}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert done.returncode == 0 and wanted in done.stdout, (number, arguments, done.stdout)
    # A part of one CPU is too small for two threads.
    assert cpus(weft, "threads", both, both, "--set", "device.threads=2") == unchanged


program.main(test)
