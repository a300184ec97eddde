# SPDX-License-Identifier: Apache-2.0
"""weft evaluate, features and encode against NumPy, on 1, 2 and 4 ranks.

features_test.py WEFT

The checkpoint is applied here in float64 with the rules of the reference (tests/reference/transcoder.py). Encoded files are compared
with that; features.h5 and --feature with what follows from the encoded files, the token ids and the decoder rows;
evaluation.json with what follows from the reconstruction.
"""
import json
import re
import shutil

import h5py
import numpy as np

import files
import page_script
import program
import transcoder

LAYERS, WIDTH, FEATURES, K, BATCH, STEPS = 3, 16, 21, 3, 256, 30     # 21 features: uneven parts on 2 and 4 ranks
ROWS, PER_FILE, TOP, CONTEXT, SAMPLE, COACTIVE = 700, 300, 6, 4, 5, 4                        # files of 300, 300 and 100 rows: batches span files


def prepare(weft):
    run = weft.folder / "run"
    source = weft.folder / "run.toml"
    source.write_text(f"""
[run]
steps = {STEPS}
[data]
train = "{weft.folder}/data/train"
validation = "{weft.folder}/data/validation"
batch_tokens = {BATCH}
[transcoder]
features = {FEATURES}
k = {K}
[optimizer]
learning_rate = 5e-3
[device]
precision = "fp32"
[synthetic]
output = "{weft.folder}/data"
layers = {LAYERS}
d_model = {WIDTH}
features = 30
k = 3
tokens = 2000
validation_tokens = {ROWS}
rows_per_file = {PER_FILE}
""")
    weft.run("synth", source)
    weft.run("train", source, "--output", run)
    return run


class Reference:
    """The checkpoint applied to the validation data, in float64."""

    def __init__(self, weft, run):
        self.tensors = {name: value.astype(np.float64) for name, value in files.read_tensors(files.checkpoints(run)[STEPS]).items()}
        x, self.y = files.read_dataset(weft.folder / "data/validation")
        train_x, train_y = files.read_dataset(weft.folder / "data/train")
        self.deviation = transcoder.statistics(train_y).deviation
        x_mean, self.x_scale = transcoder.normalisation("per_dimension", transcoder.statistics(train_x))
        self.x = (x - x_mean) * self.x_scale
        self.y_mean, self.y_scale = transcoder.normalisation("per_dimension", transcoder.statistics(train_y))
        settings = transcoder.Settings(features=FEATURES, activation="batch_topk", k=K, scope="layer", steps=STEPS)
        z_all, masks_all, cuts = [], [], []
        for begin in range(0, ROWS, BATCH):
            z = transcoder.encode(self.tensors, self.x[begin:begin + BATCH])
            masks = transcoder.select(settings, z)
            z_all.append(np.stack(z, axis=1))
            masks_all.append(np.stack(masks, axis=1))
            cuts += [[v[m].min() for m, v in zip(masks, z)]] * len(z[0])
        self.z, self.mask = np.concatenate(z_all), np.concatenate(masks_all)        # [T, L, F]
        self.cut = np.array(cuts)[:, :, None]       # smallest value kept, of the batch and layer
        self.decoders = [self.tensors[f"decoder_{s}/weight"] for s in range(LAYERS)]

    def take(self, active):
        """The active entries [T, L, F] that weft chose become those of the reference. They may differ from its own only by values
        that equal the cut-off within rounding: fp32 products of 16 terms."""
        differ = active != self.mask
        assert (np.abs(self.z - self.cut)[differ] <= 1e-5 * np.broadcast_to(self.cut, self.z.shape)[differ]).all()
        assert differ.sum() < 0.001 * self.mask.sum()
        self.activations = np.where(active, self.z, 0.0)

    def error(self):
        """Raw errors y - y^ [T, L, d]."""
        fit = transcoder.decode(self.tensors, [self.activations[:, s] for s in range(LAYERS)], self.x)
        return self.y - (fit / self.y_scale + self.y_mean)

    def cosines(self, layer):
        unit = self.decoders[layer] / np.linalg.norm(self.decoders[layer], axis=1, keepdims=True)
        cosines = unit @ unit.T
        np.fill_diagonal(cosines, -np.inf)
        return cosines

    def shares(self, layer):
        """[F, targets]"""
        squares = (self.decoders[layer].reshape(FEATURES, LAYERS - layer, WIDTH) ** 2).sum(axis=2)
        return squares, squares / squares.sum(axis=1, keepdims=True)


    def downstream(self, layer):
        """[F, later layers * F]: what a feature writes before a layer, times the encoder there, in raw space."""
        strips = self.decoders[layer].reshape(FEATURES, LAYERS - layer, WIDTH) / self.y_scale[layer:]
        return np.concatenate([strips[:, :reader - layer].sum(axis=1) @ (self.tensors[f"encoder_{reader}/weight"] * self.x_scale[reader]).T
                               for reader in range(layer + 1, LAYERS)] or [np.zeros((FEATURES, 0))], axis=1)


# --- weft encode ----------------------------------------------------------------------------------------------------------


def read_encoded(directory):
    """[T, L, F] from the files, with the checks that any reader can make."""
    metadata = json.loads((directory / "metadata.json").read_text())
    assert metadata["format"] == "weft-encoded" and metadata["rows"] == ROWS and len(metadata["files"]) == 3
    dense, first, entries = np.zeros((ROWS, LAYERS * FEATURES)), 0, 0
    for number, listed in enumerate(metadata["files"]):
        with h5py.File(directory / listed["name"], "r") as file:
            offsets, feature, value = file["offsets"][:], file["feature"][:], file["value"][:]
            rows = len(offsets) - 1
            assert (rows, first, len(value)) == (listed["rows"], listed["first_row"], listed["entries"])
            assert rows == min(PER_FILE, ROWS - first) and listed["source"] == f"chunk_{number}.hdf5"
            assert file.attrs["first_row"] == first and file.attrs["n_features"] == FEATURES
            assert offsets[0] == 0 and offsets[-1] == len(feature) == len(value) and (value > 0).all()
            for row in range(rows):
                keys = feature[offsets[row]:offsets[row + 1]].astype(np.int64)
                assert (np.diff(keys) > 0).all(), "entries of a row ascend"
                dense[first + row, keys] = value[offsets[row]:offsets[row + 1]]
            first, entries = first + rows, entries + len(value)
    assert metadata["entries"] == entries
    return dense.reshape(ROWS, LAYERS, FEATURES)


def check_encoded(weft, run, reference):
    encoded = {}
    for ranks in (1, 2, 4):
        output = weft.folder / f"encoded_{ranks}"
        weft.run("encode", run, "--data", weft.folder / "data/validation", "--output", output, ranks=ranks)
        encoded[ranks] = read_encoded(output)
        reference.take(encoded[ranks] > 0)
        # fp32 products of 16 terms and a bias.
        assert np.allclose(encoded[ranks], reference.activations, rtol=1e-5, atol=1e-6)
    said = weft.run("encode", run, "--output", weft.folder / "encoded_1", code=6)
    assert "already holds encoded_0.h5" in said, said
    assert "--output" in weft.run("encode", run, code=2)
    return encoded


# --- weft features --------------------------------------------------------------------------------------------------------


def read_tokens(directory):
    """(ids, first row and end of the document of each row), by row of the dataset; documents end with their file."""
    ids, documents, first = [], [], 0
    for path in files.chunk_files(directory):
        with h5py.File(path, "r") as file:
            rows = len(file["tokens"])
            starts = [*file["documents"][:], rows]
            assert file.attrs["format_version"] == 2 and starts[0] == 0 and (np.diff(starts) > 0).all()
            ids.append(file["tokens"][:])
            for begin, end in zip(starts, starts[1:]):
                documents += [(first + begin, first + end)] * (end - begin)
            first += rows
    return np.concatenate(ids), documents


def check_layer(group, layer, reference, active, tokens):
    """Everything that features.h5 says about a layer, from the encoded activations [T, F]."""
    ids, documents = tokens
    fired = (active > 0).sum(axis=0)
    assert np.array_equal(group["fired"][:], fired)
    mean = np.where(fired > 0, active.sum(axis=0) / np.maximum(fired, 1), 0)
    assert np.allclose(group["mean"][:], mean, rtol=1e-6)       # fp32 values, sums in fp64
    edges = [*group.file["histogram_edges"][:], np.inf]
    assert edges[0] == 0 and len(edges) == 33
    for f in range(FEATURES):
        values = active[active[:, f] > 0, f]
        assert np.array_equal(group["histogram"][f], np.histogram(values, edges)[0])
        order = np.lexsort((np.arange(ROWS), -active[:, f]))[:TOP]
        order = order[active[order, f] > 0]
        n = len(order)
        assert np.array_equal(group["top_row"][f], [*order, *[-1] * (TOP - n)]), (layer, f)
        assert np.allclose(group["top_value"][f][:n], active[order, f], rtol=1e-6) and (group["top_value"][f][n:] == 0).all()
        for i, row in enumerate(order):
            begin, end = documents[row]
            window = [ids[r] if begin <= r < end else -1 for r in range(row - CONTEXT, row + CONTEXT + 1)]
            assert np.array_equal(group["top_tokens"][f][i], window) and group["top_position"][f][i] == row - begin
        assert (group["top_tokens"][f][n:] == -1).all()
        # A sample of the rows in which the feature fires, and the activations around every example.
        sampled = group["sample_row"][f][:]
        fires = np.flatnonzero(active[:, f] > 0)
        sampled = sampled[sampled >= 0]
        assert len(set(sampled)) == len(sampled) == min(SAMPLE, len(fires)) and set(sampled) <= set(fires)
        assert np.allclose(group["sample_value"][f][:len(sampled)], active[sampled, f], rtol=1e-6)
        for kind, rows in (("top", order), ("sample", sampled)):
            for i, row in enumerate(rows):
                begin, end = documents[row]
                window = np.array([active[r, f] if begin <= r < end else 0 for r in range(row - CONTEXT, row + CONTEXT + 1)])
                shade = group[f"{kind}_shade"][f][i]
                assert ((shade > 0) == (window > 0)).all() and np.abs(shade - 255 * window / values.max()).max() < 1.001
    assert np.allclose(group["target_share"][:], reference.shares(layer)[1], rtol=1e-5)
    expected = np.sort(reference.downstream(layer), axis=1)[:, ::-1][:, :3]
    effect, reached = group["downstream_effect"][:], group["downstream"][:]
    if layer == LAYERS - 1:
        assert (reached == -1).all()
    else:
        assert np.allclose(effect, expected, rtol=1e-4, atol=1e-5)
        at = np.take_along_axis(reference.downstream(layer), reached - (layer + 1) * FEATURES, axis=1)
        assert np.allclose(at, expected, rtol=1e-4, atol=1e-5)
    together = (active > 0).astype(int).T @ (active > 0)        # few activations: no row is left out
    np.fill_diagonal(together, 0)
    for f in range(FEATURES):
        order = np.lexsort((np.arange(FEATURES), -together[f]))[:COACTIVE]
        order = order[together[f][order] > 0]
        found = group["coactive"][f]
        assert np.array_equal(found[found >= 0] - layer * FEATURES, order), (layer, f)
        assert np.allclose(group["coactive_part"][f][:len(order)], together[f][order] / max(fired[f], 1), rtol=1e-6)
    cosines = reference.cosines(layer)
    nearest, cosine = group["nearest"][:], group["nearest_cosine"][:]
    # fp32 products of at most 48 terms.
    assert np.allclose(cosine, np.sort(cosines, axis=1)[:, ::-1][:, :cosine.shape[1]], atol=1e-5)
    assert np.allclose(np.take_along_axis(cosines, nearest, axis=1), cosine, atol=1e-5)


PAGE_CHECKS = """
const search = application.all('input')[0];
search.value = 'QUOTED';
await search.oninput();
const rows = application.all('tbody')[0].children;
need(rows.length === 1 && rows[0].textContent.includes('a "quoted" label'), 'label in the list');
await rows[0].onclick();
need(application.all('h2')[0].textContent === 'Layer 0, feature 0: a "quoted" label', 'label in the title');
need(application.textContent.includes('Examples at random') && !application.textContent.includes('Tokens promoted'), 'what there is');
need(application.all('span').some(one => (one.style.background || '').includes('color-mix')), 'shades of the context');
need(/at its tokens.*%, lift/.test(application.textContent), 'co-active features');
need(application.all('figure').some(one => one.textContent.startsWith('Features of later layers') && one.all('button').length === 3), 'later features');
"""


def check_page(weft, output):
    """weft serve exports the features of the file; tests/python/serve_test.py has the page itself."""
    if not weft.has_package():
        return
    weft.run("serve", output, "--export", "page.html", "--features", f"0:0-{FEATURES - 1},{LAYERS - 1}:3")
    text = (weft.folder / "page.html").read_text()
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])
    assert len(data["features"]) == FEATURES + 1 and data["facts"]["tokens"] == ROWS
    with h5py.File(output / "features.h5", "r") as file:
        for one in (feature["details"] for feature in data["features"]):
            group, index = file[f"layer_{one['layer']}"], one["feature"]
            assert one["fired"] == group["fired"][index] and one["histogram"]["counts"] == group["histogram"][index].tolist()
            assert [example["row"] for example in one["top"]] == [row for row in group["top_row"][index] if row >= 0]
            assert all(token["text"] == f" f{token['id']}" for example in one["top"] for token in example["context"])
            assert len(one["sample"]) == min(SAMPLE, one["fired"], 4) and len(one["downstream"]) == (3 if one["layer"] < LAYERS - 1 else 0)
    page_script.run(weft.folder, text, 1, PAGE_CHECKS)


def check_features(weft, run, reference, encoded):
    tokens = read_tokens(weft.folder / "data/validation")
    vocabulary = json.loads((weft.folder / "data/validation/vocabulary.json").read_text())["texts"]
    labels = weft.folder / "labels.jsonl"
    labels.write_text('{"layer": 0, "feature": 0, "label": "a \\"quoted\\" label"}\n\n{"layer": 1, "feature": 3, "label": "x", "by": "hand"}\n')
    common = ("--data", weft.folder / "data/validation", "--top", TOP, "--context", CONTEXT, "--sample", SAMPLE, "--downstream", 3,
              "--coactive", COACTIVE, "--labels", labels)
    for ranks in (1, 2, 4):
        output = weft.folder / f"features_{ranks}"
        weft.run("features", run, *common, "--output", output, ranks=ranks)
        with h5py.File(output / "features.h5", "r") as file:
            assert file.attrs["tokens"] == ROWS and file.attrs["n_features"] == FEATURES and file.attrs["step"] == STEPS
            assert json.loads(bytes(file["vocabulary"][:]))["texts"] == vocabulary
            assert [json.loads(line) for line in bytes(file["labels"][:]).splitlines()] == [
                {"layer": 0, "feature": 0, "label": 'a "quoted" label'}, {"layer": 1, "feature": 3, "label": "x"}]
            for layer in range(LAYERS):
                check_layer(file[f"layer_{layer}"], layer, reference, encoded[ranks][:, layer], tokens)
        assert [path.name for path in output.iterdir()] == ["features.h5"]
    check_page(weft, weft.folder / "features_1")

    # Single features as JSON.
    names = [(0, 0), (LAYERS - 1, FEATURES - 1)]
    said = weft.run("features", run, *common, *(word for name in names for word in ("--feature", "%d:%d" % name)), ranks=2)
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert [(one["layer"], one["feature"]) for one in found] == names
    with h5py.File(weft.folder / "features_1/features.h5", "r") as file:
        for one in found:
            group, index = file[f"layer_{one['layer']}"], one["feature"]
            assert one["fired"] == group["fired"][index] and one["density"] == group["fired"][index] / ROWS
            assert one["histogram"]["counts"] == group["histogram"][index].tolist()
            for i, example in enumerate(one["top"]):
                kept = [t for t in group["top_tokens"][index][i] if t >= 0]
                assert [t["id"] for t in example["context"]] == kept
                assert [t["text"] for t in example["context"]] == [vocabulary[t] for t in kept]
                here = [t["id"] for t in example["context"] if t.get("here")]
                assert here == [tokens[0][example["row"]]] and example["row"] == group["top_row"][index][i]
    assert found[0]["label"] == 'a "quoted" label' and "label" not in found[1]
    for one in found[0]["coactive"]:
        assert np.isclose(one["lift"], one["part"] * ROWS / (encoded[1][:, 0, one["feature"]] > 0).sum())
    assert found[0]["downstream"][0]["layer"] > 0 and len(found[0]["sample"]) <= SAMPLE
    for line in ("no json", "[]", '{"layer": 3, "feature": 0, "label": "x"}', '{"layer": 0, "feature": 0.5, "label": "x"}',
                 '{"layer": 0, "feature": 1}', '{"layer": 1, "feature": 3, "label": "again"}'):
        labels.write_text('{"layer": 1, "feature": 3, "label": "x"}\n' + line + "\n")
        assert "labels.jsonl:2: " in weft.run("features", run, *common, "--feature", "0:0", code=3), line
    for wrong in ("3:0", "0:21", "0", "a:b", "0:-1"):
        assert "is not a feature of this transcoder" in weft.run("features", run, *common, "--feature", wrong, code=2)
    assert "nothing to write" in weft.run("features", run, *common, code=2)


def check_without_tokens(weft, run):
    """Datasets of format_version 1, without ids, are used as before; damaged ids are refused with file and dataset."""
    old = weft.folder / "old"
    shutil.copytree(weft.folder / "data/validation", old)
    (old / "vocabulary.json").unlink()
    for path in files.chunk_files(old):
        with h5py.File(path, "r+") as file:
            del file["tokens"], file["documents"]
            file.attrs["format_version"] = 1
    output = weft.folder / "features_old"
    weft.run("features", run, "--data", old, "--output", output)
    with h5py.File(output / "features.h5", "r") as file:
        assert "top_tokens" not in file["layer_0"] and "vocabulary" not in file
        with h5py.File(weft.folder / "features_1/features.h5", "r") as new:
            assert np.array_equal(file["layer_1/top_row"][:, :TOP], new["layer_1/top_row"][:])
    with h5py.File(old / "chunk_1.hdf5", "r+") as file:
        file.attrs["format_version"] = 2
    said = weft.run("features", run, "--data", old, "--output", output, code=3)
    assert "chunk_1.hdf5: /tokens is missing" in said, said

    damaged = weft.folder / "damaged"
    shutil.copytree(weft.folder / "data/validation", damaged)
    with h5py.File(damaged / "chunk_1.hdf5", "r+") as file:
        file["tokens"][:] = -5
    for arguments in (("inspect", damaged), ("features", run, "--data", damaged, "--output", output)):
        said = weft.run(*arguments, code=3, ranks=2)
        assert re.search(r"chunk_1.hdf5: /tokens row \d+ is -5", said), said


# --- weft evaluate --------------------------------------------------------------------------------------------------------


def check_evaluation(weft, run, reference):
    error, y = reference.error(), reference.y
    centred, spread = y - y.mean(axis=0), reference.deviation
    sse, sst = (error ** 2).sum(axis=0), (centred ** 2).sum(axis=0)         # [L, d]
    standard_error, standard_total = (sse / spread ** 2).sum(axis=1), (sst / spread ** 2).sum(axis=1)
    variance, total = error.var(axis=0).sum(axis=1), y.var(axis=0).sum(axis=1)
    nmse, by_dimension = sse.sum(axis=1) / sst.sum(axis=1), (sse / sst).mean(axis=1)
    fired = (reference.activations > 0).sum(axis=0)                         # [L, F]
    largest = np.stack([reference.cosines(layer).max(axis=1) for layer in range(LAYERS)])
    assert (np.abs(largest - 0.9) > 1e-4).all(), "a cosine at the border; take another seed"
    expected = {
        "nmse": nmse, "fvu": nmse, "fvu_dim": by_dimension, "fvu_dimension": by_dimension, "fvu_mean": nmse.mean(),
        "nmse_standardised": standard_error / standard_total, "fvu_dim_mean": by_dimension.mean(),
        "nmse_pooled": sse.sum() / sst.sum(), "fvu_pooled": sse.sum() / sst.sum(),
        "nmse_standardised_pooled": standard_error.sum() / standard_total.sum(),
        "explained_variance": 1 - variance / total, "explained_variance_pooled": 1 - variance.sum() / total.sum(),
        "l0": fired.sum(axis=1) / ROWS, "dead_fraction": (fired == 0).mean(axis=1),
        "redundancy": largest.mean(axis=1), "redundancy_mean": largest.mean(), "redundant_fraction": (largest > 0.9).mean(axis=1)}
    bins = np.zeros((LAYERS, 8), dtype=int)
    for layer, feature in np.ndindex(*fired.shape):
        n = fired[layer, feature]
        bins[layer, 0 if n == 0 else np.clip(np.floor(np.log10(n / ROWS)) + 8, 1, 7).astype(int)] += 1
    for ranks in (1, 2):
        output = weft.folder / f"evaluated_{ranks}"
        said = weft.run("evaluate", run, "--output", output, ranks=ranks)
        assert "features by density" in said and "decoder norm by target layer" in said, said
        found = json.loads((output / "evaluation.json").read_text())["validation"]
        for name, value in expected.items():
            # fp32 reconstructions, fp64 sums.
            assert np.allclose(found[name], value, rtol=2e-5, atol=1e-6), (name, found[name], value)
        assert np.array_equal(found["density_histogram"], bins) and found["density_bins"][0] == "never"
        for layer, row in enumerate(found["decoder_share"]):
            squares = reference.shares(layer)[0].sum(axis=0)
            assert row[:layer] == [None] * layer and np.allclose(row[layer:], squares / squares.sum(), rtol=1e-5)


def test(weft):
    run = prepare(weft)
    reference = Reference(weft, run)
    encoded = check_encoded(weft, run, reference)
    check_features(weft, run, reference, encoded)
    check_without_tokens(weft, run)
    check_evaluation(weft, run, reference)
    print("evaluate, features and encode agree with NumPy on 1, 2 and 4 ranks")


program.main(test)
