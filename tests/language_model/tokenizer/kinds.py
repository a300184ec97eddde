# SPDX-License-Identifier: Apache-2.0
"""Tokenisers of all kinds that are read, made with the tokenizers library, and odd texts.

kinds(TEXT) yields (name, contents of a tokenizer.json); texts() are the texts.
"""
import copy
import json
import random

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

MARK = "▁"
SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
FRAGMENTS = [
    "In the beginning", "the LORD", "unto", "And God said,", "heaven and earth", "a", "I", ".", ",", "!", "don't", "It's", "WE'LL", "(x)", "[y]",
    " ", "  ", "   ", "\t", "\n", "\r\n", "\r", "\u00a0", "\u2003", "\u3000", "\u2028", "\u0085", "\v", "\f", "\u200b", "\u200c", "\u200d", "\ufeff",
    "\u0000", "\u0001", "\u001f", "\u007f", "\u0080", "\u00ad", "\ufffd", "\ufffe", "\ue000", "\U0010fffd", "\U000e0041",
    "é", "e\u0301", "a\u0308\u0323", "\u0301", "q\u0323\u0307", "Å", "\u212b", "ﬁ", "ﬀ", "ſ", "ß", "ẞ", "İ", "ı", "I\u0307", "ǅ", "ŉ", "ǰ", "Σς", "ΑΣ", "\u1fb3",
    "한국어", "\u1112\u1161\u11ab", "\u1100\u1161", "日本語", "カタカナ", "ｶﾞ", "ひらがな", "ﾊﾟ", "漢字", "\U00020000", "\uf900", "中文。", "ＡＢｃ１２", "㍿", "Ⅷ", "½", "²³", "٣٤",
    "५६", "①", "\ufdfa", "\u2126", "\u1e9b\u0323", "Привет", "שלום", "\u202bمرحبا\u202c", "हिन्दी", "क्ष", "ไทย", "ா", "👍🏽", "👨‍👩‍👧", "🇩🇪", "e\u20dd", "☃️", "𝔘𝕟", "𐍈", "ⓐ", "🅰",
    "1234567", "12,345.67", "0x1F", "1e-9", "$10", "…", "—", "“q”", "©™", "x²≥0", "`a`", "~^|", "a_b", "snake_case", "CamelCase", "http://a.org/?q=1&r=%20",
    "▁", "▁▁", "a▁b", "<0x41>", "<0x", "<unk>", "<s>", "</s>", "<pad>", "<mask>", "<mas", "<|tool|>", "<|to", "tool|>", "wordy", "sword", "words", "STRASSE", "straße",
    "##ed", "x" * 120, "ab" * 60, "!" * 40, " " * 40, "\n" * 20, "1" * 30, "é" * 30, "\u0301" * 20, "n't", "do not", "lstrip", "rstrip", "the", "THE",
]


def texts():
    """More than a thousand: fragments alone, pairs with and without a space, and longer mixtures."""
    draw = random.Random(7)
    found = ["", *FRAGMENTS, *(f" {one}" for one in FRAGMENTS), *(f"{one} " for one in FRAGMENTS[:120:2])]
    while len(found) < 1050:
        found.append(draw.choice(["", "", " ", "the "]).join(draw.choice(FRAGMENTS[:-12 if draw.random() < 0.9 else None])
                                                           for _ in range(draw.choice([2, 2, 3, 4, 6]))))
    return found


def added(id, content, special=False, normalized=False, lstrip=False, rstrip=False, single_word=False):
    return {"id": id, "content": content, "single_word": single_word, "lstrip": lstrip, "rstrip": rstrip, "normalized": normalized, "special": special}


def flagged():
    """Added tokens with every flag."""
    flags = [("<mask>", dict(lstrip=True)), ("<|tool|>", dict(rstrip=True)), ("word", dict(single_word=True)), ("the", dict(single_word=True, normalized=True)),
             ("lstrip", dict(lstrip=True, normalized=True)), ("rstrip", dict(rstrip=True, lstrip=True)), ("STRASSE", dict(normalized=True)), ("<|to", {}),
             ("Привет", dict(normalized=True)), ("漢", dict(special=True, single_word=True)), ("\n\n", {}), ("LORD", dict(normalized=True, special=True))]
    return [added(0, content, **kinds) for content, kinds in flags]


def saved(tokenizer, names):
    """The contents of its tokenizer.json, with these added tokens alone."""
    file = json.loads(tokenizer.to_str())
    file["added_tokens"] = [one for one in file["added_tokens"] if one["content"] in names]
    return file


def byte_level(text):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(vocab_size=420, special_tokens=["<|endoftext|>"], show_progress=False,
                                                              initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return saved(tokenizer, ["<|endoftext|>"])


def sentencepiece_bpe(text):
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(vocab_size=620, special_tokens=SPECIAL + bytes_, show_progress=False,
                                                              initial_alphabet=["é", "日", "\n"]))
    return saved(tokenizer, SPECIAL)


def unigram(text):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator([text], trainers.UnigramTrainer(vocab_size=360, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False,
                                                                  initial_alphabet=["é", "日", "\n"]))
    file = saved(tokenizer, SPECIAL)
    scores = [score for _, score in file["model"]["vocab"]]
    # Equal scores, so that there are ties.
    file["model"]["vocab"] += [[token, round(scores[-1], 1)] for token in ("ab", "bab", "aba", "xx", "xxx", "THE", "日本", "the▁", "ae", "nd▁")
                               if token not in dict(file["model"]["vocab"])]
    file["model"]["vocab"] = [[token, round(score, 3)] for token, score in file["model"]["vocab"]]
    return file


def wordpiece(text):
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator([text, "日 本 語 한 국 ! ? . , ' strasse 1 2 3 ##e"], trainers.WordPieceTrainer(vocab_size=400, special_tokens=names, show_progress=False))
    tokenizer.decoder = decoders.WordPiece()
    file = saved(tokenizer, names)
    ids = {name: file["model"]["vocab"][name] for name in names}
    file["post_processor"] = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                                                                      {"SpecialToken": {"id": "[SEP]", "type_id": 0}}], "pair": [],
                              "special_tokens": {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in ("[CLS]", "[SEP]")}}
    return file


def sequence(kind, *steps):
    names = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
    return {kind: {"type": "Sequence", names[kind]: list(steps)}}


def replace(old, new, kind="String"):
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def split(pattern, behavior, invert=False, kind="Regex"):
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": invert}


def metaspace(scheme="always", splits=True):
    return {"type": "Metaspace", "replacement": MARK, "prepend_scheme": scheme, "split": splits}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT2_BYTES = {**BYTES, "use_regex": True}
PREFIXED = {**GPT2_BYTES, "add_prefix_space": True}
NFC, NFD, NFKC, NFKD, LOWER, ACCENTS = ({"type": one} for one in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents"))
TO_SPACES, TO_BYTES, FUSE, STRIP = replace(MARK, " "), {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}
LLAMA_DECODER = sequence("decoder", TO_SPACES, TO_BYTES, FUSE, STRIP)
SPACES = [added(0, " " * n, normalized=True) for n in (4, 3, 2)]


def small_charsmap():
    """The precompiled_charsmap of a few rules of SentencePiece; None without the package."""
    try:
        import io
        import tempfile
        from pathlib import Path

        import sentencepiece
        from sentencepiece import sentencepiece_model_pb2
    except ImportError:
        return None
    rules = {"ﬁ": "fi", "Ａ": "A", "Ｂ": "B", "１": "1", "\u3000": " ", "\u00a0": " ", "e\u0301": "\u00e9", "½": "1/2", "①": "1", "\u200b": "", "ｶﾞ": "ガ", "\u0001": "", "İ": "i", "㍿": "株式会社"}
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "rules.tsv"
        table.write_text("".join(" ".join(f"{ord(c):X}" for c in old) + "\t" + " ".join(f"{ord(c):X}" for c in new) + "\n" for old, new in rules.items()))
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(["In the beginning God created the heaven and the earth"] * 20), model_writer=model,
                                                 vocab_size=24, normalization_rule_tsv=str(table), minloglevel=2)
    import base64
    read = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    return base64.b64encode(read.normalizer_spec.precompiled_charsmap).decode()


def bases(text):
    return {"byte_level": byte_level(text), "sentencepiece_bpe": sentencepiece_bpe(text), "unigram": unigram(text), "wordpiece": wordpiece(text)}


def changes():
    """(name, base, keys that replace those of the base, keys that replace those of its model). Ids of added tokens are set by assembled()."""
    end = [added(0, "<|endoftext|>", special=True)]
    special = [added(0, name, special=True) for name in SPECIAL]
    none = {"normalizer": None, "pre_tokenizer": None, "post_processor": None}
    yield "qwen", "byte_level", {"normalizer": NFC, **sequence("pre_tokenizer", split(QWEN, "Isolated"), BYTES)}, {}
    yield "pythia", "byte_level", {"normalizer": NFC, "pre_tokenizer": GPT2_BYTES, "added_tokens": end + SPACES}, {}
    yield "nfkc_lowercase", "byte_level", {**sequence("normalizer", NFKC, LOWER), "pre_tokenizer": PREFIXED, "added_tokens": end + flagged()}, {}
    yield "flags", "byte_level", {"added_tokens": end + flagged(), "pre_tokenizer": GPT2_BYTES}, {"ignore_merges": True}
    yield "splits", "byte_level", {**sequence("normalizer", NFD, {"type": "Strip", "strip_left": True, "strip_right": True}), **sequence(
        "pre_tokenizer", split(r"\p{Lu}", "MergedWithNext"), split(r"\d{1,2}", "MergedWithPrevious"), split("[aeiou]", "Contiguous", True),
        split("t", "Isolated", kind="String"), split(r"[!?]+", "Removed"), {"type": "Digits", "individual_digits": True},
        {"type": "Punctuation", "behavior": "Isolated"}, BYTES)}, {}
    yield "llama", "sentencepiece_bpe", {**none, **sequence("normalizer", {"type": "Prepend", "prepend": MARK}, replace(" ", MARK)), **LLAMA_DECODER,
                                         "added_tokens": special}, {}
    yield "llama_first", "sentencepiece_bpe", {**none, "pre_tokenizer": metaspace("first", False), **LLAMA_DECODER, "added_tokens": special + flagged()}, {}
    yield "gemma", "sentencepiece_bpe", {**none, "normalizer": replace(" ", MARK), "pre_tokenizer": split(" ", "MergedWithPrevious", kind="String"),
                                         **sequence("decoder", TO_SPACES, TO_BYTES, FUSE), "added_tokens": special + flagged()}, {}
    yield "unknown", "sentencepiece_bpe", {**none, **sequence("normalizer", ACCENTS, LOWER), "pre_tokenizer": metaspace("never"), "decoder": metaspace("never")}, {
        "byte_fallback": False, "fuse_unk": False}
    yield "unknown_fused", "sentencepiece_bpe", {**none, **sequence("pre_tokenizer", {"type": "Whitespace"}, metaspace()), "decoder": metaspace()}, {
        "byte_fallback": False, "ignore_merges": True}
    yield "t5", "unigram", {**none, "normalizer": replace(" {2,}", MARK, "Regex"), "pre_tokenizer": metaspace(), "decoder": metaspace(), "added_tokens": special}, {}
    yield "xlm", "unigram", {**none, "normalizer": NFKC, **sequence("pre_tokenizer", {"type": "WhitespaceSplit"}, metaspace()), "decoder": metaspace(),
                             "added_tokens": special + [added(0, "<mask>", special=True, lstrip=True)]}, {}
    yield "unigram_whole", "unigram", {**none, **sequence("normalizer", NFKD, ACCENTS, LOWER, {"type": "Strip", "strip_left": False, "strip_right": True}),
                                       "pre_tokenizer": metaspace("first", False), "decoder": metaspace("first")}, {}
    yield "unigram_bytes", "unigram", {**none, "pre_tokenizer": metaspace("first"), **LLAMA_DECODER, "added_tokens": special + flagged()}, {"byte_fallback": True}
    yield "precompiled", "unigram", {**none, **sequence("normalizer", {"type": "Precompiled", "precompiled_charsmap": None}, replace(" {2,}", " ", "Regex")),
                                     "pre_tokenizer": metaspace(), "decoder": metaspace()}, {}
    yield "bert", "wordpiece", {}, {}
    yield "bert_cased", "wordpiece", {"normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
                                                     "lowercase": False}, "decoder": None}, {"max_input_chars_per_word": 20}


def assembled(base, keys, model):
    """A tokenizer.json; ids of added tokens that the vocabulary has not are the next ones."""
    file = copy.deepcopy(base)
    file.update(copy.deepcopy(keys))
    file["model"].update(model)
    vocabulary = file["model"]["vocab"]
    if model.get("byte_fallback") and isinstance(vocabulary, list):
        vocabulary += [[f"<0x{byte:02X}>", 0.0] for byte in range(256)]
    ids = {token: i for i, (token, _) in enumerate(vocabulary)} if isinstance(vocabulary, list) else vocabulary
    following = len(vocabulary)
    for token in file["added_tokens"]:
        if token["content"] in ids:
            token["id"] = ids[token["content"]]
        else:
            token["id"] = following
            following += 1
    return file


def kinds(text):
    charsmap, all_bases = small_charsmap(), bases(text)
    for name, base, keys, model in changes():
        if name == "precompiled":
            keys["normalizer"]["normalizers"][0]["precompiled_charsmap"] = charsmap
        if name != "precompiled" or charsmap:
            yield name, assembled(all_bases[base], keys, model)
