#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Quality of transcoders of a language model over L0, for several forms and seeds, as one table.

quality.py MODEL TEXT HELD_OUT DIR [--k 8 16 32 64 128] [--forms cross_layer per_layer skip] [--seeds 1 2 3] [--seeds-of K]
           [--graphs 50] [--task NAME=TEXT_A,TEXT_B]... [--set KEY=VALUE]...

MODEL: a directory of Hugging Face, or a run; TEXT and HELD_OUT: files of text. Each point is trained on TEXT by the input of weft init
(--set changes it), turned into thresholds, and measured on HELD_OUT: L0, explained variance, the part of the loss that is recovered
compared with the mean of each MLP's output, and replacement and completeness of the graphs of prompts, the beginnings of lines of
HELD_OUT. The first seed trains at all k, the others at --seeds-of only (default: the middle one): their spread is that of the table.

--task: two texts, of two classes. A probe of one feature says to which of them 32 consecutive tokens belong: the feature and the threshold
of its largest activation that separate the first half of the tokens best, its balanced accuracy on the second half. The line "a neuron"
is the same with a component of the inputs of the MLPs in place of a feature.

weft is taken from PATH. What a point has written to DIR is kept: the same command continues.
"""
import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

CHUNK = 32              # tokens that a probe judges together
CANDIDATES = 64         # features of a layer that are tried: those whose means differ most
FORMS = {"cross_layer": ["transcoder.decoder=cross_layer"], "per_layer": ["transcoder.decoder=per_layer"],
         "skip": ["transcoder.decoder=per_layer", "transcoder.skip=linear"]}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "text", "held_out", "directory"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--k", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--seeds-of", type=int, metavar="K")
    parser.add_argument("--graphs", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=65536, help="of HELD_OUT and of each text of a task, at most (default 65536)")
    parser.add_argument("--task", action="append", default=[], metavar="NAME=TEXT_A,TEXT_B")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    given.seeds_of = given.seeds_of or sorted(given.k)[len(given.k) // 2]
    given.tasks = {}
    for task in given.task:
        name, _, texts = task.partition("=")
        given.tasks[name] = texts.split(",")
        if len(given.tasks[name]) != 2:
            parser.error(f"--task {task}: NAME=TEXT_A,TEXT_B is needed")
    return given


def weft(*words):
    """Standard output of a command, which must succeed."""
    done = subprocess.run(["weft", *map(str, words)], check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"quality.py: weft {' '.join(map(str, words))} ended with code {done.returncode}")
    return done.stdout


def sets(values):
    return [word for value in values for word in ("--set", value)]


def harvested(given, text, name):
    """Activations of a text, once."""
    place = given.directory / "activations" / name
    if not (place / "complete").exists():
        weft("lm", "harvest", given.model, "--text", text, "--tokens", given.tokens, "--type", "bf16", "--output", place, "--quiet")
        (place / "complete").touch()
    return place


def prompts_of(text, count):
    """The beginnings of lines of a text at equal distances, at most 100 characters, ending with a word."""
    lines = [line.strip() for line in text.read_text(errors="replace").splitlines()]
    lines = [line[:100].rsplit(" ", 1)[0] for line in lines if len(line) >= 60 and " " in line[:100]]
    return [lines[i * len(lines) // count] for i in range(min(count, len(lines)))]


# --- Probes ---------------------------------------------------------------------------------------------------------------


def encoded(place, layers, features):
    """Largest activation of each feature in each chunk: [chunks, layers * features]."""
    import h5py     # of probes alone
    rows, at = [], 0
    for path in sorted(place.glob("encoded_*.h5"), key=lambda one: int(one.stem.split("_")[1])):
        with h5py.File(path) as file:
            offsets, columns, values = file["offsets"][:], file["feature"][:], file["value"][:]
        row = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)) + at
        at += len(offsets) - 1
        rows.append((row // CHUNK, columns.astype(np.int64), values))
    largest = np.zeros((at // CHUNK, layers * features), np.float32)
    for chunk, columns, values in rows:
        kept = chunk < len(largest)
        np.maximum.at(largest, (chunk[kept], columns[kept]), values[kept])
    return largest


def neurons(place):
    """The same of the components of the inputs of the MLPs."""
    import h5py
    parts = []
    for path in sorted(place.glob("chunk_*.hdf5"), key=lambda one: int(one.stem.split("_")[1])):
        with h5py.File(path) as file:
            layers = sum(name.startswith("layer_") for name in file)
            parts.append(np.concatenate([file[f"layer_{layer}/inputs"][:] for layer in range(layers)], axis=1))
    rows = np.concatenate(parts)
    count = len(rows) // CHUNK
    return rows[:count * CHUNK].reshape(count, CHUNK, -1).max(axis=1)


def accuracy(values, label, threshold, sign):
    says = sign * values > sign * threshold
    return (says[label].mean() + (~says[~label]).mean()) / 2


def probe(of_a, of_b):
    """Balanced accuracy on the second halves of the column and threshold that are best on the first ones."""
    halves = []
    for half in (0, 1):
        a, b = (chunks[half * len(chunks) // 2:(half + 1) * len(chunks) // 2] for chunks in (of_a, of_b))
        halves.append((np.concatenate([a, b]), np.arange(len(a) + len(b)) < len(a)))
    (train, is_a), (test, test_is_a) = halves
    spread = train.std(axis=0) + 1e-9
    difference = np.abs(train[is_a].mean(axis=0) - train[~is_a].mean(axis=0)) / spread
    best = (0.0, 0, 0.0, 1)
    for column in np.argsort(-difference, kind="stable")[:CANDIDATES]:
        values = train[:, column]
        for threshold in np.unique(np.quantile(values, np.linspace(0, 1, 33))):
            for sign in (1, -1):
                best = max(best, (accuracy(values, is_a, threshold, sign), int(column), float(threshold), sign))
    _, column, threshold, sign = best
    return float(accuracy(test[:, column], test_is_a, threshold, sign))


# --- Points ---------------------------------------------------------------------------------------------------------------


def measure(given, start, form, k, seed):
    """The figures of a point, which are made unless they are there."""
    place = given.directory / f"{form}_k{k}_seed{seed}"
    result = place / "quality.json"
    if result.exists():
        return json.loads(result.read_text())
    weft("train", start, "--quiet", "--output", place / "run", *sets([*FORMS[form], f"transcoder.k={k}", f"run.seed={seed}", *given.set]))
    if not (place / "thresholds").exists():
        weft("convert", place / "run", "--quiet", "--output", place / "thresholds")
    record = json.loads((place / "run" / "run.json").read_text())
    precision = sets([one for one in given.set if one.startswith("device.")])
    validation = json.loads(weft("evaluate", place / "thresholds", "--json", "--quiet", *precision))["validation"]
    losses = json.loads(weft("lm", "evaluate", given.model, "--transcoder", place / "thresholds", "--text", given.held_out, "--json", "--quiet",
                             *precision))["replacement"]["all_layers"]
    found = {"form": form, "k": k, "seed": seed, "tokens": record["result"]["tokens"], "l0": validation["l0_mean"],
             "explained_variance": validation["explained_variance_pooled"], "dead": validation["dead_fraction_mean"],
             "loss_recovered": losses["recovered_from_mean"]}
    if given.graphs:
        (place / "graphs").mkdir(exist_ok=True)
        graphs = json.loads(weft("attribute", given.model, "--transcoder", place / "thresholds", "--prompts", given.directory / "prompts.txt",
                                 "--output", place / "graphs" / "graph.json", "--json", "--quiet", *precision))["graphs"]
        found.update({name: float(np.mean([graph[name] for graph in graphs])) for name in ("replacement", "completeness")})
    for task, texts in given.tasks.items():
        sides = []
        for side, text in zip("ab", texts):
            target = place / f"{task}_{side}"
            if not (target / "metadata.json").exists():
                weft("encode", place / "thresholds", "--data", harvested(given, text, f"{task}_{side}"), "--output", target, "--quiet", *precision)
            facts = json.loads((target / "metadata.json").read_text())
            sides.append(encoded(target, facts["n_layers"], facts["n_features"]))
        found[task] = probe(*sides)
    result.write_text(json.dumps(found) + "\n")
    return found


def main():
    given = arguments()
    given.directory.mkdir(parents=True, exist_ok=True)
    (given.directory / "prompts.txt").write_text("\n".join(prompts_of(given.held_out, given.graphs)) + "\n")
    start = given.directory / "transcoder.toml"
    start.write_text(weft("init", "--model", given.model, "--text", given.text, "--validation", harvested(given, given.held_out, "held_out")))
    columns = {"l0": "{:.1f}", "explained_variance": "{:.3f}", "loss_recovered": "{:.3f}", "dead": "{:.2f}"}
    if given.graphs:
        columns.update(replacement="{:.3f}", completeness="{:.3f}")
    columns.update({task: "{:.3f}" for task in given.tasks})
    print("| form | k | seeds | " + " | ".join(name.replace("_", " ") for name in columns) + " |\n|---|---:|---:|" + "---:|" * len(columns))
    for form in given.forms:
        for k in given.k:
            points = [measure(given, start, form, k, seed) for seed in (given.seeds if k == given.seeds_of else given.seeds[:1])]
            cells = []
            for name, text in columns.items():
                values = [point[name] for point in points]
                spread = f" ± {text.format(np.std(values, ddof=1))}" if len(values) > 1 else ""
                cells.append(text.format(np.mean(values)) + spread)
            print(f"| {form} | {k} | {len(points)} | " + " | ".join(cells) + " |", flush=True)
    if given.tasks:
        sides = {task: [neurons(harvested(given, text, f"{task}_{side}")) for side, text in zip("ab", texts)] for task, texts in given.tasks.items()}
        print("| a neuron | | | " + " | ".join(f"{probe(*sides[name]):.3f}" if name in sides else "" for name in columns) + " |")


if __name__ == "__main__":
    main()
