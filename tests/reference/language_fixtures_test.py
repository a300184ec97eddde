# SPDX-License-Identifier: Apache-2.0
"""The language-model reference against recorded results of the transformers library (make_language_fixtures.py).

language_fixtures_test.py [live]     live: the library computes them anew; skipped where torch is not installed
"""
import json
import sys
from pathlib import Path

import h5py
import numpy as np

import language_model as m

FOLDER = Path(__file__).parent / "fixtures"
FIXTURES = sorted(FOLDER.glob("*.h5"))
# The library computes rotary angles and RMSNorm in float32, and the fixtures are stored in float32: 6e-8 per rounding,
# amplified by two layers (1e-6 occurs).
TOLERANCE = 3e-6


def difference(found, expected):
    """Relative L2 difference. The exact gradient of the bias of keys is 0 (a softmax does not see it): absolute there."""
    expected = np.asarray(expected, np.float64)
    return np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-3)


def read(path):
    """(settings, {path in the file: array})."""
    arrays = {}
    with h5py.File(path) as file:
        file.visititems(lambda name, item: arrays.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None)
        return json.loads(file.attrs["language_model"]), arrays


def group(arrays, name):
    return {path[len(name) + 1:]: array.astype(np.float64) for path, array in arrays.items() if path.startswith(name + "/")}


def test_reference():
    for path in FIXTURES:
        settings, arrays = read(path)
        there = m.forward_backward(m.Settings(**settings), group(arrays, "weights"), m.Batch(arrays["ids"], arrays["targets"]))
        gradients = group(arrays, "gradients")
        assert gradients.keys() == there.gradients.keys(), path
        differences = {"logits": difference(there.logits, arrays["logits"]), "loss": difference(there.loss, arrays["loss"]),
                       **{name: difference(there.gradients[name], gradient) for name, gradient in gradients.items()}}
        worst = max(differences, key=differences.get)
        print(f"{path.stem}: {len(gradients)} gradients, loss {there.loss:.6f}, largest difference {differences[worst]:.1e} ({worst})")
        assert differences[worst] <= TOLERANCE, differences


def test_library():
    try:
        import make_language_fixtures as maker
    except ImportError as error:
        print(f"skipped: {error}")
        sys.exit(77)
    for path in [*FIXTURES, *sorted(FOLDER.glob("families/*.h5"))]:
        _, computed = maker.compute(path.stem)
        _, recorded = read(path)
        assert computed.keys() == recorded.keys(), path
        differences = {name: difference(computed[name], array) for name, array in recorded.items()}
        worst = max(differences, key=differences.get)
        print(f"{path.stem}: computed by transformers {maker.transformers.__version__}, largest difference from the record "
              f"{differences[worst]:.1e} ({worst})")
        assert differences[worst] <= TOLERANCE, differences


if __name__ == "__main__":
    assert len(FIXTURES) == 4
    test_library() if sys.argv[1:] == ["live"] else test_reference()
