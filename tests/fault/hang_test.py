# SPDX-License-Identifier: Apache-2.0
"""A rank that stops, dies or throws ends the job: in time, with a message that names it, and with nothing left running.

hang_test.py WEFT
"""
import os
import subprocess
import time

import program

TIMEOUT = 3
INPUT = """
[synthetic]
output = "{folder}/data"
layers = 2
d_model = 16
features = 32
k = 3
tokens = 2000
validation_tokens = 100
[run]
steps = 100000
[data]
train = "{folder}/data/train"
batch_tokens = 64
[transcoder]
features = 40
k = 3
[parallel]
timeout = {timeout}
[log]
every = 1000
"""


def alive(name):
    """Processes with this path on their command line."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                if name.encode() in file.read() and entry != str(os.getpid()):
                    found.append(entry)
        except (OSError, ValueError):
            pass
    return found


def check_launch(weft):
    """Copies of a world of one rank, as a launcher of another MPI starts them."""
    for variable in ("PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        done = subprocess.run([str(weft.binary), "--version"], env=dict(os.environ, **{variable: "4"}), text=True, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert done.returncode == 2 and f"{variable} says that 4" in done.stdout and "srun --mpi=pmix" in done.stdout, done.stdout
    # In a batch script the job's count is there too, and means nothing for a program started plainly.
    weft.run("--version")
    subprocess.run([str(weft.binary), "--version"], env=dict(os.environ, SLURM_NTASKS="4"), check=True, stdout=subprocess.DEVNULL)


def check(weft):
    check_launch(weft)
    source = weft.folder / "input.toml"
    source.write_text(INPUT.format(folder=weft.folder, timeout=TIMEOUT))
    weft.run("synth", source)
    for ranks, rank, kind, expected in ((2, 1, "stop", "rank 1 on .*: it does not answer"), (3, 0, "stop", "rank 0 on .*: it does not answer"),
                                        (2, 1, "throw", "error on rank 1"), (2, 1, "kill", ""), (2, 1, "segfault", "")):
        output = weft.folder / f"{kind}_{rank}_of_{ranks}"
        begin = time.monotonic()
        done = subprocess.run(["mpiexec", "-n", str(ranks), "--oversubscribe", "--bind-to", "none", str(weft.binary), "train",
                               str(source), "--output", str(output)],
                              env=dict(os.environ, WEFT_FAULT=f"step:{rank}:25:{kind}"), text=True, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT + 60)
        seconds = time.monotonic() - begin
        assert done.returncode != 0, done.stdout
        # The promise: time limit + 30 s; starting took a few seconds of what was measured.
        assert seconds < TIMEOUT + 30, f"{kind}: took {seconds:.0f} s"
        for words in expected.split(".*"):
            assert words in done.stdout, f"{kind}: no \"{expected}\" in\n{done.stdout}"
        if kind == "stop":
            assert done.returncode == 5, (done.returncode, done.stdout)
        end = time.monotonic() + 10
        while alive(str(output)) and time.monotonic() < end:
            time.sleep(0.2)
        assert not alive(str(output)), f"{kind}: left running: {alive(str(output))}"
        print(f"{kind} of rank {rank} of {ranks}: code {done.returncode} after {seconds:.1f} s")


program.main(check)
