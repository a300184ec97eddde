# SPDX-License-Identifier: Apache-2.0
"""Records what the tokenizers library of Hugging Face does with parts of a tokenizer.json: make_variants.py

Each variant replaces keys of fixtures/gpt2.json. fixtures/variants.json has them with the ids of some texts, without and with
what the post-processor adds; and the tokenizer.json that Weft writes for characters and bytes, with their ids. Recorded with
tokenizers 0.23.1.
"""
import copy
import json
from pathlib import Path

from tokenizers import Tokenizer

HERE = Path(__file__).parent / "fixtures"
TEXTS = ["He'S here, they're there: the other 12345 herbs && ends.\n\n  Ein Ärger, 漢字かな ٣٤½ e\u0301  x&&y 7f3A\v\n",
         "!Lord! unto them<|tool|>unto<|tool|><|endoftext|> the lord's <|end|>\u00a0 fine\u180e"]
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    "intersection": r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
                    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "possessive": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    "hexadecimal": r"\h+|[^\h]", "word": r"\w+|\W", "optional": r"\p{L}{2}?\p{N}|[a-z[A-Z]]+|\v|[\s\S]",
    "nested": r"[^a-z&&[^aeiou]]+|[^\S\r\n]+|[^\p{L}[0-9\S]]|.|\n", "negated": r"\p{^L}+|\P{N}+",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
             r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"}


def split(pattern, behavior="Isolated", invert=False, kind="Regex"):
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": invert}


def byte_level(use_regex):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def sequence(*steps):
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": list(steps)}}


def added(id, content, special=False, normalized=True):
    return {"id": id, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": normalized, "special": special}


def template(single, ids):
    pieces = [{"Sequence": {"id": "A", "type_id": 0}} if name == "A" else {"SpecialToken": {"id": name, "type_id": 0}} for name in single]
    return {"type": "TemplateProcessing", "single": pieces, "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {name: {"id": name, "ids": [id], "tokens": [name]} for name, id in ids.items()}}


def variants(base):
    vocabulary, own = base["model"]["vocab"], base["added_tokens"]
    end = {name: vocabulary[name] for name in ("<|endoftext|>", "<|end|>")}
    yield from ((name, sequence(split(pattern), byte_level(False))) for name, pattern in PATTERNS.items())
    yield "removed_invert", sequence(split(LLAMA3, "Removed", True), byte_level(False))
    yield "isolated_invert", sequence(split(LLAMA3, "Isolated", True), byte_level(False))
    yield "string", sequence(split("e.", kind="String"), split("h", kind="String"), byte_level(True))
    yield "digits", sequence({"type": "Digits", "individual_digits": True}, byte_level(True))
    yield "runs_of_digits", sequence({"type": "Digits", "individual_digits": False}, byte_level(True))
    yield "two_splits", sequence(split(r"\p{N}{1,3}"), split(r"[一-龥぀-ゟ゠-ヿ]+"), split(PATTERNS["o200k"]), byte_level(False))
    yield "whole", {"pre_tokenizer": byte_level(False)}
    # Tokens of merges, and of one byte, that are added tokens too; two kinds of which one is looked for first.
    in_vocabulary = [added(vocabulary[t], t) for t in ("th", "!", "er")]
    yield "added_in_vocabulary", {"added_tokens": sorted(own + in_vocabulary, key=lambda t: t["id"])}
    size = len(vocabulary)
    yield "added_two_kinds", {"added_tokens": [*own, added(size, "to<|tool|>", normalized=False), added(size + 1, "unto"),
                                               added(size + 2, "<|tool|>", special=True, normalized=False)]}
    yield "begin", {"post_processor": {"type": "Sequence", "processors": [byte_level(True), template(["<|end|>", "A"], end)]}}
    yield "begin_and_end", {"post_processor": template(["<|end|>", "<|end|>", "A", "<|endoftext|>"], end)}
    yield "roberta", {"post_processor": {"type": "RobertaProcessing", "sep": ["<|endoftext|>", end["<|endoftext|>"]],
                                         "cls": ["<|end|>", end["<|end|>"]], "trim_offsets": True, "add_prefix_space": False}}


def own_kinds():
    """The files that Weft writes for characters and bytes."""
    empty = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "post_processor": None}
    characters = sorted(set("".join(TEXTS)))
    words = {**{c: i for i, c in enumerate(characters)}, "<|UNK|>": len(characters), "<|EOS|>": len(characters) + 1}
    yield "character", {**empty, "pre_tokenizer": split("[\\s\\S]"), "decoder": {"type": "Fuse"},
                        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<|UNK|>"}}
    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    others = [b for b in range(256) if b not in printable]
    alphabet = {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(others)}}
    pieces = {**{alphabet[b]: b for b in range(256)}, "<|EOS|>": 256}
    yield "bytes", {**empty, "pre_tokenizer": byte_level(False), "decoder": byte_level(True),
                    "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                              "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                              "vocab": pieces, "merges": []}}


def main():
    base = json.loads((HERE / "gpt2.json").read_text())
    recorded = {"texts": TEXTS, "variants": {}, "own": {}}
    for name, changes in variants(base):
        file = copy.deepcopy(base)
        file.update(changes)
        tokenizer = Tokenizer.from_str(json.dumps(file))
        ids = [[tokenizer.encode(text, add_special_tokens=adds).ids for text in TEXTS] for adds in (False, True)]
        recorded["variants"][name] = {"changes": changes, "ids": ids[0]}
        if ids[1] != ids[0]:
            recorded["variants"][name]["with_special_tokens"] = ids[1]
    for name, file in own_kinds():
        tokenizer = Tokenizer.from_str(json.dumps(file))
        texts = [text if name == "bytes" else text + "\U0001f600" for text in TEXTS]
        ids = [tokenizer.encode(text).ids for text in texts]
        if name == "bytes":
            assert [tokenizer.decode(i) for i in ids] == texts
        recorded["own"][name] = {"file": file, "texts": texts, "ids": ids}
    (HERE / "variants.json").write_text(json.dumps(recorded, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
