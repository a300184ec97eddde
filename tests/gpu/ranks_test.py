# SPDX-License-Identifier: Apache-2.0
"""The complete program on several GPUs of one machine: every grid agrees with one GPU and repeats bit for bit while the host runs
ahead; a checkpoint resumes with another number of GPUs; a rank that dies or stops within a step ends the job in time. Uses those of
CUDA_VISIBLE_DEVICES.

ranks_test.py WEFT        every grid, resume
ranks_test.py WEFT lost   a lost rank; needs two GPUs

On the real activations of $WEFT_TEST_DATA; without it on planted ones, with a message. WEFT_TEST_KEEP=DIR keeps the curves.
"""
import os
import re
import shutil
import subprocess
import sys
import time

import curves
import program

sys.path.append(os.path.join(os.path.dirname(__file__), "..", "fault"))
import jobs  # noqa: E402

STEPS = 200
TIMEOUT = 20
# Stated tolerance between grids: loss of the first 10 steps within 1e-3 in bf16.
TOLERANCE = 1e-3
# Sizes that two and four ranks do not divide evenly.
INPUT = """
[synthetic]
output = "{folder}/data"
layers = 4
d_model = 256
features = 384
k = 8
tokens = 8192
validation_tokens = 1024
dtype = "bf16"
[run]
steps = {steps}
[data]
train = "{data}/train"
validation = "{data}/validation"
batch_tokens = 510
[transcoder]
features = 1101
k = 12
scope = "all_layers"
[optimizer]
learning_rate = 1e-3
state = "8bit"
clip_norm = {clip}
[parallel]
timeout = {timeout}
[device]
precision = "bf16"
[checkpoint]
every = {half}
[log]
every = {every}
"""


def gpus():
    """Number of GPUs that this test may use."""
    program.needs_gpu()
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        return len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
    shown = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    return len(re.findall(r"^GPU \d+:", shown, re.MULTILINE))


def grids(n_gpus):
    return [(data, ranks // data) for ranks in (2, 4, 8) if ranks <= n_gpus for data in (1, 2, 4, 8) if ranks % data == 0]


class Job:
    def __init__(self, weft):
        self.weft = weft
        self.real = curves.real_data()

    def text(self, every=1, clip=0.0, steps=STEPS):
        data = self.real or f"{self.weft.folder}/data"
        return INPUT.format(folder=self.weft.folder, data=data, steps=steps, half=STEPS // 2, every=every, clip=clip,
                            timeout=TIMEOUT)

    def train(self, name, data, feature, *arguments, every=1, clip=0.0, steps=STEPS):
        grid = ("--set", f"parallel.data={data}", "--set", f"parallel.feature={feature}")
        ranks = data * feature
        return self.weft.train(self.text(every, clip, steps), name, *grid, *arguments, ranks=ranks if ranks > 1 else None)


def check_grid(job, data, feature, one):
    """Returns the run and its curve."""
    name, ranks = f"{data}x{feature}", data * feature
    # With a log line every step the host waits for each step; with few lines it runs ahead. The first run on two ranks uses no
    # graphs, so that every kernel is launched separately.
    run = job.train(name, data, feature, *(("--set", "device.graphs=false") if ranks == 2 else ()))
    curve = curves.Curve(run)
    loss, nmse = curve.agree(one, TOLERANCE, name)
    record = program.record(run)
    assert record["libraries"].get("NCCL"), "this program was built without NCCL"
    assert "through host memory" not in (run / "log.txt").read_text()
    assert len({(entry["host"], entry["device"]) for entry in record["hosts"]}) == ranks, record["hosts"]
    balance = record["result"]["train"]["entries_per_rank"]
    assert 0 < balance["min"] <= balance["mean"] <= balance["max"], balance
    assert all(line["communication"]["bytes_sent"] > 0 for line in program.metrics(run))
    curves.same_bits(run, job.train(name + "_again", data, feature, every=STEPS // 4), STEPS)
    print(f"{name}: loss of the first steps within {loss:.1e} of one GPU, validation error of each layer within {nmse:.1e}; "
          f"repeats bit for bit; entries per rank {balance}", flush=True)
    return run, curve


def check_clipped(job, n_gpus):
    """The norm over all shards: ten steps, all of them clipped."""
    one = [line["loss"] for line in program.metrics(job.train("one_clipped", 1, 1, clip=0.05, steps=curves.FIRST))]
    for data, feature in ((1, 2), (2, 1)) if n_gpus < 4 else ((1, 2), (2, 2)):
        name = f"{data}x{feature}_clipped"
        run = job.train(name, data, feature, clip=0.05, steps=curves.FIRST)
        curves.close([line["loss"] for line in program.metrics(run)], one, TOLERANCE, f"{name}, loss of step")


def check_shared(job):
    """2x2 ranks on two GPUs: those of each axis have different GPUs, and share them with the other group. Kernels that wait for
    a peer would hang: all exchanges go through the host."""
    one = [line["loss"] for line in program.metrics(job.train("one_short", 1, 1, steps=curves.FIRST))]
    everything, two = job.weft.environment, ",".join(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2])
    job.weft.environment = dict(everything, CUDA_VISIBLE_DEVICES=two)
    run = job.train("2x2_shared", 2, 2, steps=curves.FIRST)
    job.weft.environment = everything
    assert "through host memory" in (run / "log.txt").read_text()
    curves.close([line["loss"] for line in program.metrics(run)], one, TOLERANCE, "2x2 on two GPUs, loss of step")


def check_resume(job, run, curve, one):
    """Resumes a checkpoint of the run after half of its steps, with one GPU and with two."""
    half = STEPS // 2
    for data, feature in ((1, 1), (1, 2)):
        name = f"{run.name}_on_{data * feature}"
        shutil.copytree(run, run.parent / name)
        shutil.rmtree(run.parent / name / "checkpoints" / f"step_{STEPS:08d}")
        rest = curves.Curve(job.train(name, data, feature))
        assert f"resuming after step {half}" in (run.parent / name / "log.txt").read_text()
        curves.close(rest.loss[:half], curve.loss[:half], 0, f"{name}, loss of step")   # the records of the first half are kept
        curves.close(rest.loss[half:half + curves.FIRST], curve.loss[half:half + curves.FIRST], TOLERANCE,
                     f"{name}, loss of step {half} +")
        curves.close(rest.nmse, one.nmse, curves.NMSE_TOLERANCE, f"{name}, NMSE of layer")
        print(f"{run.name}: its checkpoint resumes with {data * feature}", flush=True)


def check_lost(weft, job):
    """A peer killed or stopped between two steps: the GPUs of the others wait for it in a collective."""
    source = weft.folder / "lost.toml"
    source.write_text(job.text(every=1000, steps=1000000))
    for kind, words in (("kill", ""), ("stop", r"rank 1 on \S+: no progress for \d+ s")):
        for data, feature in ((1, 2), (2, 1)):
            what = f"{kind} of rank 1 on {data}x{feature}"
            output = weft.folder / f"lost_{kind}_{data}"
            command = ["mpiexec", "-n", "2", "--oversubscribe", "--bind-to", "none", str(weft.binary), "train", str(source),
                       "--output", str(output), "--set", f"parallel.data={data}", "--set", "checkpoint.every=0"]
            begin = time.monotonic()
            done = subprocess.run(command, env=dict(os.environ, WEFT_FAULT=f"step:1:200:{kind}"), text=True, check=False,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT + 90)
            seconds = time.monotonic() - begin
            assert done.returncode != 0 and (kind == "kill" or done.returncode == 5), (what, done.returncode, done.stdout)
            assert re.search(words, done.stdout), (what, done.stdout)
            # Guaranteed: time limit + 30 s; the measured time includes a few seconds of start-up.
            assert seconds < TIMEOUT + 40, f"{what}: took {seconds:.0f} s"
            end = time.monotonic() + 10
            while jobs.alive(output) and time.monotonic() < end:
                time.sleep(0.2)
            assert not jobs.alive(output), f"{what}: left running: {jobs.alive(output)}"
            print(f"{what}: code {done.returncode} after {seconds:.1f} s", flush=True)


def check(weft):
    n_gpus = gpus()
    if n_gpus < 2:
        program.skip("fewer than two GPUs")
    job = Job(weft)
    if job.real:
        print("on real activations")
    else:
        print("on planted activations: no real ones (WEFT_TEST_DATA is not set)")
        source = weft.folder / "data.toml"
        source.write_text(job.text())
        weft.run("synth", source)
    if sys.argv[2:] == ["lost"]:
        check_lost(weft, job)
        return
    one = curves.Curve(job.train("1x1", 1, 1))
    found, kept = {}, {"1x1": one}
    for data, feature in grids(n_gpus):
        found[data, feature] = check_grid(job, data, feature, one)
        kept[f"{data}x{feature}"] = found[data, feature][1]
    curves.keep("ranks_test", {"real": bool(job.real), "steps": STEPS}, kept)
    check_clipped(job, n_gpus)
    check_shared(job)
    largest = {2: (1, 2), 4: (2, 2), 8: (2, 4)}[max(data * feature for data, feature in found)]
    check_resume(job, *found[largest], one)


program.main(check)
