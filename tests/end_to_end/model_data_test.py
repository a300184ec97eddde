# SPDX-License-Identifier: Apache-2.0
"""`weft train` from a language model without files: the same bits as from the files of `weft lm harvest`, also after a kill;
the same results on ranks but for rounding; the plan; refusals.

model_data_test.py WEFT
"""
import json

import numpy as np

import files
import program

TEXT = "".join(f"The {animal} sat on the {place}.\n" for animal in ("cat", "dog", "fox", "owl") for place in ("mat", "log", "hill", "path")) * 4
LENGTH = 32
MODEL = f"""
[run]
steps = 10
[data]
train = "text.txt"
validation_fraction = 0.1
batch_tokens = 128
sequence = {LENGTH}
[language_model]
layers = 2
heads = 2
d_model = 16
[optimizer]
learning_rate = 3e-2
warmup_steps = 2
"""
# A step of a harvest passes 128 rows, as data.batch_tokens of the model: blocks of as many rows have the same bits.
TRANSCODER = """
[run]
steps = 40
[data]
{data}
batch_tokens = 100
block_rows = 128
window_rows = 384
statistics_rows = 0
[transcoder]
features = 24
k = 4
dead_window = 300
[optimizer]
learning_rate = 1e-2
[checkpoint]
every = 15
[log]
every = 1
evaluate_every = 20
[device]
threads = 1
"""


def outcome(run, step=40):
    return files.read_tensors(run / "checkpoints" / f"step_{step:08d}"), program.metrics_without_times(run)


def same(a, b):
    assert a[0].keys() == b[0].keys()
    for name, values in a[0].items():
        assert values.tobytes() == b[0][name].tobytes(), name
    assert a[1] == b[1], "metrics differ"


def from_files(weft):
    for split in ("train", "validation"):
        weft.run("lm", "harvest", "lm", "--split", split, "--output", f"data/{split}", "--set", "device.threads=1")
    data = f'train = "{weft.folder}/data/train"\nvalidation = "{weft.folder}/data/validation"'
    return weft.train(TRANSCODER.format(data=data), "from_files")


def from_model(weft, name="from_model", *arguments, **options):
    data = f'model = "{weft.folder}/lm"\nvalidation_text = ["held_out"]'
    return weft.train(TRANSCODER.format(data=data), name, *arguments, **options)


def has_the_bits_of_files(weft):
    expected = outcome(from_files(weft))
    found = outcome(from_model(weft))
    same(found, expected)
    record = program.record(weft.folder / "from_model")
    assert record["data"]["model"].endswith("lm, step 10"), record["data"]
    log = (weft.folder / "from_model" / "log.txt").read_text()
    assert "32 tokens each, 4 in a forward pass" in log and "computed while training runs" in log, log
    # There are no files for the commands that read some: they say how to make them, and then find them.
    for command in ("features", "evaluate"):
        said = weft.run(command, weft.folder / "from_model", "--output", weft.folder / "nothing", code=2)
        assert f"record some, once: weft lm harvest {weft.folder}/lm --split validation --tokens 65536" in said, said
    weft.run("lm", "harvest", "lm", "--split", "validation", "--output", weft.folder / "from_model" / "validation")
    weft.run("evaluate", weft.folder / "from_model", "--output", weft.folder / "evaluated")
    weft.run("features", weft.folder / "from_model", "--output", weft.folder / "features")
    assert (weft.folder / "features" / "features.h5").exists() and (weft.folder / "evaluated" / "evaluation.json").exists()
    # More than one epoch, so that windows were computed again, and validation on the text that the model held out.
    assert found[1][-1]["epoch"] >= 2, found[1][-1]
    validation = json.loads((weft.folder / "data" / "validation" / "metadata.json").read_text())["total_tokens"]
    assert f"validation data, {validation} tokens" in log, log
    return found


def resumes(weft, whole):
    """Stopped in the middle of a window, then killed: the rows are computed again."""
    run = weft.folder / "killed"
    for fault, code in (("step:0:13:usr1", 75), ("step:0:25:kill", -9)):
        weft.run("train", weft.folder / "from_model.toml", "--output", run, fault=fault, code=code)
    (run / "statistics.txt").unlink()  # mean and scale come from the checkpoint
    output = weft.run("train", weft.folder / "from_model.toml", "--output", run)
    assert "resuming after step 15" in output, output
    same(outcome(run), whole)

    # Another state of the model is other data.
    changed = weft.run("train", weft.folder / "from_model.toml", "--output", run, "--set", "run.steps=50", "--set",
                       'data.model="other"', code=2)
    assert "the training data are not those of the interrupted run" in changed, changed


def runs_on_ranks(weft, whole):
    """Each rank computes its blocks. Sums over ranks are rounded in another order: 40 steps in fp32, each about 1e-7 apart."""
    for ranks, data, tensor in ((2, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 2)):
        tensors, metrics = outcome(from_model(weft, f"ranks_{ranks}_{data}_{tensor}", "--set", f"parallel.data={data}", "--set",
                                              f"parallel.tensor={tensor}", ranks=ranks))
        for name in ("encoder_0/weight", "encoder_1/weight", "decoder_0/weight"):
            error = np.linalg.norm(tensors[name] - whole[0][name]) / np.linalg.norm(whole[0][name])
            assert error <= 1e-4, (data, name, error)
        assert abs(metrics[0]["loss"] - whole[1][0]["loss"]) <= 1e-5 * whole[1][0]["loss"], (data, metrics[0]["loss"])


    # A lost rank ends those that have the other parts of the model; the run resumes on another grid.
    for fault, ranks, code in (("collective:1:25:kill", 2, program.KILLED), ("", 1, 0)):
        weft.run("train", weft.folder / "from_model.toml", "--output", weft.folder / "lost", "--set", f"parallel.tensor={ranks}", ranks=ranks,
                 fault=fault, code=code, timeout=120)


def takes_files_and_directories(weft):
    """A directory of Hugging Face on text files, with the statistics of the first rows alone."""
    weft.run("lm", "export", "lm", "--output", "directory")
    text = TRANSCODER.format(data=f'model = "{weft.folder}/directory"\ntext = ["first.txt", "text.txt"]\nsequence = 16\n'
                                  'validation_text = ["second.txt"]').replace("statistics_rows = 0", "statistics_rows = 200")
    run = weft.train(text, "of_directory")
    assert "16 tokens each, 8 in a forward pass" in (run / "log.txt").read_text()
    rows = json.loads((run / "statistics.txt").read_text().split("\n", 1)[1])["n_rows"]
    assert rows == 200, rows

    # The input that weft init prints, for a run and for a directory, with a name that is quoted.
    (weft.folder / 'a "${b}".txt').write_text(TEXT)
    for model in ("lm", "directory"):
        printed = weft.run("init", "--model", weft.folder / model, "--text", 'a "${b}".txt', "--text", "first.txt")
        (weft.folder / "printed.toml").write_text(printed)
        assert len(printed.strip().splitlines()) == 12 and "features   = 128 " in printed and "2 layers of width 16" in printed, printed
        weft.run("train", "printed.toml", "--set", "run.steps=2", "--output", f"printed_{model}")
    said = weft.run("init", "--model", "owner/name", "--text", "text.txt", code=2)
    assert "hf download owner/name --local-dir DIR" in said, said
    assert "no such file" in weft.run("init", "--model", "lm", "--text", "nowhere.txt", code=2)
    assert "needs --model MODEL and --text FILES" in weft.run("init", "--model", "lm", code=2)
    # What needs activations of a run that computed its own names the commands that record some.
    said = weft.run("features", "printed_directory", "--output", "of_features", code=2)
    assert f"weft lm harvest {weft.folder}/directory --text" in said and "printed_directory/validation" in said, said

    plan = weft.run("train", weft.folder / "of_directory.toml", "--dry-run", "--json")
    parts = {name: size for name, size in json.loads(plan)["device"].items()}
    assert parts["language model"] > 0, parts


def refusals(weft):
    model = f'model = "{weft.folder}/lm"'
    for data, words, code in (
            (f'{model}\ntrain = "data/train"', "data.model does not go with data.train", 2),
            ('train = "data/train"\ntext = ["text.txt"]', "data.text has no effect without data.model", 2),
            ("", "or give data.model", 2),
            (f'{model}\nvalidation = "data/validation"\nvalidation_text = ["held_out"]', "data.validation_text does not go with data.validation", 2),
            ('model = "nowhere"', "nowhere", 2),
            ('model = "data/train"', "data/train", 2),
            (f'model = "{weft.folder}/from_files"', "another kind of model", 2),
            (f'{model}\ntext = ["nowhere.txt"]', 'data.text "nowhere.txt": no such file', 2),
            (f'{model}\ntext = ["short.txt"]', "are less than a window of 32", 3),
            ('model = "directory"', "comes without a text; give data.text", 2),
            (f"{model}\nlayers = 3\nd_model = 16", "has 2 layers of width 16", 2)):
        for mode in ((), ("--dry-run",)):
            source = weft.folder / "refused.toml"
            source.write_text(TRANSCODER.format(data=data))
            printed = weft.run("train", source, "--output", "refused", *mode, code=code)
            assert words in printed, (data, printed)
    printed = weft.run("train", weft.folder / "from_model.toml", "--output", "refused", "--set", "data.block_rows=48", code=2)
    assert "not a multiple of the 32 tokens of a window" in printed and "take 32" in printed, printed
    assert not (weft.folder / "refused").exists()


def test(weft):
    (weft.folder / "text.txt").write_text(TEXT)
    (weft.folder / "first.txt").write_text(TEXT[:205])
    (weft.folder / "second.txt").write_text(TEXT[300:450])
    (weft.folder / "short.txt").write_text(TEXT[:31])
    for name, seed in (("lm", 1), ("other", 2)):
        source = weft.folder / f"{name}.toml"
        source.write_text(MODEL)
        weft.run("lm", "train", source, "--output", name, "--set", f"run.seed={seed}")
    whole = has_the_bits_of_files(weft)
    resumes(weft, whole)
    runs_on_ranks(weft, whole)
    takes_files_and_directories(weft)
    refusals(weft)


program.main(test)
