# SPDX-License-Identifier: Apache-2.0
"""The Python program of docs/file_formats.md reads checkpoints of any number of ranks.

documented_reader_test.py REPOSITORY WEFT
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import program

REPOSITORY = Path(sys.argv[1]).resolve()

# The sizes of the documented program: those of inputs/quickstart.toml.
INPUT = """
[synthetic]
output = "runs/quickstart_data"
layers = 4
d_model = 64
features = 96
k = 4
tokens = 2000
validation_tokens = 50
[run]
steps = 20
[data]
train = "runs/quickstart_data/train"
batch_tokens = 100
[transcoder]
features = 50
k = 4
"""


def errors_of(folder, code):
    """The errors by layer that the documented program prints."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "python")}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, text=True, stdout=subprocess.PIPE, check=True, env=environment)
    return [float(line.split()[1]) for line in done.stdout.splitlines()]


with tempfile.TemporaryDirectory(prefix="weft_test_") as name:
    folder = Path(name)
    weft = program.Program(sys.argv[2], folder)
    code, = [block for block in re.findall(r"^```python\n(.*?)^```", (REPOSITORY / "docs/file_formats.md").read_text(), re.S | re.M)
             if "weft.Run" in block]
    (folder / "input.toml").write_text(INPUT)
    weft.run("synth", "input.toml")
    found = {}
    for ranks, grid in ((1, 1), (3, 1), (2, 2)):
        shutil.rmtree(folder / "runs/quickstart", ignore_errors=True)
        weft.run("train", "input.toml", "--output", "runs/quickstart", "--set", f"parallel.data={grid}", ranks=ranks)
        assert len(list((folder / "runs/quickstart/checkpoints").glob("step_00000020/rank_*.h5"))) == ranks
        found[ranks] = errors_of(folder, code)
    # Runs on other numbers of ranks differ by rounding; a missing shard would change the errors by tens of percent.
    for ranks, errors in found.items():
        assert len(errors) == 4 and np.allclose(errors, found[1], rtol=1e-2), found
