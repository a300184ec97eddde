# SPDX-License-Identifier: Apache-2.0
"""Encoders of sentences: distances by weft lm diversity --embedder are those of a reference in float64; weft lm polychromic trains on them,
equal on 1 and 2 ranks, resumes bit for bit; refusals. tests/peers has real ones.

sentence_encoder_test.py WEFT
"""
import itertools
import json
import struct

import numpy as np

import bert
import program

TEXTS = ["God created the heaven and the earth.", "darkness was upon the face of the deep;", "let there be light", ",", "a b c",
         "the waters called he seas, and god saw that it was good; and the evening and the morning were the third day."]
INPUT = """
[run]
steps = {steps}
[data]
train = "text.txt"
validation_fraction = 0.2
tokens = "character"
batch_tokens = 256
sequence = 32
[language_model]
layers = 1
heads = 2
d_model = 16
{initial}
[optimizer]
warmup_steps = 1
"""
POLYCHROMIC = """
[polychromic]
embedder = "encoder"
every = 1
prompts = 2
samples = 4
set_size = 2
prompt_tokens = 6
max_new_tokens = 8
evaluation_prompts = 2
"""


def distance(embeddings):
    """Mean of 1 - cosine over the pairs."""
    embeddings = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    return np.mean([1 - a @ b for a, b in itertools.combinations(embeddings, 2)])


def measured(weft, directory, texts, code=0):
    (weft.folder / "answers.jsonl").write_text("".join(json.dumps({"prompt": "p", "text": text}) + "\n" for text in texts))
    return weft.run("lm", "diversity", "answers.jsonl", "--embedder", directory, "--json", code=code)


def agrees(weft):
    # Of 256 texts the tokens of several forward passes.
    many = [" ".join(TEXTS[i % 6].split()[:1 + i % 7]) for i in range(256)]
    for name, options, texts in [("plain", {}, TEXTS), ("many", {}, many), ("prefix", dict(prefix="bert.", dtype="F16"), TEXTS),
                                 ("tanh", dict(hidden_act="gelu_new", num_hidden_layers=3), TEXTS), ("cut", dict(limit=20), TEXTS)]:
        tensors = bert.write(weft.folder / name, **options)
        config = {key: value for key, value in options.items() if key in bert.CONFIG}
        ids = [bert.ids_of(text, options.get("limit") or bert.CONFIG["max_position_embeddings"]) for text in texts]
        expected = distance(np.array([bert.embedding(tensors, one, config) for one in ids]))
        printed = measured(weft, name, texts)
        found = json.loads(printed[printed.index("{"):])["mean"]["semantic"]
        # Cosines of vectors of which each component has had some hundred operations in fp32.
        assert abs(found - expected) < 1e-5 * expected, (name, found, expected)
        assert ("was cut after" in printed) == (max(map(len, ids)) > 19 and name in ("cut", "plain", "prefix", "tanh")), (name, printed)
    # An empty answer has no embedding; it is counted, as with a model.
    printed = measured(weft, "plain", ["a b", "", "a b"])
    result = json.loads(printed[printed.index("{"):])["mean"]
    assert abs(result["semantic"]) < 1e-10 and result["empty"] == 1, result


def refusals(weft):
    def refused(name, words, code=2, limit=None, **changes):
        bert.write(weft.folder / name, limit=limit)
        (weft.folder / name / "config.json").write_text(json.dumps({**bert.CONFIG, **changes}))
        printed = measured(weft, name, TEXTS, code=code)
        assert words in printed, (name, printed)

    refused("roberta", 'model_type is "roberta"', model_type="roberta")
    refused("relative", "position_embedding_type", position_embedding_type="relative_key")
    refused("relu", '"hidden_act" = "relu"', hidden_act="relu")
    refused("decoder", '"is_decoder" is true', is_decoder=True)
    refused("trick", '"trick" is not known', trick=1)
    refused("huge", '"hidden_size"', hidden_size=1 << 27)
    refused("layers", "num_hidden_layers", num_hidden_layers=1 << 20)
    refused("short", "nothing of a text is left", limit=2)
    bert.write(weft.folder / "cls")
    (weft.folder / "cls/1_Pooling/config.json").write_text('{"pooling_mode_cls_token": true}')
    assert "pooling_mode_cls_token is true" in measured(weft, "cls", TEXTS, code=2)
    # Damaged files: an error with the place, and no memory by the numbers in them.
    for change, words in [(dict(num_hidden_layers=3), "encoder.layer.2.attention.self.query.weight"),
                          (dict(num_hidden_layers=1), "belongs to no encoder of 1 layers"), (dict(intermediate_size=41), "has shape [40, 24]")]:
        bert.write(weft.folder / "sizes")
        (weft.folder / "sizes/config.json").write_text(json.dumps({**bert.CONFIG, **change}))
        assert words in measured(weft, "sizes", TEXTS, code=3), change
    weights = (weft.folder / "sizes/model.safetensors").read_bytes()
    bert.write(weft.folder / "torn")
    for data in (weights[:-1], struct.pack("<Q", 1 << 60) + weights[8:], b""):
        (weft.folder / "torn/model.safetensors").write_bytes(data)
        assert "model.safetensors" in measured(weft, "torn", TEXTS, code=3)
    (weft.folder / "torn/config.json").write_text("{")
    assert "config.json" in measured(weft, "torn", TEXTS, code=3)
    assert "missing: has no config.json" in measured(weft, "missing", TEXTS, code=3)
    (weft.folder / "sizes/tokenizer.json").unlink()
    assert "sizes: has no tokenizer.json" in measured(weft, "sizes", TEXTS, code=3)


def tunes(weft):
    (weft.folder / "text.txt").write_text(program.TEXT)
    (weft.folder / "base.toml").write_text(INPUT.format(steps=20, initial=""))
    weft.run("lm", "train", "base.toml", "--output", "base")
    (weft.folder / "tune.toml").write_text(INPUT.format(steps=4, initial='initial = "base"') + POLYCHROMIC)
    tensors = bert.write(weft.folder / "encoder")

    def tune(name, *sets, **options):
        return weft.run("lm", "polychromic", "tune.toml", "--output", name, *program.sets(*sets), **options)

    tune("whole")
    # The diversity that is measured is that of the reference.
    sample = json.loads((weft.folder / "whole/samples.json").read_text())["after"]["samples"][0]
    ids = [bert.ids_of(answer, bert.CONFIG["max_position_embeddings"]) for answer in sample["answers"]]
    assert all(answer for answer in sample["answers"]), sample
    expected = distance(np.array([bert.embedding(tensors, one) for one in ids]))
    assert abs(sample["diversity"] - expected) < 1e-5 * max(expected, 1e-2), (sample, expected)
    # Resumed: the same bits; with another encoder: refused.
    tune("pieces", "run.steps=2")
    bert.write(weft.folder / "encoder", seed=1)
    assert 'or polychromic.embedder = "encoder": has other weights' in tune("pieces", code=2)
    bert.write(weft.folder / "encoder")
    assert "resuming after step 2" in tune("pieces")
    assert program.shard(weft.folder / "whole", 4) == program.shard(weft.folder / "pieces", 4)
    # Two ranks; the likelihood needs the frozen model besides.
    for sets in ((), ("polychromic.reward=likelihood", "polychromic.kl=0.1")):
        runs = [f"ranks_{ranks}_{len(sets)}" for ranks in (1, 2)]
        tune(runs[0], *sets)
        tune(runs[1], *sets, ranks=2)
        for one, two in zip(*(program.metrics(weft.folder / run) for run in runs)):
            for key in ("loss", "answers.diversity", "answers.objective"):
                # Rounding of sums; a token drawn at the border of two intervals would show as more.
                assert abs(one[key] - two[key]) <= 1e-4 * abs(one[key]), (sets, key, one[key], two[key])
    printed = weft.run("lm", "polychromic", "tune.toml", "--output", "dry", "--dry-run")
    assert "embedder" in printed and "frozen model" not in printed, printed
    for key in ("polychromic.reward=likelihood", "polychromic.kl=0.1"):
        printed = weft.run("lm", "polychromic", "tune.toml", "--output", "dry", "--dry-run", *program.sets(key))
        assert "frozen model" in printed, (key, printed)
    printed = tune("no", "polychromic.embedder=base", code=3)
    assert "config.json" in printed, printed


def test(weft):
    agrees(weft)
    refusals(weft)
    tunes(weft)


program.main(test)
