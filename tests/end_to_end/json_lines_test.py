# SPDX-License-Identifier: Apache-2.0
"""JSON Lines from outside: training on completions resumes bit for bit on one and two ranks and equals training on the token files of the
same rows; only what the rows mark counts; prompts of weft prepare; messages.

json_lines_test.py WEFT
"""
import json

import h5py

import program

ROWS = [row for number in range(40) for row in (
    {"prompt": f"Q: {number} + 1 =", "completion": f" {number + 1}"},
    {"segments": [{"text": f"<u>{number}</u>", "loss": False}, {"text": "<a>yes</a>", "loss": True}, {"text": "\n", "loss": False}]})]
INPUT = """
[data]
train = "{train}"
validation = "{train}"
{keys}
batch_tokens = 128
sequence = 32
document_mask = true
[language_model]
layers = 1
heads = 2
d_model = 16
[run]
steps = {steps}
[optimizer]
warmup_steps = 1
[log]
every = 1
[device]
backend = "portable"
threads = 1
"""
BYTES = 'tokens = "bytes"\nspecial = ["EOS"]'


def train(weft, name, train, keys, steps=3, **options):
    (weft.folder / f"{name}.toml").write_text(INPUT.format(train=train, keys=keys, steps=steps))
    output = weft.run("lm", "train", f"{name}.toml", "--output", name, **options)
    log = weft.folder / name / "metrics.jsonl"
    return output, [(line["loss"], line["gradient_norm"]) for line in program.metrics(weft.folder / name)] if log.exists() else []


def expected_marks():
    """Ids of bytes, which count, and where rows begin; completions end with EOS, 256."""
    ids, counted, documents = [], [], []
    for row in ROWS:
        documents.append(len(ids))
        parts = [(part["text"], part["loss"]) for part in row.get("segments", ())] or [(row["prompt"], False), (row["completion"], True)]
        for text, counts in parts:
            ids += text.encode()
            counted += [int(counts)] * len(text.encode())
        if "prompt" in row:
            ids.append(256)
            counted.append(1)
    return ids, counted, documents


def test(weft):
    (weft.folder / "rows.jsonl").write_text("\r\n".join(json.dumps(row) for row in ROWS))
    said, losses = train(weft, "rows", "rows.jsonl", BYTES)
    ids, counted, documents = expected_marks()
    assert f"80 rows, 40 of prompt and completion, 40 of segments; {len(ids):,} tokens, of which {sum(counted)} count with" in said, said
    assert f"rows.jsonl: JSON Lines, {len(ids):,} tokens\nvalidation: rows.jsonl: JSON Lines" in said, said

    # Stopped after two steps and resumed: the same bits, on one and two ranks.
    for ranks in (1, 2):
        for name, stops in (("whole", (4,)), ("parts", (2, 4))):
            for steps in stops:
                train(weft, f"{name}_{ranks}", "rows.jsonl", BYTES, steps, ranks=ranks)
        for rank in range(ranks):
            assert program.shard(weft.folder / f"whole_{ranks}", 4, rank) == program.shard(weft.folder / f"parts_{ranks}", 4, rank), ranks

    # Token files of the rows have the same ids and marks, and give the same training; loss_on = "all" another one.
    tokenizer = {"format": "weft-tokenizer", "version": 1, "kind": "bytes", "special": ["EOS"]}
    (weft.folder / "bytes.json").write_text(json.dumps(tokenizer))
    weft.run("lm", "tokenize", "rows.jsonl", "--tokens", "bytes.json", "--output", "set")
    with h5py.File(weft.folder / "set/tokens_00000.h5") as file:
        assert file["tokens"][:].tolist() == ids and file["counted"][:].tolist() == counted and file["documents"][:].tolist() == documents
    assert "that /counted marks" in weft.run("inspect", "set")
    assert train(weft, "tokens", "set", "")[1] == losses
    everything = train(weft, "all", "set", 'loss_on = "all"')[1]
    assert everything != losses and train(weft, "all_rows", "rows.jsonl", BYTES + '\nloss_on = "all"')[1] == everything
    assert "data.loss_on" in weft.run("lm", "train", "tokens.toml", "--output", "tokens", "--set", "data.loss_on=all", code=2)

    # Evaluation reads rows too, and the number of predictions is that of the marks; harvest has the rows as documents.
    weft.run("lm", "evaluate", "rows", "--text", "rows.jsonl", "--output", "evaluated")
    evaluated = program.validation(weft.folder / "evaluated")
    assert evaluated["tokens"] == sum(mark for position, mark in enumerate(counted) if position not in documents), evaluated
    weft.run("lm", "harvest", "rows", "--text", "rows.jsonl", "--tokens", 64, "--output", "harvest")

    # Prompts: the text before the first that counts.
    (weft.folder / "prompts.jsonl").write_text(json.dumps(ROWS[1]))
    assert json.loads(weft.run("lm", "generate", "rows", "--prompts", "prompts.jsonl", "--max-new-tokens", 2, "--jsonl").splitlines()[-1])["prompt"] == \
        "<u>0</u>"

    # Bad lines end a run or are left out; texts and lines with objects are told apart.
    (weft.folder / "bad.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS) + '\n{"text": "\\ud800"}\n')
    assert "bad.jsonl:81: byte 17: invalid string: surrogate" in train(weft, "bad", "bad.jsonl", BYTES, code=3)[0]
    said, skipped = train(weft, "bad", "bad.jsonl", BYTES + '\nbad_lines = "skip"')
    assert skipped == losses and "1 bad lines were left out" in said, said


program.main(test)
