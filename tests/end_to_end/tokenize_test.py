# SPDX-License-Identifier: Apache-2.0
"""weft lm tokenize from the outside: token files read by h5py and decoded by an own decoder, the same tokeniser used again,
inspect, training on the files, and refusals.

tokenize_test.py WEFT
"""
import json
import os

import h5py
import numpy as np

import program

TEXT = "It's the café's 12th day; don't you see?\n\n  The mice 😀 ran.  " * 40
TRAIN = """
[data]
train = "{train}"
validation = "{validation}"
tokens = "{tokens}"
batch_tokens = 64
sequence = 16
[language_model]
layers = 1
heads = 2
d_model = 16
[run]
steps = 2
[optimizer]
warmup_steps = 1
[device]
backend = "portable"
"""


def alphabet():
    """GPT-2's character of each byte -> the byte."""
    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def decoded(directory):
    """The documents of a set, and its tokeniser."""
    texts = []
    for path in sorted(directory.glob("*.h5")):
        with h5py.File(path) as file:
            tokenizer = json.loads(bytes(file["tokenizer"][:]))
            ids, starts = file["tokens"][:].astype(int), list(file["documents"][:])
            assert file.attrs["vocabulary"] == len(tokenizer["tokens"]), dict(file.attrs)
            assert file["tokens"].chunks is None
        byte_of = alphabet()
        end = {token["id"] for token in tokenizer["added"]}
        for begin, stop in zip(starts, starts[1:] + [len(ids)]):
            assert ids[stop - 1] in end, "a document ends with its end-of-text token"
            texts.append(bytes(byte_of[c] for i in ids[begin:stop - 1] for c in tokenizer["tokens"][i]).decode())
    return texts, tokenizer


def test(weft):
    folder = weft.folder
    (folder / "a.txt").write_text(TEXT)
    (folder / "b.txt").write_text("one document<|doc|>another, the last")
    output = weft.run("lm", "tokenize", "a.txt", "b.txt", "--output", "set", "--train-bpe", 300, "--document-separator", "<|doc|>")
    assert "vocabulary of 300, 3 documents, 1 file;" in output, output
    texts, tokenizer = decoded(folder / "set")
    assert texts == [TEXT, "one document", "another, the last"], texts[1:]
    assert json.loads((folder / "set/tokenizer.json").read_text()) == tokenizer
    assert len(tokenizer["merges"]) == 300 - 257
    first = (folder / "set/tokens_00000.h5").read_bytes()

    # The same command gives the same bytes; the trained tokeniser serves for other texts.
    weft.run("lm", "tokenize", "a.txt", "b.txt", "--output", "again", "--train-bpe", 300, "--document-separator", "<|doc|>")
    assert (folder / "again/tokens_00000.h5").read_bytes() == first
    (folder / "c.txt").write_text("Unseen: 中文, the café.")
    weft.run("lm", "tokenize", "c.txt", "--output", "validation", "--tokens", "set/tokenizer.json")
    assert decoded(folder / "validation")[0] == ["Unseen: 中文, the café."]

    output = weft.run("inspect", "set")
    assert "ids below 300" in output and "documents     3" in output and "all ids are in the vocabulary" in output, output
    for name, train, tokens in (("files", "set", ""), ("text", "a.txt", "set/tokenizer.json")):
        (folder / f"{name}.toml").write_text(TRAIN.format(train=train, validation="validation", tokens=tokens))
        weft.run("lm", "train", f"{name}.toml", "--output", name)
        validation = program.record(folder / name)["result"]["validation"]
        assert np.isfinite(validation["loss"]) and validation["bits_per_byte"] > 0, validation

    # Refusals.
    def refused(code, part, *arguments):
        output = weft.run("lm", "tokenize", *arguments, code=code)
        assert part in output, output
        assert not list(folder.glob("new*"))

    refused(2, "needs --output", "a.txt", "--tokens", "bytes")
    refused(2, "needs one of --tokens and --train-bpe", "a.txt", "--output", "new")
    refused(2, "needs one of --tokens and --train-bpe", "a.txt", "--output", "new", "--tokens", "bytes", "--train-bpe", 300)
    refused(2, "too small", "a.txt", "--output", "new", "--train-bpe", 256)
    refused(2, "--pattern gpt5 is not known", "a.txt", "--output", "new", "--train-bpe", 300, "--pattern", "gpt5")
    refused(2, "--pattern belongs to --train-bpe", "a.txt", "--output", "new", "--tokens", "bytes", "--pattern", "gpt2")
    refused(2, "none.txt: no such file", "none.txt", "--output", "new", "--tokens", "bytes")
    refused(2, "no such file", "a.txt", "--output", "new", "--tokens", "none.json")
    refused(3, "a.txt: ", "a.txt", "--output", "new", "--tokens", "a.txt")
    refused(2, "set: exists", "a.txt", "--output", "set", "--tokens", "bytes")
    (folder / "bad.txt").write_bytes(b"abc<|doc|>def\xff")
    refused(3, "bad.txt: byte 13 (0xff) is not valid UTF-8", "bad.txt", "--output", "new", "--tokens", "set/tokenizer.json",
            "--document-separator", "<|doc|>")
    refused(3, "bad.txt: byte 13 (0xff)", "bad.txt", "--output", "new", "--train-bpe", 300)
    for name in ("lines.jsonl", "lines.txt"):
        (folder / name).write_text('{"text": "abc"}\n{"text": "def"}\n')
    refused(3, "lines.txt: its lines are JSON objects", "a.txt", "lines.txt", "--output", "new", "--train-bpe", 300)
    refused(2, "lines.jsonl: is JSON Lines, and --document-separator is given", "lines.jsonl", "--output", "new", "--tokens", "bytes",
            "--document-separator", "x")
    refused(2, "has tokens already", "set", "--output", "new", "--tokens", "bytes")
    rows = weft.run("lm", "tokenize", "lines.jsonl", "lines.txt", "--output", "rows", "--train-bpe", 260, "--set", "data.format=jsonl")
    assert "4 documents" in rows, rows
    (folder / "empty.txt").write_text("")
    refused(3, "empty.txt: is empty", "empty.txt", "--output", "new", "--tokens", "bytes")
    os.mkfifo(folder / "fifo")
    refused(3, "is a FIFO", "fifo", "--output", "new", "--tokens", "bytes")


program.main(test)
