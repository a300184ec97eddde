# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the weights of transcoders in the layouts of other programs, independently of Weft: NumPy and the published
layouts (docs/interchange.md).

A model is a `Weights`: L source layers, F features per layer, d dimensions.
"""
import json
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from files import from_bf16_bits, to_bf16_bits

NUMPY_TYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I64": np.int64}


def read_safetensors(path):
    """{name: array}; bf16 is widened to float32."""
    data = Path(path).read_bytes()
    length, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        values = np.frombuffer(data[begin:end], dtype=NUMPY_TYPES[entry["dtype"]]).reshape(entry["shape"])
        tensors[name] = from_bf16_bits(values) if entry["dtype"] == "BF16" else values
    return tensors


def write_safetensors(path, tensors, dtype="F32"):
    """tensors {name: array}. Arrays of integers keep their type (I64)."""
    header, body = {}, b""
    for name, values in tensors.items():
        values = np.asarray(values)
        kind = "I64" if values.dtype.kind == "i" else dtype
        stored = to_bf16_bits(values) if kind == "BF16" else values.astype(NUMPY_TYPES[kind])
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [len(body), len(body) + stored.nbytes]}
        body += np.ascontiguousarray(stored).tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + body)


@dataclass
class Weights:
    encoder: np.ndarray         # [L, F, d]
    encoder_bias: np.ndarray    # [L, F]
    decoder: list               # of source s: [F, L - s, d]
    decoder_bias: np.ndarray    # [L, d]
    threshold: np.ndarray = None   # [L, F]: JumpReLU, active iff z > threshold; None: ReLU
    skip: np.ndarray = None        # [L, d, d]: y += skip x
    offset: np.ndarray = None      # [L, F] of a target: an active feature writes (a + offset) times its decoder row

    def pre_activations(self, x):
        return np.einsum("nld,lfd->nlf", x, self.encoder) + self.encoder_bias

    def reconstruct(self, x):
        """[N, L, d] of x [N, L, d], both in the space of the weights."""
        z = self.pre_activations(x)
        a = np.where(z > (0 if self.threshold is None else self.threshold), z, 0)
        y = np.broadcast_to(self.decoder_bias, x.shape).copy()
        for s, rows in enumerate(self.decoder):
            y[:, s:] += np.einsum("nf,ftd->ntd", a[:, s], rows)
            if self.offset is not None:
                y[:, s:] += np.einsum("nf,tf,ftd->ntd", a[:, s] != 0, self.offset[s:], rows)
        return y if self.skip is None else y + np.einsum("nlj,lij->nli", x, self.skip)


def random_weights(generator, n_layers, n_features, width, thresholds):
    """Values that fp32 holds exactly."""
    draw = lambda *shape: generator.normal(0, 0.3, shape).astype(np.float32).astype(np.float64)
    return Weights(draw(n_layers, n_features, width), draw(n_layers, n_features),
                   [draw(n_features, n_layers - s, width) for s in range(n_layers)], draw(n_layers, width),
                   np.abs(draw(n_layers, n_features)) if thresholds else None)


# --- circuit-tracer -------------------------------------------------------------------------------------------------------


def read_circuit_tracer(directory):
    """As circuit-tracer loads it: the number of files is the number of layers, JumpReLU iff file 0 has threshold_0."""
    directory = Path(directory)
    n_layers = len(list(directory.glob("W_enc_*.safetensors")))
    encoders = [read_safetensors(directory / f"W_enc_{i}.safetensors") for i in range(n_layers)]
    decoders = [read_safetensors(directory / f"W_dec_{i}.safetensors") for i in range(n_layers)]
    part = lambda name: np.stack([file[f"{name}_{i}"] for i, file in enumerate(encoders)]).astype(np.float64)
    weights = Weights(part("W_enc"), part("b_enc"),
                      [file[f"W_dec_{i}"].astype(np.float64) for i, file in enumerate(decoders)], part("b_dec"),
                      part("threshold") if "threshold_0" in encoders[0] else None)
    for i, rows in enumerate(weights.decoder):
        assert rows.shape == (weights.encoder.shape[1], n_layers - i, weights.encoder.shape[2]), rows.shape
    return weights


# --- crosslayer-coding ----------------------------------------------------------------------------------------------------


def pair_biases(generator, weights):
    """One bias per pair of layers, which add up to the decoder biases: {(s, t): [d]}."""
    biases = {}
    for t, total in enumerate(weights.decoder_bias):
        parts = generator.normal(0, 0.1, (t, len(total))).astype(np.float32).astype(np.float64)
        for s in range(t):
            biases[s, t] = parts[s]
        biases[t, t] = (total - parts.sum(axis=0)).astype(np.float32).astype(np.float64)
    return biases


def write_crosslayer_coding(directory, weights, generator, config=None, name="model.safetensors"):
    directory = Path(directory)
    directory.mkdir(parents=True)
    n_layers, n_features, width = weights.encoder.shape
    tensors = {}
    for s in range(n_layers):
        tensors[f"encoder_module.encoders.{s}.weight"] = weights.encoder[s]
        tensors[f"encoder_module.encoders.{s}.bias_param"] = weights.encoder_bias[s]
    for (s, t), bias in sorted(pair_biases(generator, weights).items()):
        tensors[f"decoder_module.decoders.{s}->{t}.weight"] = weights.decoder[s][:, t - s].T
        tensors[f"decoder_module.decoders.{s}->{t}.bias_param"] = bias
    if weights.threshold is not None:
        tensors["theta_manager.log_threshold"] = np.log(weights.threshold)
    write_safetensors(directory / name, tensors)
    (directory / "cfg.json").write_text(json.dumps({
        "num_features": n_features, "num_layers": n_layers, "d_model": width, "normalization_method": "none",
        "activation_fn": "relu" if weights.threshold is None else "jumprelu", "decoder_tying": "none",
        "batchtopk_k": None, **(config or {})}))


def write_tied_crosslayer_coding(directory, weights, tying, config=None, scale=None):
    """decoder: of each layer [F, 1, d]; its own decoder, of a source or a target. scale: [L, F] of targets. Returns the weights with
    which `reconstruct` gives what the program computes."""
    directory = Path(directory)
    directory.mkdir(parents=True)
    n_layers, n_features, width = weights.encoder.shape
    tensors = {}
    for i in range(n_layers):
        tensors[f"encoder_module.encoders.{i}.weight"] = weights.encoder[i]
        tensors[f"encoder_module.encoders.{i}.bias_param"] = weights.encoder_bias[i]
        tensors[f"decoder_module.decoders.{i}.weight"] = weights.decoder[i][:, 0].T
        tensors[f"decoder_module.decoders.{i}.bias_param"] = weights.decoder_bias[i]
        for name, values in (("skip_weights", weights.skip), ("feature_offset", weights.offset), ("feature_scale", scale)):
            if values is not None:
                tensors[f"decoder_module.{name}.{i}"] = values[i]
    if weights.threshold is not None:
        tensors["theta_manager.log_threshold"] = np.log(weights.threshold)
    write_safetensors(directory / "model.safetensors", tensors)
    (directory / "cfg.json").write_text(json.dumps({
        "num_features": n_features, "num_layers": n_layers, "d_model": width, "normalization_method": "none",
        "activation_fn": "relu" if weights.threshold is None else "jumprelu", "decoder_tying": tying,
        "enable_feature_offset": weights.offset is not None, "enable_feature_scale": scale is not None,
        "skip_connection": weights.skip is not None, **(config or {})}))
    return untied(weights, tying, scale)


def untied(weights, tying, scale=None):
    """The decoder rows of every pair of layers, with their scales; per source, biases of all sources up to the target add up."""
    n_layers = len(weights.encoder)
    own = [rows[:, 0] for rows in weights.decoder]
    scale = np.ones((n_layers, weights.encoder.shape[1])) if scale is None else scale
    rows = [np.stack([scale[t][:, None] * own[s if tying == "per_source" else t] for t in range(s, n_layers)], axis=1)
            for s in range(n_layers)]
    bias = np.cumsum(weights.decoder_bias, axis=0) if tying == "per_source" else weights.decoder_bias
    return replace(weights, decoder=rows, decoder_bias=bias)


def read_tied_crosslayer_coding(directory):
    directory = Path(directory)
    config = json.loads((directory / "cfg.json").read_text())
    tensors = {name: values.astype(np.float64) for name, values in read_safetensors(directory / "model.safetensors").items()}
    layers = range(config["num_layers"])
    assert config["normalization_method"] == "none"
    part = lambda name: np.stack([tensors[name.format(i)] for i in layers])
    module = "decoder_module."
    weights = Weights(
        part("encoder_module.encoders.{}.weight"), part("encoder_module.encoders.{}.bias_param"),
        [tensors[f"{module}decoders.{i}.weight"].T[:, None] for i in layers], part(module + "decoders.{}.bias_param"),
        np.exp(tensors["theta_manager.log_threshold"]) if config["activation_fn"] == "jumprelu" else None,
        part(module + "skip_weights.{}") if config["skip_connection"] else None,
        part(module + "feature_offset.{}") if config["enable_feature_offset"] else None)
    return untied(weights, config["decoder_tying"], part(module + "feature_scale.{}") if config["enable_feature_scale"] else None)


def read_crosslayer_coding(directory):
    directory = Path(directory)
    config = json.loads((directory / "cfg.json").read_text())
    tensors = read_safetensors(directory / "model.safetensors")
    n_layers = config["num_layers"]
    assert config["normalization_method"] == "none"
    encoder = np.stack([tensors[f"encoder_module.encoders.{s}.weight"] for s in range(n_layers)])
    decoder = [np.stack([tensors[f"decoder_module.decoders.{s}->{t}.weight"].T for t in range(s, n_layers)], axis=1)
               for s in range(n_layers)]
    bias = np.stack([sum(tensors[f"decoder_module.decoders.{s}->{t}.bias_param"] for s in range(t + 1))
                     for t in range(n_layers)])
    assert encoder.shape == (n_layers, config["num_features"], config["d_model"])
    return Weights(encoder.astype(np.float64),
                   np.stack([tensors[f"encoder_module.encoders.{s}.bias_param"] for s in range(n_layers)]).astype(np.float64),
                   [rows.astype(np.float64) for rows in decoder], bias.astype(np.float64),
                   np.exp(tensors["theta_manager.log_threshold"].astype(np.float64))
                   if config["activation_fn"] == "jumprelu" else None)


# --- SAELens and sparsify: one layer per directory ------------------------------------------------------------------------


def natural(name):
    """Numbers inside a name are compared as numbers."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def reconstruct_layers(directory, x):
    """[N, L, d] of x [N, L, d]: each directory as its program loads and applies it, in the order of their numbers."""
    directory = Path(directory)
    if files := sorted(directory.glob("layer_*.safetensors"), key=lambda path: natural(path.name)):
        return np.stack([reconstruct_circuit_tracer_layer(path, x[:, i]) for i, path in enumerate(files)], axis=1)
    kinds = {"sae_weights.safetensors": reconstruct_saelens, "sae.safetensors": reconstruct_sparsify}
    layers = sorted((path for path in directory.iterdir() if path.is_dir()), key=lambda path: natural(path.name))
    apply, = {function for name, function in kinds.items() if (layers[0] / name).exists()}
    return np.stack([apply(layer, x[:, i]) for i, layer in enumerate(layers)], axis=1)


def largest(z, k):
    """z with all but the k largest of each row set to zero, and those below zero."""
    kept = np.argsort(-z, axis=1, kind="stable")[:, :k]
    a = np.zeros_like(z)
    np.put_along_axis(a, kept, np.maximum(np.take_along_axis(z, kept, axis=1), 0), axis=1)
    return a


def reconstruct_circuit_tracer_layer(path, x):
    tensors = {name: values.astype(np.float64) for name, values in read_safetensors(path).items()}
    z = x @ tensors["W_enc"].T + tensors["b_enc"]
    y = np.where(z > tensors.get("activation_function.threshold", 0), z, 0) @ tensors["W_dec"] + tensors["b_dec"]
    return y + x @ tensors["W_skip"].T if "W_skip" in tensors else y


def reconstruct_saelens(directory, x):
    config = json.loads((directory / "cfg.json").read_text())
    tensors = {name: values.astype(np.float64) for name, values in read_safetensors(directory / "sae_weights.safetensors").items()}
    assert tensors["W_enc"].shape == (config["d_in"], config["d_sae"]) and config["normalize_activations"] == "none"
    transcoder = config["architecture"].endswith("transcoder")
    assert ("d_out" in config) == transcoder
    centred = x - tensors["b_dec"] if not transcoder and config["apply_b_dec_to_input"] else x
    z = centred @ tensors["W_enc"] + tensors["b_enc"]
    a = largest(z, config["k"]) if config["architecture"] == "topk" else np.maximum(z, 0)
    if "jumprelu" in config["architecture"]:
        a = a * (z > tensors["threshold"])
    y = a @ tensors["W_dec"] + tensors["b_dec"]
    return y + x @ tensors["W_skip"].T if "skip" in config["architecture"] else y


def reconstruct_sparsify(directory, x):
    config = json.loads((directory / "cfg.json").read_text())
    tensors = {name: values.astype(np.float64) for name, values in read_safetensors(directory / "sae.safetensors").items()}
    n_latents = config["num_latents"] or config["d_in"] * config["expansion_factor"]
    assert tensors["encoder.weight"].shape == (n_latents, config["d_in"])
    centred = x if config["transcode"] else x - tensors["b_dec"]
    y = largest(centred @ tensors["encoder.weight"].T + tensors["encoder.bias"], config["k"]) @ tensors["W_dec"] + tensors["b_dec"]
    return y + x @ tensors["W_skip"].T if config["skip_connection"] else y
