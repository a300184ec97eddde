# SPDX-License-Identifier: Apache-2.0
"""--profile: the time line is valid and bounded, the figures are plausible, and the results are those of a run without it.

profile_test.py WEFT
"""
import json
from collections import Counter, defaultdict

import numpy as np

import files
import program

INPUT = """
[synthetic]
output = "data"
layers = 3
d_model = 16
features = 24
k = 3
tokens = 2000
validation_tokens = 640
[run]
steps = 40
[data]
train = "data/train"
validation = "data/validation"
batch_tokens = 64
[transcoder]
features = 40
k = 3
[checkpoint]
every = 10
[log]
every = 5
[benchmark]
layers = 2
d_model = 16
warmup = 1
steps = 8
batches = 1
cases = ["sparse", "again"]
"""
LANGUAGE = """
[run]
steps = 12
[data]
train = "text.txt"
validation = "text.txt"
tokens = "character"
batch_tokens = 256
micro_tokens = 128
sequence = 32
[language_model]
layers = 2
heads = 2
d_model = 16
[optimizer]
warmup_steps = 2
[log]
every = 4
"""
POLYCHROMIC = """
[polychromic]
every = 2
prompts = 2
samples = 4
set_size = 2
prompt_tokens = 4
max_new_tokens = 8
evaluation_prompts = 0
kl = 0.1
"""
# Parameters of the matrices of LANGUAGE, without the head: the update alone moves 28 bytes of each.
MATRICES = 2 * 12 * 16 * 16
STEPS = 20                  # kSteps of src/base/trace.hpp
FIGURES = {"steps", "ms_per_step", "device_peak_bytes", "utilisation_percent", "kernel_ms_per_step", "bandwidth_percent_of_limit",
           "copy_gb_per_second", "bytes_per_step"}


def read_trace(path, ranks):
    """{(rank, thread name): [(begin, end, name)]} in microseconds; also checks the format."""
    document = json.loads(path.read_text())
    assert document["otherData"]["ranks"] == ranks and document["otherData"]["dropped_events"] == 0, document["otherData"]
    names, spans = {}, defaultdict(list)
    for event in document["traceEvents"]:
        assert event["ph"] in ("M", "X"), event
        if event["ph"] == "M" and event["name"] == "thread_name":
            names[event["pid"], event["tid"]] = event["args"]["name"]
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            spans[event["pid"], names[event["pid"], event["tid"]]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    return spans


def check_nesting(spans):
    for thread, events in spans.items():
        open_ends = []
        for begin, end, name in sorted(events, key=lambda event: (event[0], -event[1])):
            while open_ends and open_ends[-1] <= begin + 2e-3:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 2e-3, (thread, name)
            open_ends.append(end)


def check_figures(figures, steps):
    assert set(figures) == FIGURES, figures
    assert figures["steps"] == steps, figures
    for name, value in figures.items():
        assert value > 0, (name, value)
    assert figures["kernel_ms_per_step"] < figures["ms_per_step"], figures


def check_training(weft, source):
    plain, profiled = weft.folder / "plain", weft.folder / "profiled"
    weft.run("train", source, "--output", plain, ranks=2)
    text = weft.run("train", source, "--output", profiled, "--profile", ranks=2)
    assert f"profile of {STEPS} steps: " in text, text
    assert not (plain / "profile.json").exists() and "profile" not in program.record(plain)

    # Nothing else differs: every tensor of every checkpoint, and the metrics.
    assert list(files.checkpoints(plain)) == list(files.checkpoints(profiled))
    for step, directory in files.checkpoints(plain).items():
        before, after = files.read_tensors(directory), files.read_tensors(files.checkpoints(profiled)[step])
        assert before.keys() == after.keys()
        for name, values in before.items():
            assert np.array_equal(values.view(np.uint8), after[name].view(np.uint8)), (step, name)
    assert program.metrics_without_times(plain) == program.metrics_without_times(profiled)

    spans = read_trace(profiled / "profile.json", 2)
    check_nesting(spans)
    for rank in (0, 1):
        host = Counter(name for _, _, name in spans[rank, "host"])
        assert host["step"] == STEPS, host
        for phase in ("normalise", "encode", "select", "decode", "exchange", "loss", "decoder backward", "encoder backward",
                      "waiting for data"):
            assert host[phase] >= STEPS, (phase, host)
        assert host["start checkpoint"] == 2, host          # after steps 10 and 20 of the recorded steps 4 to 23
        exchanges = Counter(name for _, _, name in spans[rank, "exchanges"])
        assert exchanges["partial sums"] == exchanges["gradient rows"] == STEPS, exchanges
        assert any(name == "prepare batch" for _, _, name in spans[rank, "reader"])
        assert any(name == "write shard" for _, _, name in spans[rank, "writer"])
        # Phases lie inside steps.
        steps = [(begin, end) for begin, end, name in spans[rank, "host"] if name == "step"]
        for begin, end, name in spans[rank, "host"]:
            assert any(first <= begin + 2e-3 and end <= last + 2e-3 for first, last in steps), name
    assert (profiled / "profile.json").stat().st_size < 1_000_000

    check_figures(program.record(profiled)["profile"], STEPS)
    if weft.has_package():
        weft.run("report", profiled)
        page = (profiled / "report.html").read_text()
        assert "memory bandwidth, of the measured limit" in page and "From the traced steps of --profile" in page


def check_other_commands(weft, source):
    run = weft.folder / "profiled"
    evaluation = weft.folder / "evaluation"
    weft.run("evaluate", run, "--profile", "--output", evaluation)
    check_figures(json.loads((evaluation / "evaluation.json").read_text())["profile"], 7)     # 10 batches, 3 of them warm-up
    assert read_trace(evaluation / "profile.json", 1)[0, "host"]
    assert "--profile needs --output DIR" in weft.run("evaluate", run, "--profile", code=2)

    benchmark = weft.folder / "benchmark"
    weft.run("benchmark", source, "--profile", "--output", benchmark)
    document = json.loads((benchmark / "benchmark.json").read_text())
    assert len(document["cases"]) == 2
    check_figures(document["profile"], 6)       # of the first case alone: 9 steps, 3 of them warm-up

    data = weft.folder / "synthetic"
    text = weft.run("synth", source, "--profile", "--set", f"synthetic.output={data}", "--set", "synthetic.tokens=8000")
    assert "profile of " in text and "ms/step" in text, text
    assert "memory bandwidth" not in text, text      # of no known number of bytes
    trace = read_trace(data / "profile.json", 1)
    assert trace[0, "host"] and trace[0, "writer"]

    # A case has its own grid.
    weft.run("benchmark", source, "--output", benchmark, "--set", 'benchmark.cases=["features", "tokens: parallel.data=2"]', ranks=2)
    features, tokens = json.loads((benchmark / "benchmark.json").read_text())["cases"]
    for case, grid, exchange in ((features, {"data": 1, "feature": 2}, "partial sums"), (tokens, {"data": 2, "feature": 1}, "rows of groups")):
        assert case["grid"] == grid and exchange in [one["name"] for one in case["communication"]["exchanges"]], case
    refused = weft.run("benchmark", source, "--set", 'benchmark.cases=["three: parallel.data=3"]', ranks=2, code=2)
    assert '"three"' in refused and "parallel.data = 3" in refused, refused
    refused = weft.run("benchmark", source, "--set", 'benchmark.cases=["one: device.threads=1"]', code=2)
    assert '"one" sets device.threads (all cases share it)' in refused, refused

    # A run that is too short for the warm-up: a warning.
    short = weft.folder / "short"
    text = weft.run("train", source, "--profile", "--output", short, "--set", "run.steps=2")
    assert "--profile recorded nothing" in text, text
    assert program.record(short)["profile"] == {"steps": 0}
    assert 'unknown option "--profile" of weft inspect' in weft.run("inspect", run, "--profile", code=2)


def check_families(weft, synthetic):
    """Every family states the least bytes of its phases."""
    (weft.folder / "text.txt").write_text(program.TEXT)
    language = weft.folder / "language.toml"
    language.write_text(LANGUAGE)

    def profiled(name, *arguments):
        weft.run(*arguments, "--output", weft.folder / name, "--profile")
        figures = program.record(weft.folder / name)["profile"]
        check_figures(figures, 9)
        return figures["bytes_per_step"]

    plain = profiled("base", "lm", "train", language)
    assert plain > 28 * MATRICES, plain
    # Clipping reads the rows of all products once more, and sums are added to once per micro-batch.
    private = profiled("private", "lm", "train", language, "--set", "privacy.epsilon=8", "--set", "privacy.delta=1e-4", "--set",
                       "privacy.noise_key=test")
    assert private > plain, (private, plain)
    language.write_text(LANGUAGE.replace("d_model = 16", 'd_model = 16\ninitial = "base"') + POLYCHROMIC)
    answers = profiled("answers", "lm", "polychromic", language)
    assert answers > 1.2 * plain, (answers, plain)
    transcoder = ("train", synthetic, "--set", "run.steps=12", "--set", "transcoder.activation=topk")
    plain = profiled("plain_transcoder", *transcoder)
    private = profiled("private_transcoder", *transcoder, "--set", "privacy.epsilon=8", "--set", "privacy.delta=1e-4", "--set",
                       "privacy.noise_key=test", "--set", "privacy.unit=token")
    assert private > plain, (private, plain)  # norms of records are formed from the same rows first


def check(weft):
    source = weft.folder / "input.toml"
    source.write_text(INPUT)
    weft.run("synth", source)
    check_training(weft, source)
    check_other_commands(weft, source)
    check_families(weft, source)


program.main(check)
