# SPDX-License-Identifier: Apache-2.0
"""Transcoders and autoencoders of Weft in SAELens, and of SAELens in Weft.

launch.py transformers4 saelens_test.py WEFT
"""
import numpy as np
import sae_lens
import torch
from sae_lens.saes.sae import SAEMetadata

import common
import models
import program

# Architecture of the file: how Weft trains it.
WRITTEN = {
    "transcoder": dict(activation="relu"),
    "skip_transcoder": dict(activation="relu", skip="linear"),
    "jumprelu_transcoder": dict(activation="jumprelu"),
    "jumprelu_skip_transcoder": dict(activation="jumprelu", skip="linear"),
    "standard": dict(activation="relu", targets="inputs"),
    "jumprelu": dict(activation="jumprelu", targets="inputs"),
    "topk": dict(activation="topk", targets="inputs"),
}
TRANSCODER = dict(d_out=common.WIDTH, apply_b_dec_to_input=False)
# Class of SAELens, settings beside the sizes.
READ = {
    "standard": ("StandardSAE", {}),
    "standard_apart": ("StandardSAE", dict(apply_b_dec_to_input=False)),
    "standard_bf16": ("StandardSAE", dict(dtype="bfloat16")),
    "standard_fp64": ("StandardSAE", dict(dtype="float64")),
    "topk": ("TopKSAE", dict(k=common.K)),
    "topk_apart": ("TopKSAE", dict(k=common.K, apply_b_dec_to_input=False)),
    "topk_rescaled": ("TopKSAE", dict(k=common.K, rescale_acts_by_decoder_norm=True)),
    "topk_folded": ("TopKSAE", dict(k=common.K, rescale_acts_by_decoder_norm=True)),
    "jumprelu": ("JumpReLUSAE", {}),
    "jumprelu_apart": ("JumpReLUSAE", dict(apply_b_dec_to_input=False)),
    "transcoder": ("Transcoder", TRANSCODER),
    "skip_transcoder": ("SkipTranscoder", TRANSCODER),
    "jumprelu_transcoder": ("JumpReLUTranscoder", TRANSCODER),
    "jumprelu_skip_transcoder": ("JumpReLUSkipTranscoder", TRANSCODER),
    # After training, as save_inference_model writes them; BatchTopK and Matryoshka become JumpReLU.
    "trained_standard": ("StandardTrainingSAE", {}),
    "trained_topk": ("TopKTrainingSAE", dict(k=common.K)),
    "trained_topk_not_rescaled": ("TopKTrainingSAE", dict(k=common.K, rescale_acts_by_decoder_norm=False)),
    "trained_batchtopk": ("BatchTopKTrainingSAE", dict(k=common.K)),
    "trained_jumprelu": ("JumpReLUTrainingSAE", {}),
    "trained_matryoshka": ("MatryoshkaBatchTopKTrainingSAE", dict(k=common.K, matryoshka_widths=[10, common.FEATURES])),
}
# What Weft cannot compute is refused; the part of the message that names it.
REFUSED = {
    "gated": ("GatedSAE", {}, '"gated"'),
    "abstopk": ("AbsTopKSAE", dict(k=common.K), '"abstopk"'),
    "matching_pursuit": ("MatchingPursuitSAE", {}, '"matching_pursuit"'),
    "layer_norm": ("StandardSAE", dict(normalize_activations="layer_norm"), "normalize_activations"),
    "scaled": ("StandardSAE", dict(normalize_activations="expected_average_only_in"), "normalize_activations"),
    "narrow": ("Transcoder", dict(d_out=common.WIDTH // 2, apply_b_dec_to_input=False), "width"),
}


def computed(layers, x):
    """(features, reconstructions) of inputs [L, rows, d], in fp32 whatever the type of the file, as Weft computes."""
    features, outputs = [], []
    with torch.no_grad():
        for sae, rows in zip(layers, torch.from_numpy(x)):
            encoded = sae.encode(rows)
            features.append((encoded.to_dense() if encoded.is_sparse else encoded).numpy())
            outputs.append(sae(rows).numpy())
    return np.stack(features), np.stack(outputs)


def exports(weft, data):
    x = common.inputs_of(data / "validation")
    for architecture, settings in WRITTEN.items():
        run = common.train_transcoder(weft, data, architecture, **settings)
        expected = common.features_and_outputs(weft, run, data / "validation")
        hooks = ["--input-hook", "blocks.{}.mlp.hook_in", "--output-hook", "blocks.{}.mlp.hook_out"]
        if "targets" in settings:
            hooks = ["--input-hook", "blocks.{}.hook_resid_post"]
        for storage, rounding in common.STORAGE.items():
            directory = weft.folder / f"{architecture}_{storage}"
            weft.run("export", run, directory, "--to", "saelens", "--type", storage, "--model", "toy", *hooks)
            layers = [sae_lens.SAE.load_from_disk(str(directory / f"layer_{i}"), dtype="float32") for i in range(common.LAYERS)]
            for i, sae in enumerate(layers):
                assert sae.cfg.architecture() == architecture, (sae.cfg.architecture(), architecture)
                found = sae.cfg.metadata
                assert found.model_name == "toy" and found.hook_name == hooks[1].format(i), (architecture, found)
                assert "targets" in settings or found.hook_name_out == hooks[3].format(i), (architecture, found)
            common.same((architecture, storage), computed(layers, x), expected, rounding)


def made(name, kind, settings):
    """A model of SAELens with random parameters."""
    config = getattr(sae_lens, kind + "Config")(d_in=common.WIDTH, d_sae=common.FEATURES, **settings)
    config.metadata = SAEMetadata(model_name="toy", hook_name="blocks.0.hook_resid_pre")
    sae = models.fill(getattr(sae_lens, kind)(config))
    if hasattr(sae, "topk_threshold"):
        sae.topk_threshold.fill_(0.5)
    if name == "topk_folded":
        sae.fold_W_dec_norm()
    return sae


def imports(weft, data):
    x = common.inputs_of(data / "validation")
    for name, (kind, settings) in READ.items():
        directory, imported = weft.folder / f"own_{name}", weft.folder / f"own_{name}_imported"
        for i in range(common.LAYERS):
            sae = made(name, kind, settings)
            (sae.save_inference_model if "Training" in kind else sae.save_model)(str(directory / f"layer_{i}"))
        weft.run("import", directory, "--output", imported)
        layers = [sae_lens.SAE.load_from_disk(str(directory / f"layer_{i}"), dtype="float32") for i in range(common.LAYERS)]
        common.same(name, computed(layers, x), common.features_and_outputs(weft, imported, data / "validation"))
    for name, (kind, settings, part) in REFUSED.items():
        made(name, kind, settings).save_model(str(weft.folder / name))
        printed = weft.run("import", weft.folder / name, "--output", weft.folder / "refused", code=2)
        assert part in printed and not (weft.folder / "refused").exists(), (name, printed)


def test(weft):
    torch.manual_seed(0)
    data = common.planted_data(weft)
    exports(weft, data)
    imports(weft, data)


if __name__ == "__main__":
    program.main(test)
