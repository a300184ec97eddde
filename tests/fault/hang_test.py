# SPDX-License-Identifier: Apache-2.0
"""A rank that stops, dies or throws ends the job within the timeout, with a message that names it, and without leaving processes.

hang_test.py WEFT
"""
import os
import re
import subprocess
import time

import jobs
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
[checkpoint]
every = 25
[log]
every = 1000
"""


def check_launch(weft):
    """Copies of a world of one rank, as started by the launcher of another MPI."""
    for variable in ("PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        done = subprocess.run([str(weft.binary), "--version"], env=dict(os.environ, **{variable: "4"}), text=True, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert done.returncode == 2 and f"{variable} says that 4" in done.stdout and "srun --mpi=pmix" in done.stdout, done.stdout
    # In a batch script SLURM_NTASKS is set too, but does not apply to a program started without a launcher.
    weft.run("--version")
    subprocess.run([str(weft.binary), "--version"], env=dict(os.environ, SLURM_NTASKS="4"), check=True, stdout=subprocess.DEVNULL)


# ranks, point, rank, kind, regular expression for the output, exit code (None: that of the launcher, not 0)
STOPPED = r'rank {rank} on \S+: no progress for \d+ s in "[^"]+", at step {step} \(dead or stopped: it does not respond\)'
CASES = ((2, "step", 1, "stop", STOPPED, 5), (3, "data-wait", 0, "stop", STOPPED, 5), (2, "collective", 1, "stop", STOPPED, 5),
         (2, "mid-dataset", 1, "stop", STOPPED, 5), (2, "step", 1, "throw", r"error on rank 1 \(\S+\) at step 25: injected fault", 1),
         (3, "collective@2", 1, "kill", "", None), (4, "data-wait", 3, "kill", "", None), (2, "step", 1, "exit", "", None),
         (2, "step", 0, "segfault", "", None))


def check(weft):
    check_launch(weft)
    source = weft.folder / "input.toml"
    source.write_text(INPUT.format(folder=weft.folder, timeout=TIMEOUT))
    weft.run("synth", source)
    for ranks, point, rank, kind, words, code in CASES:
        output = weft.folder / f"{point}_{kind}_{rank}_of_{ranks}"
        begin = time.monotonic()
        done = subprocess.run(["mpiexec", "-n", str(ranks), "--oversubscribe", "--bind-to", "none", str(weft.binary), "train",
                               str(source), "--output", str(output)],
                              env=dict(os.environ, WEFT_FAULT=f"{point}:{rank}:25:{kind}"), text=True, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT + 60)
        seconds = time.monotonic() - begin
        what = f"{kind} of rank {rank} of {ranks} at {point}"
        assert done.returncode != 0 if code is None else done.returncode == code, (what, done.returncode, done.stdout)
        # Guaranteed: timeout + 30 s. The measured time includes a few seconds for starting.
        assert seconds < TIMEOUT + 30, f"{what}: took {seconds:.0f} s"
        # A checkpoint is written by a thread while steps continue.
        step = "25" if point != "mid-dataset" else r"\d+"
        assert re.search(words.format(rank=rank, step=step), done.stdout), f"{what}: no \"{words}\" in\n{done.stdout}"
        end = time.monotonic() + 10
        while jobs.alive(output) and time.monotonic() < end:
            time.sleep(0.2)
        assert not jobs.alive(output), f"{what}: left running: {jobs.alive(output)}"
        print(f"{what}: code {done.returncode} after {seconds:.1f} s")


program.main(check)
