# SPDX-License-Identifier: Apache-2.0
"""Language models from the outside: training, resuming bit for bit, evaluation, inspection, report, refusals.

language_model_test.py WEFT
"""
import json
import math
import shutil
import signal

import program

INPUT = """
[run]
steps = 40
[data]
train = "text.txt"
validation = "held_out.txt"
batch_tokens = 256
sequence = 32
[language_model]
layers = 2
heads = 2
d_model = 32
dropout = 0.1
{more}
[optimizer]
learning_rate = 3e-3
warmup_steps = 4
[checkpoint]
every = 10
keep = 4
[log]
every = 5
evaluate_every = 20
sample_tokens = 20
"""


def train(weft, name, *arguments, more="", code=0):
    source = weft.folder / f"{name}.toml"
    source.write_text(INPUT.format(more=more))
    printed = weft.run("lm", "train", source, "--output", weft.folder / name, *arguments, code=code)
    return weft.folder / name, printed


def learns_and_reports(weft):
    run, printed = train(weft, "plain")
    lines = program.metrics(run)
    vocabulary = len(set(program.TEXT))
    assert abs(lines[0]["loss"] - math.log(vocabulary)) < 0.5, lines[0]
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"], lines[-1]
    evaluated = [line["step"] for line in lines if "validation.loss" in line]
    assert evaluated == [20, 40], evaluated
    result = program.record(run)["result"]
    assert result["validation"]["tokens"] == len((weft.folder / "held_out.txt").read_text()) - 1, result
    assert abs(result["validation"]["perplexity"] - math.exp(result["validation"]["loss"])) < 1e-6
    # One byte per token here: bits per byte follow from the loss but for the token that is not predicted.
    size = result["validation"]["tokens"]
    expected = result["validation"]["loss"] / math.log(2) * size / (size + 1)
    assert abs(result["validation"]["bits_per_byte"] - expected) < 1e-6, result
    assert printed.count("sample after step") == 2, printed
    assert "types: weights fp32" in printed and "tokens: 10,240 in this run" in printed, printed

    # The same figures from the checkpoint alone, whatever the size of a batch, and without the training text.
    (weft.folder / "text.txt").rename(weft.folder / "moved.txt")
    weft.run("lm", "evaluate", run, "--text", "held_out.txt", "--output", "evaluated", "--set", "data.batch_tokens=64")
    (weft.folder / "moved.txt").rename(weft.folder / "text.txt")
    again = program.validation(weft.folder / "evaluated")
    assert abs(again["loss"] - result["validation"]["loss"]) < 1e-6, (again, result["validation"])
    assert again["tokens"] == size

    inspected = weft.run("inspect", run)
    assert "language model of 2 layers, d_model 32, 2 heads" in inspected and "all tensors present" in inspected, inspected
    if weft.has_package():
        weft.run("report", run)
        page = (run / "report.html").read_text()
        for words in ("Validation loss", "perplexity", "bits per byte", "d_model"):
            assert words in page, words
    return run


def resumes_bit_for_bit(weft, expected):
    # Stopped between two checkpoints by a signal, and killed: both continue to the same bits.
    source = weft.folder / "interrupted.toml"
    source.write_text(INPUT.format(more=""))
    run = weft.folder / "interrupted"
    command = ["lm", "train", source, "--output", run]
    weft.run(*command, fault="step:0:25", code=-signal.SIGKILL)
    weft.run(*command)
    assert program.shard(run, 40) == program.shard(expected, 40), "the resumed run has other bits"
    assert program.record(run)["result"]["validation"] == program.record(expected)["result"]["validation"]


def evaluates_the_held_out_part(weft):
    source = weft.folder / "fraction.toml"
    source.write_text(INPUT.format(more="").replace('validation = "held_out.txt"', "validation_fraction = 0.2"))
    weft.run("lm", "train", source, "--output", weft.folder / "fraction", "--set", "run.steps=6")
    weft.run("lm", "evaluate", "fraction", "--output", "fraction_evaluated")
    measured = program.validation(weft.folder / "fraction_evaluated")
    expected = program.record(weft.folder / "fraction")["result"]["validation"]
    assert abs(measured["loss"] - expected["loss"]) < 1e-6 and measured["tokens"] == expected["tokens"], (measured, expected)


def policies_resume(weft):
    for more in ('[device]\nprecision = "bf16"\n[memory]\nrecompute = "block"', '[memory]\nhead_chunk = 100',
                 '[device]\nprecision = "fp16"', '[device]\nprecision = "bf16"\nfp8 = true'):
        name = "policy"
        text = INPUT.format(more="") + more + "\n"
        source = weft.folder / "policy.toml"
        if "fp8" in more:
            text = text.replace("layers = 2", "layers = 3")  # the second one multiplies in 8 bits
        source.write_text(text.replace("[optimizer]", '[optimizer]\nstate = "8bit"'))
        for output, steps in (("whole", 20), ("halves", 10), ("halves", 20)):
            weft.run("lm", "train", source, "--output", weft.folder / f"{name}_{output}", "--set", f"run.steps={steps}",
                     "--set", "optimizer.schedule_steps=20")
        assert program.shard(weft.folder / f"{name}_whole", 20) == program.shard(weft.folder / f"{name}_halves", 20), more
        for output in ("whole", "halves"):
            shutil.rmtree(weft.folder / f"{name}_{output}")


def grows_and_resumes(weft):
    # Lengths 8, 16 and 32 of 10 steps each, a curriculum of 30: killed when the checkpoint of step 10 is
    # published: after the first change, with the next one ahead.
    more = ("--set", "data.sequence_start=8", "--set", "data.sequence_growth_steps=20", "--set", "data.order=curriculum",
            "--set", "data.curriculum_steps=30", "--set", "language_model.attention_dropout=0.1",
            "--set", "language_model.sparse_blocks=1", "--set", "log.sample_tokens=0")
    whole, printed = train(weft, "growing", *more)
    assert "order of segments" in printed, printed
    assert [line["sequence"] for line in program.metrics(whole)] == [8, 8, 16, 16, 32, 32, 32, 32]
    killed = weft.folder / "growing_killed"
    command = ["lm", "train", weft.folder / "growing.toml", "--output", killed, *more]
    weft.run(*command, fault="before-latest:0:10", code=-signal.SIGKILL)
    printed = weft.run(*command)
    assert "resuming after step 10" in printed, printed
    assert program.shard(killed, 40) == program.shard(whole, 40), "the resumed run has other bits"
    assert program.metrics_without_times(killed) == program.metrics_without_times(whole)
    assert program.shard(whole, 40) != program.shard(weft.folder / "plain", 40)


def generates(weft, run):
    def lines(*arguments):
        return [json.loads(line) for line in weft.run("lm", "generate", run, "--jsonl", *arguments).splitlines()]

    (weft.folder / "prompts.txt").write_text("The cat\nT\nThe owl did not see the\n")
    options = ("--max-new-tokens", "40", "--temperature", "0.9", "--top-k", "20", "--top-p", "0.95", "--seed", "7")
    written = lines("--prompts", "prompts.txt", "--samples", "3", *options)
    assert [(line["prompt_number"], line["sample"]) for line in written] == [(p, n) for p in (1, 2, 3) for n in (1, 2, 3)], written
    assert {line["prompt"] for line in written} == {"The cat", "T", "The owl did not see the"}
    assert all(line["tokens"] == 40 == len(line["text"]) and line["finish"] == "length" for line in written), written
    assert all(-40 * 10 < line["log_probability"] < 0 for line in written), written
    assert len({line["text"] for line in written}) == 9, "samples repeat one another"
    # A sample does not depend on the others, nor on which texts are computed together (longer than the context of 32 each).
    assert lines("--prompt", "The cat", *options)[0] == written[0]
    assert lines("--prompt", "The cat", "--samples", "2", *options) == written[:2]
    # Other products may round differently: log-probabilities agree within fp32, and the draws of this seed do not notice.
    for other, one in zip(lines("--prompts", "prompts.txt", "--samples", "3", "--rows", "2", *options), written, strict=True):
        assert other["text"] == one["text"] and abs(other["log_probability"] - one["log_probability"]) < 1e-3, (other, one)
    assert lines("--prompt", "The cat", *options[:-1], "8")[0]["text"] != written[0]["text"]
    # The same prompts as JSON lines.
    for name in ("prompts.jsonl", "prompts.json"):
        (weft.folder / name).write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("The cat", "T", "The owl did not see the")))
        assert lines("--prompts", name, "--samples", "3", *options) == written
    # A stop text ends a sample, which is otherwise the same.
    stop = written[0]["text"][5:7]
    stopped = lines("--prompt", "The cat", "--stop", "\u20ac", "--stop", stop, *options)[0]
    assert stopped["text"] == written[0]["text"][:written[0]["text"].index(stop)] and stopped["finish"] == "stop", stopped
    # Always the most probable token: the seed has no effect.
    greedy = [lines("--prompt", "The ", "--temperature", "0", "--seed", seed, "--max-new-tokens", "10") for seed in ("1", "2")]
    assert greedy[0] == greedy[1], greedy
    printed = weft.run("lm", "generate", run, "--prompt", "The cat", *options)
    assert printed.strip() == "The cat" + written[0]["text"].rstrip(), printed
    printed = weft.run("lm", "generate", run, "--prompt", "The cat", "--samples", "2", *options)
    assert "--- prompt 1, sample 2 (40 tokens, length)" in printed, printed

    (weft.folder / "no_prompt.txt").write_text("")
    (weft.folder / "empty_line.txt").write_text("The\n\ncat\n")
    (weft.folder / "long.txt").write_text("The cat\n" + "The cat " * 5 + "\n")
    (weft.folder / "bad.jsonl").write_text('{"prompt": "The"}\n{"text": "The"}\n')
    (weft.folder / "broken.jsonl").write_text('{"prompt": "The"\n')
    (weft.folder / "latin_prompt.txt").write_bytes(b"caf\xe9\n")
    for arguments, code, words in [
            ((), 2, "needs one of --prompt TEXT and --prompts FILE"),
            (("--prompt", "The", "--prompts", "prompts.txt"), 2, "needs one of --prompt TEXT and --prompts FILE"),
            (("--prompt", ""), 2, "--prompt is empty"),
            (("--prompt", "The cat " * 5), 2, "40 tokens do not fit the context of the model, which is 32 tokens"),
            (("--prompts", "long.txt"), 3, "long.txt:2: 40 tokens do not fit the context"),
            (("--prompt", "The \u20ac"), 3, "--prompt"),
            (("--prompts", "nowhere.txt"), 2, "nowhere.txt: no such file"),
            (("--prompts", "no_prompt.txt"), 3, "no_prompt.txt: is empty"),
            (("--prompts", "empty_line.txt"), 3, "empty_line.txt:2: the prompt is empty"),
            (("--prompts", "bad.jsonl"), 3, "bad.jsonl:2: the prompt is empty"),
            (("--prompts", "broken.jsonl"), 3, "broken.jsonl:1: not a JSON object"),
            (("--prompts", "latin_prompt.txt"), 3, "latin_prompt.txt:1"),
            (("--prompt", "The", "--top-p", "0"), 2, "--top-p 0 is not above 0"),
            (("--prompt", "The", "--temperature", "-1"), 2, "--temperature -1 is not between"),
            (("--prompt", "The", "--stop", ""), 2, "--stop is empty"),
            (("--prompt", "The", "--samples", "0"), 2, "--samples"),
            (("--prompt", "The", "--set", "language_model.layers=3"), 2, "they define the run")]:
        printed = weft.run("lm", "generate", run, *arguments, code=code)
        assert words in printed, (arguments, printed)
    assert "nowhere" in weft.run("lm", "generate", "nowhere", "--prompt", "The", code=2)
    printed = weft.run("lm", "train", "plain.toml", "--set", "language_model.sparse_blocks=1", "--output", "new", code=2)
    assert "log.sample_tokens" in printed, printed


def refusals(weft, run):
    cases = [
        (("lm",), 2, "needs one of its commands"),
        (("lm", "tran", "a.toml"), 2, 'did you mean "train"'),
        (("lm", "train"), 2, "weft lm train needs its INPUT"),
        (("lm", "train", "nowhere.toml"), 2, "nowhere.toml"),
        (("lm", "train", "plain.toml", "--set", "language_model.heads=3"), 2, "no multiple of language_model.heads"),
        (("lm", "train", "plain.toml", "--set", "data.train=nowhere.txt", "--output", "new"), 2, "nowhere.txt"),
        (("lm", "train", "plain.toml", "--set", "data.train=empty.txt", "--output", "new"), 3, "empty.txt"),
        (("lm", "train", "plain.toml", "--set", "data.train=latin.txt", "--output", "new"), 3, "latin.txt"),
        (("lm", "train", "plain.toml", "--set", "data.train=short.txt", "--set", "data.validation=", "--output", "new"), 3, "short.txt"),
        (("lm", "train", "plain.toml", "--output", run, "--set", "run.steps=50", "--set", "language_model.layers=3"), 2,
         "language_model.layers"),
        (("lm", "evaluate", run, "--set", "language_model.layers=3"), 2, "they define the run"),
        (("lm", "evaluate", run, "--text", "other.txt"), 3, "other.txt"),
        (("lm", "evaluate", run, "--text", "nowhere.txt"), 2, '--text = "nowhere.txt"'),
        (("lm", "evaluate", run, "--text", "one.txt"), 3, "a prediction needs two"),
        (("lm", "evaluate", run, "--text", "lines.jsonl"), 3, 'lines.jsonl:1: has no "text"'),
        (("lm", "evaluate", run, "--text", "lines.txt"), 3, "lines.txt: its lines are JSON objects"),
        (("lm", "harvest", run, "--text", "lines.jsonl", "--output", "new"), 3, 'lines.jsonl:1: has no "text"'),
        (("lm", "generate", run, "--prompts", "lines.txt"), 3, "lines.txt: its lines are JSON objects"),
        (("lm", "polychromic", "plain.toml", "--output", "new"), 2, "has no table [polychromic]"),
        (("evaluate", run), 2, "weft lm evaluate is for language models"),
        (("lm", "evaluate", "plain.toml"), 2, "plain.toml"),
    ]
    (weft.folder / "empty.txt").write_text("")
    (weft.folder / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    (weft.folder / "one.txt").write_text("T")
    for name in ("lines.jsonl", "lines.txt"):
        (weft.folder / name).write_text('{"prompt": "The cat"}\n' * 20)
    (weft.folder / "short.txt").write_text("The cat.\n")
    (weft.folder / "other.txt").write_text("The cat says \u20ac.\n" * 10)
    for arguments, code, words in cases:
        printed = weft.run(*arguments, code=None if words == "plain.toml" else code)
        assert words in printed, (arguments, printed)
        assert not (weft.folder / "new").exists(), arguments


def test(weft):
    (weft.folder / "text.txt").write_text(program.TEXT)
    (weft.folder / "held_out.txt").write_text(program.TEXT[1000:1700])
    printed = weft.run("lm", "train", "--defaults")
    assert "[language_model]" in printed and "[transcoder]" not in printed
    run = learns_and_reports(weft)
    resumes_bit_for_bit(weft, run)
    evaluates_the_held_out_part(weft)
    generates(weft, run)
    policies_resume(weft)
    grows_and_resumes(weft)
    refusals(weft, run)
    _, printed = train(weft, "dry", "--dry-run")
    assert "plan: 2 layers" in printed and not (weft.folder / "dry").exists(), printed


program.main(test)
