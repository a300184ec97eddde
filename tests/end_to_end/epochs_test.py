# SPDX-License-Identifier: Apache-2.0
"""Training in epochs: shuffled segments and rows of whole documents, resumed in the middle of an epoch and on other numbers of ranks;
lengths given as epochs and fractions.

epochs_test.py WEFT
"""
import json
import random

import program

INPUT = """
[run]
epochs = {epochs}
[data]
train = "tokens"
validation_fraction = 0.2
batch_tokens = 128
sequence = 16
order = "shuffled"
document_mask = true
{data}
[language_model]
layers = 1
heads = 2
d_model = 16
[optimizer]
warmup_fraction = 0.25
[checkpoint]
every = 5
[log]
every = 1
evaluate_every = 10
"""


def train(weft, name, *arguments, epochs=2.0, data="", **options):
    source = weft.folder / f"{name}.toml"
    source.write_text(INPUT.format(epochs=epochs, data=data))
    return weft.folder / name, weft.run("lm", "train", source, "--output", weft.folder / name, *arguments, **options)


def make_tokens(weft):
    """Documents of 2 to 40 bytes, and a few longer ones."""
    numbers = random.Random(1)
    documents = ["".join(numbers.choice("abcdefgh ") for _ in range(numbers.choice([2, 5, 9, 14, 30]))) for _ in range(120)]
    (weft.folder / "text.txt").write_text("|".join(documents))
    weft.run("lm", "tokenize", "text.txt", "--tokens", "bytes", "--document-separator", "|", "--output", "tokens")


def stream_in_epochs(weft):
    run, printed = train(weft, "stream")
    record = program.record(run)
    tokens = int(printed.split("run.epochs = 2: ")[1].split(" steps")[0]) * 128
    assert tokens == record["result"]["tokens"] and record["result"]["step"] == tokens // 128, printed
    # Two epochs: the metric of the last step begins below and ends at 2 or a step later.
    lines = program.metrics(run)
    assert 2 <= lines[-1]["epoch"] < 2 + 1.01 * (lines[1]["epoch"] - lines[0]["epoch"]), lines[-1]
    # The resolved input states the steps; the rate rises over a quarter of them.
    resolved = (run / "input.toml").read_text()
    assert f"steps = {len(lines)}\nepochs = 0.0" in resolved, resolved
    rates = [line["learning_rate"] for line in lines]
    top = max(range(len(rates)), key=rates.__getitem__)
    assert abs(top + 1 - 0.25 * len(rates)) <= 1, rates

    # Killed in the middle of an epoch: the same bits. On two ranks the same order: losses differ by rounding only.
    half = weft.folder / "resumed"
    train(weft, "resumed", fault="step:0:9", code=program.KILLED)
    train(weft, "resumed")
    assert program.shard(half, len(lines)) == program.shard(run, len(lines)), "the resumed run has other bits"
    two, _ = train(weft, "two", ranks=2)
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(lines, program.metrics(two), strict=True)) < 1e-4
    # A longer run continues.
    _, printed = train(weft, "two", epochs=2.5, ranks=2)
    assert f"resuming after step {len(lines)}" in printed, printed


def documents(weft):
    packed, printed = train(weft, "packed", data='pack = "documents"\nlong_documents = "drop"')
    assert "training: " in printed and "longer documents dropped: " in printed, printed
    assert "order of segments" in printed, printed
    step = len(program.metrics(packed))
    train(weft, "packed_resumed", data='pack = "documents"\nlong_documents = "drop"', fault="step:0:9", code=program.KILLED)
    train(weft, "packed_resumed", data='pack = "documents"\nlong_documents = "drop"')
    assert program.shard(packed, step) == program.shard(weft.folder / "packed_resumed", step)
    # The same rows of the held-out part are evaluated from the checkpoint.
    measured = json.loads(weft.run("lm", "evaluate", packed, "--json"))["validation"]
    expected = program.record(packed)["result"]["validation"]
    assert measured["tokens"] == expected["tokens"] and abs(measured["loss"] - expected["loss"]) < 1e-6, (measured, expected)
    assert expected["bits_per_byte"] is None, expected


def refusals(weft):
    for change, words in ((("run.steps=5",), "run.epochs does not go with run.steps"),
                          (("optimizer.warmup_steps=5",), "optimizer.warmup_fraction does not go with optimizer.warmup_steps"),
                          (("data.order=random_windows", "data.pack=documents"), "data.pack does not go with data.order"),
                          (("data.long_documents=drop",), "data.long_documents is for data.pack"),
                          (("data.pack=documents", "data.sequence_start=8"), "data.pack does not go with data.sequence_start"),
                          (("optimizer.warmup_fraction=0", "optimizer.warmup_steps=5000"), "is more than run.steps")):
        _, printed = train(weft, "refused", *program.sets(*change), code=2)
        assert words in printed, (change, printed)


def transcoder_in_epochs(weft):
    (weft.folder / "synth.toml").write_text(program.SYNTHETIC.format(folder=weft.folder))
    weft.run("synth", weft.folder / "synth.toml")
    text = f'[run]\nepochs = 0.5\n[data]\ntrain = "{weft.folder}/data/train"\nbatch_tokens = 64\n[transcoder]\nfeatures = 32\nk = 3\n'
    run = weft.train(text, "transcoder")
    assert program.record(run)["result"]["step"] == 16, "2000 rows in half an epoch"  # 1000 / 64


def check(weft):
    make_tokens(weft)
    stream_in_epochs(weft)
    documents(weft)
    refusals(weft)
    transcoder_in_epochs(weft)


program.main(check)
