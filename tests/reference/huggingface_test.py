# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face in the program, against their published formulas in NumPy (float64).

huggingface_test.py WEFT

The formulas below read the library's own tensors and config.json, and share neither names nor code with Weft or with
language_model.py: GPT-2 (Radford et al. 2019), Llama 3 (Meta 2024), Qwen3 (2025), OLMo 2 (2024), Gemma 2 (2024). Weights
are random and large, so that every option changes the loss by far more than the tolerance.
"""
import json
import struct

import numpy as np

from program import main

VOCABULARY, CONTEXT, LAYERS, WIDTH, HIDDEN = 256, 64, 3, 32, 48
TEXT = "In the beginning God created the heaven and the earth."

LLAMA = dict(vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4,
             num_key_value_heads=2, intermediate_size=HIDDEN, max_position_embeddings=CONTEXT, rms_norm_eps=1e-5,
             rope_theta=1000.0, attention_bias=False, torch_dtype="float32")
CONFIGS = {
    "gpt2": dict(model_type="gpt2", vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=4, n_positions=CONTEXT,
                 n_ctx=CONTEXT, n_inner=HIDDEN, activation_function="gelu_new", layer_norm_epsilon=1e-5),
    "llama": dict(LLAMA, model_type="llama", hidden_act="silu", tie_word_embeddings=True, mlp_bias=False,
                  rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                    original_max_position_embeddings=32)),
    "qwen3": dict(LLAMA, model_type="qwen3", hidden_act="silu", head_dim=16, use_sliding_window=False, sliding_window=None,
                  max_window_layers=3),
    "olmo2": dict(LLAMA, model_type="olmo2", hidden_act="silu"),
    "gemma2": dict(LLAMA, model_type="gemma2", hidden_activation="gelu_pytorch_tanh", head_dim=16, query_pre_attn_scalar=24,
                   sliding_window=6, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
}
TIED = {"gpt2": True, "llama": True, "qwen3": False, "olmo2": False, "gemma2": True}


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
    size = c.get("head_dim", WIDTH // 4)
    queries, keys = 4 * size, 2 * size
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,)}
    if not TIED[kind]:
        shapes["lm_head.weight"] = (VOCABULARY, WIDTH)
    norms = {"olmo2": ("post_attention", "post_feedforward"),
             "gemma2": ("input", "post_attention", "pre_feedforward", "post_feedforward")}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name in norms.get(kind, ("input", "post_attention")):
            shapes[f"{at}{name}_layernorm.weight"] = (WIDTH,)
        for name, outputs, inputs in (("self_attn.q_proj", queries, WIDTH), ("self_attn.k_proj", keys, WIDTH),
                                      ("self_attn.v_proj", keys, WIDTH), ("self_attn.o_proj", WIDTH, queries),
                                      ("mlp.gate_proj", HIDDEN, WIDTH), ("mlp.up_proj", HIDDEN, WIDTH),
                                      ("mlp.down_proj", WIDTH, HIDDEN)):
            shapes[f"{at}{name}.weight"] = (outputs, inputs)
        if kind in ("qwen3", "olmo2"):
            shapes[f"{at}self_attn.q_norm.weight"] = (size if kind == "qwen3" else queries,)
            shapes[f"{at}self_attn.k_norm.weight"] = (size if kind == "qwen3" else keys,)
    return shapes


# --- Formulas ---------------------------------------------------------------------------------------------------------------


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x ** 3)))


def rms(x, w, epsilon):
    return w * x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)


def frequencies(c, size):
    f = c["rope_theta"] ** (-np.arange(0, size, 2) / size)
    scaling = c.get("rope_scaling")
    if not scaling:
        return f
    length, low, high = (scaling[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    wavelength = 2 * np.pi / f
    smooth = (length / wavelength - low) / (high - low)
    between = (1 - smooth) * f / scaling["factor"] + smooth * f
    return np.where(wavelength > length / low, f / scaling["factor"], np.where(wavelength < length / high, f, between))


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


def logits_llama(c, t, ids):
    kind, size = c["model_type"], c.get("head_dim", WIDTH // 4)
    gemma = kind == "gemma2"
    norm = lambda x, name: rms(x, t[f"{name}.weight"] + (1 if gemma else 0), c["rms_norm_eps"])
    silu = lambda x: x / (1 + np.exp(-x))
    angle = np.arange(len(ids))[:, None, None] * frequencies(c, size)

    def turn(x):
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)

    h = t["model.embed_tokens.weight"][ids] * (np.sqrt(WIDTH) if gemma else 1)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        x = h if kind == "olmo2" else norm(h, at + "input_layernorm")
        q, k, v = (x @ t[f"{at}self_attn.{side}_proj.weight"].T for side in "qkv")
        if kind == "olmo2":
            q, k = norm(q, at + "self_attn.q_norm"), norm(k, at + "self_attn.k_norm")
        q, k, v = (y.reshape(len(ids), -1, size) for y in (q, k, v))
        if kind == "qwen3":
            q, k = norm(q, at + "self_attn.q_norm"), norm(k, at + "self_attn.k_norm")
        scale = c["query_pre_attn_scalar"] ** -0.5 if gemma else size ** -0.5
        window = c["sliding_window"] if gemma and layer % 2 == 0 else None
        y = attend(turn(q), turn(k), v, scale, c.get("attn_logit_softcapping"), window) @ t[at + "self_attn.o_proj.weight"].T
        h = h + (norm(y, at + "post_attention_layernorm") if kind in ("olmo2", "gemma2") else y)
        x = h if kind == "olmo2" else norm(h, at + ("pre_feedforward_layernorm" if gemma else "post_attention_layernorm"))
        gate = x @ t[at + "mlp.gate_proj.weight"].T
        y = ((gelu if gemma else silu)(gate) * (x @ t[at + "mlp.up_proj.weight"].T)) @ t[at + "mlp.down_proj.weight"].T
        h = h + (norm(y, at + "post_feedforward_layernorm") if kind in ("olmo2", "gemma2") else y)
    z = norm(h, "model.norm") @ t["model.embed_tokens.weight" if TIED[kind] else "lm_head.weight"].T
    cap = c.get("final_logit_softcapping")
    return cap * np.tanh(z / cap) if cap else z


def loss_of(c, tensors, text):
    ids = np.frombuffer(text.encode(), np.uint8).astype(int)
    t = {name: array.astype(np.float64) for name, array in tensors.items()}
    z = (logits_gpt2 if c["model_type"] == "gpt2" else logits_llama)(c, t, ids[:-1])
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
        gain = len(shape) == 1 and name.endswith("weight") and config["model_type"] != "gemma2"
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
                               ("gemma2", "BF16", 1)):
        folder, config = program.folder / kind, CONFIGS[kind]
        tensors = make(folder, config, dtype, parts)
        expected, found = loss_of(config, tensors, TEXT), evaluate(program, folder)
        print(f"{kind}: loss {found:.7f}, formulas {expected:.7f}")
        assert abs(found / expected - 1) < 5e-6, kind
        assert f"{kind} of Hugging Face" in program.run("inspect", folder)

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
                             ("gemma2", "final_logit_softcapping", 9.0), ("olmo2", "rope_theta", 50.0)):
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
                          ({"attention_bias": True}, "attention_bias"), ({"hidden_activation": "relu"}, '"relu"'),
                          ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, '"yarn"'),
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
    source.write_text(common + f'[language_model]\ninitial = "{folder}"\n')
    output = program.run("lm", "train", source, "--output", program.folder / "other", code=2)
    assert "d_model = 32" in output and "rope_factor = 8" in output, output


def test_own_model(program):
    """What the library lacks is refused; a tokeniser that it lacks is kept in a file of its own."""
    text = program.folder / "own.txt"
    text.write_text(TEXT * 40)
    base = f'[data]\ntrain = "{text}"\nsequence = 32\nbatch_tokens = 64\n[run]\nsteps = 2\n[optimizer]\nwarmup_steps = 0\n' \
           '[language_model]\nlayers = 1\nheads = 2\nd_model = 32\n'
    source = program.folder / "own.toml"
    source.write_text(base)
    program.run("lm", "train", source, "--output", program.folder / "own")
    output = program.run("lm", "export", program.folder / "own", "--output", program.folder / "own_files")
    assert '"character"' in output and (program.folder / "own_files/weft_tokenizer.json").exists()
    assert evaluate(program, program.folder / "own_files", "--set", "data.sequence=32") == \
        evaluate(program, program.folder / "own", "--set", "data.sequence=32")
    source.write_text(base + 'mlp = "relu2"\n')
    program.run("lm", "train", source, "--output", program.folder / "relu2")
    output = program.run("lm", "export", program.folder / "relu2", "--output", program.folder / "no", code=2)
    assert "language_model.mlp" in output and not (program.folder / "no").exists()
    assert "nothing is overwritten" in program.run("lm", "export", program.folder / "own", "--output", program.folder / "own_files", code=2)


def test(program):
    for one in (test_families, test_options_matter, test_refusals, test_training, test_own_model):
        one(program)


if __name__ == "__main__":
    main(test)
