# SPDX-License-Identifier: Apache-2.0
"""Commands on a language model give the same result on any number of ranks: evaluation (also with a transcoder) and
validation to the last digit, generated texts in the same order, harvested files byte for byte; training resumes bit for bit.

language_ranks_test.py WEFT
"""
import json
import shutil

import h5py

import program

INPUT = """
[run]
steps = 6
[data]
train = "text.txt"
validation = "held_out.txt"
batch_tokens = 96
micro_tokens = 32
sequence = 16
[language_model]
layers = 2
heads = 2
d_model = 32
[optimizer]
learning_rate = 3e-3
warmup_steps = 2
[log]
every = 1
evaluate_every = 2
sample_tokens = 10
[checkpoint]
every = 3
keep = 9
[device]
threads = 1
"""
TRANSCODER = """
[run]
steps = 4
[data]
train = "mlp_r1"
batch_tokens = 128
[transcoder]
features = 64
k = 4
scope = "layer"
"""


def evaluations(weft):
    """evaluation.json of 1, 2 and 3 ranks: the windows of the text are not a multiple."""
    results = []
    for ranks in (1, 2, 3):
        for transcoder in ((), ("--transcoder", "transcoder")):
            output = f"evaluated_r{ranks}_{len(transcoder)}"
            weft.run("lm", "evaluate", "model", "--text", "held_out.txt", "--output", output, *transcoder, ranks=ranks)
            results.append(json.loads((weft.folder / output / "evaluation.json").read_text()))
    plain, replaced = results[0::2], results[1::2]
    assert plain[0] == plain[1] == plain[2], plain
    assert replaced[0] == replaced[1] == replaced[2] and "replacement" in replaced[0], replaced
    assert plain[0]["validation"] == replaced[0]["validation"]


def texts(weft):
    (weft.folder / "prompts.txt").write_text("The cat\nT\nThe owl did\n")
    options = ("lm", "generate", "model", "--prompts", "prompts.txt", "--samples", "3", "--max-new-tokens", "12", "--seed", "7",
               "--temperature", "0.9", "--rows", "2", "--jsonl")
    printed = [weft.run(*options, ranks=ranks) for ranks in (1, 2, 4)]
    assert len(printed[0].splitlines()) == 9 and printed[0] == printed[1] == printed[2], printed
    # More ranks than texts.
    one = [weft.run("lm", "generate", "model", "--prompt", "The", "--max-new-tokens", "5", ranks=ranks) for ranks in (1, 3)]
    assert one[0] == one[1] != "", one
    (weft.folder / "bad.txt").write_text("The\n\n")
    printed = weft.run("lm", "generate", "model", "--prompts", "bad.txt", ranks=2, code=3)
    assert printed.count("bad.txt:2: the prompt is empty") == 1, printed


def divided(weft):
    """Two ranks, or two groups of two, that divide the model: the losses and the rows but for rounding, the same texts, also of a
    directory of Hugging Face."""
    weft.run("lm", "export", "model", "--output", "directory")
    for model in ("model", "directory"):
        text = ("--prompts", "prompts.txt", "--samples", "2", "--max-new-tokens", "30", "--rows", "3", "--jsonl")
        found = {}
        for ranks, tensor in ((1, 1), (2, 2), (4, 2)):
            axis = ("--set", f"parallel.tensor={tensor}")
            output = f"divided_{model}_{ranks}"
            weft.run("lm", "evaluate", model, "--text", "held_out.txt", "--transcoder", "transcoder", "--output", output, *axis, ranks=ranks)
            weft.run("lm", "harvest", model, "--text", "held_out.txt", "--rows-per-file", "256", "--output", output + "_mlp", *axis,
                     ranks=ranks)
            found[ranks] = (json.loads((weft.folder / output / "evaluation.json").read_text()),
                            [weft.run("lm", "generate", model, *text, "--temperature", heat, *axis, ranks=ranks) for heat in ("0", "0.9")],
                            rows_of(weft.folder / (output + "_mlp")))
        for ranks in (2, 4):
            for part, name in (("validation", "loss"), ("replacement", "loss_original"), ("replacement", "loss_with_error_terms")):
                one, other = found[1][0][part][name], found[ranks][0][part][name]
                assert abs(other - one) <= 1e-6 * one, (ranks, name, one, other)
            texts = [[{**json.loads(line), "log_probability": 0} for line in printed.splitlines()]
                     for printed in found[1][1] + found[ranks][1]]
            assert texts[:2] == texts[2:], (ranks, texts)
            assert found[ranks][2].keys() == found[1][2].keys()
            for name, values in found[1][2].items():
                other = found[ranks][2][name]
                if values.dtype.kind == "f":
                    assert abs(other - values).max() <= 3e-6 * abs(values).max(), (ranks, name)
                else:
                    assert (other == values).all(), (ranks, name)
    plan = [json.loads(weft.run("lm", "generate", "model", "--prompt", "The", "--dry-run", "--json", "--set", f"parallel.tensor={tensor}"))
            for tensor in (1, 2)]
    assert plan[1]["device"]["weights"] < 0.6 * plan[0]["device"]["weights"], plan
    for ranks, tensor, why in ((3, 2, "start a multiple of 2"), (4, 4, "kv_heads = 2")):
        printed = weft.run("lm", "evaluate", "model", "--set", f"parallel.tensor={tensor}", ranks=ranks, code=2)
        assert why in printed, printed


def rows_of(folder):
    """Every array of the files of a harvest, by name."""
    arrays = {}
    for path in sorted(folder.glob("*.hdf5")):
        with h5py.File(path) as file:
            file.visititems(lambda name, item, stem=path.stem: arrays.update({f"{stem}/{name}": item[()]}) if hasattr(item, "dtype") else None)
    return arrays


def test(weft):
    (weft.folder / "text.txt").write_text(program.TEXT)
    (weft.folder / "held_out.txt").write_text(program.TEXT[-700:])
    (weft.folder / "input.toml").write_text(INPUT)
    (weft.folder / "transcoder.toml").write_text(TRANSCODER)
    weft.run("lm", "train", "input.toml", "--output", "model")
    for ranks in (1, 2):
        weft.run("lm", "harvest", "model", "--rows-per-file", "256", "--output", f"mlp_r{ranks}", ranks=ranks)
    files = sorted(path.name for path in (weft.folder / "mlp_r1").iterdir())
    assert len([name for name in files if name.endswith((".h5", ".hdf5"))]) >= 3, files
    assert files == sorted(path.name for path in (weft.folder / "mlp_r2").iterdir())
    for name in files:
        assert (weft.folder / "mlp_r1" / name).read_bytes() == (weft.folder / "mlp_r2" / name).read_bytes(), name
    weft.run("train", "transcoder.toml", "--output", "transcoder")
    evaluations(weft)
    texts(weft)
    divided(weft)

    # Validation while training: by two ranks in turn, and of their checkpoint by one process.
    weft.run("lm", "train", "input.toml", "--output", "two", ranks=2)
    validated = program.record(weft.folder / "two")["result"]["validation"]
    weft.run("lm", "evaluate", "two", "--output", "two_evaluated")
    again = program.validation(weft.folder / "two_evaluated")
    assert again == validated, (again, validated)
    # Resumed between two steps, when no rank has all new weights: the same bits.
    shutil.copytree(weft.folder / "two", weft.folder / "resumed")
    shutil.rmtree(weft.folder / "resumed" / "checkpoints" / "step_00000006")
    weft.run("lm", "train", "input.toml", "--output", "resumed", ranks=2)
    assert program.shard(weft.folder / "two", 6, 1) == program.shard(weft.folder / "resumed", 6, 1)


program.main(test)
