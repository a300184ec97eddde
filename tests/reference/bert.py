# SPDX-License-Identifier: Apache-2.0
"""A small encoder of type bert with random weights, in the files of sentence-transformers, and its embeddings in float64: NumPy and the
paper (Devlin et al. 2019), independently of Weft.
"""
import json
import math
import re

import numpy as np

from weights_files import write_safetensors

LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *",.;", *LETTERS, *("##" + letter for letter in LETTERS)]
CONFIG = dict(model_type="bert", vocab_size=len(VOCABULARY) + 3, hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
              intermediate_size=40, max_position_embeddings=48, type_vocab_size=2, hidden_act="gelu", layer_norm_eps=1e-12,
              position_embedding_type="absolute", architectures=["BertModel"])


def shapes(config):
    d, mlp = config["hidden_size"], config["intermediate_size"]
    all_shapes = {"embeddings.word_embeddings.weight": (config["vocab_size"], d),
                  "embeddings.position_embeddings.weight": (config["max_position_embeddings"], d),
                  "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], d),
                  "embeddings.LayerNorm.weight": (d,), "embeddings.LayerNorm.bias": (d,)}
    for layer in range(config["num_hidden_layers"]):
        for name, outputs, inputs in [("attention.self.query", d, d), ("attention.self.key", d, d), ("attention.self.value", d, d),
                                      ("attention.output.dense", d, d), ("intermediate.dense", mlp, d), ("output.dense", d, mlp)]:
            all_shapes[f"encoder.layer.{layer}.{name}.weight"] = (outputs, inputs)
            all_shapes[f"encoder.layer.{layer}.{name}.bias"] = (outputs,)
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            all_shapes[f"encoder.layer.{layer}.{name}.weight"] = all_shapes[f"encoder.layer.{layer}.{name}.bias"] = (d,)
    return all_shapes


def tokenizer():
    """The parts of a tokenizer.json of BERT."""
    special = [dict(id=i, content=VOCABULARY[i], single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
               for i in range(4)]
    piece = dict(Sequence=dict(id="A", type_id=0))
    mark = {name: dict(SpecialToken=dict(id=name, type_id=0)) for name in ("[CLS]", "[SEP]")}
    return dict(version="1.0", truncation=None, padding=None, added_tokens=special,
                normalizer=dict(type="BertNormalizer", clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=True),
                pre_tokenizer=dict(type="BertPreTokenizer"),
                post_processor=dict(type="TemplateProcessing", single=[mark["[CLS]"], piece, mark["[SEP]"]],
                                    pair=[mark["[CLS]"], piece, mark["[SEP]"]],
                                    special_tokens={name: dict(id=name, ids=[VOCABULARY.index(name)], tokens=[name])
                                                    for name in ("[CLS]", "[SEP]")}),
                decoder=dict(type="WordPiece", prefix="##", cleanup=True),
                model=dict(type="WordPiece", unk_token="[UNK]", continuing_subword_prefix="##", max_input_chars_per_word=100,
                           vocab={token: i for i, token in enumerate(VOCABULARY)}))


def write(folder, config=None, prefix="", limit=None, seed=0, dtype="F32", **changes):
    """Writes a directory; returns its tensors by their names without the prefix, as stored."""
    config = {**CONFIG, **(config or {}), **changes}
    random = np.random.default_rng(seed)
    tensors = {name: random.normal(0, 0.3, shape) + (1 if name.endswith("LayerNorm.weight") else 0) for name, shape in shapes(config).items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    unused = {f"{prefix}pooler.dense.weight": np.zeros((2, 2)), f"{prefix}embeddings.position_ids": np.arange(4).reshape(1, 4)}
    write_safetensors(folder / "model.safetensors", {prefix + name: values for name, values in tensors.items()} | unused, dtype)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
    (folder / "modules.json").write_text(json.dumps([{"path": "", "type": "a.Transformer"}, {"path": "1_Pooling", "type": "a.Pooling"},
                                                     {"path": "2_Normalize", "type": "a.Normalize"}]))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": limit, "do_lower_case": False}))
    return {name: values.astype(np.float16 if dtype == "F16" else np.float32).astype(np.float64) for name, values in tensors.items()}


def ids_of(text, longest):
    """Of a text of ASCII letters, commas, full stops and semicolons."""
    ids = []
    for word in re.findall(r"[a-z]+|[,.;]", text.lower()):
        ids += [VOCABULARY.index(word[0])] + [VOCABULARY.index("##" + letter) for letter in word[1:]]
    return [VOCABULARY.index("[CLS]"), *ids[:longest - 2], VOCABULARY.index("[SEP]")]


def embedding(tensors, ids, config=None):
    """Mean of the hidden states, [hidden_size]."""
    config = {**CONFIG, **(config or {})}
    d, heads = config["hidden_size"], config["num_attention_heads"]

    def norm(name, x):
        x = x - x.mean(axis=1, keepdims=True)
        return x / np.sqrt((x ** 2).mean(axis=1, keepdims=True) + config["layer_norm_eps"]) * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    def linear(name, x):
        return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]

    def activation(x):
        if config["hidden_act"] == "gelu":
            return x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
        return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))

    h = norm("embeddings.LayerNorm", tensors["embeddings.word_embeddings.weight"][ids]
             + tensors["embeddings.position_embeddings.weight"][:len(ids)] + tensors["embeddings.token_type_embeddings.weight"][0])
    for layer in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{layer}"
        query, key, value = (linear(f"{at}.attention.self.{part}", h).reshape(len(ids), heads, d // heads) for part in ("query", "key", "value"))
        scores = np.einsum("ihc,jhc->hij", query, key) / math.sqrt(d // heads)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        mixed = np.einsum("hij,jhc->ihc", weights, value).reshape(len(ids), d)
        h = norm(f"{at}.attention.output.LayerNorm", h + linear(f"{at}.attention.output.dense", mixed))
        inner = activation(linear(f"{at}.intermediate.dense", h))
        h = norm(f"{at}.output.LayerNorm", h + linear(f"{at}.output.dense", inner))
    return h.mean(axis=0)
