# SPDX-License-Identifier: Apache-2.0
"""weft convert: thresholds against a selection in NumPy, rounding, ranks, fine-tuning, evaluation and training of the result.

convert_test.py WEFT
"""
import json
import math
import re

import numpy as np

import files
import program
import transcoder as t

LAYERS, WIDTH, FEATURES, BATCH, ROWS = 2, 16, 32, 64, 301   # the last of five batches is short

INPUT = """
[run]
steps = 30
seed = 3
[data]
train = "{folder}/train"
validation = "{folder}/validation"
batch_tokens = 64
[transcoder]
features = 32
activation = "{activation}"
scope = "{scope}"
k = 3
[optimizer]
learning_rate = 5e-3
[device]
precision = "fp32"
backend = "portable"
"""


def converted(weft, run, name, *options, finetune=(), ranks=None):
    """The tensors of the new checkpoint, and the record."""
    weft.run("convert", run, "--output", weft.folder / name, *options, *finetune, ranks=ranks)
    saved = files.checkpoints(weft.folder / name)
    assert list(saved) == [30], saved
    return files.read_tensors(saved[30]), json.loads((weft.folder / name / "conversion.json").read_text())


def pre_activations(tensors, x):
    return t.encode({name: tensor.astype(np.float64) for name, tensor in tensors.items() if tensor.dtype == np.float32}, x)


def batches(settings, z):
    """Masks of the training activation, batch by batch of consecutive rows."""
    masks = [t.select(settings, [layer[begin:begin + BATCH] for layer in z]) for begin in range(0, ROWS, BATCH)]
    return [np.concatenate([mask[s] for mask in masks]) for s in range(LAYERS)]


def is_bf16(values):
    return not (np.ascontiguousarray(values).view(np.uint32) & 0xFFFF).any()


def check(weft, activation, scope):
    name = f"{activation}_{scope}"
    run = weft.train(INPUT.format(folder=weft.folder, activation=activation, scope=scope), name)
    trained = files.read_tensors(files.checkpoints(run)[30])
    settings = t.Settings(features=FEATURES, activation=activation, scope=scope, k=3)
    rows, targets = files.read_dataset(weft.folder / "validation")
    mean, scale = t.normalisation("per_dimension", t.statistics(files.read_dataset(weft.folder / "train")[0]))
    x = (rows - mean) * scale

    # One threshold per layer (of one budget for all layers: one), weights unchanged.
    tensors, record = converted(weft, run, f"{name}_layer", "--thresholds", "per_layer", "--type", "fp32")
    for key, tensor in trained.items():
        assert key.startswith("selection/") or np.array_equal(tensors[key], tensor), key
    z = pre_activations(tensors, x)
    masks = batches(settings, z)
    theta = [tensors[f"encoder_{s}/threshold"] for s in range(LAYERS)]
    groups = [range(LAYERS)] if scope == "all_layers" else [[s] for s in range(LAYERS)]
    for group in groups:
        values = np.sort(np.concatenate([z[s].ravel() for s in group]))[::-1]
        kept = sum(masks[s].sum() for s in group)
        bound = theta[group[0]][0]
        assert all((theta[s] == bound).all() for s in group)
        # fp32 pre-activations of 16 products: about 1e-6.
        assert values[kept] - 1e-5 <= bound <= values[kept - 1] + 1e-5, (values[kept - 1:kept + 1], bound)
        found = sum(record["after"]["l0"][s] for s in group) * ROWS
        assert abs(found - kept) <= 1, (found, kept)      # a value within rounding of the threshold
    assert np.allclose(record["before"]["l0"], [mask.sum() / ROWS for mask in masks], atol=1.5 / ROWS)

    # One per feature, everything rounded to bf16: each feature fires as often as before.
    tensors, record = converted(weft, run, f"{name}_feature")
    for key in tensors:
        if key.endswith(("/weight", "/bias", "/threshold", "decoder_bias")):
            assert is_bf16(tensors[key]), key
    nearest = files.from_bf16_bits(files.to_bf16_bits(trained["encoder_0/weight"]))
    assert np.array_equal(tensors["encoder_0/weight"], nearest)
    z = pre_activations(tensors, x)
    masks = batches(settings, z)
    off = 0
    for s in range(LAYERS):
        theta = tensors[f"encoder_{s}/threshold"]
        counts, expected = (z[s] > theta).sum(axis=0), masks[s].sum(axis=0)
        for f in np.flatnonzero(expected):
            column = np.sort(z[s][:, f])[::-1]
            gap = column[expected[f] - 1] - (column[expected[f]] if expected[f] < ROWS else 0)
            # Two neighbours closer than a step of bf16 (2^-8 of their size) cannot be told apart.
            if gap > column[expected[f] - 1] / 128:
                off += counts[f] != expected[f]
    assert off == 0, f"{off} features fire at another rate"
    ratio = np.mean(record["after"]["l0"]) / np.mean(record["before"]["l0"])
    print(f"{name}: L0 {np.mean(record['before']['l0']):.3f} -> {np.mean(record['after']['l0']):.3f}, NMSE "
          f"{np.mean(record['before']['nmse']):.4f} -> {np.mean(record['after']['nmse']):.4f}")
    assert 0.9 < ratio < 1.25, ratio      # features that did not fire in the batches may fire above their layer's threshold

    # evaluate measures what convert recorded; inspect finds every tensor.
    weft.run("evaluate", weft.folder / f"{name}_feature", "--output", weft.folder / f"{name}_evaluated")
    evaluated = json.loads((weft.folder / f"{name}_evaluated" / "evaluation.json").read_text())["validation"]
    assert evaluated["l0"] == record["after"]["l0"] and evaluated["nmse"] == record["after"]["nmse"]
    assert "all tensors present" in weft.run("inspect", files.checkpoints(weft.folder / f"{name}_feature")[30])

    # A directory that is in use, of all things that of the run, is refused and stays as it is.
    contents = lambda: {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    before = contents()
    assert "nothing is overwritten" in weft.run("convert", run, "--output", run, code=2)
    assert contents() == before
    return run


def test(weft):
    generator = np.random.default_rng(7)
    files.write_dataset(weft.folder / "train", *files.random_rows(generator, 640, LAYERS, WIDTH), rows_per_file=300)
    files.write_dataset(weft.folder / "validation", *files.random_rows(generator, ROWS, LAYERS, WIDTH), rows_per_file=200)
    run = check(weft, "batch_topk", "layer")
    check(weft, "batch_topk", "all_layers")
    per_token = check(weft, "topk", "layer")

    # Near the mean pre-activations are small: a quiet batch keeps small ones, of batch_topk, and so does a quiet token of topk. More than
    # the first room of 64 features per token and layer lie above these. The room of the result follows from what is active with it.
    x, y = files.read_dataset(weft.folder / "validation")
    for activation, quiet in (("batch_topk", slice(0, BATCH)), ("topk", slice(0, None, 30))):
        x[quiet] = x.mean(axis=0) + 0.02 * (x[quiet] - x.mean(axis=0))
        files.write_dataset(weft.folder / f"quiet_{activation}", x, y, rows_per_file=ROWS)
        wide = INPUT.format(folder=weft.folder, activation=activation, scope="layer").replace("features = 32", "features = 400")
        wide = weft.train(wide.replace("k = 3", 'k = 3\nskip = "linear"'), f"wide_{activation}")
        name = f"wide_{activation}_jumping"
        tensors, record = converted(weft, wide, name, "--data", weft.folder / f"quiet_{activation}")
        fullest = record["fullest_batch"]
        assert np.mean(record["after"]["l0"]) <= fullest <= 400, record
        assert record["capacity"] == max(64, min(400, math.ceil(2 * fullest))), record
        saved = json.loads((files.checkpoints(weft.folder / name)[30] / "manifest.json").read_text())["input"]
        assert re.search(rf'capacity *= {record["capacity"]}\b', saved), saved
        assert all(is_bf16(tensor) for key, tensor in tensors.items() if key.endswith("/weight")), list(tensors)
        weft.run("evaluate", weft.folder / name)

    one, _ = converted(weft, run, "one")
    two, _ = converted(weft, run, "two", ranks=2)
    for key, tensor in one.items():
        assert np.array_equal(tensor, two[key]), key
    # Exported from one shard or from two, the files have the same bytes.
    for name in ("one", "two"):
        assert len(list(files.checkpoints(weft.folder / name)[30].glob("rank_*.h5"))) == (1 if name == "one" else 2)
        weft.run("export", weft.folder / name, weft.folder / f"{name}_exported", "--to", "circuit-tracer")
    for path in (weft.folder / "one_exported").iterdir():
        assert path.read_bytes() == (weft.folder / "two_exported" / path.name).read_bytes(), path

    # Fine-tuning with batch_topk adapts the transcoder to thresholds, on any number of ranks.
    tuned, on_train = {}, ("--data", weft.folder / "train")
    plain, first = converted(weft, per_token, "plain", *on_train)
    for ranks in (1, 2):
        tuned[ranks], record = converted(weft, per_token, f"tuned_{ranks}", *on_train, finetune=("--finetune", 40), ranks=ranks)
        assert record["before"] == first["before"] or ranks == 2
        assert np.mean(record["after"]["nmse"]) < 0.97 * np.mean(first["after"]["nmse"]), (record, first)
        assert 0.9 < np.mean(record["after"]["l0"]) / np.mean(record["before"]["l0"]) < 1.1 and record["finetuned_steps"] == 40
        assert tuned[ranks].keys() == plain.keys() and all(is_bf16(tuned[ranks][f"encoder_{s}/threshold"]) for s in range(LAYERS))
    for key, tensor in tuned[1].items():
        if key.endswith(("/weight", "/bias", "decoder_bias")):
            difference = np.linalg.norm(tensor - tuned[2][key]) / np.linalg.norm(tensor)
            assert difference < 0.02, (key, difference)      # sums in another order, rounded to bf16
    assert first["finetuned_steps"] == 0
    assert "lm harvest" in weft.run("convert", per_token, "--output", weft.folder / "x", "--finetune", 40, "--set", "data.train=", *on_train, code=2)

    # Private training has no norm of the last gradient, and would not stay private.
    private = INPUT.format(folder=weft.folder, activation="topk", scope="layer").replace("k = 3", 'k = 3\ndecoder = "per_layer"')
    private = weft.train(private + '[privacy]\nenabled = true\nunit = "token"\nnoise_multiplier = 1.0\ndelta = 1e-3\n', "private")
    assert "thresholds alone" in weft.run("convert", private, "--output", weft.folder / "x", "--finetune", 5, code=2)
    assert converted(weft, private, "private_jumping")[1]["finetuned_steps"] == 0

    # Training goes on from the result.
    jumping = INPUT.format(folder=weft.folder, activation="jumprelu", scope="layer").replace("steps = 30", "steps = 35")
    source = files.checkpoints(weft.folder / "one")[30]
    on = weft.train(jumping, "goes_on", "--resume", source, "--set", "resume.accept_changed=true", "--set",
                    "optimizer.schedule_steps=30")
    assert [line["step"] for line in program.metrics(on)][-1] == 35

    # Or begins with its weights and normalisation: moments and steps are new, whatever the training data are.
    begins = (jumping.replace("steps = 35", "steps = 1").replace("learning_rate = 5e-3", "learning_rate = 1e-30")
              .replace("/train", "/validation", 1))
    began = weft.train(begins, "begins", "--set", f"transcoder.initial={weft.folder / 'one'}", ranks=2)
    for key, tensor in files.read_tensors(files.checkpoints(began)[1]).items():
        if not key.endswith(("moment", "tokens_since_fired")) and not key.startswith("selection/"):
            assert np.array_equal(tensor, one[key]), key
    record = json.loads((began / "run.json").read_text())["initial"]
    assert record["step"] == 30 and len(record["sha256"]) == 64, record
    for changed, message in (("transcoder.features=16", "encoder_0/weight"), ("data.normalise=none", "data.normalise"),
                             ("optimizer.state=bf16", "encoder_0/weight")):
        (weft.folder / "begins.toml").write_text(begins)
        output = weft.run("train", weft.folder / "begins.toml", "--output", weft.folder / "refused",
                          "--set", f"transcoder.initial={weft.folder / 'one'}", "--set", changed, code=2)
        assert message in output and "transcoder.initial" in output, output

    assert "it can be exported as it is" in weft.run("convert", weft.folder / "one", "--output", weft.folder / "x", code=2)
    assert "needs --output" in weft.run("convert", run, code=2)


if __name__ == "__main__":
    program.main(test)
