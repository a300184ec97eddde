# SPDX-License-Identifier: Apache-2.0
"""weft.reader against the program: the measures of `weft evaluate`, the activations of `weft encode`, parameters of several shards.

reader_test.py WEFT
"""
import json
import sys

import h5py
import numpy as np

import files
import program

sys.path.insert(0, str(program.PACKAGE))
import weft as module

INPUT = """
[synthetic]
output = "{folder}/data"
layers = 3
d_model = 16
features = 32
k = 3
tokens = 2000
validation_tokens = 301
[run]
steps = 20
[data]
train = "{folder}/data/train"
validation = "{folder}/data/validation"
batch_tokens = 64
[transcoder]
features = 61
k = 3.5
[optimizer]
learning_rate = 3e-3
[log]
every = 5
"""
# Settings, and the number of ranks that train them. All together: every activation, scope, ranking, decoder and normalisation.
CASES = {
    "plain": (1, []),
    "two": (2, ["transcoder.scope=all_layers"]),
    "four": (4, ["parallel.data=2", "transcoder.decoder=tied", "data.normalise=scalar"]),
    "topk": (2, ["transcoder.activation=topk", "transcoder.k=3", "transcoder.ranking=decoder_norm"]),
    "all_topk": (1, ["transcoder.activation=topk", "transcoder.k=3", "transcoder.scope=all_layers", "transcoder.skip=linear"]),
    "relu": (1, ["transcoder.activation=relu", "transcoder.decoder=per_layer", "data.normalise=none"]),
    "jumprelu": (2, ["transcoder.activation=jumprelu", "data.targets=inputs", "transcoder.decoder=per_layer"]),
    "z_score": (1, ["transcoder.ranking=z_score"]),
    "bf16": (2, ["optimizer.state=bf16"]),
    "by_target": (2, ["transcoder.decoder=tied_target", "transcoder.decoder_affine=true", "transcoder.decoder_scale_initial=0.2"]),
    "by_target_norm": (1, ["transcoder.decoder=tied_target", "transcoder.ranking=decoder_norm"]),
}


def check_case(weft, source, name, ranks, settings):
    run = weft.folder / name
    weft.run("train", source, "--output", run, *program.sets(*settings), ranks=ranks)
    weft.run("evaluate", run, "--output", run)
    expected = json.loads((run / "evaluation.json").read_text())["validation"]
    opened = module.Run(run)
    clt = opened.transcoder()
    assert len(clt.checkpoint.manifest["shards"]) == ranks
    data = module.Dataset(weft.folder / "data" / "validation")
    found = clt.evaluate(data)
    assert found["tokens"] == expected["tokens"] == 301
    # fp32 products summed in another order: 2^-24 times the length of a sum, and an entry at the edge of the selection may change,
    # which moves an error by far less than its own size.
    for measure in ("nmse", "nmse_standardised", "explained_variance"):
        assert np.allclose(found[measure], expected[measure], rtol=2e-5, atol=1e-6), (name, measure, found[measure], expected[measure])
    tolerance = 0.01 if name in ("relu", "jumprelu") else 1 / 301      # values within rounding of 0 or of a threshold; else one entry
    assert np.allclose(found["l0"], expected["l0"], atol=tolerance), (name, found["l0"], expected["l0"])
    assert np.allclose(found["dead_fraction"], expected["dead_fraction"], atol=1.5 / 61), name

    # The activations themselves, by row and feature.
    weft.run("encode", run, "--output", weft.folder / f"{name}_encoded")
    with h5py.File(weft.folder / f"{name}_encoded" / "encoded_0.h5") as file:
        offsets, feature, value = (file[item][:] for item in ("offsets", "feature", "value"))
    dense = np.zeros((len(offsets) - 1, clt.n_layers * clt.n_features), np.float32)
    dense[np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)), feature] = value
    own = np.concatenate([clt.encode(data.inputs[begin:begin + clt.batch_rows]) for begin in range(0, len(data), clt.batch_rows)])
    differ = np.abs(own.reshape(len(dense), -1) - dense) > 1e-4 * (1 + np.abs(dense))
    assert differ.sum() <= 2, (name, differ.sum())

    # Parameters against an independent reader, whole and by feature.
    tensors = files.read_tensors(clt.checkpoint.path)
    for tensor in tensors:
        assert np.array_equal(clt.checkpoint[tensor], tensors[tensor].astype(clt.checkpoint[tensor].dtype)), tensor
    for layer in range(clt.n_layers):
        whole = clt.decoder(layer)
        assert whole.shape[0] == 61 and whole.shape[2] == 16, whole.shape
        assert np.array_equal(clt.decoder_rows(layer, [60, 0, 7, -1, 7]), whole[[60, 0, 7, 60, 7]])
        theta = clt.thresholds(layer)
        assert (theta is None) == (name != "jumprelu") and (theta is None or (theta.dtype == np.float32 and (theta > 0).all()))
    check_torch(clt, data)


def check_torch(clt, data):
    try:
        import torch
    except ImportError:
        return
    x = data.inputs[:clt.batch_rows]
    a = clt.encode(torch.from_numpy(x))
    assert isinstance(a, torch.Tensor) and np.allclose(a.numpy(), clt.encode(x), atol=1e-4)
    assert np.allclose(clt.reconstruct(torch.from_numpy(x)).numpy(), clt.reconstruct(x), atol=1e-3)


def check_selection():
    """Ties go to the first; only positive values; a budget beyond the positive ones takes them all."""
    values = np.array([[3, 5, 5, 5, 0, -1], [0, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6]], np.float32)
    mask = module.reader._largest(values, 3)
    assert mask.tolist() == [[False, True, True, True, False, False], [False] * 6, [False] * 3 + [True] * 3], mask
    assert module.reader._largest(values, 2)[0].tolist() == [False, True, True, False, False, False]
    assert module.reader._largest(values, 99).sum() == 4 + 0 + 6


def check_written(weft, source):
    """The program reads what write_dataset has written, as the same values."""
    data = module.Dataset(weft.folder / "data" / "validation")
    for dtype in (np.float32, np.float16):
        folder = weft.folder / f"own_{np.dtype(dtype).name}"
        module.write_dataset(folder, data.inputs[:].astype(dtype), data.targets[:].astype(dtype), model="own", rows_per_file=100)
        said = weft.run("inspect", folder)
        assert "3 layers, d_model 16, 301 rows" in said and "all values finite" in said, said
        again = module.Dataset(folder)
        assert len(again) == 301 and np.array_equal(again.inputs[90:210], data.inputs[90:210].astype(dtype).astype(np.float32))
        weft.run("evaluate", weft.folder / "plain", "--data", folder)
    # Rectified values have no negative one.
    module.write_dataset(weft.folder / "rectified", data.inputs[:].astype(np.float16), np.maximum(data.targets[:], 0).astype(np.float16))
    assert "all values finite" in weft.run("inspect", weft.folder / "rectified")
    try:
        module.write_dataset(weft.folder / "no", data.inputs[:5], data.targets[:6])
    except ValueError as failure:
        assert "both must be" in str(failure) and not (weft.folder / "no").exists()
    else:
        raise AssertionError("arrays of different shapes were written")


def check_run(weft, source):
    opened = module.Run(weft.folder / "plain")
    lines = program.metrics(weft.folder / "plain")
    assert opened.metrics["step"].tolist() == [line["step"] for line in lines]
    assert opened.metrics["loss"].tolist() == [line["loss"] for line in lines]
    assert opened.metrics["layer_l0"].shape == (len(lines), 3)
    assert opened.metrics["layer_l0"].tolist() == [line["layer_l0"] for line in lines]
    assert opened.input["transcoder"]["k"] == 3.5 and opened.steps == [20]
    # What weft convert writes has checkpoints and no run.json.
    weft.run("convert", weft.folder / "plain", "--output", weft.folder / "converted")
    converted = module.Run(weft.folder / "converted")
    assert converted.input["transcoder"]["activation"] == "jumprelu" and converted.steps == [20] and not converted.record
    assert (converted.transcoder().thresholds(0) > 0).all()
    try:
        module.Run(converted.checkpoint().path)
    except FileNotFoundError as failure:
        assert "weft.Transcoder" in str(failure)
    else:
        raise AssertionError("a checkpoint was taken for a run")
    # The same reading of TOML with and without the library.
    text = opened.checkpoint().manifest["input"]
    present = sys.modules.get("tomllib")
    sys.modules["tomllib"] = None
    own = module.reader.parse_toml(text)
    if present is None:
        del sys.modules["tomllib"]
    else:
        sys.modules["tomllib"] = present
    assert own == module.reader.parse_toml(text) == opened.input, own
    # A run in progress: a torn last line, numbers that are not finite.
    with open(opened.path / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 21, "loss": "inf", "group": {"a": 2}}\n{"step": 22, "lo')
    assert opened.metrics["loss"][-1] == np.inf and opened.metrics["group.a"][-1] == 2 and len(opened.metrics["step"]) == len(lines) + 1
    for make, words in ((lambda: module.Run(weft.folder), "run.json is missing"), (lambda: opened.checkpoint(3), "no checkpoint of step 3"),
                        (lambda: module.Transcoder(weft.folder / "plain"), "manifest.json is missing"),
                        (lambda: module.Dataset(weft.folder), "no chunk files"), (lambda: opened.checkpoint()["none"], "no tensor none")):
        try:
            make()
        except (OSError, ValueError, KeyError) as failure:
            assert words in str(failure), failure
        else:
            raise AssertionError(f"no error: {words}")
    # A shard is missing a row range: an error, not zeros.
    broken = module.Run(weft.folder / "two").checkpoint()
    broken.manifest["shards"] = broken.manifest["shards"][:1]
    try:
        broken["encoder_0/weight"]
    except ValueError as failure:
        assert "is incomplete" in str(failure)
    else:
        raise AssertionError("half of a tensor was read as a whole")


def check(weft):
    source = weft.folder / "input.toml"
    source.write_text(INPUT.format(folder=weft.folder))
    weft.run("synth", source)
    check_selection()
    for name, (ranks, settings) in CASES.items():
        check_case(weft, source, name, ranks, settings)
    check_written(weft, source)
    check_run(weft, source)
    try:
        import torch
        print(f"with NumPy {np.__version__} and PyTorch {torch.__version__}")
    except ImportError:
        print(f"with NumPy {np.__version__}; without PyTorch, which is not installed: tensors were not tested")


program.main(check)
