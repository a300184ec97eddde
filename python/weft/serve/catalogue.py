# SPDX-License-Identifier: Apache-2.0
"""features.h5, as `weft features` writes it: sorting, searching and filtering over all features with NumPy; details of single features
are read on demand. The file is not trusted: shapes, types and stored bytes are compared with the attributes before anything is read."""
import json
import math
import threading
from pathlib import Path

import h5py
import numpy as np

from weft.errors import DATA, IO, LARGEST_JSON, USAGE, WeftError, read_bytes
from weft.text import member, number, parse_json, text_of

MOST_LAYERS, MOST_FEATURES = 256, 1 << 28       # of a file, all layers together
MOST_EXAMPLES = 8       # whose tokens are listed and searched
MOST_EFFECTS = 1 << 16      # of a feature, on tokens or on other features
EFFECTS = {"raised": "effect", "lowered": "effect", "downstream": "effect", "coactive": "part"}     # and the name of their values
BINS = 32
SCORES = "scores.jsonl"     # of the labels, as weft score writes it next to features.h5
ORDERS = ("layer and index", "density, highest first", "density, lowest first", "strongest activation", "nearest feature")


def find_features(directory):
    """features.h5 of a directory, or the one in DIRECTORY/features; None if there is none."""
    places = (Path(directory) / "features.h5", Path(directory) / "features" / "features.h5")
    return next((found for found in places if found.is_file()), None)


def required_features(place):
    """features.h5 of a directory as above, or the file itself. Raises if there is none."""
    found = Path(place) if Path(place).is_file() else find_features(place)
    if found is None:
        raise WeftError(USAGE, f"{place}: has no features.h5; weft features RUN --output {place} writes it")
    return found


class Catalogue:
    def __init__(self, path):
        self.path, self._lock, self._orders, self._centres = Path(path), threading.Lock(), {}, None
        try:
            self._file = h5py.File(self.path, "r")
        except OSError as failure:
            raise WeftError(IO, f"{path}: cannot be opened ({str(failure).splitlines()[0]}); is it complete?") from None
        attributes = dict(self._file.attrs)
        if text_of(attributes.get("format")) != "weft-features":
            raise self._wrong("not a file of weft features (its attribute format is another)")
        if self._integer(attributes, "format_version", 0) > 1:
            raise self._wrong("written by a newer version of Weft; take the package of that version")
        self.n_layers = self._integer(attributes, "n_layers", 1, MOST_LAYERS)
        self.n_features = self._integer(attributes, "n_features", 1, MOST_FEATURES // self.n_layers)
        self.tokens = self._integer(attributes, "tokens", 1)
        self.step = self._integer(attributes, "step", 0)
        self.top = self._integer(attributes, "top", 1, 1 << 16)
        self.context = self._integer(attributes, "context", 0, 1 << 16)
        self.sample = self._integer(attributes, "sample", 0, 1 << 16) if "sample" in attributes else 0      # earlier versions: none
        self.checkpoint, self.data, self.model = (text_of(attributes.get(name)) for name in ("checkpoint", "data", "model"))
        self.has_tokens, self.has_shades = "layer_0/top_tokens" in self._file, "layer_0/top_shade" in self._file
        self.edges = self._read(self._dataset("histogram_edges", (BINS,), "f"), slice(None)).tolist()
        self.vocabulary = self._read_vocabulary()
        self.labels = self._read_labels()
        self.scores = self._read_scores()
        self._layers = [self._layer(layer) for layer in range(self.n_layers)]
        whole = {name: np.concatenate([self._read(layer[name], slice(None)) for layer in self._layers]) for name in ("fired", "mean")}
        self.fired, self.mean = whole["fired"], whole["mean"]
        self.strongest = np.concatenate([self._read(layer["top_value"], (slice(None), 0)) for layer in self._layers])
        self.nearest = np.concatenate([self._read(layer["nearest_cosine"], (slice(None), 0)) if layer["nearest_cosine"] is not None
                                       else np.full(self.n_features, -1.0) for layer in self._layers])

    # --- Reading ------------------------------------------------------------------------------------------------------------

    def _wrong(self, problem):
        return WeftError(DATA, f"{self.path}: {problem}; write it again with weft features")

    def _integer(self, attributes, name, least, most=1 << 60):
        value = attributes.get(name)
        if not isinstance(value, (int, np.integer)) or not least <= value <= most:
            raise self._wrong(f"its attribute {name} is {text_of(str(value))[:40]} (from {least} to {most})")
        return int(value)

    def _dataset(self, name, shape, kind):
        """An array of this shape and kind of number, whose values are all in the file."""
        found = self._file.get(name)
        if not isinstance(found, h5py.Dataset):
            raise self._wrong(f"/{name} is missing")
        if found.shape != shape or found.dtype.kind != kind or found.dtype.itemsize > 8:
            raise self._wrong(f"/{name} is {found.dtype} {found.shape}, not the {shape} of its attributes")
        if found.id.get_storage_size() < math.prod(shape) * found.dtype.itemsize and not found.compression:
            raise self._wrong(f"/{name} has fewer bytes than its shape")
        return found

    def _layer(self, layer):
        """The arrays of a layer by name; None: with a single feature. What weft features writes on request only is left out without it."""
        n, group, targets = self.n_features, f"layer_{layer}/", self.n_layers - layer
        share = self._file.get(group + "target_share")      # of transcoders that write to their own layer only
        if isinstance(share, h5py.Dataset) and len(share.shape) == 2 and 1 <= share.shape[1] <= targets:
            targets = share.shape[1]
        n_nearest = min(5, n - 1)
        shapes = {"fired": ((n,), "i"), "mean": ((n,), "f"), "histogram": ((n, BINS), "i"), "target_share": ((n, targets), "f")}
        for kind, count in (("top", self.top), *([("sample", self.sample)] if self.sample else [])):
            shapes.update({f"{kind}_value": ((n, count), "f"), f"{kind}_row": ((n, count), "i")})
            if self.has_tokens:
                window = (n, count, 2 * self.context + 1)
                shapes.update({f"{kind}_position": ((n, count), "i"), f"{kind}_tokens": (window, "i")})
                if self.has_shades:
                    shapes[f"{kind}_shade"] = (window, "u")
        if n_nearest:
            shapes.update(nearest=((n, n_nearest), "i"), nearest_cosine=((n, n_nearest), "f"))
        for name, values in EFFECTS.items():
            found = self._file.get(group + name)
            if found is not None:
                width = found.shape[1] if isinstance(found, h5py.Dataset) and found.ndim == 2 else 0
                if not 1 <= width <= MOST_EFFECTS:
                    raise self._wrong(f"/{group}{name} is no table of at most {MOST_EFFECTS} columns")
                shapes.update({name: ((n, width), "i"), f"{name}_{values}": ((n, width), "f")})
        arrays = {name: self._dataset(group + name, shape, kind) for name, (shape, kind) in shapes.items()}
        return {"nearest": None, "nearest_cosine": None, **arrays}

    def arrays(self, layer, begin, end):
        """The arrays of some features of a layer, by name."""
        return {name: self._read(dataset, slice(begin, end)) for name, dataset in self._layers[layer].items() if dataset is not None}

    def _read(self, dataset, where):
        try:
            return dataset[where]
        except OSError as failure:
            raise WeftError(IO, f"{self.path}: {dataset.name} cannot be read ({str(failure).splitlines()[0]}); is the file complete?") from None

    def _read_vocabulary(self):
        if "vocabulary" not in self._file:
            return []
        found = self._file["vocabulary"]
        if not isinstance(found, h5py.Dataset) or found.ndim != 1 or found.dtype != np.uint8:
            raise self._wrong("/vocabulary is not a text")
        texts = None
        try:
            texts = json.loads(bytes(self._read(self._dataset("vocabulary", found.shape, "u"), slice(None))))["texts"]
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        if not isinstance(texts, list):
            raise self._wrong("/vocabulary is not a vocabulary")
        return [text_of(text) for text in texts]

    def _read_labels(self):
        """{(layer, feature): label}"""
        found = self._file.get("labels")
        if found is None:
            return {}
        if not isinstance(found, h5py.Dataset) or found.ndim != 1:
            raise self._wrong("/labels is damaged")
        try:
            rows = [json.loads(line) for line in bytes(self._read(self._dataset("labels", found.shape, "u"), slice(None))).splitlines()]
            return {(int(row["layer"]), int(row["feature"])): text_of(row["label"]) for row in rows}
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise self._wrong("/labels is damaged") from None

    def _read_scores(self):
        """{(layer, feature): {"detection": x, "fuzzing": y}} of the labels that are still the same ones."""
        path, scores = self.path.with_name(SCORES), {}
        if not path.is_file():
            return scores
        for at, line in enumerate(read_bytes(path, LARGEST_JSON).splitlines(), 1):
            row = parse_json(line)
            place = (member(row, "layer"), member(row, "feature"))
            if not all(isinstance(one, int) for one in place):
                raise WeftError(DATA, f"{path}:{at}: is no score of a label; write it again with weft score, or remove it")
            if self.labels.get(place) == member(row, "label"):
                scores[place] = {task: number(row[task]) for task in ("detection", "fuzzing") if math.isfinite(number(row.get(task)))}
        return scores

    def text(self, token):
        return self.vocabulary[token] if 0 <= token < len(self.vocabulary) else f"[{token}]"

    # --- Many features ------------------------------------------------------------------------------------------------------

    def _order(self, name):
        """All features in this order, as layer * n_features + index."""
        if name not in self._orders:
            keys = {"density, highest first": -self.fired, "density, lowest first": self.fired, "strongest activation": -self.strongest,
                    "nearest feature": -self.nearest}
            self._orders[name] = (np.argsort(keys[name], kind="stable") if name in keys else np.arange(len(self.fired))).astype(np.int64)
        return self._orders[name]

    def _examples(self):
        """Token ids at the strongest activations of all features: [features, examples]."""
        if self._centres is None:
            self._centres = np.concatenate([self._read(layer["top_tokens"], (slice(None), slice(0, MOST_EXAMPLES), self.context))
                                            for layer in self._layers])
        return self._centres

    def _matching(self, search, layer, fired_only):
        """Mask of all features."""
        mask = self.fired > 0 if fired_only else np.ones(len(self.fired), bool)
        if layer is not None:
            mask[:layer * self.n_features] = False
            mask[(layer + 1) * self.n_features:] = False
        search = search.strip()
        if not search:
            return mask
        of_layer, _, index = search.rpartition(":")
        if index.isascii() and index.isdigit() and len(index) < 10 and (not of_layer or (of_layer.isascii() and of_layer.isdigit() and len(of_layer) < 4)):
            wanted = np.zeros(len(mask), bool)
            layers = [int(of_layer)] if of_layer else range(self.n_layers)
            for one in layers:
                if one < self.n_layers and int(index) < self.n_features:
                    wanted[one * self.n_features + int(index)] = True
            return mask & wanted
        wanted = np.zeros(len(mask), bool)
        if self.has_tokens:
            ids = [token for token, text in enumerate(self.vocabulary) if search in text]
            wanted = np.isin(self._examples(), ids).any(axis=1)
        wanted[[layer * self.n_features + index for (layer, index), label in self.labels.items()
                if self.has(layer, index) and search.lower() in label.lower()]] = True
        return mask & wanted

    def select(self, search="", layer=None, order=ORDERS[0], fired_only=True, offset=0, most=200):
        """(number of features that match, rows of a part of them for the table)."""
        with self._lock:
            ordered = self._order(order)
            found = ordered[self._matching(search, layer, fired_only)[ordered]]
            return len(found), [self._row(int(one)) for one in found[offset:offset + most]]

    def _row(self, feature):
        layer, index = divmod(feature, self.n_features)
        texts = []
        if self.has_tokens:
            if self._centres is None:
                ids = self._read(self._layers[layer]["top_tokens"], (index, slice(0, MOST_EXAMPLES), self.context))
            else:
                ids = self._centres[feature]
            texts = list(dict.fromkeys(self.text(int(token)) for token in ids if token >= 0))
        return {**self._named(layer, index), "fired": int(self.fired[feature]), "mean": float(self.mean[feature]),
                "strongest": float(self.strongest[feature]), "tokens": texts}

    def _named(self, layer, index):
        label = self.labels.get((layer, index))
        return {"layer": layer, "feature": index, **({"label": label} if label else {})}

    def most_active(self, most):
        """Of each layer the same number of features, those that fired on most tokens."""
        of_layer = max(1, most // self.n_layers)
        chosen = []
        for layer in range(self.n_layers):
            fired = self.fired[layer * self.n_features:(layer + 1) * self.n_features]
            order = np.argsort(-fired, kind="stable")[:of_layer]
            chosen += [(layer, int(index)) for index in sorted(order) if fired[index] > 0]
        return chosen

    # --- One feature --------------------------------------------------------------------------------------------------------

    def feature(self, layer, index, most_examples=1 << 16):
        """Everything about a feature, with the members of `weft features --feature`."""
        if not self.has(layer, index):
            raise WeftError(USAGE, f"{layer}:{index} is not a feature of {self.path} (LAYER:INDEX, layers 0 to {self.n_layers - 1}, features 0 "
                            f"to {self.n_features - 1})")
        with self._lock:
            row = {name: self._read(dataset, index).tolist() for name, dataset in self._layers[layer].items() if dataset is not None}
        details = {**self._named(layer, index), "checkpoint": self.checkpoint, "data": self.data, "tokens": self.tokens, "fired": row["fired"],
                   "density": row["fired"] / self.tokens, "mean": row["mean"], "histogram": {"edges": self.edges, "counts": row["histogram"]},
                   "targets": [{"layer": layer + t, "share": share} for t, share in enumerate(row["target_share"])],
                   "nearest": [{**self._named(layer, other), "cosine": cosine}
                               for other, cosine in zip(row.get("nearest", []), row.get("nearest_cosine", [])) if other >= 0]}
        if self.scores.get((layer, index)):
            details["scores"] = self.scores[layer, index]
        for name, values in EFFECTS.items():
            if name in row:
                details[name] = [{**(self._named(*divmod(one, self.n_features)) if name in ("downstream", "coactive") else
                                     {"id": one, "text": self.text(one)}), values: value}
                                 for one, value in zip(row[name], row[f"{name}_{values}"]) if one >= 0]
        for one in details.get("coactive", []):
            fired = self.fired[layer * self.n_features + one["feature"]]
            one["lift"] = one["part"] * self.tokens / max(int(fired), 1)
        details["top"] = self._read_examples("top", row, range(min(self.top, most_examples)))
        # The sample is sorted: a part of it is taken at equal distances.
        n_drawn = sum(one >= 0 for one in row.get("sample_row", []))
        n_shown = min(n_drawn, max(1, most_examples // 2))
        details["sample"] = self._read_examples("sample", row, (i * n_drawn // n_shown for i in range(n_shown)))
        return details

    def _read_examples(self, kind, row, chosen):
        """Of the values `row` of a feature, the examples of one kind."""
        examples, strongest = [], row["top_value"][0]
        for i in chosen:
            if row[f"{kind}_row"][i] < 0:
                break
            example = {"activation": row[f"{kind}_value"][i], "row": row[f"{kind}_row"][i]}
            if self.has_tokens:
                example["position"] = row[f"{kind}_position"][i]
                shades = row[f"{kind}_shade"][i] if self.has_shades else [0] * (2 * self.context + 1)
                example["context"] = [{"id": token, "text": self.text(token), **({"here": True} if at == self.context else {}),
                                       **({"activation": strongest * shades[at] / 255} if shades[at] else {})}
                                      for at, token in enumerate(row[f"{kind}_tokens"][i]) if token >= 0]
            examples.append(example)
        return examples

    def has(self, layer, index):
        return 0 <= layer < self.n_layers and 0 <= index < self.n_features

    def row(self, layer, index):
        """The row of the table of one feature."""
        with self._lock:
            return self._row(layer * self.n_features + index)

    @property
    def facts(self):
        """What the page says about the file."""
        return {"layers": self.n_layers, "features": self.n_features, "tokens": self.tokens, "orders": list(ORDERS),
                "labelled": bool(self.labels)}
