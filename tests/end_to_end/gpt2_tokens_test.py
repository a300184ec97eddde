# SPDX-License-Identifier: Apache-2.0
"""Ids of GPT-2 with its published vocabulary: encoder.json and vocab.bpe in the folder gpt2 of WEFT_TEST_DATA; skipped where they
are absent.

gpt2_tokens_test.py WEFT
"""
import json
import os
from pathlib import Path

import h5py

import program

GOLDEN = {"The quick brown fox jumps over the lazy dog.": [464, 2068, 7586, 21831, 18045, 625, 262, 16931, 3290, 13],
          "I'm here": [40, 1101, 994], "é": [2634]}
END_OF_TEXT = 50256


def test(weft):
    data = Path(os.environ.get("WEFT_TEST_DATA", "")) / "gpt2"
    if not (data / "encoder.json").exists() or not (data / "vocab.bpe").exists():
        program.skip("gpt2/encoder.json and gpt2/vocab.bpe are not in WEFT_TEST_DATA")
    vocabulary = json.loads((data / "encoder.json").read_text())
    merges = [line for line in (data / "vocab.bpe").read_text().split("\n")[1:] if line]
    file = {"added_tokens": [{"id": END_OF_TEXT, "content": "<|endoftext|>"}],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
            "model": {"type": "BPE", "vocab": vocabulary, "merges": merges}}
    (weft.folder / "tokenizer.json").write_text(json.dumps(file))
    for number, (text, expected) in enumerate(GOLDEN.items()):
        (weft.folder / "text.txt").write_text(text)
        weft.run("lm", "tokenize", "text.txt", "--tokens", "tokenizer.json", "--output", f"set_{number}")
        with h5py.File(weft.folder / f"set_{number}/tokens_00000.h5") as tokens:
            found = tokens["tokens"][:].tolist()
        assert found == expected + [END_OF_TEXT], (text, found)


program.main(test)
