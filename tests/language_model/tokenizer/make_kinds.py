# SPDX-License-Identifier: Apache-2.0
"""Records the ids and texts that the tokenizers library makes with the tokenisers of kinds.py: make_kinds.py TEXT

fixtures/kinds.json: the texts, the tokenizer.json files (what differs from a base), and for each text a hash of its ids and of the text
that is decoded from them. TEXT: the first 200 kB are what the vocabularies are trained on (kjv_train.txt). Recorded with tokenizers 0.23.3
and sentencepiece 0.2.3.
"""
import json
import sys
from pathlib import Path

import kinds
from tokenizers import Tokenizer

PLACE = Path(__file__).parent / "fixtures/kinds.json"


def fnv(text):
    """FNV-1a of 32 bits."""
    value = 0x811C9DC5
    for byte in text.encode():
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return f"{value:08x}"


def differences(file, base):
    return {key: value for key, value in file.items() if base.get(key, 0) != value}


def main():
    text = Path(sys.argv[1]).read_text()[:200_000]
    texts, bases = kinds.texts(), kinds.bases(text)
    names = {name: base for name, base, _, _ in kinds.changes()}
    recorded = {"texts": texts, "bases": bases, "kinds": {}}
    for name, file in kinds.kinds(text):
        tokenizer, base = Tokenizer.from_str(json.dumps(file)), bases[names[name]]
        encoded = [tokenizer.encode(one, add_special_tokens=False).ids for one in texts]
        recorded["kinds"][name] = {
            "base": names[name], "keys": {key: value for key, value in differences(file, base).items() if key != "model"},
            "model": differences(file["model"], base["model"]),
            "ids": "".join(fnv(" ".join(map(str, ids))) for ids in encoded),
            "decoded": "".join(fnv(tokenizer.decode(ids, skip_special_tokens=False)) for ids in encoded)}
    PLACE.write_text(json.dumps(recorded, ensure_ascii=False, separators=(",", ":"), sort_keys=True) + "\n")
    print(f"{PLACE}: {PLACE.stat().st_size} bytes, {len(texts)} texts, {len(recorded['kinds'])} kinds")


if __name__ == "__main__":
    main()
