# SPDX-License-Identifier: Apache-2.0
"""What the tests of this folder share: transcoders that Weft trains on planted features, what it computes with them, comparisons."""
import json
from pathlib import Path

import h5py
import numpy as np

import program
import weft as reader

LAYERS, WIDTH, FEATURES, K = 2, 16, 40, 4       # layers and width of program.SYNTHETIC

TRANSCODER = """
[run]
steps = 30
[data]
train = "{data}/train"
validation = "{data}/validation"
batch_tokens = 100
targets = "{targets}"
[transcoder]
features = 40
decoder = "{decoder}"
activation = "{activation}"
k = 4
skip = "{skip}"
[optimizer]
learning_rate = 1e-2
[device]
precision = "fp32"
"""


def planted_data(weft):
    """The folder of a training and a validation set."""
    (weft.folder / "data.toml").write_text(program.SYNTHETIC.format(folder=weft.folder) + 'dtype = "fp32"\n')
    weft.run("synth", "data.toml")
    return weft.folder / "data"


def train_transcoder(weft, data, name, *, activation, decoder="per_layer", skip="none", targets="outputs"):
    """Of the sets in `data`, which are normalised, so that an export must fold the statistics into the weights."""
    return weft.train(TRANSCODER.format(data=data, targets=targets, decoder=decoder, activation=activation, skip=skip), name)


def inputs_of(data):
    """[L, rows, d] float32"""
    return reader.Dataset(data).inputs[:].transpose(1, 0, 2).copy()


def features_and_outputs(weft, path, data):
    """(features [L, rows, F] of `weft encode`, reconstructions [L, rows, d] of them) of a run or an imported checkpoint.

    The measures of `weft evaluate` vouch for the reconstructions, which are computed by the reader."""
    rows = reader.Dataset(data)
    encoded = Path(f"{path}_encoded_{Path(data).name}")
    weft.run("encode", path, "--data", data, "--output", encoded)
    parts = []
    for file in json.loads((encoded / "metadata.json").read_text())["files"]:
        with h5py.File(encoded / file["name"]) as part:
            n_features, n_layers = int(part.attrs["n_features"]), int(part.attrs["n_layers"])
            offsets = part["offsets"][:]
            dense = np.zeros((len(offsets) - 1, n_layers * n_features), np.float32)
            dense[np.repeat(np.arange(len(dense)), np.diff(offsets)), part["feature"][:]] = part["value"][:]
            parts.append(dense.reshape(-1, n_layers, n_features))
    features = np.concatenate(parts)
    transcoder = reader.Run(path).transcoder() if (Path(path) / "checkpoints").is_dir() else reader.Transcoder(path)
    outputs = transcoder.decode(features, rows.inputs[:])
    weft.run("evaluate", path, "--data", data, "--output", weft.folder / "evaluation")
    evaluated = json.loads((weft.folder / "evaluation/evaluation.json").read_text())["validation"]["nmse"]
    target = rows.inputs[:] if transcoder.targets == "inputs" else rows.targets[:]
    found = ((outputs - target) ** 2).sum((0, 2)) / ((target - target.mean(0)) ** 2).sum((0, 2))
    # Sums of fp32 over the rows, in another order.
    assert np.allclose(found, evaluated, rtol=1e-4), (path, found, evaluated)
    return features.transpose(1, 0, 2), outputs.transpose(1, 0, 2)


def error(found, expected):
    """Norm of the difference, relative to that of what is expected."""
    found, expected = (np.asarray(values, np.float64) for values in (found, expected))
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def same(name, found, expected, rounding=0.0):
    """(features, outputs) of a package against those of Weft. `rounding`: the largest of a weight, relative, when it was stored.

    Without one the active features are the same, and values agree but for some hundred operations in fp32 and weights that were folded and
    rounded to fp32 once. With one, the sum of rounded products is off by a few times as much, and features that are close to their
    thresholds, or to one another where the k largest are active, appear or disappear."""
    both = (found[0] != 0) & (expected[0] != 0)
    differ = np.mean((found[0] != 0) != (expected[0] != 0)) / np.mean(expected[0] != 0)
    assert differ <= (0.03 if rounding else 0), (name, "part of the features that are active in one of them", differ)
    tolerance = max(2e-6, 4 * rounding)
    assert error(found[0][both], expected[0][both]) <= tolerance, (name, "features", error(found[0][both], expected[0][both]))
    tolerance = max(2e-6, 16 * rounding)
    assert error(found[1], expected[1]) <= tolerance, (name, "outputs", error(found[1], expected[1]))


STORAGE = {"fp32": 0.0, "bf16": 2.0 ** -9}      # by --type of an export: `rounding`
