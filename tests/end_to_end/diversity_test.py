# SPDX-License-Identifier: Apache-2.0
"""weft lm diversity from the outside: every form of a file of answers, answers of weft lm generate, refusals. The metrics themselves:
polychromic_diversity_test.

diversity_test.py WEFT
"""
import json
import math
from pathlib import Path

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
    expected = document("answers.jsonl")
    assert expected["unit"] == "words" and [one["prompt"] for one in expected["prompts"]] == list(PROMPTS), expected
    first, second, third = expected["prompts"]
    # By hand: three answers of 3, 4 and 3 words with 10 pairs of words in all, one of them empty; 5 words of which 2 differ; one answer.
    assert [first[key] for key in ("answers", "empty", "unique")] == [4, 1, 2] and math.isclose(first["mean_length"], 10 / 3), first
    assert math.isclose(first["distinct_1"], 5 / 10) and math.isclose(first["distinct_2"], 4 / 7) and math.isclose(second["distinct_1"], 2 / 5)
    # Prompt c has no self-BLEU: the mean is that of the others.
    assert third["self_bleu"] == "nan", third
    assert math.isclose(expected["mean"]["self_bleu"], (first["self_bleu"] + second["self_bleu"]) / 2, rel_tol=1e-12), expected["mean"]
    assert "semantic" not in expected["mean"]
    for name in ("lists.jsonl", "answers.json", "answers.NDJSON"):
        assert document(name)["prompts"] == expected["prompts"], name
    assert {**document("lines.txt")["prompts"][0], "prompt": "a"} == first
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
    assert result["prompts"][0]["mean_length"] == sum(map(len, texts)) / len(texts), result  # its tokens are characters
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

    # A directory that sentence-transformers has saved: the mean over the tokens, or an error (tests/peers has the library's own files).
    weft.run("lm", "export", "model", "--output", "exported")
    modules = [{"path": "", "type": "a.Transformer"}, {"path": "1_Pooling", "type": "a.Pooling"}, {"path": "2_Normalize", "type": "a.Normalize"}]
    files = {"modules.json": modules, "1_Pooling/config.json": {"embedding_dimension": 16, "pooling_mode": "mean"},
             "config_sentence_transformers.json": {"prompts": {"query": ""}, "default_prompt_name": "query"},
             "sentence_bert_config.json": {"max_seq_length": 30, "do_lower_case": False}}
    (weft.folder / "exported/1_Pooling").mkdir()

    def write(**changes):
        for name, values in files.items():
            (weft.folder / "exported" / name).write_text(json.dumps(changes.get(Path(name).stem, values)))

    write()
    semantic = document("generated.jsonl", "--model", "exported")["mean"]["semantic"]
    assert math.isclose(semantic, result["mean"]["semantic"], rel_tol=1e-4), (semantic, result)
    for changes, code, words in [
            (dict(config={"pooling_mode": "cls"}), 2, '1_Pooling/config.json: pooling_mode is "cls"'),
            (dict(config={"pooling_mode_max_tokens": True}), 2, "pooling_mode_max_tokens is true"),
            (dict(config={"pooling_mode": "mean", "gate": 1}), 2, '"gate" is not known'),
            (dict(modules=modules[:1]), 2, 'has no module "Pooling"'),
            (dict(modules=[*modules, {"path": "3_Dense", "type": "a.Dense"}]), 2, 'the module "Dense"'),
            (dict(modules=[modules[0], {"path": "../x", "type": "a.Pooling"}]), 3, '"../x" is no directory'),
            (dict(modules=[1]), 3, "has a module without"),
            (dict(config_sentence_transformers={"prompts": {"query": "Q: "}, "default_prompt_name": "query"}), 2, 'default_prompt_name is "query"'),
            (dict(sentence_bert_config={"do_lower_case": True}), 2, "do_lower_case is true"),
            (dict(sentence_bert_config={"max_seq_length": 5}), 2, "generated.jsonl:1: a prompt of 4")]:
        write(**changes)
        printed = weft.run("lm", "diversity", "generated.jsonl", "--model", "exported", code=code)
        assert words in printed, (changes, printed)

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
