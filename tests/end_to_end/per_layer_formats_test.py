# SPDX-License-Identifier: Apache-2.0
"""weft export and weft import of transcoders of single layers and of autoencoders: what SAELens, sparsify and circuit-tracer apply
reconstructs the same as the run, and evaluates the same when it is read again. Applied by NumPy (weights_files.py). Files that these
packages have written: weights_formats_test."""
import json
import shutil

import h5py
import numpy as np

import files
import program
import weights_files as weights_of

INPUT = """
[synthetic]
output = "{folder}/data"
layers = 3
d_model = 16
features = 32
k = 3
tokens = 2000
validation_tokens = 200
dtype = "fp32"
[run]
steps = 30
[data]
train = "{folder}/data/train"
validation = "{folder}/data/validation"
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


def validation(weft, path, data):
    weft.run("evaluate", path, "--data", data, "--output", "evaluation")
    return json.loads((weft.folder / "evaluation/evaluation.json").read_text())["validation"]


def nmse(reconstruction, y):
    return ((reconstruction - y) ** 2).sum(axis=(0, 2)) / ((y - y.mean(axis=0)) ** 2).sum(axis=(0, 2))


def exports(weft):
    x, y = files.read_dataset(weft.folder / "data/validation")
    for kind, activation, skip, targets, word in (
            ("saelens", "relu", "none", "outputs", "ReLU"), ("saelens", "relu", "linear", "outputs", "linear skip connection"),
            ("saelens", "jumprelu", "linear", "outputs", "JumpReLU"), ("circuit-tracer", "jumprelu", "linear", "outputs", "JumpReLU"),
            ("saelens", "topk", "none", "inputs", "autoencoder"),
            ("sparsify", "topk", "linear", "outputs", "TopK of 4"), ("sparsify", "topk", "none", "inputs", "TopK of 4")):
        name = f"{kind}_{activation}_{skip}_{targets}"
        run = weft.train(INPUT.format(folder=weft.folder, targets=targets, decoder="per_layer", activation=activation, skip=skip),
                         name)
        found = validation(weft, run, "data/validation")
        exported = weft.folder / f"{name}_exported"
        exact = ("--to", kind, "--type", "fp32")
        text = weft.run("export", run, exported, *exact, "--model", "m", "--input-hook", "blocks.{}.mlp.hook_in", "--output-hook", "h.{}.mlp")
        assert f"format of {kind}" in text and word in text, text
        reconstruction = weights_of.reconstruct_layers(exported, x)
        # Weft's fp32 sums over 200 rows, against float64; which entries are active differs within rounding only.
        expected = nmse(reconstruction, x if targets == "inputs" else y)
        assert np.allclose(found["nmse"], expected, rtol=1e-4), (name, found["nmse"], expected)

        imported = weft.folder / f"{name}_imported"
        weft.run("import", exported, "--output", imported)
        again = validation(weft, imported, "data/validation")
        # Folding rounds each weight to fp32.
        for measure in ("nmse", "explained_variance", "l0"):
            assert np.allclose(found[measure], again[measure], rtol=1e-4), (name, measure, found[measure], again[measure])
        weft.run("export", imported, weft.folder / "again", *exact, "--input-hook", "blocks.{}.mlp.hook_in", "--output-hook", "h.{}.mlp")
        for path in exported.rglob("*.safetensors"):
            once = weights_of.read_safetensors(path)
            twice = weights_of.read_safetensors(weft.folder / "again" / path.relative_to(exported))
            for tensor, values in once.items():
                # The bias of a centred encoder is subtracted and added again: two roundings of sums of about 1.
                assert np.allclose(values, twice[tensor], rtol=0, atol=1e-6 if tensor == "encoder.bias" else 0), (path, tensor)
        shutil.rmtree(weft.folder / "again")
    # bf16: half a unit in the last place of 8 bits, and a feature of JumpReLU that crosses its threshold appears as a whole.
    weft.run("export", weft.folder / "saelens_relu_none_outputs", weft.folder / "half", "--to", "saelens", "--type", "bf16")
    exact = weights_of.reconstruct_layers(weft.folder / "saelens_relu_none_outputs_exported", x)
    half = weights_of.reconstruct_layers(weft.folder / "half", x)
    assert 0 < np.linalg.norm(half - exact) / np.linalg.norm(exact) < 2 ** -7


def one_layer(weft):
    """A layer of a set alone: its checkpoint does not differ from a cross-layer one, and returns to formats of single layers."""
    hook = "blocks.1.mlp.hook_in"
    for name, kind in (("saelens_topk_none_inputs", "saelens"), ("saelens_relu_linear_outputs", "saelens"),
                       ("sparsify_topk_linear_outputs", "sparsify")):
        layer = weft.folder / f"{name}_exported" / {"saelens": "layer_1", "sparsify": "h.1.mlp"}[kind]
        weft.run("import", layer, "--output", f"{name}_one")
        weft.run("export", f"{name}_one", f"{name}_back", "--to", kind, "--input-hook", hook, "--output-hook", "h.1.mlp")
        back = weft.folder / f"{name}_back" / {"saelens": "layer_0", "sparsify": "h.1.mlp"}[kind]
        for path in layer.glob("*.safetensors"):
            once, twice = weights_of.read_safetensors(path), weights_of.read_safetensors(back / path.name)
            assert once.keys() == twice.keys() and all(np.array_equal(once[tensor], twice[tensor]) for tensor in once), path
        if kind == "saelens":
            assert json.loads((back / "cfg.json").read_text())["metadata"]["hook_name"] == hook
    # circuit-tracer loads the skip connection of a set.
    weft.run("export", "saelens_relu_linear_outputs_one", "one_set", "--to", "circuit-tracer", "--input-hook", hook)
    config = (weft.folder / "one_set/config.yaml").read_text()
    assert "transcoder_set" in config and '"mlp.hook_in"' in config, config
    assert "W_skip" in weights_of.read_safetensors(weft.folder / "one_set/layer_0.safetensors")


def hooks(weft):
    """The data of the runs state a hook point: exports name it as TransformerLens does, and refuse another one."""
    run = weft.folder / "saelens_relu_linear_outputs"
    assert "--input-hook" not in weft.run("export", run, "named", "--to", "saelens")
    metadata = json.loads((weft.folder / "named/layer_2/cfg.json").read_text())["metadata"]
    assert metadata["hook_name"] == "blocks.2.mlp.hook_in" and metadata["hook_name_out"] == "blocks.2.mlp.hook_out", metadata
    assert metadata["model_name"] and metadata["sae_lens_version"].startswith("6."), metadata
    weft.run("export", run, "traced", "--to", "circuit-tracer", "--output-hook", "blocks.{}.hook_mlp_out")
    config = (weft.folder / "traced/config.yaml").read_text()
    assert '"mlp.hook_in"' in config and '"hook_mlp_out"' in config and "transcoder_set" in config, config
    text = weft.run("export", run, "refused", "--to", "circuit-tracer", "--input-hook", "hook_resid_mid", code=2)
    assert "mlp.hook_in" in text and "block_{}.mlp.input" in text, text
    text = weft.run("export", run, "refused", "--to", "saelens", "--input-hook", "blocks.{}.mlp_in", code=2)
    assert "give mlp.hook_in" in text, text


def autoencoders_of_several_layers(weft):
    """Formats without autoencoders do not say that the targets are the inputs: a warning."""
    run = weft.train(INPUT.format(folder=weft.folder, targets="inputs", decoder="cross_layer", activation="relu", skip="none"), "one_side")
    for kind in ("circuit-tracer", "crosslayer-coding"):
        assert "has no autoencoders" in weft.run("export", run, f"one_side_{kind}", "--to", kind), kind


def refusals(weft):
    """What a format does not have is refused with 2 and a way out; a damaged file with 3 and its tensor."""
    settings = {"folder": weft.folder, "targets": "outputs", "skip": "none"}
    clt = weft.train(INPUT.format(decoder="cross_layer", activation="relu", **settings), "clt")
    assert "per_layer" in weft.run("export", clt, "refused", "--to", "saelens", code=2)
    skip = weft.train(INPUT.format(**{**settings, "skip": "linear"}, decoder="cross_layer", activation="relu"), "skip")
    assert "per_layer" in weft.run("export", skip, "refused", "--to", "circuit-tracer", code=2)
    batch = weft.train(INPUT.format(decoder="per_layer", activation="batch_topk", **settings), "batch")
    for kind in ("saelens", "sparsify"):
        assert "JumpReLU" in weft.run("export", batch, "refused", "--to", kind, code=2)
    assert "threshold" in weft.run("export", "saelens_relu_none_outputs", "refused", "--to", "sparsify", code=2)
    assert "sparsify" in weft.run("export", "sparsify_topk_linear_outputs", "refused", "--to", "saelens", code=2)
    shutil.copytree(weft.folder / "saelens_relu_none_outputs_exported", weft.folder / "bad")
    path = weft.folder / "bad/layer_1/sae_weights.safetensors"
    tensors = weights_of.read_safetensors(path)
    weights_of.write_safetensors(path, {**tensors, "b_enc": tensors["b_enc"][1:]})
    text = weft.run("import", "bad", "--output", "refused", code=3)
    assert "layer_1/sae_weights.safetensors" in text and "b_enc" in text, text
    assert not (weft.folder / "refused").exists()


def test(weft):
    (weft.folder / "synth.toml").write_text(
        INPUT.format(folder=weft.folder, targets="outputs", decoder="per_layer", activation="relu", skip="none"))
    weft.run("synth", "synth.toml")
    # As of the MLPs of a model, which weft lm harvest writes.
    for path in (weft.folder / "data").glob("*/chunk_*"):
        with h5py.File(path, "r+") as file:
            file.attrs["hook_inputs"], file.attrs["hook_targets"] = "block_{}.mlp.input", "block_{}.mlp.output"
    exports(weft)
    one_layer(weft)
    hooks(weft)
    autoencoders_of_several_layers(weft)
    refusals(weft)


program.main(test)
