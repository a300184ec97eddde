# SPDX-License-Identifier: Apache-2.0
"""weft lm diversity from the outside: metrics against an implementation of their definitions, answers of weft lm generate, refusals.

diversity_test.py WEFT
"""
import collections
import json
import math

import program

PROMPTS = {"a": ["the cat sat", "the cat ran away", "", "the cat sat"], "b": ["one two one two", "one"], "c": ["", "alone"]}
TEXT = "the cat sat on the mat; the dog ran to the log.\n" * 40
INPUT = """
[run]
steps = 8
[data]
train = "text.txt"
batch_tokens = 128
sequence = 32
[language_model]
layers = 1
heads = 2
d_model = 16
[optimizer]
warmup_steps = 1
"""


def grams(tokens, n):
    return [tuple(tokens[i:i + n]) for i in range(len(tokens) - n + 1)]


def distinct(answers, n):
    every = [gram for answer in answers for gram in grams(answer, n)]
    return len(set(every)) / len(every) if every else math.nan


def bleu2(answer, references):
    precision = []
    for n, smoothing in ((1, 0), (2, 1)):
        own = collections.Counter(grams(answer, n))
        most = collections.Counter()
        for reference in references:
            most |= collections.Counter(grams(reference, n))
        precision.append((sum((own & most).values()) + smoothing) / (sum(own.values()) + smoothing))
    closest = min((abs(len(r) - len(answer)), len(r)) for r in references)[1]
    return min(1, math.exp(1 - closest / len(answer))) * math.sqrt(precision[0] * precision[1])


def expected(answers):
    kept = [answer for answer in answers if answer]
    values = {"answers": len(answers), "empty": len(answers) - len(kept), "unique": len({tuple(a) for a in kept}),
              "mean_length": sum(map(len, kept)) / len(kept)}
    for n in (1, 2, 3):
        values[f"distinct_{n}"] = distinct(kept, n)
        own = [distinct([a], n) for a in kept if len(a) >= n]
        values[f"mean_distinct_{n}"] = sum(own) / len(own) if own else math.nan
    values["self_bleu"] = sum(bleu2(a, kept[:i] + kept[i + 1:]) for i, a in enumerate(kept)) / len(kept) if len(kept) > 1 else math.nan
    return values


def check(entry, answers, where):
    for key, value in expected(answers).items():
        assert math.isclose(float(entry[key]), value, rel_tol=1e-12) or (math.isnan(value) and entry[key] == "nan"), (where, key, entry[key], value)


def test(weft):
    def document(*arguments):
        printed = weft.run("lm", "diversity", *arguments, "--json", "--quiet")
        return json.loads(printed[printed.index("{"):])

    # In words: an object per answer, an object per prompt, and lines of text.
    (weft.folder / "answers.jsonl").write_text("".join(
        json.dumps({"prompt": prompt, "text": text}) + "\n" for prompt, texts in PROMPTS.items() for text in texts))
    (weft.folder / "lists.jsonl").write_text("".join(json.dumps({"id": p, "prompt": "?", "answers": t}) + "\n" for p, t in PROMPTS.items()))
    for name in ("answers.json", "answers.NDJSON"):  # the same lines
        (weft.folder / name).write_text((weft.folder / "answers.jsonl").read_text())
    (weft.folder / "objects.txt").write_text((weft.folder / "answers.jsonl").read_text())
    (weft.folder / "lines.txt").write_text("\n".join(PROMPTS["a"]) + "\n")
    words = {prompt: [text.split() for text in texts] for prompt, texts in PROMPTS.items()}
    for name in ("answers.jsonl", "lists.jsonl", "answers.json", "answers.NDJSON"):
        result = document(name)
        assert result["unit"] == "words" and [one["prompt"] for one in result["prompts"]] == list(PROMPTS), result
        for entry in result["prompts"]:
            check(entry, words[entry["prompt"]], name)
        # Prompt c has one answer, which has no self-BLEU: the mean is that of the others.
        mean = sum(expected(words[p])["self_bleu"] for p in "ab") / 2
        assert math.isclose(result["mean"]["self_bleu"], mean, rel_tol=1e-12), result["mean"]
        assert "semantic" not in result["mean"]
    check(document("lines.txt")["prompts"][0], words["a"], "lines.txt")
    printed = weft.run("lm", "diversity", "answers.jsonl")
    rows = printed.splitlines()
    assert "distinct-2" in rows[-5] and "words" in rows[-5] and rows[-1].startswith("mean"), printed
    assert rows[-2].split()[:5] == ["3", "c", "2", "1", "1"] and rows[-2].split()[-1] == "-", printed

    # In the tokens of a model, with the distance of embeddings: answers that it has generated.
    (weft.folder / "text.txt").write_text(TEXT)
    (weft.folder / "input.toml").write_text(INPUT)
    weft.run("lm", "train", "input.toml", "--output", "model")
    printed = weft.run("lm", "generate", "model", "--prompt", "the ", "--samples", "6", "--max-new-tokens", "20", "--jsonl")
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    (weft.folder / "generated.jsonl").write_text("".join(line + "\n" for line in lines))
    texts = [json.loads(line)["text"] for line in lines]
    result = document("generated.jsonl", "--model", "model")
    assert result["unit"] == "tokens" and "model" in result["model"], result
    check(result["prompts"][0], [list(text) for text in texts], "generated.jsonl")  # its tokens are characters
    assert 0 < result["prompts"][0]["semantic"] < 2, result
    # Equal answers have no distance; the same answers in another order and beside other prompts have the same.
    (weft.folder / "equal.jsonl").write_text(
        json.dumps({"prompt": "the cat", "answers": [" sat"] * 3 + [""]}) + "\n"
        + json.dumps({"prompt": "the ", "answers": texts[::-1]}) + "\n" + json.dumps({"prompt": "a", "answers": ["t"]}) + "\n")
    equal = document("equal.jsonl", "--model", "model")["prompts"]
    assert abs(equal[0]["semantic"]) < 1e-10 and equal[0]["empty"] == 1, equal
    assert math.isclose(equal[1]["semantic"], result["prompts"][0]["semantic"], rel_tol=1e-4), (equal[1], result)
    assert equal[2]["semantic"] == "nan", equal
    assert "semantic" in weft.run("lm", "diversity", "equal.jsonl", "--model", "model")

    # Refusals.
    for name, text in [("broken", '{"prompt": "a"'), ("list", "[1]"), ("number", '{"prompt": 1, "text": "x"}'),
                       ("neither", '{"prompt": "a"}'), ("element", '{"prompt": "a", "answers": [1]}')]:
        (weft.folder / f"{name}.jsonl").write_text('{"prompt": "a", "text": "x"}\n' + text + "\n")
        printed = weft.run("lm", "diversity", f"{name}.jsonl", code=3)
        assert f"{name}.jsonl:2: " in printed, printed
    (weft.folder / "latin.txt").write_bytes(b"caf\n\xe9\n")
    (weft.folder / "empty.txt").write_text("")
    (weft.folder / "other.txt").write_text("\u20ac\n")
    for arguments, code, words in [(("latin.txt",), 3, "latin.txt:2: not UTF-8"), (("empty.txt",), 3, "empty.txt: is empty"),
                                   (("objects.txt",), 3, "objects.txt: its lines are JSON objects"),
                                   (("nowhere.txt",), 2, "nowhere.txt"), (("other.txt", "--model", "nowhere"), 2, "nowhere"),
                                   (("other.txt", "--model", "model"), 3, "other.txt:1"), ((), 2, "needs its FILE")]:
        printed = weft.run("lm", "diversity", *arguments, code=code)
        assert words in printed, (arguments, printed)


program.main(test)
