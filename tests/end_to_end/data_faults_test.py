# SPDX-License-Identifier: Apache-2.0
"""Faults of the data, from the outside: the program refuses what it must not use, with the place, and never in silence.

data_faults_test.py WEFT
"""
import os
import shutil
import subprocess
import time

import h5py
import numpy as np

import files
import program

LAYERS, WIDTH, ROWS, HELD_OUT = 3, 8, 2000, 300
INPUT = """
[run]
steps = {steps}
[data]
train = "{train}"
validation = "{validation}"
batch_tokens = 100
block_rows = 20
window_rows = 200
[transcoder]
features = 24
k = 3
[checkpoint]
every = 10
[log]
every = 5
"""


class Case:
    """Training and held-out data of one model in a folder of its own."""

    def __init__(self, weft, name, change=lambda x, y: None):
        self.weft, self.folder = weft, weft.folder / name
        self.folder.mkdir()
        generator = np.random.default_rng(7)
        for split, rows in (("train", ROWS), ("validation", HELD_OUT)):
            x, y = files.random_rows(generator, rows, LAYERS, WIDTH)
            change(x, y)
            files.write_dataset(self.folder / split, x, y, rows_per_file=700, dtype="float32", statistics=False)

    def input(self, steps=20, validation=True):
        path = self.folder / "input.toml"
        path.write_text(INPUT.format(steps=steps, train=self.folder / "train",
                                     validation=self.folder / "validation" if validation else ""))
        return path

    def train(self, *arguments, steps=20, validation=True, **options):
        return self.weft.run("train", self.input(steps, validation), "--output", self.folder / "run", *arguments, **options)

    def change_value(self, split, number, dataset, row, column, value):
        """Changes one value of a file in place; keeps its time of modification."""
        path = self.folder / split / f"chunk_{number}.hdf5"
        times = path.stat()
        with h5py.File(path, "r+") as file:
            file[dataset][row, column] = value
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        return path


def expect(output, *parts):
    for part in parts:
        assert part in output, f"{part!r} is not in:\n{output}"


def check_held_out(weft):
    """A value of the held-out data that is not finite ends evaluation and the final validation with 3 and its place; the
    checkpoint is there, and the run ends well with sound data."""
    for value in (np.nan, np.inf):
        case = Case(weft, f"held_out_{value}")
        for dataset in ("layer_1/targets", "layer_2/inputs"):
            shutil.rmtree(case.folder / "run", ignore_errors=True)
            case.train()
            path = case.change_value("validation", 0, dataset, 222, 5, value)
            where = f"{path}: /{dataset} row 222, column 5 is not finite"
            expect(weft.run("evaluate", case.folder / "run", code=3), where)
            expect(weft.run("evaluate", case.folder / "run", ranks=2, code=3), where)
            expect(case.train("--resume", "never", code=3), where)
            record = program.record(case.folder / "run")
            assert record["exit"]["code"] == 3 and "validation" not in record["result"], record["result"]
            assert 20 in files.checkpoints(case.folder / "run")
            case.change_value("validation", 0, dataset, 222, 5, 0.5)


def check_training(weft):
    """A value that becomes infinite or NaN after the statistics were computed: the row is named, nothing is updated."""
    for ranks in (1, 2):
        case = Case(weft, f"training_{ranks}")
        case.train(steps=20, validation=False, ranks=ranks)
        path = case.change_value("train", 1, "layer_0/targets", 333, 2, np.inf)
        more = ("--set", "resume.accept_changed=true", "--set", "data.accept_changed=true")
        output = case.train(*more, steps=60, validation=False, ranks=ranks, code=3)
        expect(output, f"{path}: /layer_0/targets row 333, column 2 is not finite, read at step ", "unharmed")
        output = case.train(*more, "--set", "run.nonfinite=skip", "--set", "run.skip_at_most=9", steps=60, validation=False,
                            ranks=ranks)
        expect(output, f"{path}: /layer_0/targets row 333, column 2 is not finite: step skipped")


def check_rewritten(weft):
    """A copied dataset resumes. Rewritten rows are other data, and their statistics are computed anew."""
    case = Case(weft, "rewritten")
    case.train(steps=10)
    time.sleep(0.02)
    shutil.copytree(case.folder / "train", case.folder / "copy")     # new times, same bytes
    output = case.train("--set", f'data.train={case.folder / "copy"}', "--set", "resume.accept_changed=true", steps=20)
    expect(output, "resuming after step 10 ")
    # New values inside a file: shape, size, header and time of modification stay.
    path = case.folder / "train" / "chunk_1.hdf5"
    times = path.stat()
    with h5py.File(path, "r+") as file:
        file["layer_1/inputs"][200:500] = file["layer_1/inputs"][200:500] + 1
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_size == times.st_size
    expect(case.train("--set", "resume.accept_changed=true", steps=30, code=2), "not those of the interrupted run")
    # A new run in the directory does not use the statistics of the old data.
    expect(case.train("--resume", "never"), "statistics.txt: ignored")
    mean = files.read_tensors(files.checkpoints(case.folder / "run")[20])["statistics/inputs_mean"]
    x, _ = files.read_dataset(case.folder / "train")
    assert np.allclose(mean, x.mean(axis=0).reshape(-1), atol=1e-9)
    # Nor after a change that no sample sees, as long as the time of modification shows it.
    with h5py.File(path, "r+") as file:
        file["layer_1/inputs"][345, 3] = 7
    os.utime(path, (time.time() + 10, time.time() + 10))
    (case.folder / "run/starts.jsonl").unlink()  # a new request, not that of the start before
    expect(case.train("--resume", "never"), "statistics.txt: ignored")


def check_different_files(weft):
    """Ranks that see different data under one path: 3, with the rank and its host."""
    case = Case(weft, "mounts")
    other = Case(weft, "mounts_other")
    with h5py.File(other.folder / "train" / "chunk_1.hdf5", "r+") as file:
        file["layer_1/inputs"][:] = file["layer_1/inputs"][:] + 1
    source = case.folder / "relative.toml"
    source.write_text(INPUT.format(steps=4, train="train", validation=""))
    command = ["mpiexec", "--oversubscribe", "--bind-to", "none"]
    for number, folder in enumerate((case.folder, other.folder)):
        command += [*([":"] if number else []), "-n", "1", "-wdir", str(folder), str(weft.binary), "train", str(source),
                    "--output", str(case.folder / "run")]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=240)
    assert done.returncode == 3, (done.returncode, done.stdout)
    expect(done.stdout, "rank 1: train/chunk_1.hdf5 on host ", "is not the file that rank 0 found")


def check_constant(weft):
    """Targets that never vary have no error measure: a warning, "-" and null, and the means are those of the others."""
    def constant(_, y):
        y[:, 1] = 2.5
        y[:, 2, 3] = -1

    case = Case(weft, "constant", constant)
    output = case.train()
    expect(output, "/layer_1/targets is the same in every row; constant targets have no standardised error",
           "1 of 8 dimensions of /layer_2/targets have the same value in every row (column 3)")
    validation = program.record(case.folder / "run")["result"]["validation"]
    for name in ("nmse", "nmse_standardised", "explained_variance"):
        values = validation[name]
        assert values[1] is None and all(np.isfinite(values[layer]) for layer in (0, 2)), (name, values)
        assert np.isclose(validation[name + "_mean"], (values[0] + values[2]) / 2), name
    assert all(value is None or value < 100 for value in validation["fvu_dimension"]), validation["fvu_dimension"]
    row = [line.split() for line in output.splitlines() if line.split()[:1] == ["1"]][-1]
    assert row[1:4] == ["-", "-", "-"], output
    last = program.metrics(case.folder / "run")[-1]
    assert last["layer_nmse_standardised"][1] is None and last["nmse_standardised"] > 0, last
    assert np.isclose(last["nmse_standardised"], np.mean([v for v in last["layer_nmse_standardised"] if v is not None]))
    expect(weft.run("evaluate", case.folder / "run"), "left out of the means")
    if weft.has_package():
        weft.run("report", case.folder / "run")
    expect(weft.run("inspect", case.folder / "validation"), "/layer_1/targets is the same in every row")


def check_overflow(weft):
    """Values beyond the range of the stored type are an error of the input; nothing is left behind."""
    text = f"[synthetic]\noutput = \"{weft.folder}/synth\"\nlayers = 2\nd_model = 8\nfeatures = 16\nk = 3\ntokens = 3000\n" \
           "validation_tokens = 50\nrows_per_file = 1000\n"
    source = weft.folder / "synth.toml"
    source.write_text(text)
    for dtype, offset in (("fp16", 3e5), ("bf16", 1e39), ("fp32", 1e39)):
        output = weft.run("synth", source, "--set", f"synthetic.dtype={dtype}", "--set", f"synthetic.mean_offset={offset}",
                          code=2)
        expect(output, f'synthetic.dtype = "{dtype}" cannot hold a value of /layer_', "synthetic.mean_offset")
        assert not (weft.folder / "synth").exists(), list((weft.folder / "synth").rglob("*"))
    # The first rows fit, a later one does not: chunk files have been written by then.
    (weft.folder / "synth").mkdir()
    (weft.folder / "synth" / "mine").write_text("kept")
    weft.run("synth", source)
    assert (weft.folder / "synth" / "train" / "metadata.json").exists()


def check_inspect(weft):
    """Counts of what is not finite, --set, and no control character on the terminal."""
    case = Case(weft, "inspected")
    for row in (40, 41, 200):
        path = case.change_value("train", 1, "layer_0/inputs", row, 6, np.nan)
    expect(weft.run("inspect", case.folder / "train", code=3), f"{path}: /layer_0/inputs row 40, column 6 is not finite",
           "3 values in 3 rows")
    metadata = case.folder / "validation" / "metadata.json"
    metadata.write_text(metadata.read_text().replace('"test"', '"\\u001b[2J\\u0007\\nwarning: no"', 1))
    output = weft.run("inspect", case.folder / "validation")
    assert "\x1b" not in output and "\a" not in output and "\nwarning: no" not in output, repr(output)
    expect(output, "\\x1b[2J\\x07\\x0awarning: no")
    generator = np.random.default_rng(3)
    files.write_dataset(weft.folder / "bits", *files.random_rows(generator, 100, 2, 8), rows_per_file=100, dtype="bfloat16",
                        statistics=False)
    expect(weft.run("inspect", weft.folder / "bits", code=3), 'set data.stored_as = "bf16"')
    weft.run("inspect", weft.folder / "bits", "--set", "data.stored_as=bf16")


def check_other_shape(weft):
    """Data of another model: layers and widths are named."""
    case = Case(weft, "shape")
    case.train(validation=False)
    generator = np.random.default_rng(3)
    files.write_dataset(weft.folder / "wide", *files.random_rows(generator, 100, 2, 12), rows_per_file=100)
    expect(weft.run("evaluate", case.folder / "run", "--data", weft.folder / "wide", code=3),
           "wide has 2 layers of width 12", f"is of a transcoder of {LAYERS} of width {WIDTH}")


def test(weft):
    check_held_out(weft)
    check_training(weft)
    check_rewritten(weft)
    check_different_files(weft)
    check_constant(weft)
    check_overflow(weft)
    check_inspect(weft)
    check_other_shape(weft)


if __name__ == "__main__":
    program.main(test)
