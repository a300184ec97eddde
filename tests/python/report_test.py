# SPDX-License-Identifier: Apache-2.0
"""weft report: the page of a real run is well-formed, fetches nothing, escapes what comes from files, and agrees with the run's files;
missing or damaged files are reported on the page.

report_test.py WEFT
"""
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import numpy as np

import files
import program

sys.path.insert(0, str(program.PACKAGE))

LAYERS, WIDTH, FEATURES = 3, 16, 40
INPUT = """
[synthetic]
output = "data"
layers = 3
d_model = 16
features = 24
k = 3
tokens = 1200
validation_tokens = 300
[run]
steps = 30
[data]
train = "data/train"
validation = "data/validation"
batch_tokens = 64
[transcoder]
features = 40
k = 3
dead_window = 600
[optimizer]
learning_rate = 3e-3
[checkpoint]
every = 10
[log]
every = 1
[benchmark]
layers = 2
d_model = 16
warmup = 1
steps = 2
batches = 1
cases = ["sparse"]
"""
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """Parses a page: elements are properly nested, and nothing in it would be fetched or run by a browser."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.words, self.titles, self.cells, self.tags, self.links = [], [], [], [], [], []
        self.text = text
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        assert tag not in ("script", "link", "iframe", "img", "object", "embed", "use", "image"), tag
        for name, value in attributes:
            if tag == "a" and name == "href":      # to another page in the directory
                self.links.append(value)
                continue
            assert name not in ("src", "href", "xlink:href", "srcset", "action", "id") and not name.startswith("on"), (name, value)
            assert name != "style" or "url(" not in value, value
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data):
        inside = self.open[-1] if self.open else ""
        if inside == "style":
            assert "url(" not in data and "@import" not in data
            return
        self.words.append(data)
        if inside == "title":
            self.titles.append(data)
        if inside in ("td", "b"):
            self.cells.append(data)

    def says(self, *wanted):
        text = " ".join(self.words)
        for words in wanted:
            assert words in text, f"the page does not say {words!r}"


def parsed(path):
    text = path.read_text()
    assert "http" not in text
    # The same bytes are XML: a stricter reading of nesting, attributes and entities.
    assert text.startswith("<!DOCTYPE html>\n")
    root = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))
    check_narrow(text, root)
    return Page(text)


def check_narrow(text, root):
    """No browser is needed to know that a window of 400 pixels does not scroll sideways: everything of a fixed width is in a box
    that scrolls by itself, and long words break."""
    style = re.search("<style>(.*?)</style>", text, re.S)[1]
    assert '<meta name="viewport" content="width=device-width, initial-scale=1"/>' in text
    assert re.search(r"@media \(max-width: \d+rem\) \{ body", style) and "(prefers-color-scheme: dark)" in style
    rules = {}      # outside @media: what a class or element has
    for selectors, body in re.findall(r"^([^{}@]+) \{([^{}]*)\}", style, re.M):
        for selector in selectors.split(","):
            rules[selector.strip()] = rules.get(selector.strip(), "") + body
    for box in (".wide", "figure", "pre"):
        assert "overflow-x: auto" in rules[box], box
    assert "min-width: 0" in rules["figure"] and "min-width: 0" in rules[".figures > *"], "a cell of the grid would not shrink"
    for words in ("h1", ".state", "pre"):
        assert "overflow-wrap: anywhere" in rules[words], words
    for width in re.findall(r"(?<!max-)(?<!min-)width: (\d+)(?:px|rem)", "".join(rules.values())):
        assert int(width) <= 3, f"a fixed width of {width}"
    parent = {child: one for one in root.iter() for child in one}
    for element in root.iter():
        if element.tag == "table":
            assert parent[element].get("class") == "wide", "a table without a box that scrolls"
        if element.get("class") == "chart":
            assert element.get("aria-label") and parent[element].tag == "figure" and element.get("width") is None and element.get("viewBox")


def report(weft, run, start=None):
    (start or weft.call)("report", run)
    return parsed(run / "report.html")


def short(value):
    """Three significant digits, as the page writes numbers of common size."""
    if value == 0:
        return "0"
    if abs(value) >= 999.5:
        return f"{float(f'{value:.2e}'):,.0f}"
    text = f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def decoder_norms(step_directory, window, tokens):
    """{(s, t): root of the mean squared norm over live features}, share of what s writes}, through h5py."""
    tensors = files.read_tensors(step_directory)
    norms = {}
    for s in range(LAYERS):
        alive = tensors[f"encoder_{s}/tokens_since_fired"] < min(window, tokens)
        blocks = tensors[f"decoder_{s}/weight"].astype(np.float64).reshape(FEATURES, LAYERS - s, WIDTH)[alive]
        squares = (blocks ** 2).sum(axis=2)
        for t in range(s, LAYERS):
            norms[s, t] = math.sqrt(squares[:, t - s].mean()), squares[:, t - s].sum() / squares.sum(), alive.sum()
    return norms


def check_real_run(weft, source):
    # A name that would be markup, in the title, the table and the input of the page.
    run = weft.folder / "a<b>&amp;\"'run"
    for fault, code in (("step:0:12:usr1", 75), ("step:0:17:kill", -9)):
        weft.run("train", source, "--output", run, fault=fault, code=code)
    weft.run("train", source, "--output", run)
    left = run / "checkpoints" / "step_00000099.tmp"
    left.mkdir()        # as if another process were writing it: a report removes nothing
    weft.run("benchmark", source, "--output", run)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    page = report(weft, run, start=weft.run)
    assert before == {path: path.stat().st_mtime_ns for path in before}, "the report changed the run"

    record = program.record(run)
    result, validation = record["result"], record["result"]["validation"]
    page.says("Finished", run.name, f"{result['tokens']:,}", short(result["tokens_per_second"]),
              record["build"]["revision"], record["hosts"][0]["host"], record["command"], record["libraries"]["HDF5"])
    for measure, factor, decimals in (("nmse_standardised", 1, 4), ("nmse", 1, 4), ("explained_variance", 1, 4), ("l0", 1, 2),
                                      ("dead_fraction", 100, 1)):
        for value in (*validation[measure], validation[f"{measure}_mean"]):
            assert f"{factor * value:.{decimals}f}" in page.cells, (measure, value)
    assert short(validation["nmse_standardised_mean"]) in page.cells, "no tile for the error"
    # The record and the page are of the run's last start, which resumed after step 14.
    lines = program.metrics(run)
    assert any(title == f"step 30: {short(lines[-1]['loss'])}" for title in page.titles), "no point for the last loss"
    # Histogram: bars in percent of all features.
    totals = np.sum(validation["density_histogram"], axis=0)
    for name, count in zip(validation["density_bins"], totals):
        wanted = f"part of the tokens on which a feature fires {name}: {short(100 * count / totals.sum())}"
        assert wanted in page.titles, wanted
    # The decoder, against h5py's reading of the newest checkpoint.
    norms = decoder_norms(files.checkpoints(run)[30], 600, result["tokens"])
    for (s, t), (norm, share, _) in norms.items():
        wanted = f"layer {s} to layer {t}: {short(norm)}; {short(100 * share)} % of what layer {s} writes"
        assert wanted in page.titles, (wanted, [title for title in page.titles if title.startswith("layer")])
    assert f"Counted: {sum(norms[s, s][2] for s in range(LAYERS))} of {FEATURES * LAYERS} features" in " ".join(page.words)
    # Phases: seconds and shares; limits from benchmark.json.
    total = sum(phase["mean"] for phase in record["timings"].values())
    for name, phase in record["timings"].items():
        wanted = f"{name}: {short(phase['mean'])} s, {short(100 * phase['mean'] / total)} %"
        assert phase["mean"] < 1e-4 or any(title.startswith(wanted) for title in page.titles), wanted
    benchmark = json.loads((run / "benchmark.json").read_text())
    page.says("Benchmark, case sparse", short(benchmark["cases"][0]["ms_per_step"]) + " ms/step")
    # Starts: one stopped, one killed, one that went to the end.
    starts = [title for title in page.titles if title.startswith("start ")]
    assert "start 1: from step 0 to step 14" in starts and "start 3: from step 14 to step 30" in starts, starts
    assert "start 2: from step 14 to step 14 at least, ended without an orderly stop" in starts, starts
    for step, directory in files.checkpoints(run).items():
        page.says(directory.name)
    page.says("start 3", (run / "input.toml").read_text().splitlines()[-1])
    assert "<b>&" not in page.text and "a&lt;b&gt;&amp;amp;&quot;&#39;run" in page.text

    # The same page elsewhere, byte for byte.
    assert json.loads(weft.run("report", run, "--output", "page.html", "--json", "--quiet")) == {"page": "page.html"}
    assert (weft.folder / "page.html").read_text() == page.text
    return run


def check_what_is_missing(weft, source, run):
    # Stopped before a line was logged: no curves, no validation measures, no timings beyond the start.
    stopped = weft.folder / "stopped"
    stopped.mkdir()
    (stopped / "STOP").touch()
    weft.run("train", source, "--output", stopped, "--set", "log.every=1000", code=75)
    page = report(weft, stopped)
    page.says("Ended with exit code 75", "No curves", "No validation measures", "weft benchmark INPUT --output RUN")
    # An evaluation in the run directory is used.
    weft.run("evaluate", stopped, "--output", stopped)
    evaluation = json.loads((stopped / "evaluation.json").read_text())
    page = report(weft, stopped)
    page.says("from evaluation.json", short(evaluation["validation"]["nmse_standardised_mean"]))

    # The newest checkpoint is damaged: the one before it is drawn.
    shard = files.checkpoints(run)[30] / "rank_00000.h5"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    report(weft, run).says("from checkpoint step_00000020")
    for path in (run / "checkpoints").iterdir():
        path.rename(weft.folder / path.name)
    report(weft, run).says("No decoder weights: the run has no checkpoint yet", "The run has no checkpoint.")

    # A failed run that left only its record.
    failed = weft.folder / "failed"
    failed.mkdir()
    record = {"exit": {"code": 4, "reason": "loss is not finite <in step 7>", "step": 7}, "result": {"step": 6}}
    (failed / "run.json").write_text(json.dumps(record))
    page = report(weft, failed)
    page.says("Ended with exit code 4", " in step 7", "loss is not finite <in step 7>", "No curves", "No timings",
              "Hosts and devices were not recorded", "The input was not recorded")


def check_replacement(weft, run):
    """What weft lm evaluate --transcoder wrote, and links to the other pages of the run."""
    replaced = weft.folder / "replaced"
    shutil.copytree(run, replaced)
    losses = {"loss": 2.5, "loss_mean_ablated": 4.0, "loss_zero_ablated": 5.0, "recovered_from_mean": 0.75, "recovered_from_zero": 0.8125}
    (replaced / "evaluation.json").write_text(json.dumps({
        "validation": {"loss": 2.0}, "replacement": {"transcoder": "<b>runs", "tokens": 4096, "loss_original": 2.0, "all_layers": losses,
                                                     "layers": [losses, {"loss": "x"}]}}))
    (replaced / "features").mkdir()
    (replaced / "features" / "a <b>'\".html").write_text("")
    page = report(weft, replaced)
    page.says("75 %", "loss recovered, all MLPs replaced", "The model with its MLPs replaced", "4,096 tokens", "0.8125", "features/a <b>'\".html")
    assert page.links == ["features/a%20%3Cb%3E%27%22.html"], page.links


def check_hostile(weft):
    """Whatever the files contain: a page, or a message."""
    run = weft.folder / "hostile"
    (run / "checkpoints" / "step_00000005").mkdir(parents=True)
    (run / "checkpoints" / "step_00000005" / "manifest.json").write_text("{}")
    deep = "[" * 20 + "]" * 20
    (run / "run.json").write_text(
        '{"exit": {"code": "seven", "reason": ["</pre><script>"]}, "result": {"step": 1e300, "validation": {"nmse": "x", '
        '"nmse_standardised": [1, "nan", null, {"a": 1}, -3, 1e308], "l0": [1e300, -1e300], "density_bins": ["<b>", 3], '
        '"density_histogram": [[1, 2, 3], 5, ["x"]]}}, "timings": {"a": 5, "<i>": {"mean": -1}, "b": {"mean": 1e99}}, '
        '"hosts": ["h", {"host": {"x": 1}, "ranks": 3}], "libraries": [1], "seconds": -1e30, "ranks": "many", '
        f'"input": {{"run": {{"steps": -5}}, "transcoder": {{"dead_window": "x"}}, "deep": {deep}}}}}')
    (run / "metrics.jsonl").write_bytes(
        b'{"step": 1, "loss": "nan", "l0": 3}\n{"step": "x"}\n\xff\xfe\n[]\n{"step": 2, "loss": 0.5, "layer_l0": [1, "inf"]}\n'
        b'{"step": 3, "loss": 1e-300, "a<b>_c": 1}\n{"step": 4, "loss": -4, "nmse_standardised": 1e99, "a<b>_c": 7}\n{"step": 5, "loss"')
    (run / "starts.jsonl").write_bytes(b'{"start": 1e300}\n{"end": -1}\n{"start": 0}\nx\n{"end": 4}\n{"end": 5}\n')
    (run / "input.toml").write_bytes(b'a = "\x00\x1b</pre>&\xff\xc3\xa9\xed\xa0\x80"\n')
    (run / "benchmark.json").write_text('{"cases": [{"name": "<u>", "phases": [{"name": 3, "ms": "x"}, {"ms": 3}]}, 5]}')
    (run / "evaluation.json").write_text('{"validation": 7, "recovery": {"fraction": "x"}}')
    page = report(weft, run)
    page.says("1 logged step had a loss that is not finite", "3 of 7 lines are not records", "</pre>&", "manifest.json",
              "a<b> c")       # a metric that the page does not know is drawn under its own name
    for number in ("nan", "inf"):
        assert not re.search(rf'="[^"]*\b{number}\b[^"]*"', re.sub(r'class="[^"]*"|<title>.*?</title>', "", page.text)), number

    # A long run is thinned: the page stays small and keeps its ends.
    long = weft.folder / "long"
    long.mkdir()
    (long / "run.json").write_text('{"exit": {"code": null, "reason": "running"}}')
    with open(long / "metrics.jsonl", "w", encoding="utf-8") as file:
        file.writelines(f'{{"step": {step}, "loss": {1 + 1 / step}}}\n' for step in range(1, 20001))
    page = report(weft, long)
    page.says("still active", "The 20,000 records are drawn as means of up to 16 neighbours")
    assert len(page.text) < 300_000


def check_changes(weft, source):
    """A restart with other settings: each with the step from which it applies. The validation curve is a line."""
    run = weft.folder / "changed"
    weft.run("train", source, "--output", run, "--set", "run.steps=20", "--set", "log.evaluate_every=5")
    weft.run("train", source, "--output", run, "--set", "run.steps=24", "--set", "log.evaluate_every=2",
             "--set", "optimizer.learning_rate=1e-3", "--set", "resume.accept_changed=true")
    weft.run("train", source, "--output", run, "--set", "run.steps=26", "--set", "log.evaluate_every=2",
             "--set", "optimizer.learning_rate=1e-3", "--set", "resume.accept_changed=true")
    page = report(weft, run)
    table = page.text[page.text.index("Settings that changed"):]
    rows = [re.findall("<td[^>]*>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", table[:table.index("</table>")])]
    found = {(row[0], row[3]): row[1:3] for row in rows if row}
    assert found == {("run.steps", "20"): ["20", "24"], ("log.evaluate_every", "20"): ["5", "2"],
                     ("optimizer.learning_rate", "20"): ["0.003", "0.001"], ("run.steps", "24"): ["24", "26"],
                     ("resume.accept_changed", "20"): ["false", "true"]}, found
    assert program.record(run)["changed"] == {"run.steps": ["24", "26"]}
    validation = page.text[page.text.index("<h3>Validation error</h3>"):]
    validation = validation[:validation.index("</figure>")]
    curve, = re.findall('<path d="([^"]*)" style="fill: none; stroke: var\\(--blue\\); stroke-width: 2"', validation)
    assert curve.count("M") == 1, curve
    assert validation.count('class="touch"') == len([one for one in program.metrics(run) if "validation.l0" in one]), validation
    # What it is about: in the title of the window, and under the heading.
    about = "transcoder of synthetic, data data/train, 40 features per layer, batch_topk, k 3.0, learning rate 0.001"
    assert f"({about})" in page.titles[0] and f"<p>{about}</p>" in page.text, page.titles[0]


def check_comparison(weft, source):
    from weft.charts import PALETTE
    runs = []
    for name, settings in (("rate_a", ("optimizer.learning_rate=1e-3",)), ("rate<b>", ("optimizer.learning_rate=1e-2",)),
                           ("short", ("run.steps=20", "optimizer.learning_rate=1e-2"))):
        runs.append(weft.folder / "grid" / name)
        weft.run("train", source, "--output", runs[-1], *program.sets(*settings))
    # Stopped after a few steps: no validation results, so it is the last row.
    weft.run("train", source, "--output", weft.folder / "grid" / "stopped", fault="step:0:12:usr1", code=75)
    runs.append(weft.folder / "grid" / "stopped")
    said = weft.call("report", *runs, "--output", weft.folder / "runs.html")
    page = parsed(weft.folder / "runs.html")
    measured = {run.name: program.record(run)["result"].get("validation", {}).get("nmse_standardised_mean", math.inf) for run in runs}
    best_first = sorted(measured, key=measured.get)
    assert measured[best_first[-1]] == math.inf and best_first[-1] == "stopped"
    table = page.text[page.text.index("Settings and results"):]
    head = [name.replace("<wbr/>", "") for name in re.findall("<th(?: [^>]*)?>(.*?)</th>", table[:table.index("</thead>")])]
    # What differs, and nothing else.
    assert head[:4] == ["run", "optimizer.learning_rate", "run.steps", "validation NMSE (standardised)"], head
    rows = [re.findall("<td[^>]*>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", table[:table.index("</table>")])][1:]
    assert [row[0].replace("&lt;", "<").replace("&gt;", ">") for row in rows] == best_first, rows
    for row, name in zip(rows, best_first):
        assert row[3] == ("-" if name == "stopped" else short(measured[name])), row
        assert row[-1] == ("exit code 75" if name == "stopped" else "finished"), row
    assert [line.split()[0] for line in said.splitlines() if line.split()[0] in measured] == best_first, said
    # Every run is in the chart of the loss, with its last value at hand.
    losses = page.text[page.text.index("<h3>Training loss</h3>"):]
    losses = losses[:losses.index("</figure>")]
    for colour, name in zip(PALETTE, best_first):
        last = program.metrics(weft.folder / "grid" / name)[-1]
        assert f"{name}, step {last['step']}: {short(last['loss'])}" in page.titles, name
        assert losses.count(f"stroke: {colour}") == 2, "the line and its legend"
    page.says("4 transcoders", "3 of 4 finished", "best run", "Against L0", "differ in optimizer.learning_rate, run.steps")
    assert "rate<b>" not in page.text

    # A language model is another thing.
    (weft.folder / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    model = weft.folder / "model.toml"
    model.write_text('[run]\nsteps = 2\n[data]\ntrain = "text.txt"\nbatch_tokens = 64\nsequence = 16\n'
                     "[language_model]\nlayers = 1\nheads = 1\nd_model = 8\n[optimizer]\nwarmup_steps = 1\n[log]\nevery = 1\n")
    for rate in ("1e-3", "1e-2"):
        weft.run("lm", "train", model, "--output", weft.folder / f"lm_{rate}", "--set", f"optimizer.learning_rate={rate}")
    said = weft.call("report", weft.folder / "lm_1e-3", runs[0], code=2)
    assert "cannot be compared (one of language models, one of transcoders" in said, said
    weft.call("report", weft.folder / "lm_1e-3", weft.folder / "lm_1e-2")
    parsed(weft.folder / "comparison.html").says("2 language models", "training loss", "differ in optimizer.learning_rate")
    assert "no such directory" in weft.call("report", runs[0], weft.folder / "none", code=2)


def check_messages(weft, run):
    assert "no such directory; name the directory of a run" in weft.call("report", weft.folder / "nothing", code=2)
    assert "is no directory; create it" in weft.call("report", run, "--output", weft.folder / "nothing" / "page.html", code=2)
    assert "is a directory (the page is a file)" in weft.call("report", run, "--output", weft.folder, code=2)
    assert "run.json is missing" in weft.call("report", weft.folder / "data", code=2)
    assert "not a directory" in weft.call("report", run / "run.json", code=2)
    assert "weft report needs its RUN" in weft.run("report", code=2)
    os.mkfifo(weft.folder / "pipe")     # a page in its place would replace it
    assert "is a device or FIFO" in weft.call("report", run, "--output", "pipe", code=2)
    full = subprocess.run(f"{weft.binary} report {shlex.quote(run.name)} > /dev/full", shell=True, cwd=weft.folder, env=weft.environment, text=True,
                          capture_output=True, check=False)
    assert full.returncode == 6 and "standard output" in full.stderr, full
    for damaged in ("{", "[]", '{"exi": 1}', "", '{"exit": ' + "[" * 100_000 + "]" * 100_000 + "}"):
        (run / "run.json").write_text(damaged)
        assert "not the record of a run" in weft.call("report", run, code=3)


def check_families(weft):
    """A private language model: what it guarantees and generates instead of a loss."""
    run = weft.folder / "private"
    run.mkdir()
    answers = {"before": {"reward": 0.5, "samples": [{"prompt": "a\nb", "answers": ["one", "two"]}]}, "after": {"step": 20, "reward": 0.75}}
    record = {"exit": {"code": 0, "reason": "finished"}, "ranks": 4,
              "input": {"run": {"steps": 20}, "language_model": {"layers": 2, "preset": "llama"}, "privacy": {"enabled": True, "mode": "auto"}},
              "result": {"step": 20, "validation": {"loss": 1.25, "perplexity": 3.49, "tokens": 4000}, "answers": answers,
                         "privacy": {"epsilon": 2.5, "delta": 1e-6, "private": False, "protects": "one record"}},
              "timings": {"generate": {"mean": 3, "min": 2, "max": 5}, "update": {"mean": 1, "min": 1, "max": 1}}}
    (run / "run.json").write_text(json.dumps(record))
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "learning_rate": 1e-3, "answers.diversity": 0.1 * step}) + "\n"
                                               for step in range(1, 21)))
    page = report(weft, run)
    page.says("language model (llama), private, polychromic", "Protected: one record.", "Not private: the noise follows", "+50.0 %", "1.25",
              "validation loss, nats per token", "4,000 predictions", "> a\\nb", "fastest to slowest rank", "generate: 3 s, 75 %",
              "Semantic diversity in training")
    points = [{"step": step, "answers": {"reward": 0.25 + step / 40, "pass_1": 0.2, "pass_8": None, "diversity": None,
                                         "distinct_2": 0.9 - step / 40}} for step in range(30, 0, -1)]
    (run / "answers.json").write_text(json.dumps({"prompts": "sums.jsonl", "samples": 8, "checkpoints": [*points, {"model": "base"}, 7]}))
    page = report(weft, run)
    page.says("Answers of the checkpoints", "8 answers to each prompt of sums.jsonl", "pass@1", "distinct-2 0.875: 0.275",
              "distinct-2 0.15: 1", "step 30: 1")
    assert "pass@8" not in page.cells, "it has no value"
    for text, notes in (('{"checkpoints": 3, "samples": []}', ()), ("[]", ('answers.json has no "checkpoints"',))):
        (run / "answers.json").write_text(text)
        page = report(weft, run)
        page.says(*notes)
        assert "Answers of the checkpoints" not in page.text
    assert "Training loss" not in page.text, "a private run has no curve of the loss"
    assert ("privacy", "epsilon") not in page.cells and "2.5" in page.cells


def check_benchmark(weft, source):
    """The results of weft benchmark alone: its cases against the limits, and side by side."""
    weft.run("benchmark", source, "--output", "cases", "--set", 'benchmark.cases=["sparse", "few: transcoder.k=2"]')
    page = report(weft, weft.folder / "cases")
    page.says("Benchmark, case sparse", "Benchmark, case few", "Benchmark, phases of all cases")
    (weft.folder / "cases" / "benchmark.json").write_text('{"cases": 3}')
    assert "not the result of a benchmark" in weft.call("report", "cases", code=3)


def check(weft):
    program.needs_package(weft)
    source = weft.folder / "input.toml"
    source.write_text(INPUT)
    weft.run("synth", source)
    run = check_real_run(weft, source)
    check_what_is_missing(weft, source, run)
    check_replacement(weft, run)
    check_hostile(weft)
    check_changes(weft, source)
    check_families(weft)
    check_benchmark(weft, source)
    check_comparison(weft, source)
    check_messages(weft, run)


program.main(check)
