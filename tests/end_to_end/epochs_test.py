# SPDX-License-Identifier: Apache-2.0
"""Training in epochs: shuffled segments and rows of whole documents, resumed in the middle of an epoch and on other numbers of ranks;
lengths given as epochs and fractions.

epochs_test.py WEFT
"""
import json
import random
import re

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
    train(weft, "resumed", fault="before-latest:0:5", code=program.KILLED)
    _, printed = train(weft, "resumed")
    assert "resuming after step 5" in printed, printed
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
    train(weft, "packed_resumed", data='pack = "documents"\nlong_documents = "drop"', fault="before-latest:0:5", code=program.KILLED)
    train(weft, "packed_resumed", data='pack = "documents"\nlong_documents = "drop"')
    assert program.shard(packed, step) == program.shard(weft.folder / "packed_resumed", step)
    # The same rows of the held-out part are evaluated from the checkpoint.
    measured = json.loads(weft.run("lm", "evaluate", packed, "--json"))["validation"]
    expected = program.record(packed)["result"]["validation"]
    assert measured["tokens"] == expected["tokens"] and abs(measured["loss"] - expected["loss"]) < 1e-6, (measured, expected)
    assert expected["bits_per_byte"] is None, expected
    # A text file is one document: the command says how many rows it makes.
    (weft.folder / "short.txt").write_text("abcd efgh")
    printed = weft.run("lm", "evaluate", packed, "--text", "short.txt")
    assert "1 documents in 1 rows of " in printed, printed


def chosen_micro_batch(weft):
    def planned(*changes):
        (weft.folder / "planned.toml").write_text(INPUT.format(epochs=2.0, data=""))
        printed = weft.run("lm", "train", "planned.toml", "--dry-run", "--json", "--output", "planned", *program.sets(*changes))
        return json.loads(printed[printed.index("{"):])

    # Memory for one of 8 sequences, and not for two: what explicit micro-batches of 16 tokens give, bit for bit.
    fits = planned("data.micro_tokens=16")["device_bytes"]
    assert planned()["device_bytes"] == planned("data.micro_tokens=128")["device_bytes"] > fits
    memory = f"device.memory={(fits + 100) * 1e-9:.9f}"
    assert planned(memory)["micro_tokens"] == 16
    chosen, printed = train(weft, "chosen", *program.sets(memory))
    assert re.search("tokens of a micro-batch +8 x 16\n", printed), printed
    assert "micro_tokens = 16" in (chosen / "input.toml").read_text()
    given, _ = train(weft, "given", *program.sets("data.micro_tokens=16"))
    whole, _ = train(weft, "whole")
    step = len(program.metrics(chosen))
    assert program.shard(chosen, step) == program.shard(given, step) != program.shard(whole, step)
    # Resumed with more memory: the size stays. With less, it cannot.
    train(weft, "more", *program.sets(memory), fault="before-latest:0:5", code=program.KILLED)
    _, printed = train(weft, "more")
    assert "resuming after step 5" in printed, printed
    assert program.shard(weft.folder / "more", step) == program.shard(chosen, step)
    train(weft, "less", fault="before-latest:0:5", code=program.KILLED)
    _, printed = train(weft, "less", *program.sets(memory))
    assert "of 128 tokens of the run so far do not fit" in printed, printed


def refusals(weft):
    for change, words in ((("run.steps=5",), "run.epochs does not go with run.steps"),
                          (("optimizer.warmup_steps=5",), "optimizer.warmup_fraction does not go with optimizer.warmup_steps"),
                          (("data.order=random_windows", "data.pack=documents"), "data.pack does not go with data.order"),
                          (("data.long_documents=drop",), "data.long_documents is for data.pack"),
                          (("data.pack=documents", "data.sequence_start=8"), "data.pack does not go with data.sequence_start"),
                          (("optimizer.warmup_fraction=0", "optimizer.warmup_steps=5000"), "is more than run.steps")):
        _, printed = train(weft, "refused", *program.sets(*change), code=2)
        assert words in printed, (change, printed)


def best_by_name(weft):
    often = program.sets("log.evaluate_every=2", "checkpoint.keep_best=true", "run.stop_after=2", "optimizer.learning_rate=0.3")
    run, _ = train(weft, "best", *often)
    result = program.record(run)["result"]
    assert "stopped_early" in result and program.record(run)["exit"]["code"] == 0, result
    best = result["best"]
    losses = {line["step"]: line["validation.loss"] for line in program.metrics(run) if "validation.loss" in line}
    assert best["loss"] == min(losses.values()) == losses[best["step"]], (best, losses)
    measured = json.loads(weft.run("lm", "evaluate", run / "best", "--json"))
    assert measured["step"] == best["step"] and abs(measured["validation"]["loss"] - best["loss"]) < 1e-6, (measured, best)
    assert f"step {best['step']}," in weft.run("inspect", run / "best")
    weft.run("lm", "generate", run / "best", "--prompt", "ab", "--max-new-tokens", "3")
    assert "has no best checkpoint" in weft.run("lm", "generate", weft.folder / "stream" / "best", "--prompt", "ab", code=2)
    # The held-out part of private text must not decide.
    private = program.sets("privacy.noise_multiplier=1", "privacy.delta=1e-5", "data.order=random_windows")
    _, printed = train(weft, "private", *often, *private, code=2)
    assert "the choice would follow the loss on a part of the private text" in printed, printed
    # Public validation data may; the guarantee is that of all planned steps.
    public = *often, *private, *program.sets("data.validation=tokens", "data.validation_fraction=0")
    run, _ = train(weft, "public", *public)
    result = program.record(run)["result"]
    planned = len(program.metrics(weft.folder / "stream"))
    assert result["step"] <= result["privacy"]["steps"], result
    assert "stopped_early" not in result or result["privacy"]["steps"] > result["step"], (result, planned)
    _, printed = train(weft, "none", *often, *program.sets("data.validation_fraction=0"), code=2)
    assert "run.stop_after compares losses on validation data" in printed, printed


def transcoder_in_epochs(weft):
    (weft.folder / "synth.toml").write_text(program.SYNTHETIC.format(folder=weft.folder))
    weft.run("synth", weft.folder / "synth.toml")
    text = f'[run]\nepochs = 0.5\n[data]\ntrain = "{weft.folder}/data/train"\nbatch_tokens = 64\n[transcoder]\nfeatures = 32\nk = 3\n'
    run = weft.train(text, "transcoder")
    assert program.record(run)["result"]["step"] == 16, "2000 rows in half an epoch"  # 1000 / 64
    text = text.replace("train =", f'validation = "{weft.folder}/data/validation"\ntrain =')
    run = weft.train(text, "transcoder_best", *program.sets("log.evaluate_every=4", "checkpoint.keep_best=true"))
    best = program.record(run)["result"]["best"]
    assert best["loss"] == min(line["validation.nmse_standardised"] for line in program.metrics(run) if line["step"] % 4 == 0), best
    weft.run("evaluate", run / "best", "--output", "evaluated")


def check(weft):
    make_tokens(weft)
    stream_in_epochs(weft)
    documents(weft)
    chosen_micro_batch(weft)
    refusals(weft)
    best_by_name(weft)
    transcoder_in_epochs(weft)


program.main(check)
