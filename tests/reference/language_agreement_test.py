# SPDX-License-Identifier: Apache-2.0
"""Compares `weft lm train` with the float64 reference: gradients at equal parameters, twenty steps, initial values, evaluation.

language_agreement_test.py WEFT

Gradients are computed from two checkpoints: first moments obey m' = beta1 m + (1 - beta1) g.
"""
import copy
import json
import random as words

import h5py
import numpy as np

import files
import language_model as m
import program
from transcoder import learning_rate

SEQUENCE, SEQUENCES, STEPS = 24, 4, 21
BASE = dict(layers=2, heads=4, d_model=32, d_mlp=40)
LLAMA = dict(norm="rms", mlp="swiglu", position="rope", tied=False, bias=False)

# Model, optimizer and data. Together each option of table [language_model] once.
CASES = {
    "gpt2": (dict(preset="gpt2"), dict(clip_norm=0.7), dict(order="random_windows")),
    "llama, grouped queries, window": (
        dict(LLAMA, preset="llama", kv_heads=2, window=5), dict(schedule="linear", decay_begin=0.4), dict(micro_tokens=48)),
    "norm of each head, norms on both sides, softcaps": (
        dict(LLAMA, mlp="geglu", qk_norm="head", norm_position="both", logit_softcap=2.0, attention_softcap=0.5),
        dict(warmup_steps=7), {}),
    "norm of all heads, outputs normalised": (
        dict(LLAMA, kv_heads=2, qk_norm="width", norm_position="post", rope_base=500.0, norm_epsilon=1e-3), dict(clip_norm=0), {}),
    "temperature, squared ReLU, one key head": (
        dict(mlp="relu2", kv_heads=1, qk_norm="scaled", bias=False, attention_softcap=0.7), dict(weight_decay=0.5), dict(micro_tokens=72)),
    "rotary positions with biases": (dict(norm="rms", position="rope"), dict(beta2=0.99), dict(batch_tokens=48)),
    "Gemma 2: wide heads, scales, full attention in every second block": (
        dict(LLAMA, mlp="geglu", norm_position="both", kv_heads=2, head_size=16, window=5, full_every=2, attention_scale=0.3,
             embedding_scale=3.0, rope_factor=4.0, rope_length=16, tied=True), {}, {}),
    "documents": (dict(position="rope", window=9), {}, dict(train="documents.h5", validation="documents.h5", document_mask=True)),
    "documents, learned positions": (dict(LLAMA, position="learned"), {}, dict(train="documents.h5", validation="documents.h5", document_mask=True)),
    "completions of JSON Lines": (dict(position="rope"), {}, dict(train="rows.jsonl", validation="rows.jsonl", document_mask=True)),
    "completions, without document mask": (dict(LLAMA), {}, dict(train="rows.jsonl", validation="train.txt", order="random_windows")),
    "smallest": (dict(layers=1, heads=1, d_model=8, d_mlp=3), dict(clip_norm=0), dict(sequence=1, batch_tokens=1, train="ab.txt", validation="ab.txt")),
}


class Case:
    """A run: its settings and its input file."""

    def __init__(self, name, seed=1):
        model, optimizer, data = CASES[name]
        self.seed = seed
        self.model = {**BASE, **model}
        self.optimizer = {"learning_rate": 2e-3, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1, "clip_norm": 0.2,
                          "schedule": "constant", "warmup_steps": 0, "decay_begin": 0.8, "final_fraction": 0.1, **optimizer}
        self.data = {"train": "train.txt", "validation": "validation.txt", "tokens": "character", "sequence": SEQUENCE,
                     "batch_tokens": SEQUENCE * SEQUENCES, "order": "sequential", "document_mask": False, **data}
        if self.data["train"].endswith(".h5"):
            del self.data["tokens"]
        self.steps = STEPS

    def settings(self):
        return m.Settings(**{key: value for key, value in self.model.items() if key != "preset"})

    def update(self, state, gradients):
        o = self.optimizer
        names = ("learning_rate", "beta1", "beta2", "epsilon", "weight_decay", "clip_norm")
        schedule = copy.copy(self)
        schedule.__dict__.update(o)
        return m.update(m.Optimizer(**{name: o[name] for name in names}), state, gradients, learning_rate(schedule, state.step))

    def text(self):
        tables = {"run": dict(steps=self.steps, seed=self.seed),
                  "data": self.data,
                  "language_model": self.model,
                  "optimizer": self.optimizer,
                  "device": dict(precision="fp32", backend="portable"),
                  "checkpoint": dict(every=1, keep_every=1),
                  "log": dict(every=1)}
        quoted = lambda value: str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else value
        return "\n".join(f"[{table}]\n" + "\n".join(f"{key} = {quoted(value)}" for key, value in keys.items())
                         for table, keys in tables.items())

    def train(self, weft, name):
        source = weft.folder / f"{name}.toml"
        source.write_text(self.text())
        weft.run("lm", "train", source, "--output", weft.folder / name)
        return weft.folder / name


# --- Data -------------------------------------------------------------------------------------------------------------------


def write_text(path, characters, seed):
    """`characters` characters of random words over a small alphabet; not all are ASCII."""
    generator = words.Random(seed)
    text = ""
    while len(text) < characters:
        text += "".join(generator.choices("aeinorst\u00e9\u03b1\U0001f600", [9, 9, 7, 6, 6, 5, 5, 4, 1, 1, 1], k=generator.randint(1, 6))) + " "
    path.write_text(text[:characters], encoding="utf-8")


def write_documents(path):
    """A token file with 30 documents of 1 to 14 tokens: several in a sequence, and some over the border of two."""
    generator = np.random.default_rng(3)
    lengths = generator.integers(1, 15, 30)
    with h5py.File(path, "w") as file:
        file.attrs.update(format="weft-tokens", format_version=1, vocabulary=17, text_bytes=0)
        file["tokens"] = generator.integers(17, size=lengths.sum(), dtype=np.uint16)
        file["documents"] = (np.cumsum(lengths) - lengths).astype(np.int64)


def write_rows(path):
    """Rows of JSON Lines of the characters of write_text: texts, of which all counts, and prompts with completions; some reach over the
    border of a sequence."""
    generator, rows = words.Random(5), []
    text = lambda least, most: "".join(generator.choices("aeinorst\u00e9\u03b1\U0001f600 ", k=generator.randint(least, most)))
    for _ in range(24):
        rows.append(generator.choice([{"text": text(1, 20)}, {"prompt": text(0, 9), "completion": text(1, 9)}]))
    path.write_text("\n".join(json.dumps(row) for row in rows))


def philox(seed, purpose, step, index):
    """Four 32-bit words of Philox4x32-10 (Salmon et al. 2011). Counter: index, step, purpose in the highest byte; key: seed."""
    low = 0xFFFFFFFF
    c = [index & low, index >> 32, step & low, (step >> 32) ^ (purpose << 24)]
    key = [seed & low, seed >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(second >> 32) ^ c[1] ^ key[0], second & low, (first >> 32) ^ c[3] ^ key[1], first & low]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return c


class Text:
    """Ids of a token file, or of a text or rows of texts: then the place of each character among those of the training text."""

    def __init__(self, folder, case):
        self.case, self.length, self.documents = case, case.data["sequence"], np.zeros(1, np.int64)
        train, validation = (folder / case.data[name] for name in ("train", "validation"))
        self.counted = {}       # by the identity of the ids; none: all count
        if train.suffix == ".h5":
            with h5py.File(train) as file:
                self.train = self.validation = file["tokens"][()].astype(np.int64)
                self.documents, self.vocabulary = file["documents"][()], int(file.attrs["vocabulary"])
        else:
            parts = [self.parts(path) for path in (train, validation)]
            train, validation = ("".join(text for text, _ in rows) for rows in parts)
            numbers = {character: number for number, character in enumerate(sorted(set(train)))}
            self.vocabulary = len(numbers)
            self.train, self.validation = (np.array([numbers[character] for character in text]) for text in (train, validation))
            for ids, rows in zip((self.train, self.validation), parts):
                self.counted[id(ids)] = np.concatenate([np.full(len(text), counts) for text, counts in rows])

    def parts(self, path):
        """[(text, True if it counts in the loss)]; sets the documents of rows."""
        content = path.read_text(encoding="utf-8")
        if path.suffix != ".jsonl":
            return [(content, True)]
        rows = [json.loads(line) for line in content.splitlines()]
        lengths = [len(row.get("text", "") + row.get("prompt", "") + row.get("completion", "")) for row in rows]
        self.documents = np.cumsum([0, *lengths[:-1]])
        return [part for row in rows for part in ((row.get("prompt", ""), False), (row.get("text", "") + row.get("completion", ""), True))]

    def window(self, ids, begin):
        """(ids, targets, first row of the document) from `begin` on; where the text ends, padding that is not counted."""
        there = np.arange(begin, begin + self.length)
        counted = there + 1 < len(ids)
        marks = self.counted.get(id(ids))
        if marks is not None:
            counted &= marks[np.minimum(there + 1, len(ids) - 1)]
        targets = np.where(counted, ids[np.minimum(there + 1, len(ids) - 1)], m.IGNORED)
        first = np.zeros_like(there)
        if self.case.data["document_mask"]:
            start = lambda position: self.documents[np.searchsorted(self.documents, position, side="right") - 1]
            targets[start(there) != start(there + 1)] = m.IGNORED
            first = np.maximum(start(there) - begin, 0)
        return np.where(there < len(ids), ids[np.minimum(there, len(ids) - 1)], 0), targets, first

    def windows(self, ids, begins):
        return m.Batch(*(np.stack(part) for part in zip(*(self.window(ids, begin) for begin in begins))))

    def batch(self, step):
        """Of the step after `step` completed ones."""
        tokens = self.case.data["batch_tokens"]
        firsts = range(step * tokens, (step + 1) * tokens, self.length)
        if self.case.data["order"] == "sequential":
            n = -(-(len(self.train) - 1) // self.length)
            return self.windows(self.train, [first // self.length % n * self.length for first in firsts])
        begins = []
        for first in firsts:
            high, low = philox(self.case.seed, 11, 0, first)[:2]
            begins.append((high << 32 | low) * (len(self.train) - self.length) >> 64)
        return self.windows(self.train, begins)

    def validation_loss(self, settings, weights):
        batch = self.windows(self.validation, range(0, len(self.validation) - 1, self.length))
        return m.forward_backward(settings, weights, batch).loss


# --- Checkpoints ------------------------------------------------------------------------------------------------------------


def read_state(directory, step):
    """Matrices that tensor parallelism cuts by their inputs are stored as [in, out]."""
    tensors = files.read_tensors(directory)

    def pick(suffix):
        picked = {name[:len(name) - len(suffix)]: tensor.astype(np.float64) for name, tensor in tensors.items()
                  if name.endswith(suffix) and name.split("/")[0].startswith(("embedding", "block_", "final_norm", "head"))
                  and (suffix or not name.endswith("_moment"))}
        return {name: tensor.T if name.endswith(("attention/output/weight", "mlp/down/weight")) else tensor for name, tensor in picked.items()}

    return m.State(pick(""), pick(".first_moment"), pick(".second_moment"), step)


def has_no_effect(case, name):
    """The exact gradient is 0, and Adam makes steps of the rounding error: of the bias of keys, which adds the same to all scores
    of a query, so that a softmax does not see it; of all of queries and keys in sequences of one token."""
    s = case.settings()
    if case.data["sequence"] == 1:
        return "/attention/query" in name or "/attention/key" in name
    return name.endswith("attention/key/bias") and s.position == "learned" and s.qk_norm == "none" and s.attention_softcap == 0


def compare(case, run, folder):
    """Problems of gradients at Weft's parameters, and of twenty steps from Weft's state after its first step."""
    s, text, saved, problems, norms, worst = case.settings(), Text(folder, case), files.checkpoints(run), [], [], (0.0, "")
    records = {line["step"]: line for line in program.metrics(run)}
    state = read_state(saved[1], 1)
    expected = m.shapes(s, text.vocabulary, text.length)
    assert {name: tensor.shape for name, tensor in state.weights.items()} == expected, f"{state.weights.keys()}, expected {expected.keys()}"
    for number in range(2, STEPS + 1):
        batch = text.batch(number - 1)
        if number in (2, STEPS):        # gradients at equal parameters
            there = read_state(saved[number - 1], number - 1)
            before = dict(there.first)
            norm, beta1 = case.update(there, m.forward_backward(s, there.weights, batch).gradients), case.optimizer["beta1"]
            found = records[number]["gradient_norm"]
            if not abs(found - norm) <= 1e-5 * norm:
                problems.append(f"gradient norm of step {number}: {found}, expected {norm}")
            for name, moment in read_state(saved[number], number).first.items():
                # Of the gradient, or of the moment where it is larger: its rounding counts too.
                largest = max(np.abs(there.first[name] - beta1 * before[name]).max() / (1 - beta1), np.abs(moment).max())
                difference = np.abs(moment - there.first[name]).max() / (1 - beta1)
                if not difference <= (1e-7 if has_no_effect(case, name) else 1e-5 * largest):
                    problems.append(f"gradient of {name} in step {number}: off by {difference:.2e}, largest {largest:.2e}")
        here = m.forward_backward(s, state.weights, batch)
        norms.append(case.update(state, here.gradients))
        if not abs(records[number]["loss"] - here.loss) <= 1e-5 * here.loss:
            problems.append(f"loss of step {number}: {records[number]['loss']}, expected {here.loss}")
    for name, tensor in read_state(saved[STEPS], STEPS).weights.items():
        if has_no_effect(case, name):
            continue
        difference = np.linalg.norm(tensor - state.weights[name]) / np.linalg.norm(state.weights[name])
        worst = max(worst, (difference, name))
        # Rotations are slow, so that terms of the gradient of the bias of keys nearly cancel.
        if not difference <= (1e-4 if name.endswith("key/bias") else 1e-5):
            problems.append(f"{name} after {STEPS} steps: relative L2 difference {difference:.2e}")
    clip = case.optimizer["clip_norm"]
    assert clip == 0 or max(norms) > clip, f"clip_norm has no effect: {norms}"
    loss, expected = program.record(run)["result"]["validation"]["loss"], text.validation_loss(s, read_state(saved[STEPS], STEPS).weights)
    if not abs(loss - expected) <= 1e-5 * expected:
        problems.append(f"validation loss: {loss}, expected {expected}")
    return problems, worst


def compare_initial(weft):
    """A learning rate of 1e-30 changes no fp32 weight: the first checkpoint holds the initial ones."""
    def initial(name, **data):
        case = Case("llama, grouped queries, window")
        case.steps = 1
        case.optimizer.update(learning_rate=1e-30, weight_decay=0)
        case.model.update(d_model=64, d_mlp=96)
        case.data.update(data)
        return case, read_state(files.checkpoints(case.train(weft, name))[1], 1).weights

    case, weights = initial("initial")
    for name, w in weights.items():
        if w.ndim == 1:
            assert (w == (0 if name.endswith("bias") else 1)).all(), name
            continue
        deviation = 0.02 / np.sqrt(2 * BASE["layers"] if name.endswith(("output/weight", "down/weight")) else 1)
        # Errors of mean and deviation of n normal values: sigma / sqrt(n) and sigma / sqrt(2 n); five of them.
        assert abs(w.mean()) < 5 * deviation / np.sqrt(w.size), name
        assert abs(w.std() / deviation - 1) < 5 / np.sqrt(2 * w.size), name
    values = np.concatenate([w.ravel() for w in weights.values() if w.ndim == 2])
    assert len(np.unique(values)) > 0.99 * len(values), "initial values are repeated"
    _, again = initial("initial_again", batch_tokens=48, micro_tokens=24, order="random_windows")
    for name, w in weights.items():
        np.testing.assert_array_equal(w, again[name], err_msg=f"{name} depends on the batch")
    loss = program.metrics(weft.folder / "initial")[0]["loss"]
    assert abs(loss - np.log(Text(weft.folder, case).vocabulary)) < 0.1, loss       # logits have a deviation of 0.02 sqrt(d_model) = 0.16


def test(weft):
    # The last window of the training text is short: its missing targets are not counted.
    write_text(weft.folder / "train.txt", 2 * SEQUENCE * SEQUENCES - 7, 1)
    write_text(weft.folder / "validation.txt", 3 * SEQUENCE + 5, 2)
    (weft.folder / "ab.txt").write_text("abbabaaabab" * 3)
    write_documents(weft.folder / "documents.h5")
    write_rows(weft.folder / "rows.jsonl")
    compare_initial(weft)
    failed = False
    for number, name in enumerate(CASES):
        case = Case(name)
        problems, worst = compare(case, case.train(weft, f"case_{number}"), weft.folder)
        print(f"{name}: {'differs' if problems else 'agrees'}; largest difference after {STEPS} steps {worst[0]:.1e} ({worst[1]})")
        for problem in problems:
            print(f"  {problem}")
        failed = failed or bool(problems)
    assert not failed, "Weft and the reference differ"


if __name__ == "__main__":
    program.main(test)
