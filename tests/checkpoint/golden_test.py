# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of every released format stay readable: each golden checkpoint is evaluated and resumed, and the numbers must be
those recorded when it was written.

golden_test.py WEFT               tests the checkpoints in golden/
golden_test.py WEFT --make        writes golden/format_N of the current format: once, when the format is released

golden/format_N: data/ (a dataset of 256 tokens), one run directory per storage type with one checkpoint of two ranks, and
expected.json: the result of evaluation, and the losses of the following steps.
"""
import json
import re
import shutil
import sys
from pathlib import Path

import files
import program

GOLDEN = Path(__file__).parent / "golden"
STEP, MORE = 20, 10
STATES = ("fp32", "8bit")
# The order of sums depends on the vector width of the processor: fp32 runs differ by rounding. With 8-bit state such a
# difference can change the last stored bit.
TOLERANCE = {"fp32": 1e-4, "8bit": 1e-2}
INPUT = """
[synthetic]
output = "data"
layers = 2
d_model = 8
features = 16
k = 3
tokens = 256
validation_tokens = 32
dtype = "bf16"
compression = "gzip"
[run]
output = "{state}"
steps = {steps}
[data]
train = "data/train"
validation = "data/train"
batch_tokens = 48
block_rows = 16
window_rows = 64
[transcoder]
features = 20
k = 3.5
[optimizer]
learning_rate = 3e-3
schedule = "cosine"
warmup_steps = 5
clip_norm = 0.05
clip_mode = "previous"
state = "{state}"
[parallel]
data = 2
[device]
threads = 1
[log]
every = 1
"""


def input_of(state):
    return INPUT.format(state=state, steps=STEP + MORE)


def evaluation(weft, state, step):
    weft.run("evaluate", f"{state}/checkpoints/step_{step:08d}", "--output", f"{state}_evaluated")
    return json.loads((weft.folder / f"{state}_evaluated" / "evaluation.json").read_text())["validation"]["nmse_standardised"]


def losses(weft, state):
    return [line["loss"] for line in program.metrics(weft.folder / state) if line["step"] > STEP]


def close(found, expected, tolerance, what):
    assert len(found) == len(expected), what
    for a, b in zip(found, expected):
        assert abs(a - b) <= tolerance * abs(b), (what, found, expected)


def make(weft):
    expected = {}
    for state in STATES:
        (weft.folder / f"{state}.toml").write_text(input_of(state))
        if not (weft.folder / "data").exists():
            weft.run("synth", f"{state}.toml")
        weft.run("train", f"{state}.toml", "--set", f"checkpoint.every={STEP}", ranks=2)
        expected[state] = {"nmse_standardised": evaluation(weft, state, STEP), "losses": losses(weft, state)}
    version = json.loads((weft.folder / STATES[0] / "checkpoints" / f"step_{STEP:08d}" / "manifest.json").read_text())["format_version"]
    target = GOLDEN / f"format_{version}"
    if target.exists():
        sys.exit(f"{target} exists: a released format does not change")
    target.mkdir(parents=True)
    shutil.copytree(weft.folder / "data" / "train", target / "data" / "train")
    for state in STATES:
        shutil.copytree(weft.folder / state / "checkpoints" / f"step_{STEP:08d}", target / state / "checkpoints" / f"step_{STEP:08d}")
    (target / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def check_format(weft, golden):
    shutil.copytree(golden, weft.folder, dirs_exist_ok=True)
    expected = json.loads((golden / "expected.json").read_text())
    for state, numbers in expected.items():
        close(evaluation(weft, state, STEP), numbers["nmse_standardised"], 1e-5, f"{golden.name}, {state}, evaluation")
        manifest = json.loads((files.checkpoints(weft.folder / state)[STEP] / "manifest.json").read_text())
        (weft.folder / f"{state}.toml").write_text(manifest["original_input"])
        for ranks, grid in ((2, ()), (1, ("--set", "parallel.data=1"))):
            run = f"{state}_{ranks}"
            shutil.copytree(weft.folder / state, weft.folder / run)
            output = weft.run("train", f"{state}.toml", "--output", run, *grid, ranks=ranks)
            assert f"resuming after step {STEP} of {STEP + MORE}" in output and not re.search("rejected|changed", output), output
            found = losses(weft, run)
            worst = max(abs(a - b) / b for a, b in zip(found, numbers["losses"]))
            print(f"{golden.name}, {state}, {ranks} ranks: {MORE} more steps, losses within {worst:.1e}")
            close(found, numbers["losses"], TOLERANCE[state], f"{golden.name}, {state}, {ranks} ranks")


def check(weft):
    formats = sorted(GOLDEN.glob("format_*"))
    assert formats, "no golden checkpoint"
    for golden in formats:
        folder = weft.folder / golden.name
        folder.mkdir()
        check_format(program.Program(weft.binary, folder), golden)


program.main(make if "--make" in sys.argv else check)
