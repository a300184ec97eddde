# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face in the program, against their published formulas in NumPy (float64).

huggingface_test.py WEFT

The formulas below read the library's own tensors and config.json, and share neither names nor code with Weft or with
language_model.py: GPT-2 (Radford et al. 2019), Llama 3 (Meta 2024), Qwen3 (2025), OLMo 2 (2024), Gemma 2 (2024). Weights
are random and large, so that every option changes the loss by far more than the tolerance.
"""
import json
import math
import struct

import numpy as np

from program import main

VOCABULARY, CONTEXT, LAYERS, WIDTH, HIDDEN = 256, 64, 3, 32, 48
TEXT = "In the beginning God created the heaven and the earth."

LLAMA = dict(vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4,
             num_key_value_heads=2, intermediate_size=HIDDEN, max_position_embeddings=CONTEXT, rms_norm_eps=1e-5,
             rope_theta=1000.0, torch_dtype="float32")
CONFIGS = {
    "gpt2": dict(model_type="gpt2", vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=4, n_positions=CONTEXT,
                 n_ctx=CONTEXT, n_inner=HIDDEN, activation_function="gelu_new", layer_norm_epsilon=1e-5),
    "llama": dict(LLAMA, model_type="llama", hidden_act="silu", tie_word_embeddings=True, mlp_bias=False,
                  rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                    original_max_position_embeddings=32)),
    "qwen3": dict(LLAMA, model_type="qwen3", hidden_act="silu", head_dim=16, use_sliding_window=False, sliding_window=None,
                  max_window_layers=3),
    "olmo2": dict(LLAMA, model_type="olmo2", hidden_act="silu"),
    "llama_biases": dict(LLAMA, model_type="llama", hidden_act="silu", attention_bias=True, mlp_bias=True),
    "qwen2": dict(LLAMA, model_type="qwen2", hidden_act="silu", use_sliding_window=True, sliding_window=6, max_window_layers=0),
    "mistral": dict(LLAMA, model_type="mistral", hidden_act="silu", sliding_window=6),
    "phi3": dict(LLAMA, model_type="phi3", hidden_act="silu", sliding_window=5, original_max_position_embeddings=CONTEXT,
                 partial_rotary_factor=0.5, rope_scaling=dict(type="longrope", short_factor=[1.25, 4.0], long_factor=[2.0, 8.0],
                                                              attention_factor=1.5)),
    "yarn": dict(LLAMA, model_type="llama", hidden_act="silu",
                 rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=4.0)),
    "smollm3": dict(LLAMA, model_type="smollm3", hidden_act="silu", no_rope_layer_interval=2),
    "gemma3_text": dict(LLAMA, model_type="gemma3_text", hidden_activation="gelu_pytorch_tanh", head_dim=16, query_pre_attn_scalar=24,
                        sliding_window=6, sliding_window_pattern=2, rope_local_base_freq=50.0,
                        rope_scaling=dict(rope_type="linear", factor=4.0)),
    "gpt_neox": dict(model_type="gpt_neox", vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4,
                     intermediate_size=HIDDEN, max_position_embeddings=CONTEXT, layer_norm_eps=1e-5, hidden_act="gelu", rotary_pct=0.5,
                     rotary_emb_base=1000, use_parallel_residual=True),
    "gemma2": dict(LLAMA, model_type="gemma2", hidden_activation="gelu_pytorch_tanh", head_dim=16, query_pre_attn_scalar=24,
                   sliding_window=6, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
}
TIED = ("gpt2", "gemma2", "gemma3_text", "smollm3")           # without the key tie_word_embeddings


def tied(c):
    return c.get("tie_word_embeddings", c["model_type"] in TIED)


def biases(c):
    """Names of the products with a bias."""
    attention = [f"self_attn.{side}_proj" for side in "qkvo"]
    return (attention[:3] if c["model_type"] == "qwen2" else attention if c.get("attention_bias") else []) + \
        ([f"mlp.{name}_proj" for name in ("gate", "up", "down")] if c.get("mlp_bias") else [])


def tensors_of(c):
    """Shape of every tensor of the library's model."""
    kind, shapes = c["model_type"], {}
    if kind == "gpt2":
        shapes = {"transformer.wte.weight": (VOCABULARY, WIDTH), "transformer.wpe.weight": (CONTEXT, WIDTH),
                  "transformer.ln_f.weight": (WIDTH,), "transformer.ln_f.bias": (WIDTH,)}
        for layer in range(LAYERS):
            at = f"transformer.h.{layer}."
            for name in ("ln_1", "ln_2"):
                shapes |= {f"{at}{name}.weight": (WIDTH,), f"{at}{name}.bias": (WIDTH,)}
            for name, inputs, outputs in (("attn.c_attn", WIDTH, 3 * WIDTH), ("attn.c_proj", WIDTH, WIDTH),
                                          ("mlp.c_fc", WIDTH, HIDDEN), ("mlp.c_proj", HIDDEN, WIDTH)):
                shapes |= {f"{at}{name}.weight": (inputs, outputs), f"{at}{name}.bias": (outputs,)}
        return shapes
    if kind == "gpt_neox":
        shapes = {"gpt_neox.embed_in.weight": (VOCABULARY, WIDTH), "embed_out.weight": (VOCABULARY, WIDTH)}
        shapes |= {f"gpt_neox.final_layer_norm.{part}": (WIDTH,) for part in ("weight", "bias")}
        for layer in range(LAYERS):
            at = f"gpt_neox.layers.{layer}."
            shapes |= {f"{at}{name}_layernorm.{part}": (WIDTH,) for name in ("input", "post_attention") for part in ("weight", "bias")}
            for name, outputs, inputs in (("attention.query_key_value", 3 * WIDTH, WIDTH), ("attention.dense", WIDTH, WIDTH),
                                          ("mlp.dense_h_to_4h", HIDDEN, WIDTH), ("mlp.dense_4h_to_h", WIDTH, HIDDEN)):
                shapes |= {f"{at}{name}.weight": (outputs, inputs), f"{at}{name}.bias": (outputs,)}
        return shapes
    size = c.get("head_dim", WIDTH // 4)
    queries, keys = 4 * size, 2 * size
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,)}
    if not tied(c):
        shapes["lm_head.weight"] = (VOCABULARY, WIDTH)
    norms = {"olmo2": ("post_attention", "post_feedforward"),
             "gemma3_text": ("input", "post_attention", "pre_feedforward", "post_feedforward"),
             "gemma2": ("input", "post_attention", "pre_feedforward", "post_feedforward")}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name in norms.get(kind, ("input", "post_attention")):
            shapes[f"{at}{name}_layernorm.weight"] = (WIDTH,)
        if kind == "phi3":
            shapes |= {f"{at}self_attn.qkv_proj.weight": (queries + 2 * keys, WIDTH), f"{at}self_attn.o_proj.weight": (WIDTH, queries),
                       f"{at}mlp.gate_up_proj.weight": (2 * HIDDEN, WIDTH), f"{at}mlp.down_proj.weight": (WIDTH, HIDDEN)}
            continue
        for name, outputs, inputs in (("self_attn.q_proj", queries, WIDTH), ("self_attn.k_proj", keys, WIDTH),
                                      ("self_attn.v_proj", keys, WIDTH), ("self_attn.o_proj", WIDTH, queries),
                                      ("mlp.gate_proj", HIDDEN, WIDTH), ("mlp.up_proj", HIDDEN, WIDTH),
                                      ("mlp.down_proj", WIDTH, HIDDEN)):
            shapes[f"{at}{name}.weight"] = (outputs, inputs)
            if name in biases(c):
                shapes[f"{at}{name}.bias"] = (outputs,)
        if kind in ("qwen3", "olmo2", "gemma3_text"):
            shapes[f"{at}self_attn.q_norm.weight"] = (queries if kind == "olmo2" else size,)
            shapes[f"{at}self_attn.k_norm.weight"] = (keys if kind == "olmo2" else size,)
    return shapes


# --- Formulas ---------------------------------------------------------------------------------------------------------------


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x ** 3)))


def rms(x, w, epsilon):
    return w * x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)


def frequencies(c, size, window=False):
    """(Angles per position, amplitude); window: of a block of Gemma 3 with a window."""
    if window:
        return c["rope_local_base_freq"] ** (-np.arange(0, size, 2) / size), 1
    f = c["rope_theta"] ** (-np.arange(0, size, 2) / size)
    scaling = c.get("rope_scaling")
    if not scaling:
        return f, 1
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "linear":
        return f / scaling["factor"], 1
    if kind == "longrope":
        return f / np.array(scaling["short_factor"]), scaling["attention_factor"]
    length, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    wavelength = 2 * np.pi / f
    if kind == "yarn":      # Peng et al. 2023, with the bounds of their program
        first, last = (size * np.log(length / (2 * np.pi * turns)) / (2 * np.log(c["rope_theta"])) for turns in (scaling["beta_fast"], 1))
        first, last = max(np.floor(first), 0), min(np.ceil(last), size - 1)
        multiplied = np.clip((np.arange(size // 2) - first) / (last - first), 0, 1)
        return f * (1 - multiplied) + f / factor * multiplied, 0.1 * np.log(factor) + 1
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = (length / wavelength - low) / (high - low)
    between = (1 - smooth) * f / factor + smooth * f
    return np.where(wavelength > length / low, f / factor, np.where(wavelength < length / high, f, between)), 1


def turned(x, f, amplitude):
    """Rotates the first 2 len(f) columns of x [T, heads, d]."""
    angle, rotated = np.arange(len(x))[:, None, None] * f, 2 * len(f)
    a, b = np.split(x[..., :rotated], 2, axis=-1)
    cosine, sine = amplitude * np.cos(angle), amplitude * np.sin(angle)
    return np.concatenate([a * cosine - b * sine, b * cosine + a * sine, x[..., rotated:]], axis=-1)


def attend(q, k, v, scale, cap=None, window=None):
    """q [T, heads, d], k, v [T, fewer heads, d]."""
    n = len(q)
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) * scale
    if cap:
        scores = cap * np.tanh(scores / cap)
    i, j = np.ogrid[:n, :n]
    scores = np.where((j <= i) & (i - j < (window or n)), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hij,jhd->ihd", p / p.sum(-1, keepdims=True), v).reshape(n, -1)


def logits_gpt2(c, t, ids):
    def norm(x, name):
        h = x - x.mean(-1, keepdims=True)
        return h / np.sqrt((h * h).mean(-1, keepdims=True) + 1e-5) * t[f"{name}.weight"] + t[f"{name}.bias"]

    def product(x, name):
        return x @ t[f"{name}.weight"] + t[f"{name}.bias"]

    h = t["transformer.wte.weight"][ids] + t["transformer.wpe.weight"][:len(ids)]
    for layer in range(LAYERS):
        at = f"transformer.h.{layer}."
        q, k, v = (x.reshape(len(ids), 4, -1) for x in np.split(product(norm(h, at + "ln_1"), at + "attn.c_attn"), 3, axis=-1))
        h = h + product(attend(q, k, v, (WIDTH // 4) ** -0.5), at + "attn.c_proj")
        h = h + product(gelu(product(norm(h, at + "ln_2"), at + "mlp.c_fc")), at + "mlp.c_proj")
    return norm(h, "transformer.ln_f") @ t["transformer.wte.weight"].T


def logits_neox(c, t, ids):
    def norm(x, name):
        h = x - x.mean(-1, keepdims=True)
        return h / np.sqrt((h * h).mean(-1, keepdims=True) + c["layer_norm_eps"]) * t[f"{name}.weight"] + t[f"{name}.bias"]

    def product(x, name):
        return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]

    h, size = t["gpt_neox.embed_in.weight"][ids], WIDTH // 4
    f = c["rotary_emb_base"] ** (-np.arange(0, size * c["rotary_pct"], 2) / (size * c["rotary_pct"]))
    for layer in range(LAYERS):
        at = f"gpt_neox.layers.{layer}."
        heads = product(norm(h, at + "input_layernorm"), at + "attention.query_key_value").reshape(len(ids), 4, 3, size)
        q, k, v = (heads[:, :, part] for part in range(3))
        attention = product(attend(turned(q, f, 1), turned(k, f, 1), v, size ** -0.5), at + "attention.dense")
        hidden = product(norm(h if c["use_parallel_residual"] else h + attention, at + "post_attention_layernorm"), at + "mlp.dense_h_to_4h")
        exact = hidden * (1 + np.vectorize(math.erf)(hidden / np.sqrt(2))) / 2
        h = h + attention + product(exact, at + "mlp.dense_4h_to_h")
    return norm(h, "gpt_neox.final_layer_norm") @ t["embed_out.weight"].T


def apart(t, size):
    """The tensors of Phi 3 under the names of Llama."""
    t = dict(t)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        qkv = np.split(t.pop(f"{at}self_attn.qkv_proj.weight"), [4 * size, 6 * size])
        t |= {f"{at}self_attn.{side}_proj.weight": part for side, part in zip("qkv", qkv)}
        gate_up = np.split(t.pop(f"{at}mlp.gate_up_proj.weight"), 2)
        t |= {f"{at}mlp.{name}_proj.weight": part for name, part in zip(("gate", "up"), gate_up)}
    return t


def logits_llama(c, t, ids):
    kind, size = c["model_type"], c.get("head_dim", WIDTH // 4)
    gemma = kind.startswith("gemma")
    norm = lambda x, name: rms(x, t[f"{name}.weight"] + (1 if gemma else 0), c["rms_norm_eps"])
    silu = lambda x: x / (1 + np.exp(-x))
    if kind == "phi3":
        t = apart(t, size)

    def product(x, name):
        return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", 0)

    h = t["model.embed_tokens.weight"][ids] * (np.sqrt(WIDTH) if gemma else 1)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        x = h if kind == "olmo2" else norm(h, at + "input_layernorm")
        q, k, v = (product(x, f"{at}self_attn.{side}_proj") for side in "qkv")
        if kind == "olmo2":
            q, k = norm(q, at + "self_attn.q_norm"), norm(k, at + "self_attn.k_norm")
        q, k, v = (y.reshape(len(ids), -1, size) for y in (q, k, v))
        if kind in ("qwen3", "gemma3_text"):
            q, k = norm(q, at + "self_attn.q_norm"), norm(k, at + "self_attn.k_norm")
        scale = c["query_pre_attn_scalar"] ** -0.5 if gemma else size ** -0.5
        window = c.get("sliding_window") if layer % 2 == 0 or not gemma else None
        if kind != "smollm3" or layer % 2 == 0:
            rotated = int(size * c.get("partial_rotary_factor", 1))
            q, k = (turned(x, *frequencies(c, rotated, kind == "gemma3_text" and window is not None)) for x in (q, k))
        y = product(attend(q, k, v, scale, c.get("attn_logit_softcapping"), window), at + "self_attn.o_proj")
        h = h + (norm(y, at + "post_attention_layernorm") if (gemma or kind == "olmo2") else y)
        x = h if kind == "olmo2" else norm(h, at + ("pre_feedforward_layernorm" if gemma else "post_attention_layernorm"))
        gate = product(x, at + "mlp.gate_proj")
        y = product((gelu if gemma else silu)(gate) * product(x, at + "mlp.up_proj"), at + "mlp.down_proj")
        h = h + (norm(y, at + "post_feedforward_layernorm") if (gemma or kind == "olmo2") else y)
    z = norm(h, "model.norm") @ t["model.embed_tokens.weight" if tied(c) else "lm_head.weight"].T
    cap = c.get("final_logit_softcapping")
    return cap * np.tanh(z / cap) if cap else z


def logits_of(c, tensors, ids):
    t = {name: array.astype(np.float64) for name, array in tensors.items()}
    return {"gpt2": logits_gpt2, "gpt_neox": logits_neox}.get(c["model_type"], logits_llama)(c, t, np.asarray(ids))


def loss_of(c, tensors, text):
    """text: a text in bytes, or ids."""
    ids = np.asarray(text) if isinstance(text, list) else np.frombuffer(text.encode(), np.uint8).astype(int)
    z = logits_of(c, tensors, ids[:-1])
    largest = z.max(-1)
    return float((np.log(np.exp(z - largest[:, None]).sum(-1)) + largest - z[np.arange(len(z)), ids[1:]]).mean())


# --- Files ------------------------------------------------------------------------------------------------------------------


def stored(array, dtype):
    """(bytes in the file, the values that they stand for)."""
    if dtype == "BF16":
        bits = (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)      # towards 0: any bf16 will do
        return bits.tobytes(), (bits.astype(np.uint32) << 16).view(np.float32).reshape(array.shape)
    kept = array.astype(np.float16 if dtype == "F16" else np.float32)
    return kept.tobytes(), kept.astype(np.float32)


def write_safetensors(path, tensors, dtype="F32"):
    """Returns the values as stored."""
    header, data, values = {}, b"", {}
    for name, array in tensors.items():
        packed, values[name] = stored(array, dtype)
        header[name] = dict(dtype=dtype, shape=list(array.shape), data_offsets=[len(data), len(data) + len(packed)])
        data += packed
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return values


def random_tensors(config):
    random, tensors = np.random.default_rng(1), {}
    for name, shape in tensors_of(config).items():
        gain = len(shape) == 1 and name.endswith("weight") and not config["model_type"].startswith("gemma")
        tensors[name] = random.normal(1 if gain else 0, 0.3, shape)
    return tensors


def make(folder, config, dtype="F32", parts=1):
    """A directory of the library's layout with random weights; returns these."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "weft_tokenizer.json").write_text('{"format":"weft-tokenizer","version":1,"kind":"bytes","special":[]}')
    tensors = random_tensors(config)
    if parts == 1:
        return write_safetensors(folder / "model.safetensors", tensors, dtype)
    names, values, places = list(tensors), {}, {}
    for part in range(parts):
        file = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        own = {name: tensors[name] for name in names[part::parts]}
        values |= write_safetensors(folder / file, own, dtype)
        places |= {name: file for name in own}
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map=places)))
    return values


def evaluate(program, folder, *options, **expected):
    text = program.folder / "text.txt"
    text.write_text(TEXT)
    output = program.run("lm", "evaluate", folder, "--text", text, "--output", program.folder / "evaluation", *options, **expected)
    if expected:
        return output
    return json.loads((program.folder / "evaluation/evaluation.json").read_text())["validation"]["loss"]


def everything_in(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- Tests ------------------------------------------------------------------------------------------------------------------


def test_families(program):
    # Three blocks in fp32: about 75 operations of 6e-8 each.
    for kind, dtype, parts in (("gpt2", "F32", 1), ("llama", "BF16", 3), ("qwen3", "F16", 1), ("olmo2", "F32", 2),
                               ("gemma2", "BF16", 1), ("llama_biases", "F32", 1), ("qwen2", "F16", 1), ("mistral", "BF16", 1),
                               ("phi3", "F16", 2), ("yarn", "F32", 1), ("smollm3", "BF16", 1), ("gemma3_text", "F16", 1),
                               ("gpt_neox", "F16", 2)):
        folder, config = program.folder / kind, CONFIGS[kind]
        tensors = make(folder, config, dtype, parts)
        expected, found = loss_of(config, tensors, TEXT), evaluate(program, folder)
        print(f"{kind}: loss {found:.7f}, formulas {expected:.7f}")
        assert abs(found / expected - 1) < 5e-6, kind
        assert f"{config['model_type']} of Hugging Face" in program.run("inspect", folder)

        # Two ranks read their parts of each tensor.
        axis = ("--set", "parallel.tensor=2")
        if kind == "olmo2":
            assert 'does not go with language_model.qk_norm = "width"' in evaluate(program, folder, *axis, ranks=2, code=2)
        else:
            program.run("lm", "evaluate", folder, "--text", program.folder / "text.txt", "--output", program.folder / "divided", *axis, ranks=2)
            divided = json.loads((program.folder / "divided/evaluation.json").read_text())["validation"]["loss"]
            assert abs(divided / expected - 1) < 5e-6, (kind, divided, expected)

        # Written again, in its type: the same loss; read and written once more: the same files.
        kept = "bf16" if dtype == "BF16" else "fp32"
        program.run("lm", "export", folder, "--output", program.folder / f"{kind}_once", "--type", kept)
        program.run("lm", "export", program.folder / f"{kind}_once", "--output", program.folder / f"{kind}_twice", "--type", kept)
        assert everything_in(program.folder / f"{kind}_once") == everything_in(program.folder / f"{kind}_twice"), kind
        assert evaluate(program, program.folder / f"{kind}_once") == found, kind


def test_options_matter(program):
    """Each of these options changes the loss: a reader that ignored it would fail the comparison above."""
    for kind, key, value in (("llama", "rope_scaling", None), ("gemma2", "sliding_window", 9), ("qwen3", "rms_norm_eps", 0.1),
                             ("gemma2", "query_pre_attn_scalar", 16), ("gemma2", "attn_logit_softcapping", None),
                             ("gemma2", "final_logit_softcapping", 9.0), ("gpt_neox", "use_parallel_residual", False),
                             ("gpt_neox", "rotary_pct", 0.25), ("gemma3_text", "rope_local_base_freq", 500.0), ("yarn", "rope_scaling", None), ("olmo2", "rope_theta", 50.0)):
        config = CONFIGS[kind]
        tensors = random_tensors(config)
        assert abs(loss_of(config, tensors, TEXT) / loss_of(dict(config, **{key: value}), tensors, TEXT) - 1) > 1e-4, key


def test_refusals(program):
    folder = program.folder / "refused"
    make(folder, CONFIGS["gemma2"])

    def config(base="gemma2", **changes):
        (folder / "config.json").write_text(json.dumps({**CONFIGS[base], **changes}))

    def refused(code, *parts):
        output = program.run("inspect", folder, code=code)
        assert all(part in output for part in parts), output

    # What Weft lacks: by name.
    for changes, part in (({"model_type": "mamba"}, '"mamba"'), ({"new_trick": 1}, '"new_trick"'),
                          ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
                          ({"hidden_activation": "relu"}, '"relu"'),
                          ({"rope_scaling": {"rope_type": "axial", "factor": 4.0}}, '"axial"'),
                          ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False}}, '"truncate"'),
                          ({"partial_rotary_factor": 0.5}, "rotates whole heads"),
                          ({"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}, "sliding"),
                          ({"num_attention_heads": 3, "num_key_value_heads": 2}, "num_key_value_heads")):
        config(**changes)
        refused(2, part)
    # Damage: by file and tensor. Sizes of config.json are compared with the files before memory is allocated.
    for changes, part in (({"vocab_size": 1 << 28}, "model.embed_tokens.weight"), ({"num_hidden_layers": 4}, "layers.3"),
                          ({"num_hidden_layers": 2}, "layers.2"), ({"hidden_size": -1}, "hidden_size"),
                          ({"rms_norm_eps": "x"}, "rms_norm_eps"), ({"vocab_size": None}, "vocab_size")):
        config(**changes)
        refused(3, part)
    (folder / "config.json").write_text('{"model_type": "gemma2",')
    refused(3, "config.json")
    config()
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-1])
    refused(3, "model.safetensors")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + weights[8:])
    refused(3, "header")
    (folder / "model.safetensors").unlink()
    for places, part in (({"a": "../x.safetensors"}, "../x"), ({"a": 3}, '"a"'), ({"a": "b.safetensors"}, "b.safetensors"), (7, "weight_map")):
        (folder / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=places)))
        refused(3, part)


def test_training(program):
    """A run that begins with the weights of a directory; its export is that directory again."""
    folder = program.folder / "start"
    make(folder, CONFIGS["llama"])
    text = program.folder / "long.txt"
    text.write_text(TEXT * 40)
    table = program.run("inspect", folder).split("\n\n", 1)[1]
    source = program.folder / "input.toml"
    common = f'[data]\ntrain = "{text}"\ntokens = "bytes"\nsequence = 32\nbatch_tokens = 64\n[run]\nsteps = 1\n' \
             '[optimizer]\nwarmup_steps = 0\nlearning_rate = 1e-30\nweight_decay = 0\n'
    source.write_text(common + table.replace('initial = ""', f'initial = "{folder}"'))
    program.run("lm", "train", source, "--output", program.folder / "run")
    program.run("lm", "export", program.folder / "run", "--output", program.folder / "exported")
    program.run("lm", "export", folder, "--output", program.folder / "written")
    same = [(program.folder / name / "model.safetensors").read_bytes() for name in ("exported", "written")]
    assert same[0] == same[1]
    # The directory gives keys that the input leaves out; one that differs is an error.
    source.write_text(common + f'[language_model]\ninitial = "{folder}"\n')
    program.run("lm", "train", source, "--output", program.folder / "other")
    program.run("lm", "export", program.folder / "other", "--output", program.folder / "other_exported")
    assert (program.folder / "other_exported/model.safetensors").read_bytes() == same[0]
    output = program.run("lm", "train", source, "--output", program.folder / "no", "--set", "language_model.d_model=64", "--set",
                         "language_model.rope_factor=4", code=2)
    assert "d_model = 32" in output and "rope_factor = 8" in output, output


def test_own_model(program):
    """What the library lacks is refused; a tokeniser of characters is written for it too."""
    text = program.folder / "own.txt"
    text.write_text(TEXT * 40)
    base = f'[data]\ntrain = "{text}"\nsequence = 32\nbatch_tokens = 64\n[run]\nsteps = 2\n[optimizer]\nwarmup_steps = 0\n' \
           '[language_model]\nlayers = 1\nheads = 2\nd_model = 32\n'
    source = program.folder / "own.toml"
    source.write_text(base)
    program.run("lm", "train", source, "--output", program.folder / "own")
    program.run("lm", "export", program.folder / "own", "--output", program.folder / "own_files")
    written = json.loads((program.folder / "own_files/tokenizer.json").read_text())
    assert written["model"]["vocab"] == {c: i for i, c in enumerate(sorted(set(TEXT)))}, written
    assert (program.folder / "own_files/weft_tokenizer.json").exists()
    assert evaluate(program, program.folder / "own_files", "--set", "data.sequence=32") == \
        evaluate(program, program.folder / "own", "--set", "data.sequence=32")
    source.write_text(base + 'mlp = "relu2"\n')
    program.run("lm", "train", source, "--output", program.folder / "relu2")
    output = program.run("lm", "export", program.folder / "relu2", "--output", program.folder / "no", code=2)
    assert "language_model.mlp" in output and not (program.folder / "no").exists()
    assert "nothing is overwritten" in program.run("lm", "export", program.folder / "own", "--output", program.folder / "own_files", code=2)


def small_tokenizer():
    """97 tokens, printable ASCII and two others; <|begin|> begins a text."""
    names = ["<|begin|>", "<|stop|>"] + [chr(c) for c in range(33, 127)] + ["\u0120"]  # the last one is the space
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {"version": "1.0", "truncation": None, "padding": None, "normalizer": None,
            "added_tokens": [{"id": i, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                              "special": True} for i, name in enumerate(names[:2])],
            "pre_tokenizer": byte_level, "decoder": byte_level,
            "post_processor": {"type": "TemplateProcessing",
                               "single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                               "pair": [], "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [0], "tokens": ["<|begin|>"]}}},
            "model": {"type": "BPE", "vocab": {name: i for i, name in enumerate(names)}, "merges": []}}


def test_special_tokens(program):
    """A model of 256 rows with a tokeniser of 97 tokens, and the files beside it: what begins a text, what ends one, which ids are
    never drawn, what an export keeps."""
    folder, tokenizer = program.folder / "special", small_tokenizer()
    tensors = make(folder, CONFIGS["llama"])
    (folder / "weft_tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    kept = {"tokenizer_config.json": '{"bos_token": "<|begin|>", "pad_token": "<|stop|>", "tokenizer_class": "PreTrainedTokenizerFast"}',
            "chat_template.jinja": "{{ messages }}", "generation_config.json": '{"eos_token_id": null, "temperature": 0.6}'}
    for name, text in kept.items():
        (folder / name).write_text(text)

    # The text begins with <|begin|>, once; without it the text alone. The formulas have the same ids.
    without = ("--set", "data.add_special_tokens=false")
    ids = [tokenizer["model"]["vocab"][c.replace(" ", "\u0120")] for c in TEXT]
    text = program.folder / "begin.txt"
    text.write_text("<|begin|>" + TEXT)
    marked = evaluate(program, folder)
    assert abs(marked / loss_of(CONFIGS["llama"], tensors, [0, *ids]) - 1) < 5e-6
    assert abs(evaluate(program, folder, *without) / loss_of(CONFIGS["llama"], tensors, ids) - 1) < 5e-6
    for more in ((), without):
        output = program.run("lm", "evaluate", folder, "--text", text, "--output", program.folder / "evaluation", *more)
        assert json.loads((program.folder / "evaluation/evaluation.json").read_text())["validation"]["loss"] == marked
        assert ("texts begin with <|begin|>" in output) == (not more), output
    program.run("lm", "tokenize", text, "--tokens", folder / "tokenizer.json", "--output", program.folder / "begin_tokens")
    assert "begin with <|begin|>" not in program.run(
        "lm", "tokenize", text, "--tokens", folder / "tokenizer.json", "--output", program.folder / "tokens", *without)
    assert (program.folder / "begin_tokens/tokens_00000.h5").read_bytes() == (program.folder / "tokens/tokens_00000.h5").read_bytes()
    assert "unknown key" in program.run("lm", "tokenize", text, "--tokens", "bytes", "--output", "no", "--set", "data.sequence=3", code=2)

    # Ids without a token are not drawn: probabilities are those among the others.
    def generate(*options):
        lines = program.run("lm", "generate", folder, "--prompt", "In the", "--jsonl", *options).splitlines()
        return [json.loads(line) for line in lines]

    drawn = generate("--samples", 8, "--max-new-tokens", 20)
    assert all(line["tokens"] == len(line["text"].replace("<|begin|>", "b").replace("<|stop|>", "s")) == 20 for line in drawn), drawn
    greedy = generate("--temperature", 0, "--max-new-tokens", 3)[0]
    logits = logits_of(CONFIGS["llama"], tensors, [0, *ids[:6]])[-1][:len(tokenizer["model"]["vocab"])]
    first = tokenizer["model"]["vocab"][greedy["text"][0].replace(" ", "\u0120")]
    assert first == int(np.argmax(logits))
    one = generate("--temperature", 0, "--max-new-tokens", 1)[0]["log_probability"]
    assert abs(one - (logits[first] - np.log(np.exp(logits).sum()))) < 1e-4, (one, logits)

    # Ends of both files, one or several; generation_config.json is kept.
    second = tokenizer["model"]["vocab"][greedy["text"][1].replace(" ", "\u0120")]
    for name, end in (("generation_config.json", second), ("config.json", [5000, second])):
        before = (folder / name).read_text()
        (folder / name).write_text(json.dumps({**json.loads(before), "eos_token_id": end}))
        ended = generate("--temperature", 0, "--max-new-tokens", 3)[0]
        assert (ended["finish"], ended["text"], ended["tokens"]) == ("end", greedy["text"][0], 2), ended
        (folder / name).write_text(before)
    (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
    assert "generation_config.json" in program.run("lm", "generate", folder, "--prompt", "In", code=3)
    (folder / "generation_config.json").write_text(kept["generation_config.json"])

    short = ("--set", "data.sequence=32")
    # Exports keep the files, also of a run that has begun with the model; samples and answers end no training.
    (program.folder / "prompts.json").write_text('{"prompt": "In the"}\n{"prompt": "God"}\n')
    text.write_text(TEXT * 20)
    table = program.run("inspect", folder).split("\n\n", 1)[1].replace('initial = ""', f'initial = "{folder}"')
    source = program.folder / "special.toml"
    source.write_text(f'[data]\ntrain = "{text}"\ntokens = "{folder}/tokenizer.json"\nsequence = 32\nbatch_tokens = 64\n[run]\nsteps = 2\n'
                      '[optimizer]\nwarmup_steps = 0\nlearning_rate = 1e-30\nweight_decay = 0\n[log]\nsample_tokens = 30\n' + table)
    output = program.run("lm", "train", source, "--output", program.folder / "special_run")
    assert "texts begin with <|begin|>" in output and "sample after step 2:\n<|begin|>" in output, output
    output = program.run("lm", "polychromic", source, "--output", program.folder / "no", code=2)
    assert "has no table [polychromic]" in output and 'reward = "likelihood"' in output, output
    source.write_text(source.read_text() + '[polychromic]\nprompts_file = "prompts.json"\nsamples = 6\nset_size = 2\nevery = 1\nprompts = 2\n'
                      'max_new_tokens = 20\nevaluation_prompts = 2\n')
    program.run("lm", "polychromic", source, "--output", program.folder / "answers", "--set", "log.sample_tokens=0")
    answers = json.loads((program.folder / "answers/samples.json").read_text())["after"]["samples"]
    assert [one["prompt"] for one in answers] == ["In the", "God"], answers
    lines = [json.loads(line) for line in (program.folder / "answers/metrics.jsonl").read_text().splitlines()]
    assert all(line["answers.log_probability_gap"] < 1e-4 for line in lines), lines
    for model, output in ((folder, "special_export"), (program.folder / "special_run", "special_run_export")):
        program.run("lm", "export", model, "--output", program.folder / output)
        for name, contents in kept.items():
            assert (program.folder / output / name).read_text() == contents, (output, name)
        assert evaluate(program, program.folder / output, *short) == evaluate(program, folder, *short)
        written = json.loads((program.folder / output / "tokenizer.json").read_text())
        assert written["added_tokens"] == tokenizer["added_tokens"] and written["model"]["vocab"] == tokenizer["model"]["vocab"]
        assert written["post_processor"]["single"] == tokenizer["post_processor"]["single"], written["post_processor"]


def test(program):
    for one in (test_families, test_options_matter, test_refusals, test_training, test_own_model, test_special_tokens):
        one(program)


if __name__ == "__main__":
    main(test)
