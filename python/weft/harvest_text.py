# SPDX-License-Identifier: Apache-2.0
"""The text of a harvest: documents, their division into training and validation, files of text, and windows of tokens. No model is needed."""
import hashlib
import json
from pathlib import Path

from weft.errors import USAGE, WeftError

SAMPLE = 1 << 16        # characters from which the length of a token is estimated


def documents(arguments):
    """All documents but empty ones, of both splits."""
    if arguments.dataset:
        import datasets
        loaded = datasets.load_dataset(arguments.dataset, arguments.dataset_config, split=arguments.dataset_split, streaming=True)
        found = (row[arguments.column] for row in loaded)
    else:
        found = (text for name in arguments.text for text in documents_of(Path(name), arguments.column))
    return (text for text in found if text.strip())


def documents_of(path, column):
    if path.suffix == ".jsonl":
        with open(path, encoding="utf-8") as file:
            for line in file:
                if line.strip():
                    yield json.loads(line)[column]
    else:
        yield path.read_text(encoding="utf-8")


def is_validation(text, fraction):
    """True for about this fraction of all documents, by their text alone: equal documents are on one side."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2 ** 64


def of_split(texts, split, fraction):
    if split == "all":
        return texts
    return (text for text in texts if is_validation(text, fraction) == (split == "validation"))


def parts(texts, size):
    """Lists of (text, begins a document, ends one), the text of one file each: about `size` characters, found without a tokenizer.
    A document of more is cut before white space."""
    part, room = [], size
    for text in texts:
        if part and len(text) > room:
            yield part
            part, room = [], size
        begins = True
        while len(text) > size:
            cut = max(text.rfind(blank, 1, size + 1) for blank in (" ", "\n"))
            cut = cut if cut > size // 2 else size
            yield [(text[:cut], begins, False)]
            text, begins = text[cut:], False
        part.append((text, begins, True))
        room -= len(text)
    if part:
        yield part


def windows(part, encode, length, join, end):
    """[(ids, offsets in them at which documents begin)], of at most `length` ids each. `encode`: text -> ids, without special ones. `end`: the
    id between joined documents, or None."""
    found, pending, starts = [], [], []

    def cut(whole):
        while len(pending) >= length or (whole and pending):
            found.append((pending[:length], [start for start in starts if start < length]))
            del pending[:length]
            starts[:] = [start - length for start in starts if start >= length]

    for text, begins, ends in part:
        if begins or not pending:
            starts.append(len(pending))
        pending += encode(text)
        if join and ends and end is not None:
            pending.append(end)
        if starts and starts[-1] == len(pending):
            starts.pop()        # nothing but what the tokenizer drops
        cut(whole=not join)
    cut(whole=True)
    return found


def characters_per_token(texts, encode):
    """The mean over the first SAMPLE characters."""
    characters = tokens = 0
    for text in texts:
        text = text[:SAMPLE - characters]
        characters += len(text)
        tokens += len(encode(text))
        if characters >= SAMPLE:
            break
    if tokens == 0:
        raise WeftError(USAGE, "the text has no tokens in this split; give more text, or another --split or --validation")
    return characters / tokens
