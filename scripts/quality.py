#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Quality of transcoders of a language model over L0, for several forms and seeds, as one table.

quality.py MODEL TEXT HELD_OUT DIR [--k 8 16 32 64 128] [--forms cross_layer per_layer skip] [--seeds 1 2 3] [--seeds-of K]
           [--graphs 50] [--task NAME=TEXT_A,TEXT_B]... [--state-steps 10000] [--planted] [--jobs N] [--minutes M] [--set KEY=VALUE]...

MODEL: a directory of Hugging Face, or a run; TEXT and HELD_OUT: files of text. Each point is trained on TEXT by the input of weft init
(--set changes it), turned into thresholds, and measured on HELD_OUT: L0, explained variance, the part of the loss that is recovered
compared with the mean of each MLP's output, and replacement and completeness of the graphs of prompts, the beginnings of lines of
HELD_OUT. The first seed trains at all k, the others at --seeds-of only (default: the middle one): their spread is that of the table.

--task: two texts, of two classes. A probe of one feature says to which of them 32 consecutive tokens belong: the feature and the threshold
of its largest activation that separate the first half of the tokens best, its balanced accuracy on the second half. The line "a neuron"
is the same with a component of the inputs of the MLPs in place of a feature.

--state-steps: also two long trainings of small steps, 512 tokens each, with fp32 and with 8-bit state (decoders per layer, --seeds-of).

--planted: also trainings of inputs/quickstart.toml on planted features of each form, with fp32 and 8-bit state: F1 of the features that
are found (a cosine of 0.9 with a planted one, one to one; precision among learned features that are alive, recall among planted ones), and
MCC, the mean cosine of planted features with their partners in a greedy one-to-one matching. Data of forms per layer have planted features
that write to one layer.

Tasks and MCC need NumPy and h5py. weft is taken from PATH, GPUs from CUDA_VISIBLE_DEVICES. What a point has written to DIR is kept: the same
command continues. DIR receives table.md, results.json and a log per point.
"""
import json
import sys
import threading
from pathlib import Path

from studies import REPOSITORY, Failed, Study, keep, kept, parser_of, sets, table

CHUNK = 32              # tokens that a probe judges together
CANDIDATES = 64         # features of a layer that are tried: those whose means differ most
PROMPT = 60             # characters of a prompt, at most
NODES = 7500            # features of a graph, as in circuit-tracer
STATE_TOKENS = 512      # tokens per step of the long trainings
FORMS = {"cross_layer": ["transcoder.decoder=cross_layer"], "per_layer": ["transcoder.decoder=per_layer"],
         "skip": ["transcoder.decoder=per_layer", "transcoder.skip=linear"]}
COLUMNS = {"l0": "{:.1f}", "explained_variance": "{:.3f}", "loss_recovered": "{:.3f}", "dead": "{:.2f}", "replacement": "{:.3f}",
           "completeness": "{:.3f}"}


def arguments():
    parser = parser_of(__doc__)
    for name in ("model", "text", "held_out", "directory"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--k", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--seeds-of", type=int, metavar="K")
    parser.add_argument("--graphs", type=int, default=50, help="prompts (default 50; 0: no graphs)")
    parser.add_argument("--tokens", type=int, default=65536, help="of HELD_OUT and of each text of a task, at most (default 65536)")
    parser.add_argument("--task", action="append", default=[], metavar="NAME=TEXT_A,TEXT_B")
    parser.add_argument("--state-steps", type=int, default=0, metavar="STEPS")
    parser.add_argument("--planted", action="store_true")
    parser.add_argument("--planted-steps", type=int, default=1500, metavar="STEPS", help="of the trainings of --planted (default 1500)")
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


def prompts_of(text, count):
    """The beginnings of lines of a text at equal distances, ending with a word."""
    lines = [line.strip() for line in text.read_text(errors="replace").splitlines()]
    lines = [line[:PROMPT].rsplit(" ", 1)[0] for line in lines if len(line) >= PROMPT and " " in line[:PROMPT]]
    return [lines[i * len(lines) // count] for i in range(min(count, len(lines)))]


# --- Probes ---------------------------------------------------------------------------------------------------------------


def encoded(place, layers, features):
    """Largest activation of each feature in each chunk: [chunks, layers * features]."""
    import h5py
    import numpy as np
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
    import numpy as np
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
    import numpy as np
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


# --- Planted features -----------------------------------------------------------------------------------------------------


def matched_cosine(truth, run):
    """Mean over the planted features of the cosine with the learned feature of their layer that a greedy matching gives them."""
    sys.path.insert(0, str(REPOSITORY / "python"))
    import h5py
    import numpy as np
    from weft import Run
    transcoder, found = Run(run).transcoder(), []
    deviation = 1 / transcoder.scaling("targets")[1]
    with h5py.File(truth) as file:
        for layer in range(transcoder.n_layers):
            learned = transcoder.decoder(layer)
            learned = learned * deviation[layer:layer + learned.shape[1]]
            planted = file[f"layer_{layer}/decoder"][:]
            learned = np.pad(learned.reshape(len(learned), -1), ((0, 0), (0, planted.shape[1] - learned[0].size)))
            unit = [rows / (np.linalg.norm(rows, axis=1, keepdims=True) + 1e-30) for rows in (planted, learned)]
            cosines = unit[0] @ unit[1].T
            for _ in range(min(cosines.shape)):
                row, column = np.unravel_index(cosines.argmax(), cosines.shape)
                found.append(float(cosines[row, column]))
                cosines[row, :] = cosines[:, column] = -2
    return sum(found) / len(found)


# --- Points ---------------------------------------------------------------------------------------------------------------


class Quality:
    def __init__(self, given):
        self.given, self.start = given, given.directory / "transcoder.toml"
        self.study = Study("quality.py", given, self.report)
        self.trained = {}       # point -> set when its training has ended
        self.neurons = {}
        state = [(f"per_layer, {state} state", given.seeds_of, seed, (f"optimizer.state={state}", f"run.steps={given.state_steps}",
                                                                      f"data.batch_tokens={STATE_TOKENS}"))
                 for state in ("fp32", "8bit") for seed in given.seeds[:1]] if given.state_steps else []
        self.points = state + [(form, k, seed, ()) for form in given.forms for k in given.k
                               for seed in (given.seeds if k == given.seeds_of else given.seeds[:1])]
        self.planted = [(form, state, seed) for form in given.forms for state in ("fp32", "8bit") for seed in given.seeds if given.planted]

    def place(self, point):
        form, k, seed, settings = point
        return self.given.directory / f"{form.replace(', ', '_').replace(' ', '_')}_k{k}_seed{seed}"

    def planted_place(self, form, state, seed):
        return self.given.directory / "planted" / f"{form}_{state}_seed{seed}"

    def weft(self, place, *words):
        return self.study.weft(place / "commands.log", *words, "--quiet")

    def harvest(self, text, name):
        """Activations of a text, once."""
        place = self.given.directory / "activations" / name
        if not (place / "metadata.json").exists():
            self.study.weft(self.given.directory / "activations" / f"{name}.log", "lm", "harvest", self.given.model, "--text", text,
                            "--tokens", self.given.tokens, "--type", "bf16", "--output", place, "--quiet")
        return place

    def train(self, point):
        try:
            (form, k, seed, settings), place = point, self.place(point)
            record = kept(place / "quality.json")
            if "loss_recovered" in record:
                return
            changes = [*FORMS[form.split(",")[0]], f"transcoder.k={k}", f"run.seed={seed}", "checkpoint.every=0", *self.given.set, *settings]
            self.weft(place, "train", self.start, "--output", place / "run", *sets(changes))
            if not (place / "thresholds").exists():
                self.weft(place, "convert", place / "run", "--output", place / "thresholds")
            validation = json.loads(self.weft(place, "evaluate", place / "thresholds", "--json", *self.precision()))["validation"]
            record.update(form=form, k=k, seed=seed, tokens=kept(place / "run" / "run.json")["result"]["tokens"], l0=validation["l0_mean"],
                          explained_variance=validation["explained_variance_pooled"], dead=validation["dead_fraction_mean"])
            keep(place / "quality.json", record)
            losses = json.loads(self.weft(place, "lm", "evaluate", self.given.model, "--transcoder", place / "thresholds", "--text",
                                          self.given.held_out, "--json", *self.precision()))
            record["loss_recovered"] = losses["replacement"]["all_layers"]["recovered_from_mean"]
            keep(place / "quality.json", record)
        finally:
            self.trained[point].set()

    def precision(self):
        return sets([value for value in self.given.set if value.startswith("device.")])

    def record_of(self, point):
        """The record of a point whose training has ended."""
        self.trained[point].wait()
        record = kept(self.place(point) / "quality.json")
        if "l0" not in record:
            raise Failed("its training has no result")
        return record

    def graph(self, point):
        record, place = self.record_of(point), self.place(point)
        if "replacement" in record:
            return
        (place / "graphs").mkdir(exist_ok=True)
        graphs = json.loads(self.weft(place, "attribute", self.given.model, "--transcoder", place / "thresholds", "--prompts",
                                      self.given.directory / "prompts.txt", "--max-nodes", NODES, "--output", place / "graphs" / "graph.json",
                                      "--json", *self.precision()))["graphs"]
        for name in ("replacement", "completeness"):
            record[name] = sum(graph[name] for graph in graphs) / len(graphs)
        keep(place / "quality.json", record)

    def probe(self, point):
        record, place = self.record_of(point), self.place(point)
        for task in [task for task in self.given.tasks if task not in record]:
            sides = []
            for side in "ab":
                target = place / f"{task}_{side}"
                if not (target / "metadata.json").exists():
                    self.weft(place, "encode", place / "thresholds", "--data", self.given.directory / "activations" / f"{task}_{side}",
                              "--output", target, *self.precision())
                facts = kept(target / "metadata.json")
                sides.append(encoded(target, facts["n_layers"], facts["n_features"]))
            record[task] = probe(*sides)
            keep(place / "quality.json", record)

    def probe_neurons(self):
        for task in self.given.tasks:
            self.neurons[task] = probe(*(neurons(self.given.directory / "activations" / f"{task}_{side}") for side in "ab"))

    def plant(self, form):
        reach = 0 if form == "cross_layer" else 1
        place = self.given.directory / "planted" / f"reach_{reach}"
        if not (place / "validation" / "metadata.json").exists():
            self.weft(place, "synth", REPOSITORY / "inputs" / "quickstart.toml", "--output", place, "--set", f"synthetic.reach={reach}")
        return place

    def recover(self, form, state, seed):
        data, place = self.plant(form), self.planted_place(form, state, seed)
        record = kept(place / "quality.json")
        if "f1" not in record:
            self.weft(place, "train", REPOSITORY / "inputs" / "quickstart.toml", "--output", place / "run",
                      *sets([*FORMS[form], f"optimizer.state={state}", f"run.seed={seed}", f"run.steps={self.given.planted_steps}",
                             f"data.train={data / 'train'}", f"data.validation={data / 'validation'}", "checkpoint.every=0", *self.precision()[1::2]]))
            result = json.loads(self.weft(place, "evaluate", place / "run", "--json", *self.precision()))
            validation, recovery = result["validation"], result["recovery"]
            learned = sum(map(sum, validation["density_histogram"])) - sum(layer[0] for layer in validation["density_histogram"])
            record.update(form=form, state=state, seed=seed, f1=2 * recovery["recovered"] / (learned + recovery["counted"]),
                          recall=recovery["fraction"], explained_variance=validation["explained_variance_pooled"])
            keep(place / "quality.json", record)
        if "mcc" not in record:
            record["mcc"] = matched_cosine(data / "ground_truth.h5", place / "run")
            keep(place / "quality.json", record)

    def report(self):
        """Markdown, and all records."""
        rows, records = {}, []
        for point in self.points:
            records.append(kept(self.place(point) / "quality.json"))
            rows.setdefault(point[:2], []).append(records[-1])
        columns = {name: text for name, text in COLUMNS.items() if self.given.graphs or name not in ("replacement", "completeness")}
        columns.update({task: "{:.3f}" for task in self.given.tasks})
        lines = [*rows.items(), *([(("a neuron", ""), [self.neurons])] if self.neurons else [])]
        text = table(["form", "k"], columns, lines)
        if self.planted:
            found = {}
            for form, state, seed in self.planted:
                records.append(kept(self.planted_place(form, state, seed) / "quality.json"))
                found.setdefault((form, state), []).append(records[-1])
            columns = {name: "{:.3f}" for name in ("f1", "mcc", "recall", "explained_variance")}
            text += "\n" + table(["planted, form", "state"], columns, found.items())
        return text, [record for record in records if record] + ([{"form": "a neuron", **self.neurons}] if self.neurons else [])

    def main(self):
        given, study = self.given, self.study
        texts = {"held_out": given.held_out, **{f"{task}_{side}": text for task, two in given.tasks.items() for side, text in zip("ab", two)}}
        (given.directory / "prompts.txt").write_text("\n".join(prompts_of(given.held_out, given.graphs)) + "\n")
        study.run([(f"activations of {text}", lambda name=name, text=text: self.harvest(text, name)) for name, text in texts.items()] +
                  [(f"planted features, {form}", lambda form=form: self.plant(form)) for form in ("cross_layer", "per_layer") if given.planted])
        if study.failures:
            return study.finish()
        self.start.write_text(study.weft(given.directory / "init.log", "init", "--model", given.model, "--text", given.text, "--validation",
                                         given.directory / "activations" / "held_out"))
        # The longest first: time grows with k and with the layers that a feature writes to.
        points = sorted(self.points, key=lambda point: (not point[3], -point[1] * (15 if point[0] == "cross_layer" else 1)))
        self.trained = {point: threading.Event() for point in points}
        tasks = [(f"{self.place(point).name}, training", lambda point=point: self.train(point)) for point in points]
        tasks += [(f"planted, {' '.join(map(str, one))}", lambda one=one: self.recover(*one)) for one in self.planted]
        if given.graphs:
            tasks += [(f"{self.place(point).name}, graphs", lambda point=point: self.graph(point)) for point in points]
        if given.tasks:
            tasks += [("probes of neurons", self.probe_neurons)]
            tasks += [(f"{self.place(point).name}, probes", lambda point=point: self.probe(point)) for point in points]
        study.run(tasks)
        return study.finish()


if __name__ == "__main__":
    sys.exit(Quality(arguments()).main())
