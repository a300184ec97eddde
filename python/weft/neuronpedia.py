# SPDX-License-Identifier: Apache-2.0
"""Writes features.h5 in the layout that Neuronpedia imports: a directory per layer with release, model, sourceset and source, and batches
of features, activations and explanations as .jsonl.gz.

    weft neuronpedia DIR --model-id gpt2-small --set weft-clt-32k --release weft-clt --output exports

DIR is what `weft features --output` wrote; with --model there, the tokens that a feature promotes and suppresses are exported, with --labels
its explanations. The activations are those of the examples, in normalised space, within 1/255 of the strongest.
"""
import gzip
import hashlib
import json
import multiprocessing
import os
import re
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from weft.errors import USAGE, Output, Parser, WeftError, pending, run
from weft.serve.catalogue import Catalogue, required_features
from weft.text import plural

BATCH = 1024        # features of a file
KINDS = ("top", "sample")


def identifier(*parts):
    """25 lower-case letters and digits that begin with a letter, the same for the same parts."""
    digits, number = "", int.from_bytes(hashlib.sha256("\0".join(map(str, parts)).encode()).digest(), "big")
    while len(digits) < 24:
        number, digit = divmod(number, 36)
        digits += "0123456789abcdefghijklmnopqrstuvwxyz"[digit]
    return "c" + digits


def gzipped(path, rows):
    with open(path, "wb") as raw, gzip.GzipFile("", "wb", 5, raw, mtime=0) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")


class Layer:
    """The directory of a layer."""

    def __init__(self, catalogue, layer, names):
        self.catalogue, self.layer, self.names = catalogue, layer, names
        self.source = f"{layer}-{names['set']}"
        self.place = {"modelId": names["model"], "layer": self.source}

    def facts(self):
        names, common = self.names, {"creatorId": self.names["creator_id"], "createdAt": self.names["created"]}
        model, title = names["model"], names["title"] or names["release"]
        return {
            "release": {**common, "name": names["release"], "description": title, "descriptionShort": title, "creatorName": names["creator"],
                        "creatorNameShort": names["creator"], "urls": [names["url"]] if names["url"] else [], "visibility": "PUBLIC"},
            "model": {**common, "id": model, "instruct": False, "displayName": model, "displayNameShort": model, "updatedAt": names["created"],
                      "layers": self.catalogue.n_layers},
            "sourceset": {**common, "modelId": model, "name": names["set"], "creatorName": names["creator"], "releaseName": names["release"],
                          "description": title, "visibility": "PUBLIC"},
            "source": {**common, "id": self.source, "modelId": model, "setName": names["set"], "visibility": "PUBLIC",
                       "dataset": self.catalogue.data, "num_tokens_in_prompt": 2 * self.catalogue.context + 1}}

    def feature(self, index, at, of):
        catalogue, text = self.catalogue, self.catalogue.text
        row = {**self.place, "index": str(index), "creatorId": self.names["creator_id"], "createdAt": self.names["created"],
               "maxActApprox": float(of["top_value"][at][0]), "hasVector": False, "vector": [],
               "frac_nonzero": float(of["fired"][at]) / catalogue.tokens,
               "freq_hist_data_bar_values": catalogue.edges, "freq_hist_data_bar_heights": of["histogram"][at].tolist()}
        for ours, strings, values in (("raised", "pos_str", "pos_values"), ("lowered", "neg_str", "neg_values")):
            kept = [i for i, token in enumerate(of[ours][at]) if token >= 0] if ours in of else []
            row[strings] = [text(int(of[ours][at][i])) for i in kept]
            row[values] = [float(of[f"{ours}_effect"][at][i]) for i in kept]
        kept = [i for i, other in enumerate(of["nearest"][at]) if other >= 0] if "nearest" in of else []
        row["topkCosSimIndices"] = [int(of["nearest"][at][i]) for i in kept]
        row["topkCosSimValues"] = [float(of["nearest_cosine"][at][i]) for i in kept]
        return row

    def activations(self, index, at, of):
        strongest = float(of["top_value"][at][0])
        for kind in KINDS:
            for i, row in enumerate(of.get(f"{kind}_row", np.empty((at + 1, 0)))[at]):
                if row < 0:
                    break
                inside = np.flatnonzero(of[f"{kind}_tokens"][at][i] >= 0)
                values = (of[f"{kind}_shade"][at][i][inside] * (strongest / 255)).tolist()
                here = int(np.searchsorted(inside, self.catalogue.context))
                values[here] = float(of[f"{kind}_value"][at][i])
                largest = max(range(len(values)), key=values.__getitem__)
                yield {**self.place, "id": identifier(*self.place.values(), index, kind, i), "index": str(index),
                       "creatorId": self.names["creator_id"], "createdAt": self.names["created"],
                       "tokens": [self.catalogue.text(int(token)) for token in of[f"{kind}_tokens"][at][i][inside]], "values": values,
                       "maxValue": values[largest], "maxValueTokenIndex": largest, "minValue": min(values), "qualifyingTokenIndex": here,
                       "dataSource": self.catalogue.data, "dataIndex": str(int(row))}

    def write(self, directory, labels):
        directory = Path(directory) / self.names["model"] / self.source
        for name in ("features", "activations", "explanations"):
            (directory / name).mkdir(parents=True)
        for name, facts in self.facts().items():
            (directory / f"{name}.jsonl").write_text(json.dumps(facts, ensure_ascii=False) + "\n")
        n = self.catalogue.n_features
        for number, begin in enumerate(range(0, n, BATCH)):
            of = self.catalogue.arrays(self.layer, begin, min(begin + BATCH, n))
            indices = range(begin, min(begin + BATCH, n))
            name = f"batch-{number}.jsonl.gz"
            gzipped(directory / "features" / name, (self.feature(index, index - begin, of) for index in indices))
            gzipped(directory / "activations" / name, (one for index in indices for one in self.activations(index, index - begin, of)))
            explained = [index for index in indices if (self.layer, index) in labels]
            if explained:
                gzipped(directory / "explanations" / name,
                        ({**self.place, "id": identifier(*self.place.values(), index, "explanation"), "index": str(index),
                          "description": labels[self.layer, index], "authorId": self.names["creator_id"], "createdAt": self.names["created"]}
                         for index in explained))


def end_with_parent():
    """A worker does not outlive a parent that was killed: it would wait for work forever."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def write_layer(path, layer, names, directory):
    """In a process of its own, which opens the file itself. Returns code and message of a failure."""
    try:
        catalogue = Catalogue(path)
        Layer(catalogue, layer, names).write(directory, catalogue.labels)
    except WeftError as failure:
        return failure.code, str(failure)
    return None


def arguments_of(arguments):
    parser = Parser("neuronpedia", description=__doc__)
    parser.add_argument("features", metavar="DIR", help="the directory of features.h5, or the file")
    parser.add_argument("--model-id", required=True, metavar="ID", help="the language model, by its name on Neuronpedia")
    parser.add_argument("--set", required=True, metavar="NAME", help="source set; a layer becomes the source LAYER-NAME")
    parser.add_argument("--release", required=True, metavar="NAME", help="release to which the set belongs")
    parser.add_argument("--title", default="", help="description of release and set (default: the release)")
    parser.add_argument("--creator", default="", metavar="NAME", help="who is shown as the creator")
    parser.add_argument("--creator-id", default="", metavar="ID", help="account on Neuronpedia")
    parser.add_argument("--url", default="", help="address of the release")
    parser.add_argument("--output", required=True, metavar="DIR", help="a new directory, which receives MODEL/LAYER-NAME/")
    Output.add_options(parser)
    options = parser.parse_args(arguments)
    for option in ("model_id", "set", "release"):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", getattr(options, option)):
            raise WeftError(USAGE, f"--{option.replace('_', '-')} {getattr(options, option)}: not a name of letters, digits, dots, dashes and "
                            "underscores (it is part of a path)")
    return options


def command(arguments):
    options = arguments_of(arguments)
    output, path = Output(options.json, options.quiet), required_features(options.features)
    target = Path(options.output)
    if target.exists():
        raise WeftError(USAGE, f"--output {target}: exists (nothing is overwritten); name a new directory")
    catalogue = Catalogue(path)
    if not catalogue.has_shades:
        raise WeftError(USAGE, f"{path}: has no tokens around its examples (the data have no token ids, or an earlier version wrote it); write it "
                        "with weft features from data of weft lm harvest")
    created = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc).isoformat()
    names = {"model": options.model_id, "set": options.set, "release": options.release, "title": options.title, "creator": options.creator,
             "creator_id": options.creator_id, "url": options.url, "created": created}
    target.parent.mkdir(parents=True, exist_ok=True)
    with pending(target) as place:
        workers = min(catalogue.n_layers, len(os.sched_getaffinity(0)))
        with ProcessPoolExecutor(workers, initializer=end_with_parent) as pool:
            for done in [pool.submit(write_layer, path, layer, names, place) for layer in range(catalogue.n_layers)]:
                if done.result():
                    raise WeftError(*done.result())
    if "layer_0/raised" not in catalogue._file:
        output.warning(f"{path}: has no tokens that features promote and suppress; weft features --model MODEL adds them")
    features = catalogue.n_layers * catalogue.n_features
    output.written(f"{target}: {features:,} features of {plural(catalogue.n_layers, 'layer')}, {plural(len(catalogue.labels), 'explanation')}",
                   {"output": str(target), "features": features, "layers": catalogue.n_layers, "explanations": len(catalogue.labels)})
    return 0


def main(arguments=None):
    return run(command, arguments)


if __name__ == "__main__":
    sys.exit(main())
