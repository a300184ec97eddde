# SPDX-License-Identifier: Apache-2.0
"""weft serve: rows and details of the server against features.h5, its refusals, the pages in a script engine where node is installed, the
export of chosen features and of graphs, and damaged files. The files are made here; tests/end_to_end/features_test.py exports one of the
program.

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

import page_script
import program

try:
    import h5py
    import matplotlib
    import numpy as np
except ImportError as missing:
    program.skip(f"{missing.name} is not installed (scripts/setup.sh --tests installs it)")

LAYERS, FEATURES, TOP, SAMPLE, CONTEXT, TOKENS, EFFECTS = 3, 250, 4, 3, 2, 5000, 2
HOSTILE = "</script><b>&"
LABELS = {(0, 12): f"Days of {HOSTILE}", (1, 3): "t7 by name", (2, 249): "days"}
ENVIRONMENT = dict(os.environ, PYTHONPATH=str(program.PACKAGE))


def write(path, layers=LAYERS, features=FEATURES, with_tokens=True):
    """As the program writes it, with all that it writes on request; without tokens as its first version wrote it."""
    generator = np.random.default_rng(7)
    with h5py.File(path, "w") as file:
        file.attrs.update({"format": "weft-features", "format_version": 1, "checkpoint": f"runs/{HOSTILE}", "data": "data", "model": "",
                           "dataset_fingerprint": "", "step": 30, "tokens": TOKENS, "n_layers": layers, "d_model": 8, "n_features": features,
                           "top": TOP, "context": CONTEXT if with_tokens else 0})
        file["histogram_edges"] = np.concatenate([[0], 2.0 ** np.arange(-15, 16)])
        texts = [f" t{i}" for i in range(99)] + [HOSTILE]
        if with_tokens:
            file.attrs["sample"] = SAMPLE
            file["vocabulary"] = np.frombuffer(json.dumps({"format": "weft-vocabulary", "texts": texts}).encode(), np.uint8)
            lines = "".join(json.dumps({"layer": layer, "feature": index, "label": text}) + "\n" for (layer, index), text in LABELS.items())
            file["labels"] = np.frombuffer(lines.encode(), np.uint8)
        for layer in range(layers):
            fired = generator.integers(0, 100, features)
            group = file.create_group(f"layer_{layer}")
            group["fired"], group["mean"] = fired, generator.random(features)
            group["histogram"] = generator.integers(0, 9, (features, 32))
            for kind, count in (("top", TOP), *([("sample", SAMPLE)] if with_tokens else [])):
                value, row = -np.sort(-generator.random((features, count)).astype("f4"), axis=1), generator.integers(0, TOKENS, (features, count))
                row[np.arange(count) >= fired[:, None]] = -1      # fewer examples
                value[row < 0] = 0
                group[f"{kind}_value"], group[f"{kind}_row"] = value, row
                if with_tokens:
                    tokens = generator.integers(0, 105, (features, count, 2 * CONTEXT + 1)).astype("i4")      # some have no text
                    tokens[row < 0] = -1
                    group[f"{kind}_position"], group[f"{kind}_tokens"] = row % 100, tokens
                    group[f"{kind}_shade"] = np.where(tokens < 50, 0, generator.integers(1, 256, tokens.shape)).astype("u1")
            group["target_share"] = generator.dirichlet(np.ones(layers - layer), features)
            group["nearest"] = generator.integers(0, features, (features, min(5, features - 1)))
            group["nearest_cosine"] = -np.sort(-generator.random((features, min(5, features - 1))).astype("f4"), axis=1)
            if with_tokens:
                same = layer * features + generator.integers(0, features, (features, EFFECTS))
                group["coactive"], group["coactive_part"] = same, generator.random(same.shape).astype("f4")
                later = np.full((features, EFFECTS), -1) if layer == layers - 1 else generator.integers((layer + 1) * features, layers * features,
                                                                                                    (features, EFFECTS))
                for name, index in (("raised", generator.integers(0, 100, (features, EFFECTS))),
                                    ("lowered", generator.integers(0, 100, (features, EFFECTS))), ("downstream", later)):
                    group[name], group[f"{name}_effect"] = index, generator.normal(size=index.shape).astype("f4")
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
    # By the token or by the label, which is in the row.
    with_token, hostile = np.isin(centres, ids).any(axis=2), (centres == 99).any(axis=2)
    assert server.get("features", search="t7")["count"] == with_token.sum() + (not with_token[1, 3])
    assert server.get("features", search=HOSTILE)["count"] == hostile.sum() + (not hostile[0, 12]) > 1
    assert {(row["layer"], row["feature"]): row["label"] for row in server.get("features", search="days")["rows"]} == {
        name: text for name, text in LABELS.items() if "ays" in text}
    assert server.get("features", search="no such token")["count"] == 0


def text_of(token):
    return f" t{token}" if token < 99 else HOSTILE if token == 99 else f"[{token}]"


def check_details(server, path):
    with h5py.File(path, "r") as file:
        for layer, index in ((0, 0), (2, 249), (1, int(np.argmin(file["layer_1/fired"][:])))):
            one, group = server.get("feature", layer=layer, feature=index), file[f"layer_{layer}"]
            assert (one["layer"], one["feature"], one["fired"], one["tokens"]) == (layer, index, group["fired"][index], TOKENS)
            assert one["histogram"]["counts"] == group["histogram"][index].tolist() and len(one["histogram"]["edges"]) == 32
            assert [target["layer"] for target in one["targets"]] == list(range(layer, LAYERS))
            assert np.allclose([target["share"] for target in one["targets"]], group["target_share"][index], rtol=1e-3)
            assert [near["feature"] for near in one["nearest"]] == group["nearest"][index].tolist()
            assert one.get("label") == LABELS.get((layer, index))
            for name in ("raised", "lowered"):
                assert [token["id"] for token in one[name]] == group[name][index].tolist()
                assert np.allclose([token["effect"] for token in one[name]], group[f"{name}_effect"][index], rtol=1e-3)
                assert all(token["text"] == text_of(token["id"]) for token in one[name])
            assert [other["layer"] * FEATURES + other["feature"] for other in one["downstream"]] == [
                other for other in group["downstream"][index] if other >= 0]
            assert [FEATURES * layer + other["feature"] for other in one["coactive"]] == group["coactive"][index].tolist()
            assert np.allclose([other["lift"] * group["fired"][other["feature"]] for other in one["coactive"]],
                               group["coactive_part"][index] * TOKENS, rtol=1e-3)
            for kind in ("top", "sample"):
                rows = [row for row in group[f"{kind}_row"][index] if row >= 0]
                assert [example["row"] for example in one[kind]] == rows
                for i, example in enumerate(one[kind]):
                    inside = group[f"{kind}_tokens"][index][i] >= 0
                    tokens, shades = group[f"{kind}_tokens"][index][i][inside], group[f"{kind}_shade"][index][i][inside]
                    assert [token["id"] for token in example["context"]] == tokens.tolist()
                    assert all(token["text"] == text_of(token["id"]) for token in example["context"])
                    assert np.allclose([token.get("activation", 0) for token in example["context"]], group["top_value"][index][0] * (shades / 255),
                                       rtol=1e-3)
                    assert [token["id"] for token in example["context"] if token.get("here")] == [group[f"{kind}_tokens"][index][i][CONTEXT]]


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
const body = () => application.all('tbody')[0].children;
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
need(application.all('span').some(one => (one.style.background || '').includes('color-mix')), 'shades of the context');
need(['Examples at random', 'Tokens promoted', 'Tokens suppressed'].every(text => application.textContent.includes(text)), 'what it writes');
search.value = 'days';
await search.oninput();
need(body().length === %(labelled)d && body().every(row => /days/i.test(row.children[5].textContent)), 'labels');
await body()[0].onclick();
need(application.all('h2')[0].textContent.includes(': Days of </scr' + 'ipt><b>&') && application.all('b').length === 0, 'label of the feature');
const later = application.all('figure').find(one => one.textContent.startsWith('Features of later layers')).all('button')[0];
await later.onclick();
need(application.textContent.includes('Layer ' + later.textContent.split(':')[0] + ', feature ' + later.textContent.split(':')[1].split(' ')[0]), 'link');
search.value = '';
fired.checked = false;
await fired.oninput();
need(application.textContent.includes('%(all)d features'), 'those that never fired');
"""


GRAPH_STAND_IN = """
const marks = kind => application.all('g').filter(one => (one.attributes.class || '').startsWith('node ' + kind));
const press = key => application.all('svg')[0].onkeydown({key, preventDefault() {}});
const button = text => application.all('button').find(one => one.textContent === text);
const click = text => button(text).onclick();
need(marks('feature').length === 3 && marks('token').length === 3 && marks('logit').length === 2, 'nodes');
need(application.all('path').filter(one => (one.attributes.class || '').startsWith('edge')).length === 8, 'edges');
marks('feature')[0].onclick({detail: 0});
await new Promise(done => setTimeout(done, 500));
need(application.textContent.includes('feature 0:7 at token 1'), 'selection');
need(application.all('mark').length === %d, 'what the feature responds to');
click('Pin');
need(marks('feature pinned').length + marks('feature selected pinned').length === 1 && button('Unpin'), 'pin');
const group = application.all('input').find(one => one.id === 'group');
group.value = 'mine';
group.onchange();
need(marks('group').length === 1 && marks('feature').length === 2 && application.textContent.includes('Group mine'), 'group');
press('ArrowUp');
press('Enter');
need(marks('group selected').length === 0 && application.textContent.includes('Reads'), 'keys');
"""


def run_page(folder, text, port, n_fired, n_all, densest, labelled):
    """The script of the page lists, sorts, searches and shows."""
    page_script.run(folder, text, port, STAND_IN % {"rows": min(200, n_fired), "count": n_fired, "densest": densest, "marks": TOP + SAMPLE,
                                                    "all": n_all, "labelled": labelled})


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
        run_page(folder, page, server.port, int((fired > 0).sum()), fired.size, fired.max() / TOKENS, 2)
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
        run_page(folder, text, 1, sum(one > 0 for one in fired), 6, max(fired) / TOKENS, 1)
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
    details = page_data(text)["features"][0]["details"]
    assert "no token ids" in text and "context" not in details["top"][0]
    assert details["sample"] == [] and not {"label", "raised", "lowered", "downstream"} & set(details)


def graph_text(**changes):
    """A graph as weft attribute writes it, with a hostile label and link."""
    def node(name, layer, token, kind, **more):
        return {"node_id": name, "feature": 1, "layer": layer, "ctx_idx": token, "feature_type": kind, "token_prob": 0.0, "clerp": "",
                "influence": 0.5, "activation": None, **more}
    tokens = [node(f"E_9_{i}", "E", i, "embedding") for i in range(3)]
    features = [node("0_7_1", "0", 1, "cross layer transcoder", activation=2.5, influence=0.1),
                node("1_7_2", "1", 2, "cross layer transcoder", activation=1.5, clerp=HOSTILE), node("2_9999_2", "2", 2, "cross layer transcoder")]
    errors = [node("0_0_1", "0", 1, "mlp reconstruction error")]
    logits = [node(f"4_{i}_2", "4", 2, "logit", clerp=f'Output "{HOSTILE}" (p=0.500)', token_prob=0.5, influence=None) for i in range(2)]
    pairs = [("E_9_1", "0_7_1"), ("E_9_2", "1_7_2"), ("0_7_1", "1_7_2"), ("0_7_1", "2_9999_2"), ("0_0_1", "2_9999_2"), ("1_7_2", "4_0_2"),
             ("2_9999_2", "4_0_2"), ("2_9999_2", "4_1_2")]
    graph = {"metadata": {"slug": "graph", "prompt_tokens": ["In", HOSTILE, " the"], "prompt": HOSTILE, "scores": {"replacement": 0.6}},
             "qParams": {"pinnedIds": [], "supernodes": []}, "nodes": tokens + features + errors + logits,
             "links": [{"source": one, "target": other, "weight": 0.5 - i / 4} for i, (one, other) in enumerate(pairs)], **changes}
    return json.dumps(graph)


def require_damaged(read, place, words):
    from weft.errors import WeftError
    try:
        read(place)
    except WeftError as failure:
        assert failure.code == 3 and words in str(failure), failure
    else:
        raise AssertionError(f"read: {words}")


def check_graphs(folder):
    both = folder / "both"
    (both / "graphs").mkdir(parents=True)
    write(both / "features.h5")
    with h5py.File(both / "features.h5", "r+") as file:     # of the node that is selected: all examples
        file["layer_0/top_row"][7] = range(TOP)
        file["layer_0/top_tokens"][7] = 5
        file["layer_0/sample_row"][7] = range(SAMPLE)
        file["layer_0/sample_tokens"][7] = 5
    (both / "graph.json").write_text(graph_text())
    (both / "graphs" / "bad.json").write_text(graph_text(links=3))
    (both / "run.json").write_text('{"state": "finished"}')
    server = Running(both)
    try:
        front = server.get("")
        page_data(front)
        assert "graph?name=graphs%2Fbad.json" in front and "run.json" not in front
        text = server.get("graph", name="graph.json")
        data = page_data(text)
        assert "details" not in data and len(data["layout"]["places"]) == 9 and data["features"][3] == "0:7"
        assert data["names"][0] == "In" and data["names"][3] == "t5" and data["names"][5] == "2:9999" and data["names"][7] == f"{HOSTILE} 0.5"
        page_script.run(folder, text, server.port, GRAPH_STAND_IN % (TOP + SAMPLE))
        for name, status in (("no.json", 400), ("../graph.json", 400), ("/etc/passwd", 400), ("", 400), ("graphs/bad.json", 500)):
            assert server.status("/graph?" + urlencode({"name": name})) == status, name
        assert server.status("/graph?name=graph.json", host="attacker.example") == 403
    finally:
        server.stop(signal.SIGTERM)
    # One file, with what the features respond to; a picture.
    assert serve(both, "--export", folder / "graph.html", "--graph", "graph.json") == f"{folder / 'graph.html'}: the graph graph.json; open it in a browser\n"
    text = (folder / "graph.html").read_text()
    assert sorted(page_data(text)["details"]) == ["0:7", "1:7"] and "href=" not in text
    page_script.run(folder, text, 1, GRAPH_STAND_IN % (TOP + SAMPLE))
    serve(both / "graph.json", "--export", folder / "graph.svg", "--nodes", 2)
    text = (folder / "graph.svg").read_text()
    picture = ElementTree.fromstring(text)
    assert "<b>" not in text and "script>" not in re.sub("&lt;/script&gt;", "", text)
    assert len([one for one in picture.iter("{http://www.w3.org/2000/svg}rect") if "node" in one.get("class")]) == 3 + 2 + 2
    assert "no such graph" in serve(both, "--export", folder / "no.html", "--graph", "x", code=2)
    assert "is no directory; create it" in serve(both, "--export", folder / "nothing" / "x.html", "--graph", "graph.json", code=2)
    said = serve(both, "--export", folder / "no.html", "--graph", "graphs/bad.json", code=3)
    assert said.startswith("error: ") and "not a graph" in said
    # Whatever is damaged is named; in this process, since a process for each takes long.
    sys.path.insert(0, str(program.PACKAGE))
    from weft.serve.graphs import Graph
    whole = json.loads(graph_text())
    place = folder / "damaged.json"

    def damaged(words, content):
        place.write_text(content if isinstance(content, str) else json.dumps(content))
        require_damaged(Graph, place, words)

    def with_node(i, **changes):
        return {**whole, "nodes": [{**node, **changes} if j == i else node for j, node in enumerate(whole["nodes"])]}

    damaged("no JSON", graph_text()[:-40])
    damaged("no JSON", "[" * 100_000)
    damaged("not finite", graph_text().replace("0.25", "NaN"))
    damaged("not finite", graph_text().replace("0.25", "1e999"))
    damaged("not a graph", [])
    damaged("prompt_tokens", {**whole, "metadata": {"prompt_tokens": [1]}})
    damaged("nodes[3].ctx_idx", with_node(3, ctx_idx=3))
    damaged("nodes[3].ctx_idx", with_node(3, ctx_idx=True))
    damaged("nodes[3].layer", with_node(3, layer="-1"))
    damaged("nodes[3].layer", with_node(3, layer=None))
    damaged("nodes[3].influence", with_node(3, influence="x"))
    damaged("nodes[3].clerp", with_node(3, clerp=["x"]))
    damaged("nodes[4].node_id", with_node(4, node_id="0_7_1"))
    damaged("nodes[4] is no object", {**whole, "nodes": [*whole["nodes"][:4], 1]})
    damaged("links[0] does not lead", {**whole, "links": [{"source": "x", "target": "0_7_1", "weight": 1}]})
    damaged("links[0].weight", {**whole, "links": [{"source": "E_9_1", "target": "0_7_1", "weight": "1"}]})
    damaged("links[0].weight", {**whole, "links": [{"source": "E_9_1", "target": "0_7_1", "weight": 10 ** 400}]})
    damaged("pinnedIds", {**whole, "qParams": {"pinnedIds": "x"}})
    damaged("supernodes", {**whole, "qParams": {"supernodes": [["a", 1]]}})
    damaged("a page holds 5000", {**whole, "nodes": whole["nodes"] * 1000})


def check_damage(folder, path):
    """A clear message, whatever the file says; nothing is sized by it."""
    from weft.serve.catalogue import Catalogue
    place = folder / "damaged.h5"

    def damaged(change, words):
        shutil.copy(path, place)
        with h5py.File(place, "r+") as file:
            change(file)
        require_damaged(Catalogue, place, words)

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
    damaged(replace("layer_0/raised", data=np.zeros(FEATURES, int)), "/layer_0/raised is no table")
    damaged(replace("layer_1/sample_shade"), "/layer_1/sample_shade is missing")
    for content in (b"[1]", b'{"layer": 1}', b'{"layer": 1e999, "feature": 0, "label": "x"}', b"\xff"):
        damaged(replace("labels", data=np.frombuffer(content, np.uint8)), "/labels is damaged")
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
    said = serve(place, "--export", folder / "no.html", code=3)
    assert said.startswith("error: ") and "fewer bytes than its shape" in said and "Traceback" not in said, said

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
    check_graphs(directory)
    check_damage(directory, features)
print("rows, details and exports are those of the file; damaged files are named")
