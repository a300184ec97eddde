# SPDX-License-Identifier: Apache-2.0
"""Weft reads files written by h5py: the same values in every variant of the crosslayer-coding layout give bitwise the same run.

weft_reads_test.py WEFT

The values are exact in fp32, fp16 and bf16, so the parameters must be the same for any stored type, filter, index form and file
suffix. Damaged files are refused with exit 3 and a message that names the file.
"""
import numpy as np

import files
import program

LAYERS, WIDTH, ROWS = 11, 8, 90      # eleven layers: layer_10 must come after layer_2

FORMS = {
    "fp32": dict(dtype="float32"),
    "fp32_gzip": dict(dtype="float32", compression="gzip"),
    "fp16": dict(dtype="float16"),
    "fp16_gzip_legacy_index": dict(dtype="float16", compression="gzip", index="legacy"),
    "bf16_by_attribute": dict(dtype="bfloat16", attribute=("dtype", "bfloat16")),
    "bf16_by_input": dict(dtype="bfloat16"),
    "bf16_gzip": dict(dtype="bfloat16", compression="gzip", attribute=("dtype", "bf16")),
    "legacy_index": dict(dtype="float32", index="legacy"),
    "no_index": dict(dtype="float32", index=None),
    "no_statistics": dict(dtype="float32", statistics=False),
}


def input_text(directory, *more):
    return "\n".join(['[run]', 'steps = 3', '[data]', f'train = "{directory}"', 'batch_tokens = 48', *more,
                      '[transcoder]', 'features = 16', 'k = 3'])


def test(weft):
    generator = np.random.default_rng(5)
    x, y = files.random_rows(generator, ROWS, LAYERS, WIDTH)
    expected = None
    for name, form in FORMS.items():
        directory = weft.folder / f"data_{name}"
        # More than ten files: chunk_10 must come after chunk_2.
        files.write_dataset(directory, x, y, rows_per_file=8, **form)
        if name == "no_statistics":
            for path in files.chunk_files(directory):
                path.rename(path.with_suffix(".h5"))
        more = ['stored_as = "bf16"'] if name == "bf16_by_input" else []
        run = weft.train(input_text(directory, *more), name)
        tensors = files.read_tensors(files.checkpoints(run)[3])
        if expected is None:
            expected = tensors
        for tensor, value in tensors.items():
            assert np.array_equal(value, expected[tensor]), f"{name}: {tensor} differs from the run with fp32 files"

    def refused(directory, *says, more=()):
        source = weft.folder / "refused.toml"
        source.write_text(input_text(directory, *more))
        output = weft.run("train", source, "--output", weft.folder / "refused", code=3)
        for words in says:
            assert words in output, f"{directory.name}: the message does not contain {words!r}:\n{output}"

    # Bit patterns that are not declared to be bf16.
    refused(weft.folder / "data_bf16_by_input", "chunk_0.hdf5", "stored_as")
    # Statistics of other data.
    directory = weft.folder / "foreign_statistics"
    files.write_dataset(directory, x, y, rows_per_file=45, statistics=False)
    files.write_dataset(weft.folder / "other", x + 1, y, rows_per_file=45)
    (weft.folder / "other" / "norm_stats.json").rename(directory / "norm_stats.json")
    refused(directory, "norm_stats.json")
    # The known defect of a writer: 16-bit patterns clipped at zero, no negative number left.
    directory = weft.folder / "clipped"
    files.write_dataset(directory, np.maximum(x, 0), y, rows_per_file=45, dtype="bfloat16", attribute=("dtype", "bf16"))
    refused(directory, "chunk_0.hdf5", "layer_", "negative")


if __name__ == "__main__":
    program.main(test)
