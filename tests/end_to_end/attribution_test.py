# SPDX-License-Identifier: Apache-2.0
"""weft attribute against the formulas of docs/attribution.md in NumPy and float64: effects are propagated forward from what a source
writes through the frozen model, where Weft propagates gradients backward. Files, several prompts, ranks, refusals.

attribution_test.py WEFT
"""
import json
import sys

import h5py
import numpy as np

import files
import program

sys.path.insert(0, str(program.PACKAGE))
import weft as reader  # noqa: E402

LAYERS, HEADS, WIDTH, EPSILON = 3, 2, 16, 1e-5
MODEL = f"""
[run]
steps = 20
[data]
train = "text.txt"
validation_fraction = 0.1
batch_tokens = 256
sequence = 32
[language_model]
layers = {LAYERS}
heads = {HEADS}
d_model = {WIDTH}
[optimizer]
learning_rate = 3e-2
warmup_steps = 2
"""
TRANSCODER = """
[run]
steps = 40
[data]
model = "lm"
batch_tokens = 100
[transcoder]
features = 24
k = 4
decoder = "{decoder}"
activation = "{activation}"
skip = "{skip}"
[optimizer]
learning_rate = 1e-2
"""
PROMPT = "The cat sat on the log"


def norm(w, name, h, scale=None):
    """(norm, its denominators)"""
    scale = scale if scale is not None else np.sqrt(h.var(1, keepdims=True) + EPSILON)
    return (h - h.mean(1, keepdims=True)) / scale * w[f"{name}/weight"] + w[f"{name}/bias"], scale


class Frozen:
    """Matrices that write to the residual stream are stored by inputs. The forward pass of a model of the preset gpt2, and the linear map that is left when patterns and denominators are fixed."""

    def __init__(self, w, ids, written=None, like=None):
        """written [L, n, d]: added to MLP outputs; like: another Frozen, whose patterns and denominators are taken."""
        self.w, n = w, len(ids)
        scale_of = (lambda block, which: like.scales[block][which]) if like else (lambda block, which: None)
        self.embeddings = w["embedding/tokens"][ids]
        h = self.embeddings + w["embedding/positions"][:n]
        self.inputs, self.outputs, self.patterns, self.scales = [], [], [], []
        for block in range(LAYERS):
            x, scale = norm(w, f"block_{block}/attention_norm", h, scale_of(block, 0))
            q, k, v = (self.heads(x @ w[f"block_{block}/attention/{part}/weight"].T + w[f"block_{block}/attention/{part}/bias"])
                       for part in ("query", "key", "value"))
            scores = np.where(np.tri(n, dtype=bool), q @ k.swapaxes(1, 2) / np.sqrt(WIDTH // HEADS), -np.inf)
            pattern = np.exp(scores - scores.max(2, keepdims=True))
            pattern /= pattern.sum(2, keepdims=True)
            pattern = like.patterns[block] if like else pattern
            h = h + self.joined(pattern @ v) @ w[f"block_{block}/attention/output/weight"] + w[f"block_{block}/attention/output/bias"]
            y, mlp_scale = norm(w, f"block_{block}/mlp_norm", h, scale_of(block, 1))
            z = y @ w[f"block_{block}/mlp/up/weight"].T + w[f"block_{block}/mlp/up/bias"]
            z = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z ** 3)))
            out = z @ w[f"block_{block}/mlp/down/weight"] + w[f"block_{block}/mlp/down/bias"]
            h = h + out + (0 if written is None else written[block])
            self.inputs.append(y), self.outputs.append(out), self.patterns.append(pattern), self.scales.append((scale, mlp_scale))
        self.hidden, self.final_scale = norm(w, "final_norm", h, like and like.final_scale)

    def logits(self):
        return self.hidden @ self.w["embedding/tokens"].T

    def log_probabilities(self, ids):
        """Of each token but the first."""
        logits = self.logits()[:-1]
        logits = logits - logits.max(1, keepdims=True)
        return logits[np.arange(len(ids) - 1), ids[1:]] - np.log(np.exp(logits).sum(1))

    @staticmethod
    def heads(x):
        return x.reshape(len(x), HEADS, -1).swapaxes(0, 1)

    @staticmethod
    def joined(x):
        return x.swapaxes(0, 1).reshape(x.shape[1], -1)

    def linear_norm(self, name, h, scale):
        return (h - h.mean(1, keepdims=True)) / scale * self.w[f"{name}/weight"]

    def reads(self, written, embedding=None, skip=None):
        """What MLPs and the head read more if MLP outputs are larger by written [L, n, d] and embeddings by `embedding` [n, d]."""
        h = np.zeros_like(self.hidden) if embedding is None else embedding.copy()
        inputs = []
        for block in range(LAYERS):
            x = self.linear_norm(f"block_{block}/attention_norm", h, self.scales[block][0])
            v = self.heads(x @ self.w[f"block_{block}/attention/value/weight"].T)
            h = h + self.joined(self.patterns[block] @ v) @ self.w[f"block_{block}/attention/output/weight"]
            inputs.append(self.linear_norm(f"block_{block}/mlp_norm", h, self.scales[block][1]))
            h = h + written[block] + (0 if skip is None else inputs[-1] @ skip[block].T)
        return inputs, self.linear_norm("final_norm", h, self.final_scale)


def expected_graph(w, transcoder, found):
    """Effects [targets, sources] of the nodes found, whose order they have."""
    ids, places = found["tokens"].astype(int), found["features"]
    frozen, n = Frozen(w, ids), len(ids)
    mean_x, scale_x = transcoder.scaling("inputs")
    mean_y, scale_y = transcoder.scaling("targets")
    x = np.stack(frozen.inputs, 1)
    activations = np.zeros((n, LAYERS, transcoder.n_features))
    activations[places[:, 1], places[:, 0], places[:, 2]] = found["activations"]
    errors = np.stack(frozen.outputs, 1) - transcoder.decode(activations, x)
    errors[0] = 0
    skip = None
    if "skip_0/weight" in transcoder.checkpoint:
        skip = [transcoder._tensor(f"skip_{t}/weight") * scale_x[t] / scale_y[t][:, None] for t in range(LAYERS)]
    encoders = [transcoder.encoder(layer)[0] * scale_x[layer] for layer in range(LAYERS)]
    head = w["embedding/tokens"]
    head = head[found["logits"].astype(int)] - head.mean(0)

    columns = []

    def add(written, embedding=None):
        inputs, hidden = frozen.reads(written, embedding, skip)
        columns.append(np.concatenate([[encoders[s][f] @ inputs[s][p] for s, p, f in places], head @ hidden[-1]]))

    for (s, p, f), activation in zip(places, found["activations"]):
        written = np.zeros((LAYERS, n, WIDTH))
        rows = transcoder.decoder_rows(s, [f])[0]
        for t in range(LAYERS - s if len(rows) > 1 or transcoder.settings["decoder"] == "tied" else 1):
            written[s + t, p] = activation * rows[t if len(rows) > 1 else 0] / scale_y[s + t]
        add(written)
    for t in range(LAYERS):
        for p in range(n):
            written = np.zeros((LAYERS, n, WIDTH))
            written[t, p] = errors[p, t]
            add(written)
    for p in range(n):
        embedding = np.zeros((n, WIDTH))
        embedding[p] = frozen.embeddings[p]
        add(np.zeros((LAYERS, n, WIDTH)), embedding)
    return np.stack(columns, 1), transcoder.encode(x)


def read(path):
    with h5py.File(path) as file:
        return {name: file[name][()] for name in file}


def effects_are_those_of_the_formulas(weft, w):
    for decoder, activation, skip in (("cross_layer", "batch_topk", "none"), ("per_layer", "relu", "linear"), ("tied", "topk", "none"),
                                      ("tied_target", "relu", "none")):
        run = weft.train(TRANSCODER.format(decoder=decoder, activation=activation, skip=skip), decoder)
        weft.run("attribute", "lm", "--transcoder", run, "--prompt", PROMPT, "--output", f"{decoder}.json", "--matrix")
        found = read(weft.folder / f"{decoder}.h5")
        expected, activations = expected_graph(w, reader.Run(run).transcoder(), found)
        error = np.linalg.norm(found["effects"] - expected) / np.linalg.norm(expected)
        assert error < 1e-5, (decoder, error)
        if activation == "relu":      # what is active does not depend on rounding, but for values near 0
            active = np.argwhere(activations[1:].swapaxes(0, 1) > 1e-5)
            listed = {tuple(place) for place in found["features"]}
            assert all((s, p + 1, f) in listed for s, p, f in active), decoder
            assert abs(len(listed) - len(active)) <= 2, (decoder, len(listed), len(active))


def files_are_complete(weft):
    """The JSON has what circuit-tracer's viewer and the schema of Neuronpedia ask for."""
    document = json.loads((weft.folder / "tied.json").read_text())
    matrix = read(weft.folder / "tied.h5")
    assert {"slug", "scan", "prompt_tokens", "prompt"} <= set(document["metadata"]), document["metadata"]
    assert document["metadata"]["prompt_tokens"] == list(PROMPT) and document["metadata"]["prompt"] == PROMPT
    assert document["qParams"]["linkType"] == "both"
    types = dict(node_id=str, feature=int, layer=str, ctx_idx=int, feature_type=str, jsNodeId=str, clerp=str)
    for node in document["nodes"]:
        assert all(isinstance(node[key], kind) for key, kind in types.items()), node
    ids = [node["node_id"] for node in document["nodes"]]
    assert len(set(ids)) == len(ids)
    assert document["links"] and all(link["source"] in ids and link["target"] in ids and link["weight"] for link in document["links"])
    kinds = [node["feature_type"] for node in document["nodes"]]
    assert kinds.count("embedding") == len(PROMPT) and kinds.count("logit") == len(matrix["logits"])
    assert np.allclose(matrix["scores"], list(document["metadata"]["scores"].values()))
    assert 0.95 <= matrix["probabilities"].sum() or len(matrix["logits"]) == 10


def several_prompts_and_ranks(weft):
    """Each prompt as if it were alone; the bits of the matrix do not depend on the number of ranks."""
    (weft.folder / "prompts.txt").write_text(f"The dog\n{PROMPT}\n")
    said = weft.run("attribute", "lm", "--transcoder", "tied", "--prompts", "prompts.txt", "--output", "some/two.json", "--matrix",
                    "--json", "--quiet", "--set", "device.threads=1", ranks=2)
    said = json.loads(said[said.index("{"):])
    assert [graph["output"] for graph in said["graphs"]] == ["some/two_1.json", "some/two_2.json"], said
    weft.run("attribute", "lm", "--transcoder", "tied", "--prompt", PROMPT, "--output", "one.json", "--matrix", "--set", "device.threads=1")
    one, two = read(weft.folder / "one.h5"), read(weft.folder / "some/two_2.h5")
    assert all(one[name].tobytes() == two[name].tobytes() for name in one)

    weft.run("attribute", "lm", "--transcoder", "tied", "--prompt", PROMPT, "--output", "few.json", "--matrix", "--max-nodes", 20)
    few = read(weft.folder / "few.h5")
    place = {tuple(feature): i for i, feature in enumerate(one["features"])}
    chosen = [place[tuple(feature)] for feature in few["features"]]
    rows = chosen + list(range(len(place), len(one["effects"])))
    columns = chosen + list(range(len(place), one["effects"].shape[1]))
    assert len(chosen) == 20 and np.allclose(few["effects"], one["effects"][np.ix_(rows, columns)], atol=1e-6)


def written_by(transcoder, layer, feature, amounts):
    """What a feature of these activations [n] writes to MLP outputs, [L, n, d]."""
    written = np.zeros((LAYERS, len(amounts), WIDTH))
    rows, scale = transcoder.decoder_rows(layer, [feature])[0], transcoder.scaling("targets")[1]
    for t in range(len(rows) if len(rows) > 1 or transcoder.settings["decoder"] != "tied" else LAYERS - layer):
        written[layer + t] = amounts[:, None] * rows[t if len(rows) > 1 else 0] / scale[layer + t]
    return written


def predictions_are_those_of_interventions(weft, w):
    """A frozen pass confirms the graph but for rounding; with everything recomputed the change is that of NumPy."""
    for decoder in ("cross_layer", "per_layer", "tied"):
        said = weft.run("attribute", "lm", "--transcoder", decoder, "--prompt", PROMPT, "--output", "check.json", "--check", 4, "--json", "--quiet",
                        *(["--max-nodes", 30] if decoder == "tied" else []))
        checked = json.loads(said[said.index("{"):])["graphs"][0]["check"]
        assert len(checked) == 4, checked
        strongest = json.loads(said[said.index("{"):])["graphs"][0]["strongest"]
        assert [(one["layer"], one["feature"], one["token"]) for one in strongest[:4]] == [(one["layer"], one["feature"], one["token"]) for one in checked]
        assert all(one["text"] == PROMPT[one["token"]] and one["activation"] > 0 for one in strongest) and len(strongest) == 10, strongest
        value = lambda name: np.array([[logit[name] for logit in feature["logits"]] for feature in checked])
        largest = np.abs(value("predicted")).max()
        assert np.abs(value("predicted") - value("frozen")).max() < 1e-4 * largest, (decoder, value("predicted"), value("frozen"))
        transcoder, ids = reader.Run(weft.folder / decoder).transcoder(), read(weft.folder / f"{decoder}.h5")["tokens"].astype(int)
        before, place = Frozen(w, ids), [logit["id"] for logit in checked[0]["logits"]]
        for feature, recomputed in zip(checked, value("recomputed")):
            amounts = np.where(np.arange(len(ids)) == feature["token"], -feature["activation"], 0)
            after = Frozen(w, ids, written_by(transcoder, feature["layer"], feature["feature"], amounts))
            change = (after.logits() - before.logits())[-1]
            assert np.abs(change[place] - change.mean() - recomputed).max() < 1e-4 * (1 + largest), (decoder, feature, change[place])
    # Weights in bf16, which products in fp32 read: the frozen pass and the graph read the same ones.
    weft.run("lm", "train", "lm.toml", "--output", "lm_8bit", *program.sets("optimizer.state=8bit", "run.steps=2"))
    said = weft.run("attribute", "lm_8bit", "--transcoder", "tied", "--prompt", PROMPT, "--output", "check.json", "--check", 2, "--json", "--quiet")
    checked = [logit for feature in json.loads(said[said.index("{"):])["graphs"][0]["check"] for logit in feature["logits"]]
    largest = max(abs(logit["predicted"]) for logit in checked)
    assert checked and max(abs(logit["predicted"] - logit["frozen"]) for logit in checked) < 1e-4 * largest, checked
    table = weft.run("attribute", "lm", "--transcoder", "tied", "--prompt", PROMPT, "--output", "check.json", "--check")
    assert "predicted" in table and "recomputed" in table, table


def interventions_change_generation_and_evaluation(weft, w):
    """Losses and probabilities with changed features, against NumPy; ranks; graphs without attention of its own."""
    transcoder = reader.Run(weft.folder / "per_layer").transcoder()
    (weft.folder / "short.txt").write_text("The cat sat on the hill; the")
    places = read(weft.folder / "per_layer.h5")
    layer = 0                     # a later layer that changes at positions of the prompt would change less of the text
    feature = int(places["features"][np.argmax(places["activations"] * (places["features"][:, 0] == layer))][2])
    option = ["--transcoder", "per_layer", "--set-feature", f"{layer}:{feature}=4@2-9"]

    def evaluated(*options, **how):
        said = weft.run("lm", "evaluate", "lm", "--text", "short.txt", *options, "--json", "--quiet", **how)
        return json.loads(said[said.index("{"):])
    same = evaluated("--transcoder", "per_layer", "--scale-feature", f"{layer}:{feature}=1")
    assert abs(same["interventions"]["validation"]["loss"] - same["validation"]["loss"]) < 1e-6, same
    alphabet = {symbol: number for number, symbol in enumerate(sorted(set(program.TEXT)))}
    assert [alphabet[symbol] for symbol in PROMPT] == places["tokens"].tolist()

    def changed(ids, first, last):
        before = Frozen(w, ids)
        active = transcoder.encode(np.stack(before.inputs, 1))[:, layer, feature]
        where = (np.arange(len(ids)) >= first) & (np.arange(len(ids)) <= last)
        return before, written_by(transcoder, layer, feature, np.where(where, 4 - active, 0))

    said = weft.run("lm", "generate", "lm", "--prompt", "The cat sat", "--max-new-tokens", 8, *option, "--jsonl")
    line = json.loads(said[said.index("{"):].splitlines()[0])
    plain = weft.run("lm", "generate", "lm", "--prompt", "The cat sat", "--max-new-tokens", 8, "--jsonl")
    assert line["log_probability"] != json.loads(plain[plain.index("{"):].splitlines()[0])["log_probability"]
    tokens = "The cat sat" + line["text"]
    ids = np.array([alphabet[symbol] for symbol in tokens])
    before, written = changed(ids, 2, 9)
    expected = Frozen(w, ids, written).log_probabilities(ids)[len("The cat sat") - 1:].sum()
    assert abs(line["log_probability"] - expected) < 1e-3 * (1 + abs(expected)), (line, expected)
    ids = np.array([alphabet[symbol] for symbol in "The cat sat on the log"])
    (weft.folder / "short.txt").write_text("The cat sat on the log")
    before, written = changed(ids, 2, 9)
    for options, like in (([], None), (["--frozen-attention"], before)):
        found = evaluated(*option, *options)
        expected = -Frozen(w, ids, written, like).log_probabilities(ids).mean()
        assert abs(found["validation"]["loss"] + before.log_probabilities(ids).mean()) < 1e-4, found
        assert abs(found["interventions"]["validation"]["loss"] - expected) < 1e-4, (found, expected, options)
        assert abs(expected + before.log_probabilities(ids).mean()) > 1e-3, "an intervention that changes nothing"
    two = evaluated(*option, ranks=2)
    one = evaluated(*option)
    assert two["interventions"]["validation"]["loss"] == one["interventions"]["validation"]["loss"]


def refusals(weft):
    def refused(code, *arguments, word):
        said = weft.run("attribute", *arguments, "--output", "no.json", code=code)
        assert word in said, said
    refused(2, "lm", "--prompt", "a", word="--transcoder")
    refused(2, "lm", "--transcoder", "tied", word="--prompt")
    refused(2, "lm", "--transcoder", "lm", "--prompt", "The", word="transcoder")
    refused(2, "lm", "--transcoder", "tied", "--prompt", "The" * 20, word="data.sequence")
    refused(2, "lm", "--transcoder", "tied", "--prompt", "The", "--prune", "1.5", word="--prune")
    refused(3, "lm", "--transcoder", "tied", "--prompt", "§", word="--prompt")
    (weft.folder / "bad.jsonl").write_text('{"prompt": 3}\n')
    refused(3, "lm", "--transcoder", "tied", "--prompts", "bad.jsonl", word="bad.jsonl")
    assert not (weft.folder / "no.json").exists()

    def no_intervention(*arguments, word, command=("evaluate",)):
        said = weft.run("lm", *command, "lm", *arguments, code=2)
        assert word in said, said
    no_intervention("--set-feature", "0:1=0", word="--transcoder")
    no_intervention("--transcoder", "tied", "--set-feature", "0:1", word="LAYER:FEATURE")
    no_intervention("--transcoder", "tied", "--set-feature", "3:1=0", word="layers 0 to 2")
    no_intervention("--transcoder", "tied", "--set-feature", "0:24=0", word="features 0 to 23")
    no_intervention("--transcoder", "tied", "--set-feature", "0:1=0@3-32", word="positions 0 to 31")
    no_intervention("--transcoder", "tied", "--frozen-attention", word="--set-feature")
    generate = ("generate", "--prompt", "The", "--max-new-tokens", "4")
    no_intervention("--transcoder", "tied", word="--set-feature", command=generate)
    no_intervention("--transcoder", "cross_layer", "--set-feature", "0:1=0", word="weft convert", command=generate)
    for command in (("evaluate",), generate):
        planned = weft.run("lm", *command, "lm", "--transcoder", "tied", "--set-feature", "0:1=0", "--dry-run")
        assert "interventions" in planned and "transcoder" in planned, planned
    planned = weft.run("attribute", "lm", "--transcoder", "tied", "--prompt", PROMPT, "--output", "no.json", "--dry-run")
    assert "frozen text" in planned and "transcoder" in planned and not (weft.folder / "no.json").exists(), planned


def test(weft):
    (weft.folder / "text.txt").write_text(program.TEXT * 4)
    (weft.folder / "lm.toml").write_text(MODEL)
    weft.run("lm", "train", "lm.toml", "--output", "lm")
    w = {name: values.astype(np.float64) for name, values in files.read_tensors(weft.folder / "lm/checkpoints/step_00000020").items()}
    effects_are_those_of_the_formulas(weft, w)
    files_are_complete(weft)
    predictions_are_those_of_interventions(weft, w)
    interventions_change_generation_and_evaluation(weft, w)
    several_prompts_and_ranks(weft)
    refusals(weft)


if __name__ == "__main__":
    program.main(test)
