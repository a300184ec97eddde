# SPDX-License-Identifier: Apache-2.0
"""weft neuronpedia: the fields are those of the published records of Neuronpedia, values those of features.h5, refusals.

neuronpedia_test.py
"""
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import program

try:
    import h5py
    import numpy as np
except ImportError as missing:
    program.skip(f"{missing.name} is not installed (scripts/setup.sh --tests installs it)")

LAYERS, FEATURES, TOP, SAMPLE, CONTEXT, TOKENS = 2, 1030, 3, 2, 2, 500     # two batches per layer
ENVIRONMENT = dict(os.environ, PYTHONPATH=str(program.PACKAGE))
# Fields without a default, and all that Weft may write, of the records that Neuronpedia imports.
REQUIRED = {"release": {"name", "description", "creatorName", "creatorId"}, "model": {"id", "instruct", "creatorId"},
            "sourceset": {"modelId", "name", "creatorId"}, "source": {"id", "modelId", "setName", "creatorId"},
            "features": {"modelId", "layer", "index"},
            "activations": {"id", "tokens", "index", "layer", "modelId", "maxValue", "maxValueTokenIndex", "minValue", "values", "creatorId"},
            "explanations": {"id", "modelId", "layer", "index", "description", "authorId"}}
KNOWN = {"release": {"visibility", "descriptionShort", "urls", "creatorNameShort", "createdAt"},
         "model": {"displayName", "displayNameShort", "layers", "createdAt", "updatedAt"},
         "sourceset": {"visibility", "description", "creatorName", "releaseName", "createdAt"},
         "source": {"visibility", "num_tokens_in_prompt", "dataset", "createdAt"},
         "features": {"creatorId", "createdAt", "maxActApprox", "hasVector", "vector", "topkCosSimIndices", "topkCosSimValues", "neg_str", "neg_values",
                      "pos_str", "pos_values", "frac_nonzero", "freq_hist_data_bar_heights", "freq_hist_data_bar_values"},
         "activations": {"dataSource", "dataIndex", "createdAt", "qualifyingTokenIndex"}, "explanations": {"createdAt"}}


def write(path):
    generator, window = np.random.default_rng(3), 2 * CONTEXT + 1
    with h5py.File(path, "w") as file:
        file.attrs.update({"format": "weft-features", "format_version": 1, "checkpoint": "runs/a", "data": "data", "model": "", "step": 3,
                           "dataset_fingerprint": "", "tokens": TOKENS, "n_layers": LAYERS, "d_model": 8, "n_features": FEATURES, "top": TOP,
                           "sample": SAMPLE, "context": CONTEXT})
        file["histogram_edges"] = np.concatenate([[0], 2.0 ** np.arange(-15, 16)])
        texts = {"format": "weft-vocabulary", "texts": [f" t{i}" for i in range(40)]}
        file["vocabulary"] = np.frombuffer(json.dumps(texts).encode(), np.uint8)
        file["labels"] = np.frombuffer(b'{"layer": 1, "feature": 1025, "label": "days"}\n', np.uint8)
        for layer in range(LAYERS):
            group = file.create_group(f"layer_{layer}")
            group["fired"], group["mean"] = np.full(FEATURES, 9), np.ones(FEATURES)
            group["histogram"] = generator.integers(0, 9, (FEATURES, 32))
            for kind, n in (("top", TOP), ("sample", SAMPLE)):
                row = generator.integers(0, TOKENS, (FEATURES, n))
                row[5] = -1     # a feature that never fires
                group[f"{kind}_value"] = np.where(row < 0, 0, np.linspace(4, 3, n, dtype="f4"))
                tokens = generator.integers(0, 40, (FEATURES, n, window)).astype("i4")
                tokens[:, 0, 0] = -1        # the document begins here
                group[f"{kind}_row"], group[f"{kind}_position"], group[f"{kind}_tokens"] = row, row, tokens
                group[f"{kind}_shade"] = generator.integers(0, 180, (FEATURES, n, window)).astype("u1")
            for name in ("raised", "lowered"):
                group[name], group[f"{name}_effect"] = generator.integers(0, 40, (FEATURES, 10)), np.ones((FEATURES, 10), "f4")
            group["target_share"] = np.full((FEATURES, LAYERS - layer), 1 / (LAYERS - layer))
            group["nearest"], group["nearest_cosine"] = generator.integers(0, FEATURES, (FEATURES, 5)), np.full((FEATURES, 5), 0.5, "f4")


def export(*arguments, code=0):
    done = subprocess.run([sys.executable, "-m", "weft.neuronpedia", *map(str, arguments)], env=ENVIRONMENT, text=True, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == code, (arguments, done.returncode, done.stdout)
    return done.stdout


def rows_of(path):
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
        return [json.loads(line) for line in file]


def test(folder):
    write(folder / "features.h5")
    names = ("--model-id", "gpt2-small", "--set", "weft-1k", "--release", "weft", "--creator", "A. Person", "--creator-id", "c1")
    export(folder, *names, "--output", folder / "out")
    assert sorted(path.name for path in (folder / "out/gpt2-small").iterdir()) == ["0-weft-1k", "1-weft-1k"]
    with h5py.File(folder / "features.h5") as file:
        for layer in range(LAYERS):
            source, group = folder / f"out/gpt2-small/{layer}-weft-1k", file[f"layer_{layer}"]
            found = {name: rows_of(source / f"{name}.jsonl") for name in ("release", "model", "sourceset", "source")}
            for name in ("features", "activations", "explanations"):
                paths = sorted((source / name).iterdir(), key=lambda path: int(path.name.split("-")[1].split(".")[0]))
                assert name == "explanations" or [path.name for path in paths] == ["batch-0.jsonl.gz", "batch-1.jsonl.gz"]
                found[name] = [row for path in paths for row in rows_of(path)]
            for name, rows in found.items():
                for row in rows:
                    assert REQUIRED[name] <= set(row) <= REQUIRED[name] | KNOWN[name], (name, set(row))
                    assert row.get("modelId", "gpt2-small") == "gpt2-small" and row.get("layer", source.name) == source.name
            assert [row["index"] for row in found["features"]] == [str(index) for index in range(FEATURES)]
            feature = found["features"][7]
            assert feature["pos_str"] == [f" t{token}" for token in group["raised"][7]] and feature["frac_nonzero"] == 9 / TOKENS
            assert [row["description"] for row in found["explanations"]] == (["days"] if layer else [])
            assert len(found["activations"]) == (FEATURES - 1) * (TOP + SAMPLE) == len({row["id"] for row in found["activations"]})
            one = [row for row in found["activations"] if row["index"] == "7"][0]
            assert one["tokens"] == [f" t{token}" for token in group["top_tokens"][7][0][1:]] and one["qualifyingTokenIndex"] == CONTEXT - 1
            expected = group["top_shade"][7][0][1:].astype(float) * 4 / 255
            expected[CONTEXT - 1] = 4
            assert np.allclose(one["values"], expected) and one["maxValue"] == 4 and one["maxValueTokenIndex"] == CONTEXT - 1

    assert "nothing is overwritten" in export(folder, *names, "--output", folder / "out", code=2)
    assert "part of a path" in export(folder, *names[:3], "../x", *names[4:], "--output", folder / "b", code=2)
    with h5py.File(folder / "features.h5", "r+") as file:
        del file["layer_1/top_shade"]
        file["layer_1/top_shade"] = np.zeros((FEATURES, TOP, 4), "u1")
    assert "/layer_1/top_shade is uint8" in export(folder, *names, "--output", folder / "b", code=3)
    assert [path.name for path in folder.iterdir() if "tmp" in path.name or path.name == "b"] == []

    # A limit of the size of files, standard streams that are closed, SIGKILL: an error that names the output, success, and neither a process
    # nor, after a repetition, a file that is left.
    command = [sys.executable, "-m", "weft.neuronpedia", str(folder), *names, "--output", str(folder / "b")]
    write(folder / "features.h5")
    limited = subprocess.run(["prlimit", "--fsize=100:", *command], env=ENVIRONMENT, text=True, capture_output=True, check=False)
    assert limited.returncode == 6 and f"{folder}/b: File too large" in limited.stderr, limited
    killed = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE)
    while not list(folder.glob("b.*.tmp/b/*")):
        time.sleep(0.001)
    killed.kill()
    killed.communicate(timeout=60)      # the workers have its output open
    if (folder / "b").exists():         # it was faster
        shutil.rmtree(folder / "b")
    closed = subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command], env=ENVIRONMENT, check=False)
    assert closed.returncode == 0 and (folder / "b").is_dir() and not list(folder.glob("*.tmp")), closed
    print("the export has the fields of the published records and the values of features.h5")


with tempfile.TemporaryDirectory() as directory:
    test(Path(directory))
