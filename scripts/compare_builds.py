#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares two builds of Weft bit for bit: trains the same short runs with both and compares every tensor of every checkpoint.

For changes that must not change results. Planted data are written by the first program. The runs cover all activations, scopes and state
policies, both clip modes and several process grids.

  compare_builds.py OLD_WEFT NEW_WEFT [--steps 50] [--grids 1x1 1x2 2x1 2x2] [--backend portable|cuda] [--directory DIR]

A grid DxF has D groups on the data axis and F ranks on the feature axis. Exit codes: 0 all tensors equal; 1 some differ or a run failed.
"""
import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import h5py
import numpy as np

INPUT = """
[run]
steps = {steps}
seed = 7
[data]
train = "{data}/train"
batch_tokens = 256
block_rows = 16
window_rows = 512
[transcoder]
features = {features}
activation = "{activation}"
k = {k}
scope = "{scope}"
dead_window = 2000
[optimizer]
learning_rate = 1e-3
state = "{state}"
clip_norm = {clip_norm}
clip_mode = "{clip_mode}"
weight_decay = 0.01
[parallel]
data = {groups}
[device]
backend = "{backend}"
precision = "{precision}"
[checkpoint]
every = 20
keep = 10
[synthetic]
output = "{data}"
layers = 3
d_model = {d_model}
features = 160
k = 6
tokens = 6000
validation_tokens = 1000
rows_per_file = 2000
"""

ENVIRONMENT = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1",
               "OMP_WAIT_POLICY": "passive"}


def weft(program, ranks, *arguments):
    launcher = ["mpirun", "-n", str(ranks), "--oversubscribe", "--bind-to", "none"] if ranks > 1 else []
    return subprocess.run([*launcher, program, *map(str, arguments)], env=ENVIRONMENT, capture_output=True, text=True)


def tensors(checkpoint):
    """Name in the form shard/dataset -> array, of all shards."""
    found = {}
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for shard in manifest["shards"]:
        with h5py.File(checkpoint / shard["file"], "r") as file:
            def visit(name, item, shard=shard["file"]):
                if isinstance(item, h5py.Dataset):
                    found[f"{shard}/{name}"] = item[()]
            file.visititems(visit)
    return found


def difference(old, new):
    """Text on the first difference of two run directories; "" when all tensors of all checkpoints are equal."""
    steps = sorted(p.name for p in (old / "checkpoints").glob("step_*"))
    if steps != sorted(p.name for p in (new / "checkpoints").glob("step_*")) or not steps:
        return "the checkpoints are of different steps"
    for step in steps:
        a, b = (tensors(run / "checkpoints" / step) for run in (old, new))
        if a.keys() != b.keys():
            return f"{step}: tensors only in one: {sorted(a.keys() ^ b.keys())}"
        for name in a:
            same = a[name].dtype == b[name].dtype and a[name].shape == b[name].shape and a[name].tobytes() == b[name].tobytes()
            if not same:
                where = ""
                if a[name].shape == b[name].shape:
                    differing = np.argwhere(np.atleast_1d(a[name] != b[name]))
                    where = f" ({len(differing)} of {a[name].size} elements)"
                return f"{step}: {name}{where}"
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--grids", nargs="+", default=["1x1", "1x2", "2x1", "2x2"])
    parser.add_argument("--backend", default="portable", choices=["portable", "cuda"])
    parser.add_argument("--directory")
    options = parser.parse_args()
    scratch = Path(options.directory or tempfile.mkdtemp(prefix="weft_compare_"))
    cuda = options.backend == "cuda"
    sizes = {"d_model": 64 if cuda else 24, "features": 512 if cuda else 100}
    failed = compared = 0
    cases = itertools.product(["batch_topk", "topk", "relu"], ["layer", "all_layers"], ["fp32", "bf16", "8bit"], options.grids)
    for number, (activation, scope, state, grid) in enumerate(cases):
        groups, ranks_of_group = map(int, grid.split("x"))
        clip = [("0", "exact"), ("0.05", "exact"), ("0.05", "previous")][number % 3]
        precision = "bf16" if cuda or number % 2 else "fp32"
        text = INPUT.format(steps=options.steps, data=scratch / "data", activation=activation, scope=scope, state=state, groups=groups,
                            k=4, clip_norm=clip[0], clip_mode=clip[1], backend=options.backend, precision=precision, **sizes)
        case = scratch / f"{activation}_{scope}_{state}_{grid}"
        case.mkdir(parents=True)
        (case / "input.toml").write_text(text)
        if not (scratch / "data").exists():
            planted = weft(options.old, 1, "synth", case / "input.toml")
            if planted.returncode != 0:
                sys.exit(f"synth failed:\n{planted.stdout}{planted.stderr}")
        problem = ""
        for name, program in (("old", options.old), ("new", options.new)):
            done = weft(program, groups * ranks_of_group, "train", case / "input.toml", "--output", case / name)
            if done.returncode != 0:
                problem = f"{name} ended with {done.returncode}: {(done.stdout + done.stderr)[-400:]}"
        problem = problem or difference(case / "old", case / "new")
        compared += 1
        failed += bool(problem)
        print(f"{case.name}, {precision}, clip {clip[0]} {clip[1]}: {problem or 'equal'}", flush=True)
    print(f"{compared - failed} of {compared} runs equal bit for bit")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
