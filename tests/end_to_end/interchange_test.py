# SPDX-License-Identifier: Apache-2.0
"""weft export and weft import: what another program reads reconstructs the same as the transcoder that was trained, and what
another program has written evaluates as it should. Read and written by NumPy in the published layouts (weights_files.py)."""
import json
import shutil

import numpy as np

import files
import program
import transcoder
import weights_files as weights_of

LAYERS, WIDTH, FEATURES = 3, 16, 40

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
steps = 40
[data]
train = "{folder}/data/train"
validation = "{folder}/data/validation"
batch_tokens = 100
normalise = "{normalise}"
[transcoder]
features = 40
activation = "{activation}"
k = 4
[optimizer]
learning_rate = 1e-2
state = "{state}"
[device]
precision = "fp32"
"""


def validation(weft, path, *arguments, data="data/validation"):
    """Validation metrics by layer, as `weft evaluate` finds them."""
    weft.run("evaluate", path, "--data", data, "--output", "evaluation", *arguments)
    return json.loads((weft.folder / "evaluation/evaluation.json").read_text())["validation"]


def nmse(reconstruction, y):
    return ((reconstruction - y) ** 2).sum(axis=(0, 2)) / ((y - y.mean(axis=0)) ** 2).sum(axis=(0, 2))


def trained_model(step_directory, normalise):
    """(weights, input normalisation, target normalisation) of a checkpoint, read through h5py."""
    tensors = files.read_tensors(step_directory)
    side = lambda name: transcoder.normalisation(normalise, transcoder.Statistics(
        tensors[f"statistics/{name}_mean"].reshape(LAYERS, WIDTH),
        tensors[f"statistics/{name}_standard_deviation"].reshape(LAYERS, WIDTH), tensors[f"statistics/{name}_mean_norm"]))
    weights = weights_of.Weights(
        np.stack([tensors[f"encoder_{s}/weight"] for s in range(LAYERS)]).astype(np.float64),
        np.stack([tensors[f"encoder_{s}/bias"] for s in range(LAYERS)]).astype(np.float64),
        [tensors[f"decoder_{s}/weight"].reshape(FEATURES, LAYERS - s, WIDTH).astype(np.float64) for s in range(LAYERS)],
        tensors["decoder_bias"].reshape(LAYERS, WIDTH).astype(np.float64),
        np.stack([tensors[f"encoder_{s}/threshold"] for s in range(LAYERS)]).astype(np.float64)
        if "encoder_0/threshold" in tensors else None)
    return weights, side("inputs"), side("targets")


def relative(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def exports(weft, folder):
    """Exports of a run on two ranks reconstruct as the trained model does; a run on one rank gives the same format."""
    x, y = files.read_dataset(folder / "data/validation")
    cases = [("per_dimension", 2, "fp32", "relu"), ("scalar", 1, "fp32", "relu"), ("none", 1, "bf16", "relu"),
             ("per_dimension", 1, "fp32", "jumprelu")]
    for normalise, ranks, state, activation in cases:
        text = INPUT.format(folder=folder, normalise=normalise, activation=activation, state=state)
        name = f"{normalise}_{activation}"
        run = weft.train(text, name, ranks=ranks)
        weights, (x_mean, x_scale), (y_mean, y_scale) = trained_model(run / "checkpoints/step_00000040", normalise)
        expected = weights.reconstruct((x - x_mean) * x_scale) / y_scale + y_mean
        found = np.array(validation(weft, run)["nmse"])
        # The metrics of fp32 sums over 200 rows.
        assert np.allclose(nmse(expected, y), found, rtol=1e-4), (normalise, nmse(expected, y), found)

        for kind, read in (("circuit-tracer", weights_of.read_circuit_tracer),
                           ("crosslayer-coding", weights_of.read_crosslayer_coding)):
            # Rounding of the stored weights, half a unit in the last place: 2^-9 of bf16, 2^-24 of fp32. Sums of many of
            # them have about that relative error; a weight that is not folded, or the wrong layer, changes all. A feature of
            # JumpReLU that rounding moves across its threshold appears or disappears as a whole.
            for dtype, tolerance in (("fp32", 2 ** -20), ("bf16", 2 ** -5 if activation == "jumprelu" else 2 ** -7)):
                if dtype == "bf16" and (kind != "circuit-tracer" or normalise != "per_dimension"):
                    continue
                directory = folder / f"{name}_{kind}_{dtype}"
                weft.run("export", run, directory, "--to", kind, "--type", dtype)
                reconstruction = read(directory).reconstruct(x)
                error = relative(reconstruction, expected)
                assert error <= tolerance, (normalise, kind, dtype, error)
                assert dtype == "bf16" or error > 0 or normalise == "none"
                assert np.allclose(nmse(reconstruction, y), found, rtol=1e-4 if dtype == "fp32" else 4 * tolerance)
            if normalise == "scalar":
                continue
            text = weft.run("inspect", directory)
            assert f"format of {kind}" in text and "3 layers, d_model 16, 40 features per layer" in text, text
            assert ("JumpReLU" in text) == (activation == "jumprelu"), text
    return folder / "per_dimension_relu"


def other_decoders(weft, folder):
    """Tied decoders are written as a vector for each pair of layers that reconstructs the same."""
    x, y = files.read_dataset(folder / "data/validation")
    text = INPUT.format(folder=folder, normalise="per_dimension", activation="relu", state="fp32")
    for name in ("tied", "tied_target"):
        run = weft.train(text, name, "--set", f"transcoder.decoder={name}", ranks=2)
        found = np.array(validation(weft, run)["nmse"])
        directory = folder / f"{name}_exported"
        weft.run("export", run, directory, "--to", "circuit-tracer", "--type", "fp32")
        # As of decoders for every pair: metrics of fp32 sums over 200 rows. A missing target changes the first digits.
        assert np.allclose(nmse(weights_of.read_circuit_tracer(directory).reconstruct(x), y), found, rtol=1e-4), name
        directory = folder / f"{name}_coding"
        weft.run("export", run, directory, "--to", "crosslayer-coding")
        # Folded, only decoders of targets are still the same for all sources.
        tied = json.loads((directory / "cfg.json").read_text())["decoder_tying"]
        assert tied == ("per_target" if name == "tied_target" else "none"), tied
        read = weights_of.read_crosslayer_coding if tied == "none" else weights_of.read_tied_crosslayer_coding
        assert np.allclose(nmse(read(directory).reconstruct(x), y), found, rtol=1e-4), name
    settings = ["--set", "transcoder.decoder=tied_target", "--set", "transcoder.decoder_affine=true"]
    run = weft.train(text, "affine", *settings)
    assert "an offset for each target" in weft.run("export", run, folder / "refused", "--to", "circuit-tracer", code=2)
    # Trained, offsets and scales of a target differ between sources.
    assert "differ" in weft.run("export", run, folder / "refused", "--to", "crosslayer-coding", code=2)
    assert not (folder / "refused").exists()


def round_trip(weft, folder, run):
    """export -> import -> evaluate gives the metrics of the run; export again gives the same bytes."""
    found = validation(weft, run)
    for kind in ("circuit-tracer", "crosslayer-coding"):
        exported = folder / f"per_dimension_relu_{kind}_fp32"
        imported = folder / f"imported_{kind}"
        text = weft.run("import", exported, "--output", imported)
        assert f"format of {kind}" in text, text
        assert "all tensors present (weights only, without moments)" in weft.run("inspect", imported)
        again = validation(weft, imported)
        # Folding rounds each weight to fp32 (2^-24), which the pre-activations and reconstructions inherit.
        for name in ("nmse", "explained_variance", "l0"):
            assert np.allclose(found[name], again[name], rtol=1e-4), (kind, name, found[name], again[name])
        weft.run("export", imported, folder / "again", "--to", kind, "--type", "fp32")
        for path in exported.glob("*.safetensors"):
            assert path.read_bytes() == (folder / "again" / path.name).read_bytes(), path
        shutil.rmtree(folder / "again")


def imports(weft, folder):
    """Models of crosslayer-coding with every normalisation, and with tied decoders, evaluate as the formulas say; the same in a
    circuit-tracer directory made of them. Elements of the other formats: weights_formats_test."""
    generator = np.random.default_rng(7)
    x, y = files.random_rows(generator, 300, LAYERS, WIDTH)
    files.write_dataset(folder / "rows", x, y, rows_per_file=300)
    draw = lambda *shape: generator.normal(0, 0.3, shape).astype(np.float32).astype(np.float64)
    mean, std = 0.3 + draw(2, LAYERS, WIDTH), 1 + np.abs(draw(2, LAYERS, WIDTH))
    mean, std = mean.astype(np.float32).astype(np.float64), std.astype(np.float32).astype(np.float64)
    (folder / "norm_stats.json").write_text(json.dumps({str(layer): {
        side: {"mean": mean[i, layer].tolist(), "std": std[i, layer].tolist()}
        for i, side in enumerate(("inputs", "targets"))} for layer in range(LAYERS)}))

    def evaluates(name, expected, *arguments):
        weft.run("import", folder / name, "--output", folder / f"{name}_imported", *arguments)
        assert "all tensors present" in weft.run("inspect", folder / f"{name}_imported"), name
        found = validation(weft, folder / f"{name}_imported", data="rows")
        # fp32 arithmetic of Weft against float64; active entries differ only within rounding of the threshold.
        assert np.allclose(found["nmse"], nmse(expected, y), rtol=1e-4), (name, found["nmse"], nmse(expected, y))

    def exported(name, kind, read):
        weft.run("export", folder / f"{name}_imported", folder / f"{name}_again", "--to", kind, "--type", "fp32")
        return read(folder / f"{name}_again").reconstruct(x)

    # (x - shift_in) * scale_in goes in, y * scale_out + shift_out comes out. Half of them have thresholds.
    standard = (mean[0], 1 / (std[0] + 1e-6), std[1] + 1e-6, mean[1])
    for name, method, thresholds, (shift_in, scale_in, scale_out, shift_out) in (
            ("cc_none", "none", True, (0, 1, 1, 0)), ("cc_mean_std", "mean_std", False, standard), ("cc_auto", "auto", True, standard),
            ("cc_sqrt", "sqrt_d_model", False, (0, np.sqrt(WIDTH), 1 / np.sqrt(WIDTH), 0))):
        weights = weights_of.random_weights(generator, LAYERS, FEATURES, WIDTH, thresholds)
        weights_of.write_crosslayer_coding(folder / name, weights, generator, {"normalization_method": method},
                                           "clt_checkpoint_97689.safetensors" if name == "cc_auto" else "model.safetensors")
        expected = weights.reconstruct((x - shift_in) * scale_in) * scale_out + shift_out
        evaluates(name, expected, *(("--statistics", folder / "norm_stats.json") if method == "auto" else ()))
        # Folded and unfolded weights round differently; sigma instead of sigma + 1e-6 would be 1e-6 or more.
        assert relative(exported(name, "circuit-tracer", weights_of.read_circuit_tracer), expected) <= 5e-7, name
    # Decoders tied per source, or per target with skip matrices, offsets and scales.
    for tying, affine in (("per_source", False), ("per_target", True)):
        name = f"tied_{tying}"
        weights = weights_of.Weights(
            draw(LAYERS, FEATURES, WIDTH), draw(LAYERS, FEATURES), [draw(FEATURES, 1, WIDTH) for _ in range(LAYERS)], draw(LAYERS, WIDTH),
            np.abs(draw(LAYERS, FEATURES)), draw(LAYERS, WIDTH, WIDTH) if affine else None, draw(LAYERS, FEATURES) if affine else None)
        written = weights_of.write_tied_crosslayer_coding(folder / name, weights, tying, scale=1 + draw(LAYERS, FEATURES) if affine else None)
        expected = written.reconstruct(x)
        evaluates(name, expected)
        assert "decoders tied per" in weft.run("inspect", folder / name), name
        # Biases per source are differences of sums, rounded to fp32.
        assert relative(exported(name, "crosslayer-coding", weights_of.read_tied_crosslayer_coding), expected) <= 5e-7, name
    # The second does not train with thresholds: no pseudo-derivative of an activation with an offset is published.
    (folder / "affine.toml").write_text(INPUT.format(folder=folder, normalise="none", activation="jumprelu", state="fp32"))
    settings = program.sets("transcoder.decoder=tied_target", "transcoder.decoder_affine=true")
    assert "pseudo-derivative" in weft.run("train", folder / "affine.toml", "--output", folder / "refused", *settings, code=2)


def refusals(weft, folder, run):
    """What cannot be expressed ends with 2, a damaged file with 3; both are named, and nothing is left behind. Every damage of every
    format: damaged_formats_test, foreign_settings_test."""
    text = weft.train(INPUT.format(folder=folder, normalise="none", activation="batch_topk", state="8bit"), "topk")
    text = weft.run("export", text, folder / "refused", "--to", "circuit-tracer", code=2)
    assert "JumpReLU" in text and not (folder / "refused").exists(), text
    assert "circuit-tracer, crosslayer-coding" in weft.run("export", run, folder / "refused", "--to", "onnx", code=2)
    assert "nothing is overwritten" in weft.run("export", run, folder / "data", "--to", "circuit-tracer", code=2)
    assert "one process" in weft.run("export", run, folder / "refused", "--to", "circuit-tracer", code=2, ranks=2)
    assert "known format" in weft.run("import", folder / "data", "--output", folder / "refused", code=2)

    good = folder / "per_dimension_relu_circuit-tracer_fp32"

    def refused(code, *words):
        text = weft.run("import", folder / "bad", "--output", folder / "refused", code=code)
        for word in words:
            assert word in text, (word, text)
        assert not (folder / "refused").exists()
        shutil.rmtree(folder / "bad")

    def damaged(change):
        shutil.copytree(good, folder / "bad")
        change(folder / "bad")

    damaged(lambda bad: (bad / "W_dec_1.safetensors").unlink())
    refused(3, "W_dec_1.safetensors", "missing")
    tensors = weights_of.read_safetensors(good / "W_enc_2.safetensors")
    tensors["b_enc_2"] = np.array(tensors["b_enc_2"])
    tensors["b_enc_2"][3] = np.nan
    damaged(lambda bad: weights_of.write_safetensors(bad / "W_enc_2.safetensors", tensors))
    refused(4, "encoder_2/bias", "row 3")
    damaged(lambda bad: weights_of.write_safetensors(
        bad / "W_enc_1.safetensors", {**weights_of.read_safetensors(good / "W_enc_1.safetensors"), "gate_1": np.ones(3)}))
    refused(2, "W_enc_1.safetensors", "gate_1")
    shutil.copytree(folder / "cc_mean_std", folder / "bad")
    (folder / "norm_stats.json").unlink()
    refused(2, "norm_stats.json")


def test(weft):
    folder = weft.folder
    (folder / "synth.toml").write_text(INPUT.format(folder=folder, normalise="none", activation="relu", state="fp32"))
    weft.run("synth", "synth.toml")
    run = exports(weft, folder)
    other_decoders(weft, folder)
    round_trip(weft, folder, run)
    imports(weft, folder)
    refusals(weft, folder, run)


program.main(test)
