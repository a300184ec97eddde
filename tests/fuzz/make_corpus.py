# SPDX-License-Identifier: Apache-2.0
"""Writes the seeds of the fuzz targets: make_corpus.py DIRECTORY (tests/fuzz/corpus). Small files with different features.
Inputs of past findings are added by hand, as finding_*."""
import json
import struct
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np


def put(target, name, content):
    path = ROOT / target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def inputs():
    put("input", "override.toml", "# --set optimizer.learning_rate=1e-3\n[data]\ntrain = \"a\"\n[transcoder]\nfeatures = 8\n")
    put("input", "wrong.toml", "[data]\ntrian = 3\ntrain = [1, [2, {a = 1}]]\nbatch_tokens = 1e300\n[[log]]\nevery = -1\n"
        "[nowhere]\nx = 1979-05-27T07:32:00Z\n[optimizer]\nlearning_rate = nan\n")
    put("input", "text.toml", "data.train = \"\"\"a\\u00e9\\\n  ${HOME} $${x}\"\"\"\ndata.\"validation\" = 'c:\\d'\n"
        "transcoder = {features = 0x10, k = 0.5, activation = \"topk\", scope = \"all_layers\"}\n")


def index():
    rows = [80, 7]
    head = bytes([len(rows) - 1] + [r - 1 for r in rows])
    put("index", "by_file", head + struct.pack("<iiqiiq", 0, 80, 0, 1, 7, 80))
    put("index", "by_row", head + b"".join(struct.pack("<II", f, r) for f, n in enumerate(rows) for r in range(n)))
    put("index", "one_file", bytes([0, 2]) + struct.pack("<III", 0, 3, 0))
    put("index", "twice", bytes([0, 2]) + struct.pack("<IIIIII", 0, 1, 0, 2, 0, 1))


METADATA = {"model_name": "m", "dataset": "t", "split": "train", "num_layers": 2, "d_model": 8, "dtype": "torch.float32",
            "total_tokens": 87, "chunk_tokens": 80, "hook": ["a", {"b": None}]}


def json_rows():
    put("json_rows", "forms", '\ufeff{"text": "a\\u00e9\\ud83d\\ude00"}\r\n\n{"prompt": "p", "completion": "c", "more": [1]}\n'
        '{"segments": [{"text": "a", "loss": false}, {"text": "b", "loss": true}, {"text": "", "loss": false}]}')
    put("json_rows", "bad", '{"text": "a"\n{"text": "\\ud800"}\n[1]\n{"text": 1}\n{"segments": [{"text": "a"}]}\n{"text": "b"}')
    put("json_rows", "deep", '{"text": ' + "[" * 3000 + "]" * 3000 + "}")


def vocabulary():
    head = {"format": "weft-vocabulary", "format_version": 1}
    put("vocabulary", "good", json.dumps({**head, "texts": ["a", " the", "\ufffd", "\n", ""]}))
    put("vocabulary", "number", json.dumps({**head, "texts": ["a", 3]}))
    put("vocabulary", "newer", json.dumps({**head, "format_version": 2, "texts": []}))
    put("vocabulary", "deep", json.dumps(head)[:-1] + ', "texts": ' + "[" * 3000 + "]" * 3000 + "}")


def metadata():
    put("metadata", "good", json.dumps(METADATA, indent=1))
    put("metadata", "bf16", json.dumps({**METADATA, "dtype": "bfloat16"}))
    put("metadata", "layers", json.dumps({**METADATA, "num_layers": 2**63}))
    put("metadata", "negative", json.dumps({**METADATA, "total_tokens": -1}))
    put("metadata", "finding_deep_dtype", '{"dtype": ' + "[" * 3000 + "]" * 3000 + "}")


def statistics():
    side = {"mean": [0, 1, 2], "std": [1, 1, 1.0]}
    other = {"mean": [-3, 0.5, 100], "std": [0, 2, 3]}
    both = {"0": {"inputs": side, "targets": side}, "1": {"inputs": other, "targets": other}}
    put("statistics", "norm_stats", json.dumps(both))
    put("statistics", "not_numbers", json.dumps({**both, "1": {"inputs": {"mean": [None] * 3, "std": 1}, "targets": []}}))
    cached = {"mean": [0, 1, 2, 3, 4, 5.5], "standard_deviation": [1] * 6, "mean_norm": [1, 2]}
    put("statistics", "cache", json.dumps({"n_rows": 4, "fingerprint": "f00d", "inputs": cached, "targets": cached}))


TENSORS = [("encoder_0/weight", "fp32", (13, 7)), ("encoder_0/weight.first_moment", "bf16", (13, 7)),
           ("encoder_0/weight.codes", "u8", (13, 301)), ("encoder_0/tokens_since_fired", "i64", (13,)),
           ("decoder_0/weight", "fp16", (2, 3, 5)), ("statistics/mean_inputs", "fp64", (4, 5)),
           ("schedule/words", "u64", (1,))]


def manifest_text(**changes):
    """A manifest with a zero sha256: the target inserts the correct one."""
    root = {"format_version": 1, "step": 3, "tokens": 1536, "cursor": {"epoch": 0, "position": 3}, "world": 2,
            "grid": {"data": 1, "feature": 2}, "code_revision": "abc", "libraries": {"hdf5": "1.10.8"},
            "dataset_fingerprint": "f00d", "input": "[run]\nsteps = 1\n", "original_input": "", "extra": {"norm": 0.1},
            "tensors": [{"name": "a/weight", "dtype": "fp32", "shape": [3, 7]}, {"name": "b", "dtype": "u8", "shape": [2]}],
            "shards": [{"file": "rank_00000.h5", "bytes": 4000, "sha256": ["0" * 64], "owned": [[0, 2], [0, 2]]},
                       {"file": "rank_00001.h5", "bytes": 67108865, "sha256": ["0" * 64] * 2, "owned": [[2, 3], [0, 0]]}],
            **changes}
    head = '{\n  "format": "weft-checkpoint",\n  "sha256": "' + "0" * 64 + '"'
    return head + "".join(f',\n  "{key}": {json.dumps(value)}' for key, value in root.items()) + "\n}\n"


def manifest():
    put("manifest", "good", manifest_text())
    put("manifest", "format_2", manifest_text(format_version=2, cursor={"document": 7, "stage": 1, "token": 123456789012},
                                              grid={"data": 1, "tensor": 2}))
    put("manifest", "newer", manifest_text(format_version=3))
    put("manifest", "huge", manifest_text(tensors=[{"name": "a", "dtype": "fp64", "shape": [2**31, 2**31, 2**31]}]))
    put("manifest", "no_digest", '{\n  "format": "weft-checkpoint",\n  "sha256": "0')
    put("manifest", "finding_deep_extra",
        manifest_text(extra="DEEP").replace('"DEEP"', '{"a": ' + "[" * 3000 + "]" * 3000 + "}"))


def bf16():
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_precision(16)
    kind.set_size(2)
    kind.set_ebias(127)
    return kind


FILE_TYPES = {"fp32": h5py.h5t.IEEE_F32LE, "fp16": h5py.h5t.IEEE_F16LE, "fp64": h5py.h5t.IEEE_F64LE,
              "u8": h5py.h5t.STD_U8LE, "i64": h5py.h5t.STD_I64LE, "u64": h5py.h5t.STD_U64LE, "bf16": bf16()}


def dataset(group, name, kind, shape, chunks=None, gzip=False, fletcher=False):
    create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if chunks:
        create.set_chunk(chunks)
    if gzip:
        create.set_deflate(4)
    if fletcher:
        create.set_fletcher32()
    made = h5py.h5d.create(group.id, name.encode(), FILE_TYPES[kind], h5py.h5s.create_simple(shape), create)
    size = FILE_TYPES[kind].get_size()
    values = np.random.default_rng(1).integers(0, 120, int(np.prod(shape)) * size, dtype=np.uint8)
    values.reshape(-1, size)[::2, -1] |= 0x80       # both signs
    made.write(h5py.h5s.ALL, h5py.h5s.ALL, values, mtype=made.get_type())
    return made


def h5(target, name, libver, fill, **options):
    path = ROOT / target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w", libver=libver, track_order=False, **options) as file:
        fill(file)


def activations():
    def layers(kind, attributes=(), **storage):
        def fill(file):
            for key, value in attributes:
                file.attrs[key] = value
            for layer in range(2):
                group = file.create_group(f"layer_{layer}")
                for side in ("inputs", "targets"):
                    dataset(group, side, kind, (9, 4), **storage)
        return fill
    old, new = ("earliest", "v108"), ("v110", "v110")
    own = [("format", np.bytes_("weft-activations")), ("format_version", 1), ("model", "m")]
    h5("activation_bytes", "plain_old", old, layers("fp32"))
    h5("activation_bytes", "chunked_old", old, layers("bf16", chunks=(4, 4)))
    h5("activation_bytes", "gzip_old", old, layers("fp16", chunks=(4, 3), gzip=True))
    h5("activation_bytes", "own_new", new, layers("bf16", own, chunks=(4, 4)))
    h5("activation_bytes", "gzip_new", new, layers("fp32", own, chunks=(5, 4), gzip=True, fletcher=True))
    h5("activation_bytes", "user_block", old, layers("fp32"), userblock_size=512)
    # The layout of crosslayer-transcoder, and files that are nearly so.
    for name, shape, kind, storage in (("tensor", (9, 2, 3, 4), "fp32", {}), ("tensor_half", (9, 2, 3, 4), "fp16", {}),
                                       ("tensor_chunked", (9, 2, 3, 4), "fp32", {"chunks": (3, 2, 3, 4)}),
                                       ("tensor_sides", (9, 3, 3, 4), "fp32", {}), ("tensor_axes", (9, 2, 12), "fp32", {}),
                                       ("tensor_type", (9, 2, 3, 4), "fp64", {})):
        h5("activation_bytes", name, new, lambda file: dataset(file, "tensor", kind, shape, **storage))
    rng = np.random.default_rng(2)
    for i in range(12):
        put("activation_layout", f"random_{i}", rng.integers(0, 256, 60 + 10 * i, dtype=np.uint8).tobytes())
    put("activation_layout", "zeros", bytes(40))


def shard():
    def fill(file):
        file.attrs["step"], file.attrs["rank"] = 3, 0
        for name, kind, shape in TENSORS:
            group, _, leaf = name.rpartition("/")
            made = dataset(file.require_group(group), leaf, kind, shape, chunks=shape, fletcher=True)
            h5py.AttributeManager(h5py.Dataset(made))["first_row"] = 0
    h5("shard", "good", ("v110", "v110"), fill)


def tokenizers():
    form = {"format": "weft-tokenizer", "version": 1}
    put("tokenizer", "characters", json.dumps({**form, "kind": "character", "characters": [10, 32, 97, 233, 0x1f600],
                                               "special": ["UNK", "EOS"]}))
    put("tokenizer", "bytes", json.dumps({**form, "kind": "bytes", "special": []}))
    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    others = [b for b in range(256) if b not in printable]
    alphabet = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    tokens = [alphabet[b] for b in range(256)] + ["th", "the", ""]
    bpe = {**form, "kind": "bpe", "pattern": "gpt2", "ignore_merges": False, "tokens": tokens,
           "merges": [[116, 104], [256, 101]], "added": [{"id": 258, "content": "<|endoftext|>"}]}
    put("tokenizer", "bpe", json.dumps(bpe, ensure_ascii=False, separators=(",", ":")))
    put("tokenizer", "pattern", json.dumps({**bpe, "pattern": "(a+)+$|\\p{L}*"}, ensure_ascii=False, separators=(",", ":")))
    vocabulary = {token: i for i, token in enumerate(tokens[:-1])}
    imported = {"added_tokens": [{"id": 258, "content": "<|endoftext|>", "special": True}], "normalizer": None,
                "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
                "model": {"type": "BPE", "vocab": vocabulary, "merges": ["t h", ["th", "e"]]}}
    put("tokenizer", "huggingface", json.dumps(imported, ensure_ascii=False, separators=(",", ":")))
    # Other parts of a tokenizer.json, one file per model.
    mark, characters = "\u2581", ["<unk>", "\u2581", *"Tthecafn\u00e912mi", "th", "\u2581th", *(f"<0x{byte:02X}>" for byte in range(0, 256, 3))]
    characters = list(dict.fromkeys(characters))
    added = [{"id": len(characters), "content": "<|endoftext|>", "special": True, "lstrip": True, "normalized": False},
             {"id": len(characters) + 1, "content": "don", "special": False, "single_word": True, "normalized": True, "rstrip": True}]
    metaspace = {"type": "Metaspace", "replacement": mark, "prepend_scheme": "first", "split": True}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": mark}
    steps = {
        "sentencepiece_bpe": {"added_tokens": added, "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Prepend", "prepend": mark}, replace]},
                              "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": mark}, "content": " "}, {"type": "ByteFallback"},
                                                                           {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
                              "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True,
                                        "vocab": {token: i for i, token in enumerate(characters)}, "merges": [["t", "h"], [mark, "th"]]}},
        "unigram": {"added_tokens": added, "normalizer": {"type": "Precompiled", "precompiled_charsmap": "CAAAAAAAAAAAAAAAYQA="}, "pre_tokenizer": metaspace, "decoder": metaspace,
                    "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": True, "vocab": [[token, -i / 8] for i, token in enumerate(characters)]}},
        "wordpiece": {"added_tokens": added, "normalizer": {"type": "BertNormalizer", "lowercase": True}, "pre_tokenizer": {"type": "BertPreTokenizer"},
                      "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
                      "model": {"type": "WordPiece", "unk_token": "<unk>", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
                                "vocab": {token: i for i, token in enumerate(characters)}}},
    }
    for name, file in steps.items():
        put("tokenizer", name, json.dumps(file, ensure_ascii=False, separators=(",", ":")))


def tokens():
    def foreign(magic, version, kind, ids):
        return struct.pack("<256i", magic, version, len(ids), *[0] * 253) + np.array(ids, kind).tobytes()
    put("foreign_tokens", "gpt2", foreign(20240520, 1, "<u2", [50256, 1, 2, 50256, 3, 4, 5, 6, 7, 8, 9, 10]))
    put("foreign_tokens", "llama3", foreign(20240801, 7, "<u4", [128000, 100000, 1, 2]))
    put("foreign_tokens", "range", foreign(20240520, 1, "<u2", [65535]))

    def fill(file):
        file.attrs["format"], file.attrs["format_version"] = np.bytes_("weft-tokens"), 1
        file.attrs["vocabulary"], file.attrs["text_bytes"] = 100, 30
        file.create_dataset("tokens", data=np.arange(20, dtype="<u2"))
        file.create_dataset("documents", data=np.array([0, 7, 8], "<i8"))
        file.create_dataset("tokenizer", data=np.frombuffer(b"{}", np.uint8))
    h5("token_bytes", "new", ("v110", "v110"), fill)
    h5("token_bytes", "old", ("earliest", "v108"), fill)


def weights():
    def container(header, body):
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + body
    entry = lambda dtype, shape, begin, end: {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    put("safetensors", "types", container({
        "a": entry("F32", [2, 3], 0, 24), "b": entry("BF16", [4], 24, 32), "c": entry("F16", [], 32, 34),
        "d": entry("F64", [1, 1], 34, 42), "e": entry("I64", [1], 42, 50), "__metadata__": {"format": "pt"}}, bytes(range(50))))
    put("safetensors", "empty", container({}, b""))
    put("safetensors", "no_elements", container({"a": entry("F32", [0, 2**40], 0, 0)}, b""))
    put("safetensors", "hole", container({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, b"123"))
    # The first byte: which file beside which weights.
    config = {"num_features": 3, "num_layers": 2, "d_model": 2, "normalization_method": "sqrt_d_model",
              "activation_fn": "jumprelu", "decoder_tying": "none", "skip_connection": False}
    put("weights_config", "coding", b"\0" + json.dumps(config).encode())
    side = {"mean": [0.5, -1], "std": [1, 2e-3]}
    put("weights_config", "statistics", b"\1" + json.dumps({str(i): {"inputs": side, "targets": side} for i in range(2)}).encode())
    put("weights_config", "tracer", b"\2" + b"model_name: 'gpt2'\nmodel_kind: cross_layer_transcoder # kind\n"
        b"feature_input_hook: hook_resid_mid\ntranscoders:\n  - a: b\n")
    put("weights_config", "forge", b"\3" + b'{"cross_layer_decoders": true, "model_name": "gpt2"}')
    put("weights_config", "saelens", b"\5" + json.dumps({"architecture": "jumprelu_transcoder", "d_in": 2, "d_sae": 3, "d_out": 2,
                                                         "metadata": {"hook_name": "blocks.0.hook_mlp_in"}}).encode())
    put("weights_config", "sparsify", b"\6" + b'{"d_in": 2, "num_latents": 3, "k": 2, "transcode": false}')
    tied = {"num_features": 3, "num_layers": 2, "d_model": 2, "decoder_tying": "per_target", "skip_connection": True,
            "enable_feature_offset": True, "enable_feature_scale": True}
    put("weights_config", "tied", b"\7" + json.dumps(tied).encode())
    model = {"model_type": "llama", "vocab_size": 5, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
             "intermediate_size": 3, "max_position_embeddings": 4, "rms_norm_eps": 1e-5,
             "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                              "original_max_position_embeddings": 32}}
    gemma = {**model, "model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 4,
             "layer_types": ["sliding_attention"], "rope_scaling": None}
    phi = {**model, "model_type": "phi3", "sliding_window": 4, "rope_scaling": None}
    put("huggingface", "phi3", b"\0" + json.dumps(phi).encode())
    qwen = {**model, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 4}
    put("huggingface", "qwen2", b"\0" + json.dumps(qwen).encode())
    longrope = {**phi, "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
                "original_max_position_embeddings": 2, "sliding_window": None}
    put("huggingface", "longrope", b"\0" + json.dumps(longrope).encode())
    yarn = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.5}
    put("huggingface", "yarn", b"\0" + json.dumps({**model, "rope_scaling": yarn}).encode())
    put("huggingface", "smollm3", b"\0" + json.dumps({**model, "model_type": "smollm3", "no_rope_layers": [0]}).encode())
    gemma3 = {**model, "model_type": "gemma3_text", "head_dim": 8, "query_pre_attn_scalar": 24, "sliding_window": 4, "rope_scaling": None,
              "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": {"rope_theta": 1e4}}}
    put("huggingface", "gemma3", b"\0" + json.dumps(gemma3).encode())
    neox = {"model_type": "gpt_neox", "vocab_size": 5, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
            "intermediate_size": 3, "max_position_embeddings": 4, "rotary_pct": 0.5, "rotary_emb_base": 100, "hidden_act": "gelu"}
    put("huggingface", "neox", b"\0" + json.dumps(neox).encode())
    put("huggingface", "biases", b"\0" + json.dumps({**model, "attention_bias": True, "mlp_bias": False}).encode())
    put("huggingface", "llama", b"\0" + json.dumps(model).encode())
    put("huggingface", "gemma2", b"\0" + json.dumps(gemma).encode())
    put("huggingface", "index", b"\1" + json.dumps({"weight_map": {"model.norm.weight": "a.safetensors"}}).encode())
    put("weights_config", "goreg", b"\4" + b"model:\n  init_args:\n    nonlinearity:\n      class_path: a.JumpReLU\n"
        b"    input_standardizer:\n      class_path: a.LayerwiseInputStandardizer\n    output_standardizer:\n"
        b"      class_path: Standardizer\n  is_folded: false\n")


def foreign_activations():
    def split(rows, kind, size, tokens):
        side = rows * 3 * 2 * size
        header = {"act_in": {"dtype": kind, "shape": [rows, 3, 2], "data_offsets": [0, side]},
                  "act_out": {"dtype": kind, "shape": [rows, 3, 2], "data_offsets": [side, 2 * side]}}
        values = np.random.default_rng(3).normal(0, 1, 2 * side // 4).astype("<f4").tobytes()
        if tokens:
            header["tokens"] = {"dtype": "I64", "shape": [rows], "data_offsets": [2 * side, 2 * side + 8 * rows]}
            values += np.arange(rows, dtype="<i8").tobytes()
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + values
    put("foreign_activations", "fp32", split(6, "F32", 4, True))
    put("foreign_activations", "bf16", split(4, "BF16", 2, False))
    put("foreign_activations", "odd_texts", split(5, "F32", 4, True))


def compressed_activations():
    def cache(quantization, bits, rows, compression="none", pack=bytes, **changes):
        n = rows * 2 * 3
        values = np.random.default_rng(4).integers(0, 256, (n * bits + 7) // 8, dtype=np.uint8).tobytes()
        meta = {"quantization": quantization, "compression": compression, "symmetric": True, "original_shape_in": [rows, 2, 3],
                "original_shape_out": [rows, 2, 3], "original_dtype": "torch.bfloat16", "scale_shape_in": [1, 2, 1],
                "scale_shape_out": [], "has_tokens": True, **changes}
        items = {"act_in_data": values, "act_in_scale": struct.pack("<2f", 0.5, 2), "act_out_data": values,
                 "act_out_scale": struct.pack("<f", 1), "tokens": np.arange(rows, dtype="<i8").tobytes()}
        text = json.dumps(meta).encode()
        body = struct.pack("<I", len(text)) + text + struct.pack("<I", len(items))
        for key, value in items.items():
            value = pack(value)
            body += struct.pack("<I", len(key)) + key.encode() + struct.pack("<Q", len(value)) + value
        return body

    def through(*command):
        return lambda value: subprocess.run(command, input=value, stdout=subprocess.PIPE, check=True).stdout
    put("compressed_activations", "int8", cache("int8", 8, 5))
    put("compressed_activations", "int4", cache("int4", 4, 5))
    put("compressed_activations", "int2", cache("int2", 2, 5))
    put("compressed_activations", "zstd", cache("int8", 8, 6, "zstd", through("zstd", "-q", "-c")))
    put("compressed_activations", "lz4", cache("int4", 4, 6, "lz4", through("lz4", "-q", "-c")))
    put("compressed_activations", "asymmetric", cache("int8", 8, 5, symmetric=False))
    put("compressed_activations", "huge", cache("int8", 8, 5, "zstd", through("zstd", "-q", "-c"), original_shape_in=[2**37, 2, 3],
                                                 original_shape_out=[2**37, 2, 3]))


if __name__ == "__main__":
    ROOT = Path(sys.argv[1])
    for write in (inputs, index, metadata, json_rows, vocabulary, statistics, manifest, activations, shard, tokenizers, tokens, weights, foreign_activations,
                  compressed_activations):
        write()
