# SPDX-License-Identifier: Apache-2.0
"""weft serve: rows and details of the server against features.h5, its refusals, the page in a script engine where node is installed, the
export of chosen features, and damaged files. The file is made here; tests/end_to_end/features_test.py exports one of the program.

serve_test.py
"""
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from urllib.parse import urlencode

import program

try:
    import h5py
    import matplotlib
    import numpy as np
except ImportError as missing:
    program.skip(f"{missing.name} is not installed (scripts/setup.sh --tests installs it)")

LAYERS, FEATURES, TOP, CONTEXT, TOKENS = 3, 250, 4, 2, 5000
HOSTILE = "</script><b>&"
ENVIRONMENT = dict(os.environ, PYTHONPATH=str(program.PACKAGE))


def write(path, layers=LAYERS, features=FEATURES, with_tokens=True):
    generator = np.random.default_rng(7)
    with h5py.File(path, "w") as file:
        file.attrs.update({"format": "weft-features", "format_version": 1, "checkpoint": f"runs/{HOSTILE}", "data": "data", "model": "",
                           "dataset_fingerprint": "", "step": 30, "tokens": TOKENS, "n_layers": layers, "d_model": 8, "n_features": features,
                           "top": TOP, "context": CONTEXT if with_tokens else 0})
        file["histogram_edges"] = np.concatenate([[0], 2.0 ** np.arange(-15, 16)])
        texts = [f" t{i}" for i in range(99)] + [HOSTILE]
        if with_tokens:
            file["vocabulary"] = np.frombuffer(json.dumps({"format": "weft-vocabulary", "texts": texts}).encode(), np.uint8)
        for layer in range(layers):
            fired = generator.integers(0, 100, features)
            group = file.create_group(f"layer_{layer}")
            group["fired"], group["mean"] = fired, generator.random(features)
            group["histogram"] = generator.integers(0, 9, (features, 32))
            value, row = -np.sort(-generator.random((features, TOP)).astype("f4"), axis=1), generator.integers(0, TOKENS, (features, TOP))
            row[np.arange(TOP) >= fired[:, None]] = -1      # fewer examples than TOP
            value[row < 0] = 0
            group["top_value"], group["top_row"] = value, row
            if with_tokens:
                tokens = generator.integers(0, 105, (features, TOP, 2 * CONTEXT + 1)).astype("i4")      # some have no text
                tokens[row < 0] = -1
                group["top_position"], group["top_tokens"] = row % 100, tokens
            group["target_share"] = generator.dirichlet(np.ones(layers - layer), features)
            group["nearest"] = generator.integers(0, features, (features, min(5, features - 1)))
            group["nearest_cosine"] = -np.sort(-generator.random((features, min(5, features - 1))).astype("f4"), axis=1)
    return path


def serve(*arguments, code=0):
    done = subprocess.run([sys.executable, "-m", "weft.serve.command", *map(str, arguments)], env=ENVIRONMENT, text=True, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == code, (arguments, done.returncode, done.stdout)
    return done.stdout


class Running:
    """A server on a free port of the loopback device."""

    def __init__(self, directory):
        self.process = subprocess.Popen([sys.executable, "-m", "weft.serve.command", str(directory), "--port", "0"], env=ENVIRONMENT, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        line = self.process.stdout.readline()
        match = re.search(r"at http://127\.0\.0\.1:(\d+)/ \(Ctrl-C ends\)", line)
        assert match, line + self.process.stdout.read()
        self.port = int(match[1])

    def get(self, path, **values):
        url = f"http://127.0.0.1:{self.port}/{path}{'?' + urlencode(values) if values else ''}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            content = answer.read().decode()
            return json.loads(content) if answer.headers["Content-Type"].startswith("application/json") else content

    def status(self, path, method="GET", host=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, headers={"Host": host or f"127.0.0.1:{self.port}"})
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return answer.status

    def stop(self, number):
        self.process.send_signal(number)
        said = self.process.communicate(timeout=60)[0]
        assert self.process.returncode == 0 and said == "", (self.process.returncode, said)


def check_rows(server, path):
    with h5py.File(path, "r") as file:
        groups = [file[f"layer_{layer}"] for layer in range(LAYERS)]
        fired = np.stack([group["fired"][:] for group in groups])
        strongest = np.stack([group["top_value"][:, 0] for group in groups])
        cosine = np.stack([group["nearest_cosine"][:, 0] for group in groups])
        centres = np.stack([group["top_tokens"][:, :, CONTEXT] for group in groups])
    every = server.get("features", order="layer and index")
    assert every["count"] == LAYERS * FEATURES and len(every["rows"]) == 200
    names = [(row["layer"], row["feature"]) for row in every["rows"]]
    for offset in (200, 400, 600, 800):
        names += [(row["layer"], row["feature"]) for row in server.get("features", order="layer and index", offset=offset)["rows"]]
    assert names == list(np.ndindex(LAYERS, FEATURES))
    assert server.get("features", fired="1")["count"] == (fired > 0).sum()
    for order, values in (("density, highest first", -fired), ("density, lowest first", fired), ("strongest activation", -strongest),
                          ("nearest feature", -cosine)):
        rows = server.get("features", order=order)["rows"]
        expected = np.argsort(values.ravel(), kind="stable")[:200]
        assert [row["layer"] * FEATURES + row["feature"] for row in rows] == expected.tolist(), order
    for row in server.get("features", layer="1", order="density, highest first")["rows"]:
        assert row["layer"] == 1 and row["fired"] == fired[1, row["feature"]]
        assert abs(row["strongest"] - strongest[1, row["feature"]]) < 1e-3
    # By index, by layer and index, by the token at a strongest activation.
    assert [(row["layer"], row["feature"]) for row in server.get("features", search="17")["rows"]] == [(layer, 17) for layer in range(LAYERS)]
    assert [(row["layer"], row["feature"]) for row in server.get("features", search=" 2:17 ")["rows"]] == [(2, 17)]
    assert server.get("features", search="9:17")["count"] == server.get("features", search="2:99999")["count"] == 0
    ids = [i for i in range(99) if "t7" in f" t{i}"]
    assert server.get("features", search="t7")["count"] == np.isin(centres, ids).any(axis=2).sum()
    assert server.get("features", search=HOSTILE)["count"] == (centres == 99).any(axis=2).sum() > 0
    assert server.get("features", search="no such token")["count"] == 0


def check_details(server, path):
    with h5py.File(path, "r") as file:
        for layer, index in ((0, 0), (2, 249), (1, int(np.argmin(file["layer_1/fired"][:])))):
            one, group = server.get("feature", layer=layer, feature=index), file[f"layer_{layer}"]
            assert (one["layer"], one["feature"], one["fired"], one["tokens"]) == (layer, index, group["fired"][index], TOKENS)
            assert one["histogram"]["counts"] == group["histogram"][index].tolist() and len(one["histogram"]["edges"]) == 32
            assert [target["layer"] for target in one["targets"]] == list(range(layer, LAYERS))
            assert np.allclose([target["share"] for target in one["targets"]], group["target_share"][index], rtol=1e-3)
            assert [near["feature"] for near in one["nearest"]] == group["nearest"][index].tolist()
            rows = [row for row in group["top_row"][index] if row >= 0]
            assert [example["row"] for example in one["top"]] == rows
            for i, example in enumerate(one["top"]):
                tokens = [token for token in group["top_tokens"][index][i] if token >= 0]
                assert [token["id"] for token in example["context"]] == tokens
                assert all(token["text"] == (f" t{token['id']}" if token["id"] < 99 else HOSTILE if token["id"] == 99 else f"[{token['id']}]")
                           for token in example["context"])
                assert [token["id"] for token in example["context"] if token.get("here")] == [group["top_tokens"][index][i][CONTEXT]]


def check_refusals(server):
    for path, status in (("/nothing", 404), ("/../features.h5", 404), ("/feature?layer=3&feature=0", 400), ("/feature?layer=0&feature=250", 400),
                         ("/feature?layer=0", 400), ("/feature?layer=-1&feature=0", 400), ("/feature?layer=1e1&feature=0", 400),
                         ("/features?order=random", 400), ("/features?layer=7", 400), ("/features?offset=-1", 400),
                         ("/features?offset=" + "9" * 400, 400), ("/features?search=" + "9" * 4000, 200), ("/features?" + "layer=0&" * 20, 400),
                         ("/features?search=%EF%BC%91:%EF%BC%91", 200), ("/features?offset=10000", 200)):
        assert server.status(path) == status, path
    for method in ("POST", "PUT", "DELETE", "HEAD"):
        assert server.status("/", method) == 501, method
    # Another site whose name resolves to this machine.
    assert server.status("/", host="attacker.example:80") == server.status("/features", host="attacker.example") == 403
    assert server.status("/", host=f"localhost:{server.port}") == 200


def page_data(text):
    ElementTree.fromstring(text.replace("<!DOCTYPE html>", ""))
    assert not re.search(r"(src|href)\s*=\s*['\"]?\s*(https?:)?//|@import|url\(", text), "the page fetches something"
    assert "<b>&" not in text and text.count("</script>") == 2
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


STAND_IN = """
class Element {
  constructor(name) { this.name = name; this.children = []; this.style = {}; this.own = ''; }
  appendChild(child) { this.children.push(child); }
  get value() { return this.chosen ?? (this.name === 'select' ? this.children[0].value : this.own); }
  set value(text) { this.chosen = text; }
  set textContent(text) { this.own = String(text); this.children = []; }
  get textContent() { return this.own + this.children.map(child => child.textContent).join(''); }
  all(name) { return [...(this.name === name ? [this] : []), ...this.children.flatMap(child => child.all(name))]; }
  scrollIntoView() {}
  focus() {}
}
const application = new Element('div'), source = new Element('script');
source.textContent = %(data)s;
globalThis.location = {};
globalThis.document = {createElement: name => new Element(name), getElementById: id => id === 'data' ? source : application};
const send = globalThis.fetch;
globalThis.fetch = path => send('http://127.0.0.1:%(port)s/' + path);
%(script)s
const need = (condition, what) => { if (!condition) throw new Error(what + ': ' + application.textContent.slice(0, 3000)); };
const body = () => application.all('tbody')[0].children;
(async () => {
  const [layer, order] = application.all('select'), [search, fired] = application.all('input');
  order.value = 'layer and index';
  await order.oninput();
  need(body().length === %(rows)d, 'rows');
  need(application.textContent.includes('%(count)d features'), 'count');
  order.value = 'density, highest first';
  await order.oninput();
  const first = body()[0].children.map(child => child.textContent);
  need(Number(first[2]) === %(densest)s, 'order');
  search.value = first[0] + ':' + first[1];
  await search.oninput();
  need(body().length === 1, 'search');
  await body()[0].onclick();
  need(application.textContent.includes('Layer ' + first[0] + ', feature ' + first[1]), 'details');
  need(application.all('mark').length === %(marks)d, 'examples');
  search.value = '';
  fired.checked = false;
  await fired.oninput();
  need(application.textContent.includes('%(all)d features'), 'those that never fired');
})().catch(failure => { console.error(failure); process.exit(1); });
"""


def run_page(folder, text, port, n_fired, n_all, densest):
    """The script of the page on a minimal document: it lists, sorts, searches and shows."""
    if not shutil.which("node"):
        print("not checked: the script of the page (node is not installed)")
        return
    data = re.search(r'id="data">(.*?)</script>', text, re.S)[1]
    script = re.search(r"<script>(.*?)</script>", text, re.S)[1]
    path = folder / "page.js"
    path.write_text(STAND_IN % {"data": json.dumps(data), "script": script, "port": port, "rows": min(200, n_fired), "count": n_fired,
                                "densest": densest, "marks": TOP, "all": n_all})
    done = subprocess.run(["node", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def check_served(folder, path):
    server = Running(folder)
    with h5py.File(path, "r") as file:
        fired = np.stack([file[f"layer_{layer}/fired"][:] for layer in range(LAYERS)])
    try:
        page = server.get("")
        assert page_data(page) == {"facts": page_data(page)["facts"]} and len(page) < 30_000, "the page has the features themselves"
        check_rows(server, path)
        check_details(server, path)
        check_refusals(server)
        run_page(folder, page, server.port, int((fired > 0).sum()), fired.size, fired.max() / TOKENS)
        # A second one cannot have its port.
        assert "--port 0 takes a free one" in serve(folder, "--port", server.port, code=6)
    finally:
        server.stop(signal.SIGTERM)
    server = Running(path)      # the file itself
    server.get("feature", layer=0, feature=1)
    server.stop(signal.SIGINT)


def check_export(folder, path):
    said = serve(folder, "--export", folder / "page.html", "--features", "0:12,2:55", "--features", "1:0-3,0:12")
    assert said == f"{folder / 'page.html'}: 6 features; open it in a browser\n", said
    text = (folder / "page.html").read_text()
    data = page_data(text)
    chosen = [(one["row"]["layer"], one["row"]["feature"]) for one in data["features"]]
    assert chosen == [(0, 12), (2, 55), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert "The page holds 6 of 750 features" in text
    with h5py.File(path, "r") as file:
        for one in data["features"]:
            group, index = file[f"layer_{one['row']['layer']}"], one["row"]["feature"]
            assert one["details"]["histogram"]["counts"] == group["histogram"][index].tolist()
        fired = [int(file[f"layer_{layer}/fired"][index]) for layer, index in chosen]
    several = [one for one in zip(fired, chosen) if one[0] >= TOP]
    assert several, "no chosen feature has all examples"
    if max(fired) >= TOP:
        run_page(folder, text, 1, sum(one > 0 for one in fired), 6, max(fired) / TOKENS)
    # Without a choice: of each layer those that fired most.
    assert serve(folder, "--export", folder / "all.html", "--quiet") == ""
    with h5py.File(path, "r") as file:
        n_fired = sum(int((file[f"layer_{layer}/fired"][:] > 0).sum()) for layer in range(LAYERS))
    assert len(page_data((folder / "all.html").read_text())["features"]) == n_fired
    for wrong in ("3:0", "0:250", "0:5-3", "0:0-250", "x", "0", "", "-1:2", "0:1,", "0:١"):
        assert "not features of" in serve(folder, "--export", folder / "no.html", f"--features={wrong}", code=2), wrong
    assert not (folder / "no.html").exists()
    assert "give --export FILE" in serve(folder, "--features", "0:1", code=2)
    assert "is no directory; create it" in serve(folder, "--export", folder / "nothing" / "x.html", code=2)
    # Without token ids, and a single feature.
    (folder / "old").mkdir()
    write(folder / "old" / "features.h5", layers=1, features=1, with_tokens=False)
    serve(folder / "old", "--export", folder / "old.html", "--features", "0:0")
    text = (folder / "old.html").read_text()
    assert "no token ids" in text and "context" not in page_data(text)["features"][0]["details"]["top"][0]


def check_damage(folder, path):
    """A clear message, whatever the file says; nothing is sized by it."""
    place = folder / "damaged.h5"

    def damaged(change, words, code=3):
        shutil.copy(path, place)
        with h5py.File(place, "r+") as file:
            change(file)
        said = serve(place, "--export", folder / "no.html", code=code)
        assert said.startswith("error: ") and words in said and "Traceback" not in said, said

    def replace(name, **dataset):
        def change(file):
            del file[name]
            if dataset:
                file.create_dataset(name, **dataset)
        return change

    for name, value, words in (("format", "other", "not a file of weft features"), ("format_version", 2, "newer version"),
                               ("n_layers", 1 << 40, "n_layers"), ("n_layers", -1, "n_layers"), ("n_layers", 4, "is missing"),
                               ("n_features", 1 << 40, "n_features"), ("n_features", 251, "not the (251,)"), ("top", 1 << 16, "top_value"),
                               ("context", 3, "top_tokens"), ("tokens", 0, "tokens"), ("step", "x", "step"), ("tokens", 1.5, "tokens")):
        damaged(lambda file, name=name, value=value: file.attrs.__setitem__(name, value), words)
    damaged(lambda file: file.attrs.__delitem__("top"), "top")
    damaged(replace("layer_1/fired"), "/layer_1/fired is missing")
    damaged(replace("layer_1/fired", data=np.zeros(FEATURES)), "/layer_1/fired is float64")
    damaged(replace("layer_1/top_row", data=np.zeros((FEATURES, TOP + 1), int)), "/layer_1/top_row")
    damaged(replace("layer_0/mean", data=np.array([b"x"] * FEATURES)), "/layer_0/mean")
    damaged(lambda file: (file.__delitem__("layer_2"), file.__setitem__("layer_2", np.zeros(3))), "layer_2")
    damaged(replace("vocabulary", data=np.frombuffer(b"[1,", np.uint8)), "vocabulary")
    damaged(replace("vocabulary", data=np.frombuffer(b"[" * 100_000, np.uint8)), "vocabulary")
    damaged(replace("vocabulary", data=np.frombuffer(b'{"texts": {}}', np.uint8)), "vocabulary")

    def huge(file):     # of which no byte is stored
        file.attrs["n_features"] = 1 << 26
        for layer in range(LAYERS):
            for name, dataset in list(file[f"layer_{layer}"].items()):
                shape, dtype = (1 << 26, *dataset.shape[1:]), dataset.dtype
                del file[f"layer_{layer}/{name}"]
                file.create_dataset(f"layer_{layer}/{name}", shape, dtype, chunks=True)
    damaged(huge, "fewer bytes than its shape")

    content = path.read_bytes()
    for cut in (0, 100, len(content) // 2, len(content) - 10):
        place.write_bytes(content[:cut])
        assert serve(place, "--export", folder / "no.html", code=6).startswith("error: ")
    assert "no such file or directory" in serve(folder / "nothing", code=2)
    (folder / "empty").mkdir()
    assert "has no features.h5 and no graph; write them with weft features" in serve(folder / "empty", code=2)
    assert "weft serve needs its DIR" in serve(code=2)
    assert "out of range" in serve(folder, "--port", 70000, code=2)
    assert not (folder / "no.html").exists()


with tempfile.TemporaryDirectory(prefix="weft_test_") as name:
    directory = Path(name)
    features = write(directory / "features.h5")
    check_served(directory, features)
    check_export(directory, features)
    check_damage(directory, features)
print("rows, details and exports are those of the file; damaged files are named")
