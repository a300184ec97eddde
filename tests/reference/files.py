# SPDX-License-Identifier: Apache-2.0
"""Reads and writes activation datasets and checkpoints through h5py, independently of Weft.

A dataset DIR holds chunk_{i}.hdf5 (groups layer_{l} with inputs and targets [rows, d]), index.bin, metadata.json and
norm_stats.json; a checkpoint step_XXXXXXXX holds rank_NNNNN.h5 (one shard per rank) and manifest.json.
"""
import json
import re
import struct
from pathlib import Path

import h5py
import numpy as np

import transcoder


# --- 16-bit brain floats --------------------------------------------------------------------------------------------------


def to_bf16_bits(values):
    """uint16 patterns, rounded to nearest even. Finite values only."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16_bits(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


# --- Datasets -------------------------------------------------------------------------------------------------------------


def chunk_files(directory):
    """In the order of their numbers: chunk_10 after chunk_2."""
    files = [p for p in Path(directory).iterdir() if re.fullmatch(r"chunk_\d+\.(hdf5|h5)", p.name)]
    return sorted(files, key=lambda p: int(re.search(r"\d+", p.name).group()))


def layers_of(file):
    return sorted((name for name in file if re.fullmatch(r"layer_\d+", name)), key=lambda name: int(name[6:]))


def read_dataset(directory):
    """(x, y), each [rows, L, d] float64, in stored order. Unsigned 16-bit integers are taken as bf16 patterns."""
    def read(dataset):
        values = dataset[:]
        return from_bf16_bits(values) if values.dtype == np.uint16 else values.astype(np.float32)

    sides = ([], [])
    for path in chunk_files(directory):
        with h5py.File(path, "r") as file:
            for side, name in zip(sides, ("inputs", "targets")):
                side.append(np.stack([read(file[layer][name]) for layer in layers_of(file)], axis=1).astype(np.float64))
    return np.concatenate(sides[0]), np.concatenate(sides[1])


def write_dataset(directory, x, y, *, rows_per_file, dtype="float32", compression=None, index="records",
                  statistics=True, attribute=None):
    """crosslayer-coding's layout, written by h5py.

    x, y [rows, L, d]. dtype float32, float16 or bfloat16 (stored as uint16 patterns; `attribute` is a (name, value) put on
    each such dataset). index: "records" (16 bytes per file), "legacy" (8 bytes per row) or None. Bounds are v110 to v110, so
    that every HDF5 library from 1.10 on can read the files.
    """
    directory = Path(directory)
    directory.mkdir(parents=True)
    records, legacy = b"", b""
    for number, begin in enumerate(range(0, len(x), rows_per_file)):
        end = min(begin + rows_per_file, len(x))
        with h5py.File(directory / f"chunk_{number}.hdf5", "w", libver=("v110", "v110")) as file:
            for layer in range(x.shape[1]):
                group = file.create_group(f"layer_{layer}")
                for name, rows in (("inputs", x), ("targets", y)):
                    values = rows[begin:end, layer]
                    values = to_bf16_bits(values) if dtype == "bfloat16" else values.astype(dtype)
                    dataset = group.create_dataset(name, data=values, chunks=(min(end - begin, 16384), x.shape[2]),
                                                   compression=compression)
                    if dtype == "bfloat16" and attribute:
                        dataset.attrs[attribute[0]] = attribute[1]
        records += struct.pack("<iiq", number, end - begin, begin)
        legacy += b"".join(struct.pack("<II", number, row) for row in range(end - begin))
    if index:
        (directory / "index.bin").write_bytes(records if index == "records" else legacy)
    (directory / "metadata.json").write_text(json.dumps({
        "model_name": "test", "dataset": "test", "split": "train", "num_layers": x.shape[1], "d_model": x.shape[2],
        "dtype": dtype, "total_tokens": len(x), "chunk_tokens": rows_per_file, "created": "2025-01-01T00:00:00"}))
    if statistics:
        sides = {"inputs": transcoder.statistics(x), "targets": transcoder.statistics(y)}
        (directory / "norm_stats.json").write_text(json.dumps({
            str(layer): {side: {"mean": stats.mean[layer].astype(np.float32).tolist(),
                                "std": stats.deviation[layer].astype(np.float32).tolist()}
                         for side, stats in sides.items()}
            for layer in range(x.shape[1])}))


def random_rows(generator, rows, n_layers, width, correlated=True):
    """Rows whose targets depend on their inputs, not centred, exactly representable in bf16 and fp16 alike: multiples of
    1/16 below 8 have at most 7 significant bits."""
    x = generator.normal(0.3, 1.0, (rows, n_layers, width))
    y = generator.normal(0.0, 0.3, x.shape)
    if correlated:
        mix = generator.normal(0, 1 / np.sqrt(width), (n_layers, width, width))
        y += np.maximum(np.einsum("nld,lde->nle", x, mix), 0)
    return tuple(np.clip(np.round(side * 16) / 16, -7.9375, 7.9375) for side in (x, y))


# --- Checkpoints ----------------------------------------------------------------------------------------------------------


def checkpoints(run):
    """{step: directory} of a run directory."""
    found = (Path(run) / "checkpoints").glob("step_*")
    return {int(p.name[5:]): p for p in found if re.fullmatch(r"step_\d{8}", p.name)}


def read_tensors(step_directory):
    """Every tensor of a checkpoint by name, the rows of all shards in their order."""
    parts = {}

    def take(name, item):
        if isinstance(item, h5py.Dataset):
            parts.setdefault(name, []).append((int(item.attrs["first_row"]), item[()]))

    for shard in sorted(Path(step_directory).glob("rank_*.h5")):
        with h5py.File(shard, "r") as file:
            file.visititems(take)
    rows = {name: [piece for _, piece in sorted(pieces, key=lambda one: one[0])] for name, pieces in parts.items()}
    return {name: np.concatenate(pieces) if len(pieces) > 1 else pieces[0] for name, pieces in rows.items()}


def read_state(step_directory, step, beta1=0.9):
    """A transcoder.State in float64. previous_norm is valid only after one unclipped step from zero moments."""
    tensors = read_tensors(step_directory)
    names = [name for name in tensors if re.fullmatch(
        r"encoder_\d+/(weight|bias|threshold)|(decoder|skip)_\d+/(\w+_)?weight|decoder_\d+/(offset|scale)_\d+|decoder_bias", name)]
    pick = lambda suffix: {name: tensors[name + suffix].astype(np.float64) for name in names}
    state = transcoder.State(pick(""), pick(".first_moment"), pick(".second_moment"), step)
    state.silent = [tensors[f"encoder_{s}/tokens_since_fired"] for s in range(sum(name.endswith("/bias") for name in names))]
    state.previous_norm = transcoder.gradient_norm(state.first) / (1 - beta1)
    return state
