# SPDX-License-Identifier: Apache-2.0
"""`weft lm harvest`: values against the float64 reference, the layout of weft harvest, resumption, refusals.

harvest_test.py WEFT
"""
import json
import os
import shutil
import signal
import subprocess
import time

import h5py
import numpy as np

import files
import language_model as m
import program

TEXT = "".join(f"The {animal} sat on the {place}.\n" for animal in ("cat", "dog", "fox", "owl") for place in ("mat", "log", "hill", "path")) * 4
LENGTH, LAYERS, WIDTH = 32, 2, 16
MODEL = dict(layers=LAYERS, heads=2, d_model=WIDTH)
INPUT = """
[run]
steps = 10
[data]
train = "text.txt"
validation_fraction = 0.1
batch_tokens = 128
sequence = {length}
[language_model]
layers = {layers}
heads = 2
d_model = {width}
norm_position = "{position}"
[optimizer]
learning_rate = 3e-2
warmup_steps = 2
"""


def train(weft, name, position):
    source = weft.folder / f"{name}.toml"
    source.write_text(INPUT.format(length=LENGTH, layers=LAYERS, width=WIDTH, position=position))
    weft.run("lm", "train", source, "--output", weft.folder / name)
    return weft.folder / name


def reference(run, position, ids):
    """(inputs, outputs) of the MLPs, [windows * LENGTH, LAYERS, WIDTH], of windows of ids [windows, LENGTH]."""
    weights = {name: tensor.astype(np.float64) for name, tensor in files.read_tensors(run / "checkpoints" / "step_00000010").items()
               if name.startswith(("embedding", "block_", "final_norm")) and not name.endswith("_moment")}
    for name in weights:
        if name.endswith(("attention/output/weight", "mlp/down/weight")):
            weights[name] = weights[name].T
    taken = []

    class Tapped(m.Pass):
        def mlp(self, block, x):
            y, through = super().mlp(block, x)
            taken.append((x, y))
            return y, through

    original, m.Pass = m.Pass, Tapped
    m.forward_backward(m.Settings(**MODEL, d_mlp=4 * WIDTH, norm_position=position), weights, m.Batch(ids, ids))
    m.Pass = original
    return tuple(np.stack([side.reshape(-1, WIDTH) for side in sides], axis=1) for sides in zip(*taken))


def harvest(weft, run, output, *arguments, **options):
    return weft.run("lm", "harvest", run, "--output", weft.folder / output, *arguments, **options)


def contents(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def agrees_with_the_reference(weft, run, position):
    printed = harvest(weft, run, f"{position}_data", "--text", "first.txt", "second.txt", "--type", "fp32", "--rows-per-file", 100)
    data = weft.folder / f"{position}_data"
    first, second = ((weft.folder / name).read_text() for name in ("first.txt", "second.txt"))
    characters = sorted(set(TEXT))
    stream = np.array([characters.index(character) for character in first + second])
    windows = len(stream) // LENGTH
    ids = stream[:windows * LENGTH].reshape(windows, LENGTH)
    x, y = files.read_dataset(data)
    expected_x, expected_y = reference(run, position, ids)
    # fp32 products of at most 64 terms: a few roundings of 6e-8 of values of order 1.
    for found, expected in ((x, expected_x), (y, expected_y)):
        assert found.shape == expected.shape, (found.shape, expected.shape)
        assert np.abs(found - expected).max() <= 3e-5 * np.abs(expected).max(), np.abs(found - expected).max()

    # The layout: 3 windows per file, ids, positions, documents, attributes, texts.
    assert f"{windows * LENGTH:,} rows of {LAYERS} layers" in printed, printed
    chunks = files.chunk_files(data)
    assert len(chunks) == -(-windows // 3), chunks
    row, rows = 0, 3 * LENGTH
    for chunk in chunks:
        with h5py.File(chunk) as file:
            n = len(file["tokens"])
            assert n == min(rows, windows * LENGTH - row), (chunk, n)
            assert (file["tokens"][()] == ids.reshape(-1)[row:row + n]).all(), chunk
            assert (file["positions"][()] == np.arange(n) % LENGTH).all(), chunk
            starts = [0] + [start - row for start in (0, len(first)) if row < start < row + n]
            assert file["documents"][()].tolist() == starts, (chunk, file["documents"][()])
            for name, value in (("format", "weft-activations"), ("format_version", 2), ("hook_inputs", "block_{}.mlp.input"),
                                ("hook_targets", "block_{}.mlp.output")):
                found = file.attrs[name]
                assert (found.decode() if isinstance(found, bytes) else found) == value, (name, found)
            assert json.loads(file.attrs["harvest"])["context"] == LENGTH
            row += n
    assert json.loads((data / "vocabulary.json").read_text())["texts"] == characters
    assert json.loads((data / "metadata.json").read_text())["total_tokens"] == row
    weft.run("inspect", data)


def resumes(weft, run):
    """Files that are missing are written again with the same bytes, by one process or two, after whatever interruption."""
    # Threads decide how products are cut: bits are those of one number of threads per process.
    arguments = ("--text", "text.txt", "--type", "bf16", "--rows-per-file", 160, "--set", "device.threads=1")
    harvest(weft, run, "whole", *arguments)
    whole = contents(weft.folder / "whole")
    assert len(whole) > 8 and not any(name.endswith(".tmp") for name in whole), sorted(whole)

    broken = weft.folder / "broken"
    shutil.copytree(weft.folder / "whole", broken)
    for name in ("chunk_1.hdf5", "chunk_3.hdf5", "index.bin", "metadata.json"):
        (broken / name).unlink()
    (broken / "chunk_1.hdf5.0123abcd.tmp").mkdir()
    (broken / "chunk_1.hdf5.0123abcd.tmp" / "chunk_1.hdf5").write_bytes(whole["chunk_1.hdf5"][:1000])
    times = {name: (broken / name).stat().st_mtime_ns for name in ("chunk_0.hdf5", "chunk_2.hdf5")}
    printed = harvest(weft, run, "broken", *arguments)
    assert "2 of" in printed, printed
    assert contents(broken) == whole
    assert times == {name: (broken / name).stat().st_mtime_ns for name in times}, "complete files were written again"

    killed = weft.folder / "killed"
    process = subprocess.Popen([weft.binary, "lm", "harvest", run, "--output", killed, *map(str, arguments)], cwd=weft.folder,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (killed / "chunk_0.hdf5").exists():
        time.sleep(0.001)
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.wait()
    harvest(weft, run, "killed", *arguments)
    assert contents(killed) == whole

    harvest(weft, run, "two_ranks", *arguments, ranks=2)
    assert contents(weft.folder / "two_ranks") == whole

    for change, word in ((("--type", "fp32"), "store"), (("--tokens", "320"), "windows"), (("--text", "first.txt"), "text")):
        changed = dict(zip(arguments[::2], arguments[1::2]), **dict([change]))
        printed = harvest(weft, run, "whole", *(part for pair in changed.items() for part in pair), code=2)
        assert "belongs to another dataset" in printed and word in printed, printed
    assert contents(weft.folder / "whole") == whole


def recognises_weights(weft, run):
    """Other weights in files of the same names and sizes are another model: its activations are not mixed with those there."""
    weft.run("lm", "export", run, "--output", weft.folder / "directory")
    harvest(weft, "directory", "of_directory", "--text", "first.txt", "--rows-per-file", 100)
    before = contents(weft.folder / "of_directory")
    weights = weft.folder / "directory" / "model.safetensors"
    stored = bytearray(weights.read_bytes())
    stored[-1] ^= 1
    weights.write_bytes(stored)
    (weft.folder / "of_directory" / "chunk_1.hdf5").unlink()
    assert "belongs to another dataset" in harvest(weft, "directory", "of_directory", "--text", "first.txt", "--rows-per-file", 100, code=2)
    stored[-1] ^= 1
    weights.write_bytes(stored)
    harvest(weft, "directory", "of_directory", "--text", "first.txt", "--rows-per-file", 100)
    assert contents(weft.folder / "of_directory") == before


def is_read(weft, run):
    """`weft train` and `weft features` take the files; the parts of the run's own text need no --text."""
    for split in ("train", "validation"):
        harvest(weft, run, f"own/{split}", "--split", split)
    rows = {split: json.loads((weft.folder / "own" / split / "metadata.json").read_text())["total_tokens"] for split in ("train", "validation")}
    held_out = -(-len(TEXT) // 10)
    assert rows == {"train": (len(TEXT) - held_out) // LENGTH * LENGTH, "validation": held_out // LENGTH * LENGTH}, rows
    transcoder = weft.train(f"""
[run]
steps = 20
[data]
train = "{weft.folder}/own/train"
validation = "{weft.folder}/own/validation"
batch_tokens = 128
[transcoder]
features = 32
k = 4
[optimizer]
learning_rate = 1e-2
""", "transcoder")
    every = (argument for feature in range(32) for argument in ("--feature", f"0:{feature}"))
    printed = weft.run("features", transcoder, "--output", weft.folder / "meaning", *every)
    assert '"e"' in printed or '"t"' in printed, f"no token has a text: {printed}"
    return transcoder


def replaces(weft, run, transcoder):
    """Losses with replaced MLPs: the model's own with error terms, the better the more is right, and their ratios."""
    weft.run("lm", "evaluate", run, "--transcoder", transcoder, "--output", weft.folder / "judged")
    record = json.loads((weft.folder / "judged" / "evaluation.json").read_text())
    found, original = record["replacement"], record["validation"]["loss"]
    # The same passes over the same windows: equal but for the order of sums.
    assert abs(found["loss_original"] - original) <= 1e-9 * original, (found, original)
    assert abs(found["loss_with_error_terms"] - original) <= 1e-5 * original, found
    assert found["tokens"] == record["validation"]["tokens"] and len(found["layers"]) == LAYERS
    for entry in (*found["layers"], found["all_layers"]):
        for ablated in ("zero", "mean"):
            loss = entry[f"loss_{ablated}_ablated"]
            expected = (loss - entry["loss"]) / (loss - original)
            assert abs(entry[f"recovered_from_{ablated}"] - expected) <= 1e-6 * max(1, abs(expected)), entry
    assert found["all_layers"]["loss"] < found["all_layers"]["loss_zero_ablated"], found

    for arguments, word in ((("--transcoder", run), "another kind of model"), (("--transcoder", "missing"), "missing")):
        assert word in weft.run("lm", "evaluate", run, *arguments, code=None), arguments


def refusals(weft, run):
    for arguments, word, code in (
            ((), "needs --output", 2),
            (("--output", "x", "--text", "missing.txt"), "missing.txt", 2),
            (("--output", "x", "--text", "first.txt", "--tokens", "100000"), "are asked for", 2),
            (("--output", "x", "--text", "first.txt", "--split", "train"), "exclude each other", 2),
            (("--output", "x", "--type", "int8"), "--type", 2)):
        printed = weft.run("lm", "harvest", run, *arguments, code=code)
        assert word in printed, printed
    assert not (weft.folder / "x").exists()


def test(weft):
    (weft.folder / "text.txt").write_text(TEXT)
    (weft.folder / "first.txt").write_text(TEXT[:205])
    (weft.folder / "second.txt").write_text(TEXT[300:450])
    runs = {position: train(weft, position, position) for position in ("pre", "post")}
    for position, run in runs.items():
        agrees_with_the_reference(weft, run, position)
    resumes(weft, runs["pre"])
    recognises_weights(weft, runs["pre"])
    replaces(weft, runs["pre"], is_read(weft, runs["pre"]))
    refusals(weft, runs["pre"])


program.main(test)
