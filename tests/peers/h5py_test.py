# SPDX-License-Identifier: Apache-2.0
"""Activations in files of h5py, whose HDF5 may be newer than that of the program: crosslayer-coding writes with libver = "latest" and gzip.

launch.py transformers4 h5py_test.py WEFT
"""
import json

import h5py
import numpy as np

import common
import program

ROWS = 600
EARLIEST, V110, LATEST = ("earliest", "v108"), ("v110", "v110"), "latest"
READ = ((EARLIEST, None), (EARLIEST, "gzip"), (V110, None), (V110, "gzip"), (LATEST, None))


def write(folder, values, libver, compression):
    """The layout of crosslayer-coding."""
    folder.mkdir()
    with h5py.File(folder / "chunk_0.hdf5", "w", libver=libver) as file:
        for layer in range(common.LAYERS):
            for side, rows in zip(("inputs", "targets"), values):
                file.create_dataset(f"layer_{layer}/{side}", data=rows[:, layer], compression=compression,
                                    chunks=(256, common.WIDTH) if compression else None)
    (folder / "metadata.json").write_text(json.dumps(dict(
        model_name="toy", dataset="text", split="train", num_layers=common.LAYERS, d_model=common.WIDTH, dtype="float32",
        total_tokens=ROWS, chunk_tokens=ROWS)))


def test(weft):
    values = np.random.default_rng(0).normal(size=(2, ROWS, common.LAYERS, common.WIDTH)).astype(np.float32)

    def inspected(name, *options, **expected):
        write(weft.folder / name, values, *options)
        return weft.run("inspect", name, **expected)

    for number, options in enumerate(READ):
        assert "every row read: all values finite" in inspected(f"read_{number}", *options), options
    # A program with as new an HDF5 reads this too; others name the reason and what they read.
    printed = inspected("newer", LATEST, "gzip", code=None)
    assert "all values finite" in printed or all(part in printed for part in ("newer HDF5", 'libver=("v110", "v110")')), printed
    # The filter is h5py's own.
    assert '"lzf"' in inspected("filter", V110, "lzf", code=3)


if __name__ == "__main__":
    program.main(test)
