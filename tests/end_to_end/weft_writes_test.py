# SPDX-License-Identifier: Apache-2.0
"""h5py reads files written by Weft: synthetic datasets in each stored type, their ground truth, and checkpoint shards.

weft_writes_test.py WEFT
"""
import hashlib
import json
import struct

import h5py
import numpy as np

import files
import program
import transcoder

LAYERS, WIDTH, PLANTED, ROWS, HELD_OUT = 3, 24, 40, 700, 100


def synthetic(folder, dtype, **more):
    keys = dict(output=f"{folder}/{dtype}", layers=LAYERS, d_model=WIDTH, features=PLANTED, k=4, tokens=ROWS,
                validation_tokens=HELD_OUT, rows_per_file=300, dtype=dtype, seed=3, **more)
    return "[synthetic]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())


def check_dataset(directory, dtype, rows):
    """Layout, attributes, index, statistics of one split; returns its values."""
    paths = files.chunk_files(directory)
    sizes = []
    for path in paths:
        with h5py.File(path, "r") as file:
            assert file.attrs["format"] in ("weft-activations", b"weft-activations"), dict(file.attrs)
            assert files.layers_of(file) == [f"layer_{layer}" for layer in range(LAYERS)]
            for layer in files.layers_of(file):
                for side in ("inputs", "targets"):
                    dataset = file[layer][side]
                    kind = dataset.id.get_type()
                    # bits, exponent and mantissa: a bf16 is a true float of 16 bits, not an integer.
                    assert kind.get_class() == h5py.h5t.FLOAT
                    fields = kind.get_size(), kind.get_fields()[2], kind.get_fields()[4]
                    assert fields == {"fp32": (4, 8, 23), "fp16": (2, 5, 10), "bf16": (2, 8, 7)}[dtype], fields
                    assert dataset.shape[1] == WIDTH
            sizes.append(file["layer_0/inputs"].shape[0])
    assert sum(sizes) == rows and max(sizes) <= 300, sizes
    index = (directory / "index.bin").read_bytes()
    offsets = [0, *np.cumsum(sizes[:-1])]
    assert index == b"".join(struct.pack("<iiq", i, size, begin) for i, (size, begin) in enumerate(zip(sizes, offsets)))
    metadata = json.loads((directory / "metadata.json").read_text())
    assert (metadata["num_layers"], metadata["d_model"], metadata["total_tokens"]) == (LAYERS, WIDTH, rows)
    x, y = files.read_dataset(directory)
    assert x.shape == y.shape == (rows, LAYERS, WIDTH)
    assert np.isfinite(x).all() and np.isfinite(y).all()
    return x, y


def check_datasets(weft):
    values = {}
    for dtype in ("fp32", "fp16", "bf16"):
        source = weft.folder / f"{dtype}.toml"
        source.write_text(synthetic(weft.folder, dtype, compression="gzip" if dtype == "fp16" else "none"))
        weft.run("synth", source)
        values[dtype] = check_dataset(weft.folder / dtype / "train", dtype, ROWS)
        check_dataset(weft.folder / dtype / "validation", dtype, HELD_OUT)
        weft.run("inspect", weft.folder / dtype / "train")
        assert (weft.folder / dtype / "ground_truth.h5").exists()
    for dtype, unit in (("fp16", 2.0 ** -11), ("bf16", 2.0 ** -8)):
        for side in (0, 1):
            exact = values["fp32"][side]
            # The same numbers, rounded to nearest: half a unit in the last place; 6e-8 covers subnormal halves.
            assert (np.abs(values[dtype][side] - exact) <= unit * np.abs(exact) + 6e-8).all(), dtype
    exact = values["fp32"][1].astype(np.float32)
    bits = files.to_bf16_bits(exact)
    assert np.array_equal(files.from_bf16_bits(bits).astype(np.float64), values["bf16"][1]), "not rounded to nearest even"


def check_checkpoint(weft):
    features, steps = 32, 4
    run = weft.train(f"""
[run]
steps = {steps}
[data]
train = "{weft.folder}/bf16/train"
batch_tokens = 128
[transcoder]
features = {features}
k = 4
""", "run")
    saved = files.checkpoints(run)
    assert max(saved) == steps, saved
    manifest = json.loads((saved[steps] / "manifest.json").read_text())
    tensors = files.read_tensors(saved[steps])
    shapes = {"decoder_bias": (LAYERS * WIDTH,)}
    for s in range(LAYERS):
        shapes |= {f"encoder_{s}/weight": (features, WIDTH), f"encoder_{s}/bias": (features,),
                   f"decoder_{s}/weight": (features, (LAYERS - s) * WIDTH)}
    for name, shape in shapes.items():
        for suffix in ("", ".first_moment", ".second_moment"):
            tensor = tensors[name + suffix]
            assert tensor.shape == shape, (name + suffix, tensor.shape)
            assert np.isfinite(tensor).all(), name + suffix
        assert tensors[name + ".second_moment"].min() >= 0
        assert np.abs(tensors[name]).max() > 0, f"{name} is still zero after {steps} steps"
    assert {entry["name"] for entry in manifest["tensors"]} == set(tensors), "manifest and shards list different tensors"
    assert manifest["step"] == steps
    for shard in saved[steps].glob("rank_*.h5"):
        listed = [entry for entry in manifest["shards"] if entry["file"] == shard.name]
        assert len(listed) == 1 and listed[0]["bytes"] == shard.stat().st_size
        assert listed[0]["sha256"] == [hashlib.sha256(shard.read_bytes()).hexdigest()]     # one segment: below 64 MiB
    # The statistics used by the run are those of its data.
    x, _ = files.read_dataset(weft.folder / "bf16" / "train")
    mean = transcoder.statistics(x).mean.ravel()
    near = [name for name, tensor in tensors.items()
            if tensor.size == mean.size and tensor.dtype.kind == "f" and np.allclose(tensor.ravel(), mean, atol=1e-5)]
    assert near, "no tensor contains the mean of the inputs"


def test(weft):
    check_datasets(weft)
    check_checkpoint(weft)


if __name__ == "__main__":
    program.main(test)
