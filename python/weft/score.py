# SPDX-License-Identifier: Apache-2.0
"""Scores the labels of features: a predictor, a person's program or one that asks a language model, reads a label and texts, and says where
the label holds. Two scores, as in Paulo et al. 2024 (arXiv:2410.13928): detection, of texts in which the feature fires and of others of the
same layer; fuzzing, of texts in which the feature fires, with its tokens between << and >>, or as many other tokens.

    weft score DIR --predictor "python3 predictor.py"

DIR is what `weft features --labels FILE --output DIR` wrote. The predictor is one process: for each line that it reads,

    {"id": "3:17:detection", "task": "detection", "label": "days of the week", "texts": ["on Monday we", "the cat"]}

it writes {"scores": [0.9, 0.1]} at once, the probability that each text agrees with the label. A score is the balanced accuracy: the mean of
the parts of both kinds that are on the right side of 0.5; 0.5 is chance. The scores are written to DIR/scores.jsonl, which weft serve shows.
"""
import json
import os
import queue
import signal
import subprocess
import sys
import threading

import numpy as np

from weft.errors import DATA, IO, USAGE, Output, Parser, WeftError, run, write_atomically
from weft.serve.catalogue import SCORES, Catalogue, required_features
from weft.text import plural

MOST_BYTES = 1 << 20        # of an answer
GRACE = 5                   # seconds for the predictor to end after its input


class Predictor:
    """The process. A request is a line, as is its answer."""

    def __init__(self, command, seconds):
        self.command, self.seconds, self.lines = command, seconds, queue.Queue()
        self.process = subprocess.Popen(command, shell=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        while line := self.process.stdout.readline(MOST_BYTES):
            self.lines.put(line)
        self.lines.put(b"")

    def _failed(self, code, problem):
        return WeftError(code, f"the predictor, {self.command[:200]}, {problem}")

    def scores(self, request):
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            line = self.lines.get(timeout=self.seconds)
        except BrokenPipeError:
            line = b""
        except queue.Empty:
            raise self._failed(IO, f"wrote nothing within {self.seconds} s; it must answer each line at once, without buffering; raise "
                               "--time-limit if it needs longer") from None
        if not line:
            raise self._failed(IO, f"ended before it answered \"{request['id']}\" (exit status {self.process.wait()}); it must run until its "
                               "input ends")
        count = len(request["texts"])
        try:
            found = json.loads(line)["scores"]
            scores = np.array([float(one) for one in found])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            scores = np.empty(0)
        if len(scores) != count or not ((scores >= 0) & (scores <= 1)).all():
            raise self._failed(DATA, f"answers \"{request['id']}\" with {line[:100].decode('utf-8', 'replace').strip()!r}; needed are "
                               f'{{"scores": [...]}} with {count} numbers from 0 to 1')
        return scores

    def end(self):
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Examples:
    """Texts of the features of a layer, as rows of token ids with the mask of those on which the feature fires."""

    def __init__(self, catalogue, layer):
        self.catalogue, self.layer = catalogue, layer
        self.own = {}

    def of(self, feature):
        """[(row of the dataset, ids, fires)] of a feature: those drawn at random, then the strongest."""
        if feature not in self.own:
            arrays = {name: values[0] for name, values in self.catalogue.arrays(self.layer, feature, feature + 1).items()}
            found = {}
            for kind in ("sample", "top"):
                for row, ids, shade in zip(arrays.get(f"{kind}_row", []), arrays.get(f"{kind}_tokens", []), arrays.get(f"{kind}_shade", [])):
                    inside = ids >= 0
                    if row >= 0:
                        found.setdefault(int(row), (int(row), ids[inside], shade[inside] > 0))
            self.own[feature] = list(found.values())
        return self.own[feature]

    def others(self, feature, count, generator):
        """Examples of other features of the layer, at rows where this one is not known to fire."""
        rows, found = {row for row, _, _ in self.of(feature)}, []
        for _ in range(20 * count):
            if len(found) == count:
                break
            other = int(generator.integers(self.catalogue.n_features))
            examples = [one for one in self.of(other) if one[0] not in rows] if other != feature else []
            if examples:
                found.append(examples[int(generator.integers(len(examples)))])
                rows.add(found[-1][0])
        return found


def marked_text(catalogue, ids, marked=None):
    return "".join(f"<<{catalogue.text(int(token))}>>" if marked is not None and marked[at] else catalogue.text(int(token))
                   for at, token in enumerate(ids))


def other_tokens(fires, generator):
    """A mask with as many tokens, none of which fires; None if there are not as many."""
    rest = np.flatnonzero(~fires)
    if len(rest) < fires.sum():
        return None
    mask = np.zeros(len(fires), bool)
    mask[generator.choice(rest, int(fires.sum()), replace=False)] = True
    return mask


def balanced_accuracy(scores, true):
    return float(((scores[true] > 0.5).mean() + (scores[~true] <= 0.5).mean()) / 2)


def score(catalogue, examples, feature, label, predictor, count, seed):
    """{"detection": x, "fuzzing": y}; one is missing if the feature has too few examples."""
    layer = examples.layer
    generator = np.random.default_rng([seed, layer, feature])
    own = examples.of(feature)[:count]
    others = examples.others(feature, len(own), generator)
    pairs = [(ids, fires, mask) for _, ids, fires in own if (mask := other_tokens(fires, generator)) is not None]
    texts = {"detection": [(marked_text(catalogue, ids), True) for _, ids, _ in own] + [(marked_text(catalogue, ids), False) for _, ids, _ in others],
             "fuzzing": [(marked_text(catalogue, ids, fires if i % 2 == 0 else mask), i % 2 == 0) for i, (ids, fires, mask) in enumerate(pairs)]}
    found = {}
    for task, chosen in texts.items():
        true = np.array([right for _, right in chosen], bool)
        if not true.any() or true.all():
            continue
        order = generator.permutation(len(chosen))
        request = {"id": f"{layer}:{feature}:{task}", "task": task, "label": label, "texts": [chosen[i][0] for i in order]}
        found[task] = balanced_accuracy(predictor.scores(request), true[order])
    return found


def arguments_of(arguments):
    parser = Parser("score", description=__doc__)
    parser.add_argument("features", metavar="DIR", help="the directory of features.h5, or the file")
    parser.add_argument("--predictor", required=True, metavar="COMMAND", help="program that reads and writes JSON lines")
    parser.add_argument("--examples", type=int, default=10, metavar="N", help="texts of each kind per feature (default 10)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the texts that are drawn (default 1)")
    parser.add_argument("--time-limit", type=float, default=300, metavar="SECONDS", help="for one answer (default 300)")
    Output.add_options(parser)
    options = parser.parse_args(arguments)
    if options.examples < 2 or options.seed < 0 or not options.time_limit > 0:
        raise WeftError(USAGE, "--examples is at least 2, --seed at least 0 and --time-limit above 0")
    return options


def command(arguments):
    options = arguments_of(arguments)
    output, path = Output(options.json, options.quiet), required_features(options.features)
    catalogue = Catalogue(path)
    if not catalogue.labels:
        raise WeftError(USAGE, f"{path}: has no labels to score; weft features --labels FILE adds them")
    if not catalogue.has_shades:
        raise WeftError(USAGE, f"{path}: has no tokens around its examples (the data have no token ids); write it with weft features from data of "
                        "weft lm harvest")
    predictor, lines, of_layer = Predictor(options.predictor, options.time_limit), [], {}
    try:
        for (layer, feature), label in sorted(catalogue.labels.items()):
            examples = of_layer.setdefault(layer, Examples(catalogue, layer))
            found = score(catalogue, examples, feature, label, predictor, options.examples, options.seed)
            lines.append({"layer": layer, "feature": feature, "label": label, **found})
            examples.own.clear()
            output.info(f"{layer}:{feature} {label}: " + (", ".join(f"{task} {value:.2f}" for task, value in found.items()) or "too few examples"))
    finally:
        predictor.end()
    target = path.with_name(SCORES)
    write_atomically(target, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    means = {task: float(np.mean([line[task] for line in lines if task in line])) for task in ("detection", "fuzzing")
             if any(task in line for line in lines)}
    output.written(f"{target}: {plural(len(lines), 'label')}; mean " + ", ".join(f"{task} {value:.2f}" for task, value in means.items()) +
                   f"\nnext: weft serve {path.parent}", {"output": str(target), "labels": len(lines), "mean": means, "scores": lines})
    return 0


def main(arguments=None):
    return run(command, arguments)


if __name__ == "__main__":
    sys.exit(main())
