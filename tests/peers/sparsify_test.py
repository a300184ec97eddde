# SPDX-License-Identifier: Apache-2.0
"""Transcoders and autoencoders of Weft in sparsify (eai-sparsify), and of sparsify in Weft.

launch.py transformers4 sparsify_test.py WEFT
"""
import numpy as np
import torch
from sparsify import SparseCoder, SparseCoderConfig

import common
import models
import program

WRITTEN = {"transcoder": dict(activation="topk"), "skip": dict(activation="topk", skip="linear"),
           "autoencoder": dict(activation="topk", targets="inputs")}
READ = {"autoencoder": {}, "transcoder": dict(transcode=True), "skip": dict(transcode=True, skip_connection=True),
        "latents": dict(num_latents=common.FEATURES), "decoder": dict(normalize_decoder=False),
        "multi_topk": dict(multi_topk=True), "multi_topk_skip": dict(multi_topk=True, transcode=True, skip_connection=True)}


def forward(coder, rows):
    """The flag multi_topk is about the loss: its second term is of the 4 k largest features, without the skip connection. forward returns
    these as its features and reconstruction; encode keeps the k largest, and the measure fvu is of them. Without the flag, forward
    returns those of which fvu is, so that this is what the import must compute."""
    out = coder(rows)
    if not coder.cfg.multi_topk:
        return out
    coder.cfg.multi_topk = False
    of_loss, out = out, coder(rows)
    assert of_loss.latent_acts.shape[1] == 4 * coder.cfg.k and not torch.allclose(of_loss.sae_out, out.sae_out)
    assert torch.equal(of_loss.fvu, out.fvu) and torch.equal(coder.encode(rows).top_indices, out.latent_indices)
    return out


def computed(coders, x):
    """(features, reconstructions) of inputs [L, rows, d], in fp32 whatever the type of the file, as Weft computes."""
    features, outputs = [], []
    with torch.no_grad():
        for coder, rows in zip(coders, torch.from_numpy(x)):
            out = forward(coder.float(), rows)
            features.append(torch.zeros(len(rows), coder.num_latents).scatter(1, out.latent_indices, out.latent_acts).numpy())
            outputs.append(out.sae_out.numpy())
    return np.stack(features), np.stack(outputs)


def exports(weft, data):
    x = common.inputs_of(data / "validation")
    for name, settings in WRITTEN.items():
        run = common.train_transcoder(weft, data, name, **settings)
        expected = common.features_and_outputs(weft, run, data / "validation")
        for storage, rounding in common.STORAGE.items():
            directory = weft.folder / f"{name}_{storage}"
            weft.run("export", run, directory, "--to", "sparsify", "--type", storage)
            coders = SparseCoder.load_many(str(directory), local=True)
            assert list(coders) == [f"layers.{i}.mlp" for i in range(common.LAYERS)], list(coders)
            common.same((name, storage), computed(coders.values(), x), expected, rounding)


def imports(weft, data):
    x = common.inputs_of(data / "validation")
    for name, settings in READ.items():
        for dtype in (torch.float32, torch.bfloat16):
            directory, imported = (weft.folder / f"own_{name}_{str(dtype)[6:]}{end}" for end in ("", "_imported"))
            for i in range(common.LAYERS):
                coder = SparseCoder(common.WIDTH, SparseCoderConfig(expansion_factor=2, k=common.K, **settings), dtype=dtype)
                models.fill(coder).save_to_disk(directory / f"layers.{i}.mlp")
            weft.run("import", directory, "--output", imported)
            common.same((name, dtype), computed(SparseCoder.load_many(str(directory), local=True).values(), x),
                        common.features_and_outputs(weft, imported, data / "validation"))
    coder = SparseCoder(common.WIDTH, SparseCoderConfig(expansion_factor=2, k=common.K, activation="groupmax"))
    coder.save_to_disk(weft.folder / "groupmax")
    printed = weft.run("import", weft.folder / "groupmax", "--output", weft.folder / "refused", code=2)
    assert '"groupmax"' in printed, printed


def test(weft):
    torch.manual_seed(1)
    data = common.planted_data(weft)
    exports(weft, data)
    imports(weft, data)


if __name__ == "__main__":
    program.main(test)
