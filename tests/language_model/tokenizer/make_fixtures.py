# SPDX-License-Identifier: Apache-2.0
"""Records what the tokenizers library of Hugging Face does with byte-level BPE: make_fixtures.py TEXT

Trains small models on the first 200 kB of TEXT (kjv_train.txt) and writes to fixtures/

  gpt2.json, llama3.json   tokenizer.json files; merges as "a b" and as ["a", "b"]; added tokens; Llama 3 with ignore_merges
  expected.json            texts, and for each model their pieces and ids

Recorded with tokenizers 0.22.1. tiktoken 0.12.0, if installed, checks the ids as a second opinion.
"""
import json
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).parent / "fixtures"
PATTERNS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
TEXTS = [
    "", "a", " ", "\n", "The LORD is my shepherd; I shall not want.", "I'm here, you're there; we'll see what they've done, he'd said it's John's.",
    "I'M HERE, YOU'RE THERE, 'S 'T 'LL 'D'VE", "don't  stop   now    ", "  leading and trailing  ", "tab\tand\t\ttabs \t mixed",
    "line\nbreaks\r\n\r\nand\n\n\nmore \n \n end\n", "1 12 123 1234 12345 1234567890 3.14159 1,000,000 ½ ² Ⅷ ٣٤ 五",
    "Naïve café, déjà vu: e\u0301 a\u0300, Ærøskøbing, Straße, ÅNGSTRÖM", "Ωμέγα и ещё русский текст, שלום עולם, مرحبا بالعالم",
    "中文文本没有空格。日本語のテキスト、한국어 텍스트", "emoji 😀😃 👨‍👩‍👧‍👦 🇩🇪 👍🏽 and \u2764\ufe0f",
    "non\u00a0breaking\u00a0\u00a0spaces\u2003em\u3000ideographic\u2028line\u2029paragraph\u0085next", "zero\u200bwidth\ufeffmark\u180evowel \u180e separator",
    "\x1c\x1d\x1e\x1f control \x00\x01\x7f characters \x0b\x0c", "'ſ 'K x'ſ and don’t ‘quotes’ “double”", "snake_case CamelCase kebab-case a+b=c <b>x</b> {\"k\": [1, 2]}",
    "!!!???...---===   ###\n\n$$$ %%% &&&", "https://example.org/path?q=1&r=2#frag user@example.org", "<|endoftext|>", "one<|endoftext|>two <|endoftext|> three<|endoftext",
    "<|endoftext|><|endoftext|>x<|end|>y<|end|><|endoftext|>", "ends with spaces and newline   \n", "a" * 300, " " * 100 + "x", "ab" * 100 + " " + "abc" * 50, "\n" * 50 + " " * 7,
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness was upon the face of the deep.",
    "\U0001d54f\U0001d556 math \u0660\u0661 \u0966 digits \u00b2\u00b3 x\u0327", "Ǆ ǅ ǆ ŉ ﬁ ﬆ İ ı", "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0928\u092e\u0938\u094d\u0924\u0947",
]


def pre_tokenizer(name):
    if name == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PATTERNS[name]), "isolated"),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def train(name, text, size):
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama3"))
    tokenizer.pre_tokenizer = pre_tokenizer(name)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<|endoftext|>", "<|end|>"] if name == "gpt2" else []))
    if name == "llama3":
        tokenizer.add_special_tokens(["<|endoftext|>", "<|end|>"])
    return tokenizer


def second_opinion(name, file, texts, ids):
    try:
        import tiktoken
    except ImportError:
        return
    alphabet = {}
    extra = 256
    for byte in range(256):
        printable = 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174
        alphabet[chr(byte if printable else extra)] = byte
        extra += not printable
    special = {token["content"]: token["id"] for token in file["added_tokens"]}
    ranks = {bytes(alphabet[c] for c in token): id for token, id in file["model"]["vocab"].items() if token not in special}
    encoding = tiktoken.Encoding("x", pat_str=PATTERNS[name], mergeable_ranks=ranks, special_tokens=special)
    for text, expected in zip(texts, ids):
        found = encoding.encode(text, allowed_special="all")
        if found != expected:
            print(f"{name}: tiktoken differs on {text[:40]!r}")


def main():
    text = Path(sys.argv[1]).read_text()[:200_000] + " ".join(TEXTS[4:]) * 3
    expected = {"texts": TEXTS, "models": {}}
    HERE.mkdir(exist_ok=True)
    for name, size in (("gpt2", 700), ("llama3", 600)):
        tokenizer = train(name, text, size)
        file = json.loads(tokenizer.to_str())
        if name == "gpt2":
            file["model"]["merges"] = [" ".join(pair) for pair in file["model"]["merges"]]
        (HERE / f"{name}.json").write_text(json.dumps(file, ensure_ascii=False, separators=(",", ":")) + "\n")
        ids = [tokenizer.encode(t, add_special_tokens=False).ids for t in TEXTS]
        assert all(tokenizer.decode(i, skip_special_tokens=False) == t for i, t in zip(ids, TEXTS))
        split = pre_tokenizers.Split(Regex(PATTERNS[name]), "isolated")
        expected["models"][name] = {"pieces": [[piece for piece, _ in split.pre_tokenize_str(t)] for t in TEXTS], "ids": ids}
        second_opinion(name, file, TEXTS, ids)
    (HERE / "expected.json").write_text(json.dumps(expected, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
