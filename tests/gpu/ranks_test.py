# SPDX-License-Identifier: Apache-2.0
"""The whole program on several GPUs of one machine: every grid trains what one GPU trains and repeats bit for bit, however far the
host runs ahead; a checkpoint goes on with another number of GPUs; a rank that dies or stops inside a step ends the job in time.

ranks_test.py WEFT
"""
import os
import re
import subprocess
import sys
import time

import files
import program

sys.path.append(os.path.join(os.path.dirname(__file__), "..", "fault"))
import jobs  # noqa: E402

STEPS = 40
TIMEOUT = 20
# decisions: loss of the first 10 steps within 1e-3 between grids in bf16.
TOLERANCE = 1e-3
INPUT = """
[synthetic]
output = "{folder}/data"
layers = 4
d_model = 96
features = 384
k = 8
tokens = 8192
validation_tokens = 1024
dtype = "bf16"
[run]
steps = {steps}
[data]
train = "{folder}/data/train"
validation = "{folder}/data/validation"
batch_tokens = 500
[transcoder]
features = 701
k = 8
scope = "all_layers"
[optimizer]
learning_rate = 2e-3
state = "8bit"
clip_norm = {clip}
[parallel]
timeout = {timeout}
[device]
precision = "bf16"
[log]
every = {every}
"""


def gpus():
    """How many the driver shows."""
    program.needs_gpu()
    shown = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    return len(re.findall(r"^GPU \d+:", shown, re.MULTILINE))


def grids(n_gpus):
    return [(data, ranks // data) for ranks in (2, 4) if ranks <= n_gpus for data in (1, 2, 4) if ranks % data == 0]


class Job:
    def __init__(self, weft):
        self.weft = weft

    def text(self, every=1, clip=0.0, steps=STEPS):
        return INPUT.format(folder=self.weft.folder, steps=steps, every=every, clip=clip, timeout=TIMEOUT)

    def train(self, name, data, feature, *arguments, every=1, clip=0.0, steps=STEPS):
        grid = ("--set", f"parallel.data={data}", "--set", f"parallel.feature={feature}")
        ranks = data * feature
        return self.weft.train(self.text(every, clip, steps), name, *grid, *arguments, ranks=ranks if ranks > 1 else None)


def losses(run):
    return [line["loss"] for line in program.metrics(run)]


def tensors(run, step=STEPS):
    return files.read_tensors(run / "checkpoints" / f"step_{step:08d}")


def same_bits(a, b):
    first, second = tensors(a), tensors(b)
    assert first.keys() == second.keys()
    for name, values in first.items():
        assert values.tobytes() == second[name].tobytes(), f"{name} differs between {a.name} and {b.name}"


def agree(run, one, what):
    for step, (mine, alone) in enumerate(zip(losses(run)[:10], losses(one)[:10])):
        assert abs(mine - alone) <= TOLERANCE * abs(alone), f"{what}, step {step + 1}: {mine} against {alone}"


def check_grid(job, data, feature, one, one_clipped):
    name = f"{data}x{feature}"
    run = job.train(name, data, feature)
    agree(run, one, name)
    record = program.record(run)
    assert record["libraries"].get("NCCL"), "this program was built without NCCL"
    assert "through host memory" not in (run / "log.txt").read_text()
    assert len({(entry["host"], entry["device"]) for entry in record["hosts"]}) == data * feature, record["hosts"]
    balance = record["result"]["train"]["entries_per_rank"]
    assert 0 < balance["min"] <= balance["mean"] <= balance["max"], balance
    # Logged rarely the host runs ahead and waits for nothing; without graphs every kernel is started by itself.
    same_bits(run, job.train(name + "_ahead", data, feature, every=STEPS))
    same_bits(run, job.train(name + "_eager", data, feature, "--set", "device.graphs=false", every=STEPS))
    agree(job.train(name + "_clipped", data, feature, clip=0.05), one_clipped, name + " clipped")
    # Half way on these GPUs, the rest on one.
    first = job.train(name + "_resumed", data, feature, steps=STEPS // 2)
    job.train(name + "_resumed", 1, 1, steps=STEPS)
    assert program.record(first)["result"]["step"] == STEPS
    assert abs(losses(first)[-1] - losses(one)[-1]) <= 0.05 * losses(one)[-1], (losses(first)[-1], losses(one)[-1])
    print(f"{name}: agrees with one GPU, repeats, goes on alone; entries per rank {balance}")


def check_lost(weft, job):
    """A peer killed or stopped between two steps: the others' GPUs wait for it inside a collective."""
    source = weft.folder / "lost.toml"
    source.write_text(job.text(every=1000, steps=1000000))
    for kind, words in (("kill", ""), ("stop", r"rank 1 on \S+: no progress for \d+ s")):
        for data, feature in ((1, 2), (2, 1)):
            what = f"{kind} of rank 1 on {data}x{feature}"
            output = weft.folder / f"lost_{kind}_{data}"
            command = ["mpiexec", "-n", "2", "--oversubscribe", "--bind-to", "none", str(weft.binary), "train", str(source),
                       "--output", str(output), "--set", f"parallel.data={data}"]
            begin = time.monotonic()
            done = subprocess.run(command, env=dict(os.environ, WEFT_FAULT=f"step:1:200:{kind}"), text=True, check=False,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT + 90)
            seconds = time.monotonic() - begin
            assert done.returncode != 0 and (kind == "kill" or done.returncode == 5), (what, done.returncode, done.stdout)
            assert re.search(words, done.stdout), (what, done.stdout)
            # The promise: time limit + 30 s; starting took a few seconds of what was measured.
            assert seconds < TIMEOUT + 40, f"{what}: took {seconds:.0f} s"
            end = time.monotonic() + 10
            while jobs.alive(output) and time.monotonic() < end:
                time.sleep(0.2)
            assert not jobs.alive(output), f"{what}: left running: {jobs.alive(output)}"
            print(f"{what}: code {done.returncode} after {seconds:.1f} s")


def check(weft):
    n_gpus = gpus()
    if n_gpus < 2:
        program.skip("fewer than two GPUs")
    job = Job(weft)
    source = weft.folder / "data.toml"
    source.write_text(job.text())
    weft.run("synth", source)
    one, one_clipped = job.train("one", 1, 1), job.train("one_clipped", 1, 1, clip=0.05)
    for data, feature in grids(n_gpus):
        check_grid(job, data, feature, one, one_clipped)
    check_lost(weft, job)


program.main(check)
