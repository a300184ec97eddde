# SPDX-License-Identifier: Apache-2.0
"""weft score: a predictor that knows the words of a label scores 1, one that does not 0.5; predictors that end, hang or write something else;
the scores in weft serve.

score_test.py
"""
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import program

try:
    import h5py
    import numpy as np
except ImportError as missing:
    program.skip(f"{missing.name} is not installed (scripts/setup.sh --tests installs it)")

FEATURES, TOP, SAMPLE, CONTEXT, VOCABULARY = 6, 3, 4, 3, 90
ENVIRONMENT = dict(os.environ, PYTHONPATH=str(program.PACKAGE))
# Says that a text agrees with a label if it has the word of the label; in fuzzing, if this word is marked.
PREDICTOR = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    has = lambda text: f"<< {asked['label']}>>" in text if asked["task"] == "fuzzing" else asked["label"] in text.split()
    print(json.dumps({"scores": [float(has(text)) for text in asked["texts"]]}), flush=True)
"""


def write(path):
    """Feature f fires on the token f alone, which no context of another feature has."""
    generator, window = np.random.default_rng(5), 2 * CONTEXT + 1
    with h5py.File(path, "w") as file:
        file.attrs.update({"format": "weft-features", "format_version": 1, "checkpoint": "runs/a", "data": "data", "model": "", "step": 3,
                           "dataset_fingerprint": "", "tokens": 500, "n_layers": 1, "d_model": 8, "n_features": FEATURES, "top": TOP,
                           "sample": SAMPLE, "context": CONTEXT})
        file["histogram_edges"] = np.concatenate([[0], 2.0 ** np.arange(-15, 16)])
        file["vocabulary"] = np.frombuffer(json.dumps({"format": "weft-vocabulary", "texts": [f" t{i}" for i in range(VOCABULARY)]}).encode(), np.uint8)
        labels = [{"layer": 0, "feature": 2, "label": "t2"}, {"layer": 0, "feature": 3, "label": "t77"}, {"layer": 0, "feature": 5, "label": "t5"}]
        file["labels"] = np.frombuffer("".join(json.dumps(label) + "\n" for label in labels).encode(), np.uint8)
        group = file.create_group("layer_0")
        group["fired"], group["mean"] = np.full(FEATURES, 9), np.ones(FEATURES)
        group["histogram"] = generator.integers(0, 9, (FEATURES, 32))
        for kind, n in (("top", TOP), ("sample", SAMPLE)):
            tokens = generator.integers(FEATURES, 60, (FEATURES, n, window)).astype("i4")
            tokens[:, :, CONTEXT] = np.arange(FEATURES)[:, None]
            row = generator.permutation(500)[:FEATURES * n].reshape(FEATURES, n)
            row[5] = -1     # a feature without examples
            group[f"{kind}_value"], group[f"{kind}_row"], group[f"{kind}_position"] = np.where(row < 0, 0, np.ones((FEATURES, n), "f4")), row, row
            group[f"{kind}_tokens"], group[f"{kind}_shade"] = tokens, np.where(np.arange(window) == CONTEXT, 255, np.zeros(tokens.shape)).astype("u1")
        group["target_share"] = np.ones((FEATURES, 1))
        group["nearest"], group["nearest_cosine"] = generator.integers(0, FEATURES, (FEATURES, 5)), np.full((FEATURES, 5), 0.5, "f4")


def score(folder, predictor, *arguments, code=0):
    done = subprocess.run([sys.executable, "-m", "weft.score", str(folder), "--predictor", predictor, *map(str, arguments)], env=ENVIRONMENT,
                          text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
    assert done.returncode == code, (arguments, done.returncode, done.stdout)
    return done.stdout


def test(folder):
    assert "has no features.h5" in score(folder, "cat", code=2)
    write(folder / "features.h5")
    (folder / "predictor.py").write_text(PREDICTOR)
    command = f"{sys.executable} {folder}/predictor.py"
    said = json.loads(score(folder, command, "--json", "--quiet"))
    lines = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    assert said["scores"] == lines == [{"layer": 0, "feature": 2, "label": "t2", "detection": 1.0, "fuzzing": 1.0},
                                       {"layer": 0, "feature": 3, "label": "t77", "detection": 0.5, "fuzzing": 0.5},
                                       {"layer": 0, "feature": 5, "label": "t5"}], lines
    before = (folder / "scores.jsonl").read_bytes()
    score(folder, command)
    assert (folder / "scores.jsonl").read_bytes() == before, "the same seed draws the same texts"

    # What the browser shows; a score of a label that was changed since is left out.
    sys.path.insert(0, str(program.PACKAGE))
    from weft.errors import WeftError
    from weft.serve.catalogue import Catalogue
    assert Catalogue(folder / "features.h5").feature(0, 2)["scores"] == {"detection": 1.0, "fuzzing": 1.0}
    (folder / "scores.jsonl").write_text('{"layer": 0, "feature": 2, "label": "another", "detection": 1}\n')
    assert "scores" not in Catalogue(folder / "features.h5").feature(0, 2)
    (folder / "scores.jsonl").write_text('{"layer": 0}\n')
    try:
        Catalogue(folder / "features.h5")
        raise AssertionError("a damaged file of scores was read")
    except WeftError as failure:
        assert failure.code == 3 and "scores.jsonl:1" in str(failure), failure
    (folder / "scores.jsonl").unlink()

    for predictor, code, word in (("true", 6, "ended before it answered"), ("exit 3", 6, "ended before"), ("sleep 30", 6, "wrote nothing within"),
                                  ("yes", 3, "needed are"), ("yes '{\"scores\": [2, 2]}'", 3, "numbers from 0 to 1")):
        assert word in score(folder, predictor, "--time-limit", 0.5 if "sleep" in predictor else 20, code=code), predictor
        assert not (folder / "scores.jsonl").exists()
    with h5py.File(folder / "features.h5", "r+") as file:
        del file["labels"]
    assert "no labels to score" in score(folder, command, code=2)
    print("labels are scored by a program")


with tempfile.TemporaryDirectory() as directory:
    test(Path(directory))
