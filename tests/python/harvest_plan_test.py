# SPDX-License-Identifier: Apache-2.0
"""weft harvest without PyTorch: how documents become splits, files and windows, sizes, and arguments. harvest_test.py runs models.
"""
import contextlib
import io
import json
import os
import random
import sys
import tempfile
from pathlib import Path

for stale in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
    os.environ.pop(stale, None)
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
from weft import harvest, harvest_text
from weft.errors import WeftError

END = 0


def encode(text):
    """A tokeniser of words: ids from 1."""
    return [1 + int(word[1:] or 0) for word in text.split()]


def texts(count, seed=1):
    generator = random.Random(seed)
    return [" ".join(f"w{generator.randrange(40)}" for _ in range(generator.randrange(1, 60))) for _ in range(count)]


def check_split():
    documents = texts(2000)
    sides = {split: list(harvest_text.of_split(documents, split, 0.2)) for split in ("train", "validation", "all")}
    # Every document once, in its order, on a side that its text alone determines.
    assert sides["all"] == documents and len(sides["train"]) + len(sides["validation"]) == 2000
    assert sides["validation"] == [one for one in documents if harvest_text.is_validation(one, 0.2)]
    assert set(sides["train"]).isdisjoint(sides["validation"])
    assert list(harvest_text.of_split(documents[::-1], "train", 0.2)) == sides["train"][::-1]
    # 2000 draws of 0.2: a standard deviation is 18.
    assert abs(len(set(sides["validation"])) - 0.2 * len(set(documents))) < 90, len(sides["validation"])


def check_parts():
    documents = texts(50) + [" ".join(f"w{i % 40}" for i in range(3000))] + texts(50, 2) + ["x" * 5000]
    for size in (1, 40, 500, 100_000):
        found = list(harvest_text.parts(documents, size))
        # Nothing is lost, and documents begin and end where they do.
        rebuilt, text = [], ""
        for part in found:
            assert part and sum(len(piece) for piece, _, _ in part) <= max(size, 1)
            for number, (piece, begins, ends) in enumerate(part):
                assert begins == (text == "") and (not text or number == 0), "a document is continued in the middle of a file"
                text += piece
                if ends:
                    rebuilt.append(text)
                    text = ""
        assert rebuilt == documents and text == "", size
    # Cut before white space where there is some, so that words stay whole.
    long = documents[50]
    pieces = [piece for part in harvest_text.parts([long], 500) for piece, _, _ in part]
    assert len(pieces) > 10 and sum((encode(piece) for piece in pieces), []) == encode(long)


def check_windows():
    documents = texts(30)
    part = [(text, True, True) for text in documents]
    for length in (1, 7, 1000):
        # Each document by itself: whole windows but for its last one; it begins at the start of its first.
        found, at = harvest_text.windows(part, encode, length, False, END), 0
        for text in documents:
            ids, n = encode(text), -(-len(encode(text)) // length)
            assert [one for one, _ in found[at:at + n]] == [ids[begin:begin + length] for begin in range(0, len(ids), length)]
            assert [starts for _, starts in found[at:at + n]] == [[0]] + [[]] * (n - 1)
            at += n
        assert at == len(found)
        # Joined: one stream with an id between documents.
        stream, begins = [], []
        for text in documents:
            begins.append(len(stream))
            stream += [*encode(text), END]
        found = harvest_text.windows(part, encode, length, True, END)
        assert sum((ids for ids, _ in found), []) == stream and all(len(ids) == length for ids, _ in found[:-1])
        assert [number * length + start for number, (_, starts) in enumerate(found) for start in starts] == begins
    # A continued document begins at the first row of its file; a text without tokens leaves nothing.
    assert harvest_text.windows([("w1 w2", False, True), ("w3", True, True)], encode, 8, False, END) == [([2, 3], [0]), ([4], [0])]
    assert harvest_text.windows([("w1 w2", False, True), ("w3", True, True)], encode, 8, True, END) == [([2, 3, END, 4, END], [0, 3])]
    assert harvest_text.windows([("   ", True, True), ("w3", True, True)], encode, 8, False, END) == [([4], [0])]


def check_sizes():
    documents = texts(3000)
    ratio = harvest_text.characters_per_token(iter(documents), encode)
    tokens = sum(len(encode(text)) for text in documents)
    assert abs(sum(map(len, documents)) / ratio / tokens - 1) < 0.01       # words of 2 or 3 letters and a blank
    try:
        harvest_text.characters_per_token(iter(()), encode)
    except WeftError as problem:
        assert "no tokens in this split" in str(problem)
    else:
        raise AssertionError("no text, no error")
    assert harvest.bytes_of(1000, 12, 768, "bf16") == 1000 * (2 * 12 * 768 * 2 + 8)
    assert harvest.bytes_of(1000, 12, 768, "fp32") == 1000 * (2 * 12 * 768 * 4 + 8)


def check_files(folder):
    (folder / "a.txt").write_text("one document")
    (folder / "b.jsonl").write_text('{"text": "two"}\n\n{"text": " "}\n{"text": "three"}\n')
    given = harvest.parse(["m", "--text", str(folder / "a.txt"), str(folder / "b.jsonl"), "--output", str(folder / "o")])
    assert list(harvest_text.documents(given)) == ["one document", "two", "three"]
    assert (given.split, given.join, given.store) == ("all", False, "bf16")


def check_arguments(folder):
    base = ["m", "--text", str(folder / "a.txt"), "--output", "o"]
    for more, words in ((["--validation", "1"], "must be between 0 and 1"), (["--split", "test"], "invalid choice"),
                        (["--dataset", "d"], "either --text or --dataset"), (["--context", "0"], "must be positive"),
                        (["--device-map", "auto", "--device", "cpu"], "exclude each other")):
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                harvest.parse([*base, *more])
        except SystemExit as ended:
            assert ended.code == 2 and words in said.getvalue(), said.getvalue()
        else:
            raise AssertionError(f"{more} was accepted")
    os.environ.update(RANK="1", WORLD_SIZE="2")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            harvest.parse([*base, "--device-map", "auto"])
    except SystemExit:
        assert "one process uses all GPUs" in said.getvalue()
    else:
        raise AssertionError("two processes with one model")
    finally:
        del os.environ["RANK"], os.environ["WORLD_SIZE"]


def check_complete(folder):
    """index.bin has the rows that the files have."""
    try:
        import h5py
    except ImportError:
        return
    for number, rows in enumerate((5, 3)):
        with h5py.File(harvest.chunk_path(folder, number), "w") as file:
            file["layer_0/inputs"] = [[0.0] * 4] * rows
            file.attrs["harvest"] = json.dumps({"model": "m", "text": "abc"})

    class Tokenizer:
        def __len__(self):
            return 2

        def decode(self, ids, **_):
            return f"t{ids[0]}"

        def convert_ids_to_tokens(self, token):
            return f"t{token}"

    assert harvest.complete(folder, 3, {}, Tokenizer()) is None and not (folder / "index.bin").exists()
    assert harvest.complete(folder, 2, {"num_layers": 1}, Tokenizer()) == 8
    assert (folder / "index.bin").read_bytes() == bytes.fromhex("00000000 05000000 0000000000000000 01000000 03000000 0500000000000000")
    assert json.loads((folder / "metadata.json").read_text()) == {"num_layers": 1, "d_model": 4, "total_tokens": 8}
    harvest.require_same(harvest.chunk_path(folder, 0), {"model": "m", "text": "abc"})
    try:
        harvest.require_same(harvest.chunk_path(folder, 0), {"model": "m", "text": "abd"})
    except WeftError as problem:
        assert "text was 'abc', now 'abd'" in str(problem)
    else:
        raise AssertionError("another text was taken for the same")


with tempfile.TemporaryDirectory(prefix="weft_harvest_") as name:
    check_split()
    check_parts()
    check_windows()
    check_sizes()
    check_files(Path(name))
    check_arguments(Path(name))
    check_complete(Path(name))
