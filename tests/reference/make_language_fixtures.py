# SPDX-License-Identifier: Apache-2.0
"""Records what the transformers library computes with tiny random models: logits, loss and gradients of all parameters.

make_language_fixtures.py [DIRECTORY [NAME …]]     needs torch and transformers 5; writes fixtures/NAME.h5, fixtures/families/NAME.h5

A fixture has the datasets ids and targets [B, T] (int32; target -1 is not counted), logits [B, T, V], loss, and the groups
weights and gradients under Weft's parameter names; attributes: language_model (settings, JSON under the names of the
input), torch, transformers (versions). The models compute in float64, except where the library forces float32
(rotary angles, RMSNorm); everything is stored in float32. Weights come from NumPy's frozen generator: each run gives the
same ones.
"""
import json
import re
import sys
from pathlib import Path

import h5py
import numpy as np
import torch
import transformers

if int(transformers.__version__.split(".")[0]) < 5:
    raise ImportError("transformers 5 or later is needed")

VOCABULARY, SEQUENCE, SEQUENCES = 61, 24, 3
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=VOCABULARY,
             max_position_embeddings=SEQUENCE, attn_implementation="eager")
COMMON = dict(layers=2, heads=4, d_model=32, d_mlp=48)
SMALL = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, vocab_size=VOCABULARY,
             max_position_embeddings=SEQUENCE, attn_implementation="eager", pad_token_id=None, bos_token_id=0, eos_token_id=0)
SMALL_SIZES = dict(layers=2, heads=2, d_model=16, d_mlp=24)
ROTARY = dict(norm="rms", mlp="swiglu", position="rope", tied=False, bias=False)

MODELS = {
    "gpt2": (
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_inner=48, n_positions=SEQUENCE, vocab_size=VOCABULARY,
                                bos_token_id=0, eos_token_id=0, attn_implementation="eager"),
        dict(COMMON, norm="layer", mlp="gelu", position="learned", tied=True, bias=True, norm_epsilon=1e-5)),
    "llama": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(**SIZES, num_key_value_heads=2, rms_norm_eps=1e-5, rope_theta=10000.0),
        dict(COMMON, **ROTARY, kv_heads=2, norm_epsilon=1e-5, rope_base=10000.0)),
    "qwen3": (
        transformers.Qwen3ForCausalLM,
        transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-6,
                                 rope_parameters=dict(rope_type="default", rope_theta=1000000.0)),
        dict(COMMON, **ROTARY, kv_heads=2, norm_epsilon=1e-6, rope_base=1000000.0, qk_norm="head")),
    "olmo2": (
        transformers.Olmo2ForCausalLM,
        transformers.Olmo2Config(**SIZES, num_key_value_heads=2, rms_norm_eps=1e-6,
                                 rope_parameters=dict(rope_type="default", rope_theta=500000.0), pad_token_id=None,
                                 eos_token_id=0),
        dict(COMMON, **ROTARY, kv_heads=2, norm_epsilon=1e-6, rope_base=500000.0, qk_norm="width", norm_position="post")),
    "qwen2": (
        transformers.Qwen2ForCausalLM,
        transformers.Qwen2Config(**SMALL, num_key_value_heads=1, rms_norm_eps=1e-6),
        dict(SMALL_SIZES, **ROTARY, kv_heads=1, norm_epsilon=1e-6, biases=["query", "key", "value"])),
    # The sequences are longer than those of the training.
    "phi3": (
        transformers.Phi3ForCausalLM,
        transformers.Phi3Config(**SMALL, num_key_value_heads=1, rms_norm_eps=1e-5, sliding_window=9, original_max_position_embeddings=16,
                                rope_parameters=dict(rope_type="longrope", rope_theta=1e4, partial_rotary_factor=0.5,
                                                     short_factor=[1.0, 2.0], long_factor=[1.5, 4.0])),
        dict(SMALL_SIZES, **ROTARY, kv_heads=1, norm_epsilon=1e-5, window=9, rope_columns=4, rope_method="longrope", rope_factor=1.5,
             rope_length=16, rope_short=[1.0, 2.0], rope_long=[1.5, 4.0])),
    "smollm3": (
        transformers.SmolLM3ForCausalLM,
        transformers.SmolLM3Config(**SMALL, num_key_value_heads=1, rms_norm_eps=1e-6, no_rope_layer_interval=2, rope_parameters=dict(
            rope_type="yarn", rope_theta=100.0, factor=2.0, original_max_position_embeddings=12, beta_fast=4.0, beta_slow=1.0)),
        dict(SMALL_SIZES, **{**ROTARY, "tied": True}, kv_heads=1, norm_epsilon=1e-6, unrotated_every=2, rope_base=100.0,
             rope_method="yarn", rope_factor=2.0, rope_length=12, rope_low=1.0, rope_high=4.0)),
    "gemma3_text": (
        transformers.Gemma3ForCausalLM,
        transformers.Gemma3TextConfig(**SMALL, num_key_value_heads=1, head_dim=16, rms_norm_eps=1e-6, query_pre_attn_scalar=16,
                                      sliding_window=5, layer_types=["sliding_attention", "full_attention"], rope_parameters=dict(
                                          full_attention=dict(rope_type="linear", factor=2.0, rope_theta=1000.0),
                                          sliding_attention=dict(rope_type="default", rope_theta=50.0))),
        dict(SMALL_SIZES, **{**ROTARY, "tied": True, "mlp": "geglu"}, kv_heads=1, head_size=16, norm_epsilon=1e-6, qk_norm="head",
             norm_position="both", embedding_scale=4.0, window=5, full_every=2, rope_base=1000.0, rope_factor=2.0, rope_window_base=50.0)),
    "gpt_neox": (
        transformers.GPTNeoXForCausalLM,
        transformers.GPTNeoXConfig(**SMALL, rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)),
        dict(SMALL_SIZES, norm="layer", mlp="gelu_exact", position="rope", tied=False, bias=True, norm_epsilon=1e-5, rope_columns=4,
             residual="parallel")),
}

# In a folder of their own: the reference in NumPy does not have all of their options.
FAMILIES = ("qwen2", "phi3", "smollm3", "gemma3_text", "gpt_neox")

# Weft's name -> the library's. GPT-2 holds queries, keys and values in one matrix, and its matrices as [in, out].
GPT2 = {
    "embedding/tokens": "transformer.wte.weight",
    "embedding/positions": "transformer.wpe.weight",
    "block_{}/attention_norm": "transformer.h.{}.ln_1",
    "block_{}/attention/query": "transformer.h.{}.attn.c_attn",
    "block_{}/attention/key": "transformer.h.{}.attn.c_attn",
    "block_{}/attention/value": "transformer.h.{}.attn.c_attn",
    "block_{}/attention/output": "transformer.h.{}.attn.c_proj",
    "block_{}/mlp_norm": "transformer.h.{}.ln_2",
    "block_{}/mlp/up": "transformer.h.{}.mlp.c_fc",
    "block_{}/mlp/down": "transformer.h.{}.mlp.c_proj",
    "final_norm": "transformer.ln_f",
}
LLAMA = {
    "embedding/tokens": "model.embed_tokens.weight",
    "block_{}/attention_norm": "model.layers.{}.input_layernorm",
    "block_{}/attention/query": "model.layers.{}.self_attn.q_proj",
    "block_{}/attention/key": "model.layers.{}.self_attn.k_proj",
    "block_{}/attention/value": "model.layers.{}.self_attn.v_proj",
    "block_{}/attention/output": "model.layers.{}.self_attn.o_proj",
    "block_{}/mlp_norm": "model.layers.{}.post_attention_layernorm",
    "block_{}/mlp/gate": "model.layers.{}.mlp.gate_proj",
    "block_{}/mlp/up": "model.layers.{}.mlp.up_proj",
    "block_{}/mlp/down": "model.layers.{}.mlp.down_proj",
    "final_norm": "model.norm",
    "head": "lm_head",
}
NORMS = {f"block_{{}}/attention/{side}_norm": f"model.layers.{{}}.self_attn.{side[0]}_norm" for side in ("query", "key")}
QWEN3 = {**LLAMA, **NORMS}
OLMO2 = {**{name: source for name, source in QWEN3.items() if name not in ("block_{}/attention_norm", "block_{}/mlp_norm")},
         "block_{}/attention_post_norm": "model.layers.{}.post_attention_layernorm",
         "block_{}/mlp_post_norm": "model.layers.{}.post_feedforward_layernorm"}
GEMMA3 = {**QWEN3, "block_{}/attention_post_norm": "model.layers.{}.post_attention_layernorm",
          "block_{}/mlp_norm": "model.layers.{}.pre_feedforward_layernorm",
          "block_{}/mlp_post_norm": "model.layers.{}.post_feedforward_layernorm"}
PHI3 = {**LLAMA, **{f"block_{{}}/attention/{side}": "model.layers.{}.self_attn.qkv_proj" for side in ("query", "key", "value")},
        **{f"block_{{}}/mlp/{name}": "model.layers.{}.mlp.gate_up_proj" for name in ("gate", "up")}}
NEOX = {
    "embedding/tokens": "gpt_neox.embed_in.weight",
    "block_{}/attention_norm": "gpt_neox.layers.{}.input_layernorm",
    **{f"block_{{}}/attention/{side}": "gpt_neox.layers.{}.attention.query_key_value" for side in ("query", "key", "value")},
    "block_{}/attention/output": "gpt_neox.layers.{}.attention.dense",
    "block_{}/mlp_norm": "gpt_neox.layers.{}.post_attention_layernorm",
    "block_{}/mlp/up": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
    "block_{}/mlp/down": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
    "final_norm": "gpt_neox.final_layer_norm",
    "head": "lm_head",
}
NAMES = {"gpt2": GPT2, "llama": LLAMA, "qwen3": QWEN3, "olmo2": OLMO2, "qwen2": LLAMA, "phi3": PHI3, "smollm3": LLAMA,
         "gemma3_text": GEMMA3, "gpt_neox": NEOX}


def part(array, name, source, settings):
    """The rows of a tensor of several parameters."""
    word, sides = name.rsplit("/", 1)[-1], ("query", "key", "value")
    if source.endswith("c_attn"):
        return np.split(array, 3)[sides.index(word)]
    if source.endswith("gate_up_proj"):
        return np.split(array, 2)[("gate", "up").index(word)]
    size = settings["d_model"] // settings["heads"]
    if source.endswith("qkv_proj"):
        return np.split(array, [settings["heads"] * size, (settings["heads"] + settings["kv_heads"]) * size])[sides.index(word)]
    if source.endswith("query_key_value"):
        return np.concatenate([head[sides.index(word)] for head in array.reshape(settings["heads"], 3, size, *array.shape[1:])])
    return array


def to_weft(model, tensors):
    """Tensors of the library by name -> arrays by Weft's names, matrices as [out, in]."""
    result, used = {}, set()
    for name, source in NAMES[model].items():
        for layer in range(COMMON["layers"]) if "{}" in name else [0]:
            for suffix in [""] if source.endswith(".weight") else ["weight", "bias"]:
                key = ".".join(filter(None, (source.format(layer), suffix)))
                if key not in tensors:          # no bias
                    continue
                array = tensors[key]
                if re.search(r"\.c_\w+\.weight$", key):
                    array = array.T
                array = part(array, name, source, MODELS[model][2])
                result["/".join(filter(None, (name.format(layer), suffix)))] = array
                used.add(key)
    assert used == set(tensors), f"no name for {set(tensors) - used}"
    return result


def compute(name):
    """Settings and arrays of one fixture, by their paths in the file."""
    kind, config, settings = MODELS[name]
    random = np.random.RandomState(7)
    model = kind(config).double().eval()
    for parameter_name, parameter in model.named_parameters():
        # Far above usual initial values, so that every term has an effect.
        gain = parameter.ndim == 1 and parameter_name.endswith("weight") and name != "gemma3_text"
        values = random.normal(1.0 if gain else 0.0, 0.15, parameter.shape).astype(np.float32)
        parameter.data.copy_(torch.from_numpy(values))
    ids = random.randint(VOCABULARY, size=(SEQUENCES, SEQUENCE + 1))
    targets = np.where(random.random_sample((SEQUENCES, SEQUENCE)) < 0.1, -1, ids[:, 1:])

    logits = model(torch.from_numpy(ids[:, :-1])).logits.double()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).flatten(), ignore_index=-1)
    loss.backward()
    parameters = dict(model.named_parameters())         # tied parameters are there once
    arrays = {"ids": ids[:, :-1].astype(np.int32), "targets": targets.astype(np.int32),
              "logits": logits.detach().numpy().astype(np.float32), "loss": np.float64(loss.item())}
    for group, tensors in (("weights", {key: p.detach().numpy() for key, p in parameters.items()}),
                           ("gradients", {key: p.grad.numpy() for key, p in parameters.items()})):
        for weft_name, array in to_weft(name, tensors).items():
            array = array.astype(np.float32)
            if group == "weights" and name == "gemma3_text" and "norm" in weft_name:
                array += np.float32(1)          # its norms multiply by 1 + weight
            arrays[f"{group}/{weft_name}"] = array
    return settings, arrays


def main(directory, names):
    for name in names or MODELS:
        settings, arrays = compute(name)
        folder = directory / "families" if name in FAMILIES else directory
        with h5py.File(folder / f"{name}.h5", "w", libver=("v110", "v110")) as file:
            file.attrs["language_model"] = json.dumps(settings)
            file.attrs["torch"], file.attrs["transformers"] = str(torch.__version__), transformers.__version__
            for path, array in arrays.items():
                file.create_dataset(path, data=array, track_times=False)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "fixtures"), sys.argv[2:])
