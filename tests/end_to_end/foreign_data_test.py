# SPDX-License-Identifier: Apache-2.0
"""Activation files of CLT-Forge (plain and compressed) and of crosslayer-transcoder train, evaluate and describe features as the same
rows in Weft's own layout do. The files are written by NumPy and h5py from their description (docs/interchange.md)."""
import ctypes
import ctypes.util
import json
import struct

import h5py
import numpy as np

import files
import program
import weights_files

LAYERS, WIDTH, CONTEXT = 3, 16, 8

INPUT = """
[run]
steps = 12
[data]
train = "{train}"
batch_tokens = 96
[transcoder]
features = 24
activation = "topk"
k = 3
[optimizer]
learning_rate = 1e-2
[device]
precision = "fp32"
"""


def write_splits(directory, x, y, ids, rows_per_file, dtype="F32"):
    directory.mkdir(parents=True)
    for number, begin in enumerate(range(0, len(x), rows_per_file)):
        part = slice(begin, begin + rows_per_file)
        weights_files.write_safetensors(directory / f"activations_split_{number}.safetensors",
                                        {"act_in": x[part], "act_out": y[part], "tokens": ids[part]}, dtype)


def zstd(data):
    """One frame; None without the library."""
    name = ctypes.util.find_library("zstd")
    if not name:
        return None
    library = ctypes.CDLL(name)
    library.ZSTD_compressBound.restype = library.ZSTD_compress.restype = ctypes.c_size_t
    library.ZSTD_compressBound.argtypes = [ctypes.c_size_t]
    library.ZSTD_compress.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]
    out = ctypes.create_string_buffer(library.ZSTD_compressBound(len(data)))
    size = library.ZSTD_compress(out, len(out), data, len(data), 3)
    return out.raw[:size]


def write_cache(directory, x, y, ids, rows_per_file, compress):
    """int8, symmetric, one scale per layer and file. Returns the values that the files stand for."""
    directory.mkdir(parents=True)
    restored = ([], [])
    for number, begin in enumerate(range(0, len(x), rows_per_file)):
        part = slice(begin, begin + rows_per_file)
        items = {}
        for side, name, rows in ((0, "in", x[part]), (1, "out", y[part])):
            scale = (np.abs(rows).max(axis=(0, 2), keepdims=True) / 127).astype(np.float32)
            codes = np.clip(np.round(rows.astype(np.float32) / scale), -127, 127).astype(np.int8)
            items[f"act_{name}_data"], items[f"act_{name}_scale"] = codes.tobytes(), scale.tobytes()
            restored[side].append(codes.astype(np.float32) * scale)
        items["tokens"] = ids[part].astype("<i8").tobytes()
        shape = list(x[part].shape)
        text = json.dumps({"quantization": "int8", "compression": "none" if compress is bytes else "zstd", "compression_level": 3,
                           "per_layer_scale": True, "symmetric": True, "original_shape_in": shape, "original_shape_out": shape,
                           "original_dtype": "torch.float32", "scale_shape_in": [1, LAYERS, 1],
                           "scale_shape_out": [1, LAYERS, 1], "has_tokens": True}).encode()
        body = struct.pack("<I", len(text)) + text + struct.pack("<I", len(items))
        for name, data in items.items():
            packed = compress(data)
            body += struct.pack("<I", len(name)) + name.encode() + struct.pack("<Q", len(packed)) + packed
        (directory / f"activations_ctx_{CONTEXT}_split_{number}.bin").write_bytes(body)
    return tuple(np.concatenate(side).astype(np.float64) for side in restored)


def trained(weft, name, data):
    run = weft.train(INPUT.format(train=data), name)
    return run, files.read_tensors(run / "checkpoints/step_00000012")


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def evaluated(weft, run, data):
    weft.run("evaluate", run, "--data", data, "--output", "evaluation")
    return json.loads((weft.folder / "evaluation/evaluation.json").read_text())["validation"]


def test(weft):
    generator = np.random.default_rng(5)
    x, y = files.random_rows(generator, 480, LAYERS, WIDTH)
    ids = generator.integers(0, 1000, len(x))
    folder = weft.folder
    files.write_dataset(folder / "own", x, y, rows_per_file=160, statistics=False)
    write_splits(folder / f"ctx_{CONTEXT}", x, y, ids, 160)
    with h5py.File(folder / "whole.h5", "w", libver=("v110", "v110")) as file:
        file.create_dataset("tensor", data=np.stack([x, y], axis=1).astype(np.float32))
    (folder / "goreg").mkdir()
    (folder / "whole.h5").rename(folder / "goreg/activations.h5")
    files.write_dataset(folder / "own_whole", x, y, rows_per_file=480, statistics=False)

    # The same rows in the same files: the same bits. (Their order depends on the files, so each has its counterpart.)
    own, expected = trained(weft, "own_run", folder / "own")
    run, tensors = trained(weft, "forge_run", folder / f"ctx_{CONTEXT}")
    assert same(expected, tensors)
    assert evaluated(weft, own, "own") == evaluated(weft, run, f"ctx_{CONTEXT}")
    _, expected = trained(weft, "own_whole_run", folder / "own_whole")
    _, tensors = trained(weft, "goreg_run", folder / "goreg")
    assert same(expected, tensors)

    text = weft.run("inspect", f"ctx_{CONTEXT}")
    assert "clt-forge's layout" in text and "60 documents" in text and f"ids {ids.min()} to {ids.max()}" in text, text
    assert "crosslayer-transcoder's layout" in weft.run("inspect", "goreg")
    weft.run("features", run, "--data", f"ctx_{CONTEXT}", "--output", "features")

    # A compressed cache is refused as data, with the command that converts it.
    for name, compress in (("plain", bytes), ("packed", zstd)):
        if compress(b"x") is None:
            continue
        cache = folder / name / f"ctx_{CONTEXT}"
        values = write_cache(cache, x, y, ids, 160, compress)
        assert "weft import" in weft.run("inspect", cache, code=2)
        text = weft.run("import", cache, "--output", folder / f"{name}_converted", code=None)
        if "was built without" in text:
            continue
        assert "int8" in text and "480 rows" in text, text
        for found, value in zip(files.read_dataset(folder / f"{name}_converted"), values):
            assert np.array_equal(found, value)
        assert "60 documents" in weft.run("inspect", f"{name}_converted")
    damaged = folder / f"plain/ctx_{CONTEXT}/activations_ctx_{CONTEXT}_split_1.bin"
    damaged.write_bytes(damaged.read_bytes()[:-3])
    text = weft.run("import", damaged.parent, "--output", folder / "none", code=3)
    assert "split_1.bin" in text and "tokens" in text and not (folder / "none").exists(), text


program.main(test)
