# SPDX-License-Identifier: Apache-2.0
"""Runs, checkpoints, transcoders and datasets of Weft in Python; needs h5py and NumPy.

    import weft

    run = weft.Run("runs/quickstart")
    run.metrics["loss"]                      # [records]; by layer [records, L]; NaN where a record has none
    run.record["result"]["validation"]       # run.json
    data = weft.Dataset("runs/quickstart_data/validation")

    clt = run.transcoder()                   # of the newest checkpoint; weft.Transcoder(path) of another
    x = data.inputs[:1000]                   # [rows, L, d_model] float32, raw activations of the model
    a = clt.encode(x)                        # [rows, L, F] activations, 0 where a feature is not active
    y = clt.decode(a, x)                     # [rows, L, d_model] raw reconstructions; clt.reconstruct(x) does both
    clt.decoder_rows(2, [17, 40])            # [2, targets, d_model] of two features, without reading the others
    clt.evaluate(data)                       # the measures of `weft evaluate`

    weft.write_dataset("activations/train", inputs, targets)     # arrays [rows, L, d_model] -> data of `weft train`

Arrays are NumPy's; given a PyTorch tensor, encode, decode and reconstruct compute with PyTorch on the device of the tensor and return
tensors. Existing files are opened read-only. Parameters are read when they are first used, from the shards of any number of ranks.

Selection is exact, as in the program: batch_topk keeps the k * rows largest of the rows given together, so give as many rows at a time
as `data.batch_tokens` (Transcoder.batch_rows) to have the program's activations; relu, topk and jumprelu do not depend on the others.
All pre-activations of the rows are in memory at once: 4 * rows * L * F bytes.
"""
import json
import re
import struct
import sys
from pathlib import Path

import h5py
import numpy as np

__all__ = ["Run", "Checkpoint", "Transcoder", "Dataset", "write_dataset"]

EPSILON = 1e-6      # added to a standard deviation


# --- Runs -----------------------------------------------------------------------------------------------------------------


class Run:
    """A run directory, of a transcoder or of a language model, or the output of `weft convert`; a run may be in progress."""

    def __init__(self, path):
        self.path = Path(path)
        self.record = {}        # of what `weft convert` wrote
        if (self.path / "run.json").is_file():
            self.record = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
        elif not (self.path / "checkpoints").is_dir():
            advice = ("it is a checkpoint, which weft.Checkpoint and weft.Transcoder read" if (self.path / "manifest.json").is_file()
                      else "name the directory of a run")
            raise FileNotFoundError(f"{path}: not a run directory (run.json is missing); {advice}")

    @property
    def input(self):
        """{table: {key: value}}, as the run used it."""
        if "input" in self.record or not self.steps:
            return self.record.get("input", {})
        return self.checkpoint().input

    @property
    def metrics(self):
        """{name: array [records]} of metrics.jsonl, read anew; arrays by layer are [records, L], groups are "name.member"."""
        records = []
        path = self.path / "metrics.jsonl"
        if path.exists():
            for line in path.read_bytes().split(b"\n")[:-1]:      # the last line has no end while it is being written
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if isinstance(record, dict) and "step" in record:
                    records.append(_flat(record))
        values = {}
        for name in dict.fromkeys(name for record in records for name in record):
            column = [record.get(name) for record in records]
            width = max((len(one) for one in column if isinstance(one, list)), default=None)
            if width is None:
                values[name] = np.array([_number(one) for one in column])
            else:
                values[name] = np.array([[_number(item) for item in one] if isinstance(one, list) and len(one) == width
                                         else [np.nan] * width for one in column])
        if "step" in values:
            values["step"] = values["step"].astype(np.int64)
        return values

    @property
    def steps(self):
        """Steps of the checkpoints, ascending."""
        found = (self.path / "checkpoints").glob("step_*")
        return sorted(int(path.name[5:]) for path in found if re.fullmatch(r"step_\d{8,}", path.name))

    def checkpoint(self, step=None):
        """The checkpoint of a step; the newest one by default."""
        steps = self.steps
        if not steps or (step is not None and step not in steps):
            raise FileNotFoundError(f"{self.path}: no checkpoint{'' if step is None else f' of step {step}'} (there are {steps})")
        return Checkpoint(self.path / "checkpoints" / f"step_{steps[-1] if step is None else step:08d}")

    def transcoder(self, step=None):
        return Transcoder(self.checkpoint(step))


def _flat(record):
    """Members of a group become "name.member"."""
    flat = {}
    for name, value in record.items():
        if isinstance(value, dict):
            flat.update({f"{name}.{member}": inner for member, inner in _flat(value).items()})
        else:
            flat[name] = value
    return flat


def _number(value):
    """Numbers that are not finite are the strings "nan", "inf" and "-inf"; anything else that is no number is NaN."""
    if isinstance(value, (int, float)):
        return float(value)
    return {"inf": np.inf, "-inf": -np.inf}.get(value if isinstance(value, str) else "", np.nan)


# --- Checkpoints ----------------------------------------------------------------------------------------------------------


class Checkpoint:
    """checkpoints/step_XXXXXXXX: named tensors, divided by rows among the shards of its ranks."""

    def __init__(self, path):
        self.path = Path(path)
        if not (self.path / "manifest.json").is_file():
            raise FileNotFoundError(f"{path}: not a checkpoint (manifest.json is missing); name a directory step_XXXXXXXX")
        self.manifest = json.loads((self.path / "manifest.json").read_text(encoding="utf-8"))
        self.step = self.manifest["step"]
        self.shapes = {entry["name"]: tuple(entry["shape"]) for entry in self.manifest["tensors"]}
        self._files, self._parts = [], {}

    def __contains__(self, name):
        return name in self.shapes

    def __getitem__(self, name):
        """The whole tensor. bf16 is returned as float32."""
        return self.rows(name, slice(None))

    @property
    def input(self):
        """The resolved input of the run: {table: {key: value}}."""
        return parse_toml(self.manifest["input"])

    def rows(self, name, rows):
        """Rows of a tensor along its first axis: a slice, or a list of indices. Only these are read."""
        if name not in self.shapes:
            raise KeyError(f"{self.path}: no tensor {name}")
        n = self.shapes[name][0]
        wanted = np.arange(n)[rows] if isinstance(rows, slice) else np.asarray(rows, np.int64)
        wanted = np.where(wanted < 0, wanted + n, wanted)
        if wanted.ndim != 1 or (len(wanted) and (wanted.min() < 0 or wanted.max() >= n)):
            raise IndexError(f"{self.path}: {name} has {n} rows")
        out, found = None, 0
        for first, part in self._of(name):
            inside = np.flatnonzero((wanted >= first) & (wanted < first + len(part)))
            dtype = np.float32 if part.dtype.kind == "f" and part.dtype.itemsize < 4 else part.dtype
            if out is None:
                out = np.zeros((len(wanted), *part.shape[1:]), dtype)
            if len(inside):
                local = wanted[inside] - first
                unique, back = np.unique(local, return_inverse=True)     # h5py takes ascending indices without repetition
                consecutive = unique[-1] - unique[0] + 1 == len(unique)
                out[inside] = part[unique[0]:unique[-1] + 1][back] if consecutive else part[unique][back]
                found += len(inside)
        if found != len(wanted):
            raise ValueError(f"{self.path}: {name} is incomplete ({found} of {len(wanted)} rows are in the shards); "
                             "weft inspect checks the checkpoint")
        return out

    def _of(self, name):
        """[(first row, dataset)] of the shards."""
        if not self._files:
            self._files = [h5py.File(self.path / shard["file"], "r") for shard in self.manifest["shards"]]
        if name not in self._parts:
            self._parts[name] = [(int(file[name].attrs["first_row"]), file[name]) for file in self._files if name in file]
        return self._parts[name]

    def close(self):
        for file in self._files:
            file.close()
        self._files, self._parts = [], {}


def parse_toml(text):
    """The resolved input as Weft prints it: tables of `key = value` with strings, numbers, booleans and arrays of strings. (tomllib is
    in the standard library since Python 3.11.)"""
    try:
        import tomllib
        return tomllib.loads(text)
    except ImportError:
        pass
    tables, table = {}, None
    for line in text.splitlines():
        line = line.strip()
        if header := re.fullmatch(r"\[(\w+)\]", line):
            table = tables.setdefault(header[1], {})
        elif entry := re.match(r"(\w+)\s*=\s*(\"(?:[^\"\\]|\\.)*\"|'[^']*'|\[.*\]|[^#\s]+)", line):
            value = entry[2]
            if value[0] == "'":
                table[entry[1]] = value[1:-1]
            elif re.fullmatch(r"[+-]?(inf|nan)", value):
                table[entry[1]] = float(value)
            else:
                table[entry[1]] = json.loads(value)
    return tables


# --- Datasets -------------------------------------------------------------------------------------------------------------


class Dataset:
    """Activations as Weft stores them: `inputs` and `targets` are indexed by a slice of rows, over all files."""

    def __init__(self, path):
        self.path = Path(path)
        paths = [one for one in self.path.iterdir() if re.fullmatch(r"chunk_\d+\.(hdf5|h5)", one.name)]
        if not paths:
            raise FileNotFoundError(f"{path}: no chunk files (chunk_0.hdf5, …); name the directory of a dataset")
        self._files = [h5py.File(one, "r") for one in sorted(paths, key=lambda one: int(re.search(r"\d+", one.name)[0]))]
        self.n_layers = sum(re.fullmatch(r"layer_\d+", name) is not None for name in self._files[0])
        self._counts = [len(file["layer_0/inputs"]) for file in self._files]
        self.d_model = self._files[0]["layer_0/inputs"].shape[1]
        self.inputs, self.targets = _Side(self, "inputs"), _Side(self, "targets")

    def __len__(self):
        return sum(self._counts)


class _Side:
    def __init__(self, dataset, name):
        self.dataset, self.name = dataset, name

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, rows):
        """float32 [rows, L, d_model]; uint16 holds bf16 patterns."""
        begin, end, stride = rows.indices(len(self))
        if stride != 1:
            raise IndexError("rows are read in order; index the result")
        data, at = self.dataset, 0
        out = np.empty((max(0, end - begin), data.n_layers, data.d_model), np.float32)
        for file, count in zip(data._files, data._counts):
            first, last = max(begin, at), min(end, at + count)
            if first < last:
                for layer in range(data.n_layers):
                    part = file[f"layer_{layer}/{self.name}"][first - at:last - at]
                    if part.dtype == np.uint16:
                        part = (part.astype(np.uint32) << 16).view(np.float32)
                    out[first - begin:last - begin, layer] = part
            at += count
        return out


def write_dataset(path, inputs, targets, model="", rows_per_file=65536):
    """Writes activations [rows, L, d_model], float32 or float16, as a new dataset: inputs and targets of the MLP of each layer."""
    path = Path(path)
    if inputs.shape != targets.shape or inputs.ndim != 3 or inputs.dtype != targets.dtype or inputs.dtype not in (np.float32, np.float16):
        raise ValueError(f"inputs {inputs.shape} {inputs.dtype} and targets {targets.shape} {targets.dtype}: both must be float32 or float16 "
                         "[rows, layers, d_model]")
    if not (np.isfinite(inputs).all() and np.isfinite(targets).all()):
        raise ValueError("a value is not finite; leave such rows out")
    path.mkdir(parents=True)
    rows, n_layers, d_model = inputs.shape
    index = b""
    for number, begin in enumerate(range(0, rows, rows_per_file)):
        end = min(begin + rows_per_file, rows)
        with h5py.File(path / f"chunk_{number}.hdf5", "w", libver=("v110", "v110")) as file:
            for layer in range(n_layers):
                for name, side in (("inputs", inputs), ("targets", targets)):
                    file.create_dataset(f"layer_{layer}/{name}", data=side[begin:end, layer], chunks=(min(end - begin, 1024), d_model))
        index += struct.pack("<iiq", number, end - begin, begin)
    (path / "index.bin").write_bytes(index)
    metadata = {"model_name": model, "num_layers": n_layers, "d_model": d_model, "dtype": str(inputs.dtype), "total_tokens": rows,
                "chunk_tokens": min(rows, rows_per_file)}
    (path / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")


# --- Transcoders ----------------------------------------------------------------------------------------------------------


class Transcoder:
    """A cross-layer transcoder: L layers, F features per layer, all of width d_model. See docs/numbers.md for the formulas."""

    def __init__(self, checkpoint):
        self.checkpoint = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
        shapes = self.checkpoint.shapes
        if "encoder_0/weight" not in shapes:
            raise ValueError(f"{self.checkpoint.path}: not a transcoder (it has no tensor encoder_0/weight)")
        self.n_layers = sum(re.fullmatch(r"encoder_\d+/weight", name) is not None for name in shapes)
        self.n_features, self.d_model = shapes["encoder_0/weight"]
        known = re.compile(r"(encoder_\d+/(weight|bias|threshold|tokens_since_fired)|decoder_\d+/(tied_|target_)?weight|"
                           r"decoder_\d+/(offset|scale)_\d+|decoder_bias|"
                           r"skip_\d+/weight)(\.\w+)?|(statistics|selection|optimizer|run|auxiliary|resampling|features)/.*")
        unknown = [name for name in shapes if not known.fullmatch(name)]
        if unknown:
            raise ValueError(f"{self.checkpoint.path}: tensors that this package does not know ({', '.join(unknown[:3])}); take the package "
                             "of the version of Weft that wrote it")
        settings = self.checkpoint.input
        self.settings = settings["transcoder"]
        self.activation = self.settings.get("activation", "batch_topk")
        self.batch_rows = settings["data"]["batch_tokens"]
        self.targets = settings["data"].get("targets", "outputs")
        self.normalisation = settings["data"]["normalise"]
        self._tensors, self._on = {}, {}

    # Parameters, as NumPy arrays.

    def encoder(self, layer):
        """(weight [F, d_model], bias [F]): pre-activation = weight · normalised input + bias."""
        return self._tensor(f"encoder_{layer}/weight"), self._tensor(f"encoder_{layer}/bias")

    def thresholds(self, layer):
        """[F] float32: a feature is active where its pre-activation exceeds it; None unless the activation is jumprelu."""
        name = f"encoder_{layer}/threshold"
        return self._tensor(name) if name in self.checkpoint else None

    def decoder(self, layer):
        """[F, targets, d_model]: what each feature writes, in normalised space, to layers `layer`, `layer` + 1, … per unit of
        activation (with `transcoder.decoder_affine` of the activation plus an offset)"""
        return self.decoder_rows(layer, slice(None))

    def decoder_rows(self, layer, features):
        """The same of some features (a slice or a list), without reading the others."""
        if f"decoder_{layer}/weight" in self.checkpoint:
            rows = self.checkpoint.rows(f"decoder_{layer}/weight", features)
            return rows.reshape(len(rows), -1, self.d_model)
        return np.stack([self._pair(layer, t, lambda name: self.checkpoint.rows(name, features)) for t in self._targets(layer)], axis=1)

    def _tensor(self, name):
        if name not in self._tensors:
            self._tensors[name] = self.checkpoint[name]
        return self._tensors[name]

    def _stored_decoder(self, s):
        """The tensors whose rows of a feature form its decoder row: tied per target one for each layer, else one."""
        if f"decoder_{s}/target_weight" in self.checkpoint:
            return [f"decoder_{t}/target_weight" for t in range(s, self.n_layers)]
        return [next(name for name in (f"decoder_{s}/weight", f"decoder_{s}/tied_weight") if name in self.checkpoint)]

    def _targets(self, s):
        """The layers that the features of layer s write to."""
        rows = self.checkpoint.shapes.get(f"decoder_{s}/weight")
        return range(s, s + rows[1] // self.d_model if rows else self.n_layers)

    def _pair(self, s, t, by_feature):
        """[F, d_model]: what the features of layer s write to layer t. by_feature reads a tensor, or some rows of it."""
        if f"decoder_{s}/weight" in self.checkpoint:
            return by_feature(f"decoder_{s}/weight")[:, (t - s) * self.d_model:(t - s + 1) * self.d_model]
        if f"decoder_{s}/tied_weight" in self.checkpoint:
            return by_feature(f"decoder_{s}/tied_weight")
        rows = by_feature(f"decoder_{t}/target_weight")
        return rows * by_feature(f"decoder_{s}/scale_{t}")[:, None] if f"decoder_{s}/scale_{t}" in self.checkpoint else rows

    def scaling(self, side):
        """(mean, scale) [L, d_model] float64 of "inputs" or "targets": normalised = (raw - mean) * scale."""
        shape = (self.n_layers, self.d_model)
        side = "inputs" if self.targets == "inputs" else side
        if self.normalisation == "per_dimension":
            return (self._tensor(f"statistics/{side}_mean").reshape(shape),
                    1 / (self._tensor(f"statistics/{side}_standard_deviation").reshape(shape) + EPSILON))
        if self.normalisation == "scalar":
            norm = self._tensor(f"statistics/{side}_mean_norm")
            return np.zeros(shape), np.repeat((np.sqrt(self.d_model) / norm)[:, None], self.d_model, axis=1)
        return np.zeros(shape), np.ones(shape)

    # Arithmetic, of NumPy arrays or PyTorch tensors.

    def encode(self, x):
        """Activations [rows, L, F], in normalised space, of raw inputs x [rows, L, d_model]."""
        xp = _library(x)
        inputs = self._normalised(x)
        z = xp.stack([inputs[:, s] @ self._of(x, f"encoder_{s}/weight").T + self._of(x, f"encoder_{s}/bias")
                      for s in range(self.n_layers)], 1)
        return xp.where(self._selected(x, z), z, xp.zeros_like(z))

    def decode(self, a, x=None):
        """Raw reconstructions [rows, L, d_model] of activations [rows, L, F]; x: the inputs, needed with a skip connection."""
        shape = (self.n_layers, self.d_model)
        y = [self._of(a, "decoder_bias").reshape(shape)[t] + 0 * a[:, 0, :1] for t in range(self.n_layers)]
        of = lambda name: self._of(a, name)
        for s in range(self.n_layers):
            for t in self._targets(s):
                amount = a[:, s]
                if f"decoder_{s}/offset_{t}" in self.checkpoint:
                    amount = amount + (amount != 0) * of(f"decoder_{s}/offset_{t}")
                y[t] = y[t] + amount @ self._pair(s, t, of)
        if "skip_0/weight" in self.checkpoint:
            if x is None:
                raise ValueError("a transcoder with a skip connection needs the inputs: decode(a, x)")
            inputs = self._normalised(x)
            y = [out + inputs[:, t] @ self._of(a, f"skip_{t}/weight").T for t, out in enumerate(y)]
        mean, scale = self._scale(a, "targets")
        return _library(a).stack(y, 1) / scale + mean

    def reconstruct(self, x):
        return self.decode(self.encode(x), x)

    def _of(self, like, name):
        """A parameter as an array of the library and the device of `like`."""
        if isinstance(like, np.ndarray):
            return self._tensor(name)
        key = (name, str(like.device))
        if key not in self._on:
            self._on[key] = _library(like).from_numpy(self._tensor(name)).to(like.device)
        return self._on[key]

    def _scale(self, like, side):
        return tuple(_like(like, values.astype(np.float32)) for values in self.scaling(side))

    def _normalised(self, x):
        mean, scale = self._scale(x, "inputs")
        if isinstance(x, np.ndarray):
            return (x.astype(np.float32) - mean) * scale
        return (x.float() - mean) * scale

    def _selected(self, like, z):
        """Mask of z [rows, L, F]. Ties go to the lowest (row, layer, feature)."""
        n, n_layers, n_features = z.shape
        if self.activation == "relu":
            return z > 0
        if self.activation == "jumprelu":
            theta = _library(like).stack([self._of(like, f"encoder_{s}/threshold") for s in range(n_layers)], 0)
            at = self.settings.get("pseudo_derivative") == "crosslayer-coding"
            return ((z >= theta) if at else (z > theta)) & (z > 0)
        k = self.settings.get("k_total", 0) / n_layers or self.settings["k"]
        together = self.settings.get("scope", "layer") == "all_layers"
        ranked = self._ranked(like, z)
        whole = lambda number: max(1, int(np.floor(number + 0.5)))
        if self.activation == "batch_topk" and together:
            return _largest(ranked.reshape(1, -1), whole(k * n_layers * n)).reshape(z.shape)
        if self.activation == "batch_topk":
            by_layer = _library(like).stack([ranked[:, s].reshape(-1) for s in range(n_layers)], 0)
            mask = _largest(by_layer, whole(k * n)).reshape(n_layers, n, n_features)
            return _library(like).stack([mask[s] for s in range(n_layers)], 1)
        if self.activation != "topk":
            raise ValueError(f"{self.checkpoint.path}: unknown activation {self.activation}")
        rows = ranked.reshape(n, -1) if together else ranked.reshape(n * n_layers, n_features)
        return _largest(rows, whole(k * n_layers if together else k)).reshape(z.shape)

    def _ranked(self, like, z):
        """What the largest of are active; values <= 0 never are."""
        ranking, xp = self.settings.get("ranking", "value"), _library(like)
        if ranking == "decoder_norm":
            norms = [sum((self._of(like, name) ** 2).sum(1) for name in self._stored_decoder(s)) ** 0.5 for s in range(self.n_layers)]
            return z * xp.stack(norms, 0)
        if ranking == "z_score":
            mean = z.mean(0)
            deviation = (((z - mean) ** 2).sum(0) / (len(z) - 1)) ** 0.5
            return xp.where(z > 0, (z - mean) / (deviation + EPSILON), -xp.ones_like(z))
        return z

    # Measures.

    def evaluate(self, data, rows=None):
        """The measures of `weft evaluate` on a Dataset (or its first rows): a list by layer of each, and "tokens"."""
        rows = len(data) if rows is None else min(rows, len(data))
        shape = (self.n_layers, self.d_model)
        sums = {name: np.zeros(shape) for name in ("error", "squared_error", "target", "squared_target")}
        fired = np.zeros((self.n_layers, self.n_features), np.int64)
        pivot = self._tensor(f"statistics/{'inputs' if self.targets == 'inputs' else 'targets'}_mean").reshape(shape)
        for begin in range(0, rows, self.batch_rows):
            part = slice(begin, min(begin + self.batch_rows, rows))
            x = data.inputs[part]
            target = (x if self.targets == "inputs" else data.targets[part]).astype(np.float64)
            a = self.encode(x)
            fired += (a > 0).sum(0)
            error = self.decode(a, x) - target
            sums["error"] += error.sum(0)
            sums["squared_error"] += (error ** 2).sum(0)
            sums["target"] += (target - pivot).sum(0)
            sums["squared_target"] += ((target - pivot) ** 2).sum(0)
        total = sums["squared_target"] - sums["target"] ** 2 / rows      # about the mean
        side = "inputs" if self.targets == "inputs" else "targets"
        deviation = self._tensor(f"statistics/{side}_standard_deviation").reshape(shape)
        weight = np.divide(1, deviation, out=np.zeros(shape), where=deviation > 0) ** 2     # a constant dimension is excluded
        with np.errstate(divide="ignore", invalid="ignore"):
            measures = {
                "nmse": sums["squared_error"].sum(1) / total.sum(1),
                "nmse_standardised": (sums["squared_error"] * weight).sum(1) / (total * weight).sum(1),
                "explained_variance": 1 - (sums["squared_error"] - sums["error"] ** 2 / rows).sum(1) / total.sum(1)}
        measures["l0"] = fired.sum(1) / rows
        measures["dead_fraction"] = (fired == 0).mean(1)
        return {"tokens": rows, **{name: values.tolist() for name, values in measures.items()}}


def _library(array):
    """numpy, or torch for a tensor."""
    return np if isinstance(array, np.ndarray) else sys.modules["torch"]


def _like(like, values):
    return values if isinstance(like, np.ndarray) else sys.modules["torch"].from_numpy(values).to(like.device)


def _largest(values, count):
    """Mask of the `count` largest positive values of each row [rows, n]; of equal ones the first."""
    xp = _library(values)
    count = min(count, values.shape[1])
    if xp is np:
        cut = np.partition(values, -count, axis=1)[:, -count, None]
    else:
        cut = values.topk(count, dim=1).values[:, -1:]
    above = values > cut
    tied = values == cut
    return (above | (tied & (tied.cumsum(1) <= count - above.sum(1)[:, None]))) & (values > 0)
