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


def norm(w, name, h):
    """(norm, its denominators)"""
    scale = np.sqrt(h.var(1, keepdims=True) + EPSILON)
    return (h - h.mean(1, keepdims=True)) / scale * w[f"{name}/weight"] + w[f"{name}/bias"], scale


class Frozen:
    """Matrices that write to the residual stream are stored by inputs. The forward pass of a model of the preset gpt2, and the linear map that is left when patterns and denominators are fixed."""

    def __init__(self, w, ids):
        self.w, n = w, len(ids)
        self.embeddings = w["embedding/tokens"][ids]
        h = self.embeddings + w["embedding/positions"][:n]
        self.inputs, self.outputs, self.patterns, self.scales = [], [], [], []
        for block in range(LAYERS):
            x, scale = norm(w, f"block_{block}/attention_norm", h)
            q, k, v = (self.heads(x @ w[f"block_{block}/attention/{part}/weight"].T + w[f"block_{block}/attention/{part}/bias"])
                       for part in ("query", "key", "value"))
            scores = np.where(np.tri(n, dtype=bool), q @ k.swapaxes(1, 2) / np.sqrt(WIDTH // HEADS), -np.inf)
            pattern = np.exp(scores - scores.max(2, keepdims=True))
            pattern /= pattern.sum(2, keepdims=True)
            h = h + self.joined(pattern @ v) @ w[f"block_{block}/attention/output/weight"] + w[f"block_{block}/attention/output/bias"]
            y, mlp_scale = norm(w, f"block_{block}/mlp_norm", h)
            z = y @ w[f"block_{block}/mlp/up/weight"].T + w[f"block_{block}/mlp/up/bias"]
            z = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z ** 3)))
            out = z @ w[f"block_{block}/mlp/down/weight"] + w[f"block_{block}/mlp/down/bias"]
            h = h + out
            self.inputs.append(y), self.outputs.append(out), self.patterns.append(pattern), self.scales.append((scale, mlp_scale))
        self.hidden, self.final_scale = norm(w, "final_norm", h)

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
                                      ("low_rank", "relu", "none"), ("tied_target", "relu", "none")):
        text = TRANSCODER.format(decoder=decoder, activation=activation, skip=skip)
        run = weft.train(text.replace("[optimizer]", "rank = 4\n[optimizer]" if decoder == "low_rank" else "[optimizer]"), decoder)
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


def test(weft):
    (weft.folder / "text.txt").write_text(program.TEXT * 4)
    (weft.folder / "lm.toml").write_text(MODEL)
    weft.run("lm", "train", "lm.toml", "--output", "lm")
    w = {name: values.astype(np.float64) for name, values in files.read_tensors(weft.folder / "lm/checkpoints/step_00000020").items()}
    effects_are_those_of_the_formulas(weft, w)
    files_are_complete(weft)
    several_prompts_and_ranks(weft)
    refusals(weft)


if __name__ == "__main__":
    program.main(test)
