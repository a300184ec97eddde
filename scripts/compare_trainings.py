#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares trainings of small language models: validation loss at equal tokens and at equal time, for several seeds.

compare_trainings.py WEFT {activations|growth|sparse|tuning} [--seeds 1 2 3] [--steps N] [--jobs N] [--output DIR] [--results DIR]
                     [--input FILE] [--set table.key=value ...]

activations: the activations of the MLP at equal parameters. growth: sequences that grow, and a curriculum. sparse: sparse attention
against dense at 8,192 tokens. tuning: the learning rate of the input, and that which optimizer.tuning finds from a tenth of it. The time of a step is measured first and alone, by weft benchmark, for each length of the sequences; then
the runs train, --jobs at a time. Equal time: the time in which the fastest variant trains all steps; losses between two evaluations are
interpolated. Writes RESULTS/NAME.json, from which scripts/experiments.py makes docs/experiments.md. Runs that are complete in DIR are
not repeated. On one H200 each takes less than 200 s.
"""
import argparse
import concurrent.futures
import json
import re
import subprocess
import sys
from pathlib import Path

SPARSE = ["data.sequence=8192", "language_model.position=rope"]
GROWTH = ["data.sequence=2048", "language_model.position=rope"]
GROWING = ["data.sequence_start=128", "data.sequence_growth_steps={half}"]
CURRICULUM = ["data.order=curriculum", "data.curriculum_steps={half}"]
TENTH = ["optimizer.learning_rate=1e-4"]  # of that of inputs/lm_parity_gpt.toml
# Name -> steps, settings of all variants, those of each. {half}: half of the steps.
COMPARISONS = {
    "activations": (1000, ["language_model.bias=false"], {
        "GELU": ["language_model.mlp=gelu", "language_model.d_mlp=1536"],
        "ReLU²": ["language_model.mlp=relu2", "language_model.d_mlp=1536"],
        "SwiGLU": ["language_model.mlp=swiglu", "language_model.d_mlp=1024"],
        "GEGLU": ["language_model.mlp=geglu", "language_model.d_mlp=1024"]}),
    "growth": (1000, GROWTH, {
        "full length, random windows": [],
        "growing from 128": GROWING,
        "curriculum": CURRICULUM,
        "growing and curriculum": GROWING + CURRICULUM}),
    "sparse": (600, SPARSE, {
        "dense": [],
        "sparse: 4 local and 4 chosen blocks of 64 keys": ["language_model.sparse_local=4", "language_model.sparse_blocks=4"]}),
    "tuning": (1000, [], {
        "rate of the input": [],
        "a tenth of it": TENTH,
        "a tenth, range test": [*TENTH, "optimizer.tuning=range"],
        "a tenth, greedy": [*TENTH, "optimizer.tuning=greedy"],
        "rate of the input, plateau": ["optimizer.tuning=plateau"]}),
}
EVALUATIONS = 20
NOT_OF_A_STEP = ("data.sequence", "data.order", "data.curriculum", "optimizer.tuning=range")  # settings that a benchmark of one length leaves out


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weft")
    parser.add_argument("comparison", choices=COMPARISONS)
    parser.add_argument("--input", default="inputs/lm_parity_gpt.toml")
    parser.add_argument("--steps", type=int, help="a multiple of 40")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=4, help="runs at the same time")
    parser.add_argument("--output", type=Path, default=Path("runs/compared"))
    parser.add_argument("--results", type=Path, default=Path("docs/experiments"))
    parser.add_argument("--set", action="append", default=[], metavar="table.key=value")
    return parser.parse_args()


def run(command, settings):
    words = [*map(str, command), *(word for setting in settings for word in ("--set", setting))]
    done = subprocess.run(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\n{' '.join(words)} ended with {done.returncode}")


def train(options, common, name, settings, longest, seed):
    """[(step, length of sequences, validation loss or None)] of a run. longest: of its sequences."""
    folder = options.output / options.comparison / f"{re.sub(r'[^a-z0-9]+', '_', name.split(':')[0].lower())}_{seed}"
    every = max(1, options.steps // (2 * EVALUATIONS))  # lengths change at multiples of an eighth of the steps
    run([options.weft, "lm", "train", options.input, "--output", folder],
        [*common, *settings, f"run.steps={options.steps}", f"run.seed={seed}", f"log.every={every}", f"log.evaluate_every={2 * every}",
         "log.sample_tokens=0", *options.set])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    points = [(line["step"], line.get("sequence", longest), line.get("validation.loss")) for line in lines]
    if points[-1][0] != options.steps or points[-1][2] is None:
        sys.exit(f"{folder}: the last step has no validation loss (the input needs data.validation or data.validation_fraction)")
    return points


def milliseconds(options, common, variants, lengths):
    """{variant: {length: ms per step}} of steps alone on the machine, and the record of the measurement."""
    cases = {f"{i} {length}": (name, length) for i, name in enumerate(variants) for length in lengths[name]}
    texts = []
    for case, (name, length) in cases.items():
        settings = [each for each in [*common, *variants[name]] if not each.startswith(NOT_OF_A_STEP)]
        texts.append(f"{case}: {', '.join([*settings, f'data.sequence={length}'])}")
    folder = options.output / options.comparison / "benchmark"
    run([options.weft, "benchmark", options.input, "--output", folder],
        ["benchmark.vocabulary=64", "benchmark.warmup=5", "benchmark.steps=20", *options.set, f"benchmark.cases={json.dumps(texts)}"])
    result = json.loads((folder / "benchmark.json").read_text())
    if result["not_measured"]:
        sys.exit(f"{folder}: {result['not_measured'][0]['reason']}")
    measured = {name: {} for name in variants}
    for case in result["cases"]:
        name, length = cases[case["name"]]
        measured[name][length] = case["ms_per_step"]
    return measured, result


def curve(points, ms):
    """[(seconds, validation loss)] of a run, without the time of its evaluations."""
    seconds, step, found = 0.0, 0, []
    for end, length, loss in points:
        seconds += (end - step) * ms[length] / 1000
        step = end
        if loss is not None:
            found.append((seconds, loss))
    return found


def at_time(points, seconds):
    """The loss at a time between two evaluations."""
    for (t0, loss0), (t1, loss1) in zip(points, points[1:]):
        if seconds <= t1:
            return loss0 + (loss1 - loss0) * max(0.0, seconds - t0) / (t1 - t0)
    return points[-1][1]


def lengths_of(common, settings):
    """Lengths of the sequences of a variant, in tokens."""
    keys = dict(each.split("=") for each in [*common, *settings])
    longest = int(keys.get("data.sequence", 256))
    length, all_of_them = int(keys.get("data.sequence_start", longest)), []
    while length <= longest:
        all_of_them.append(length)
        length *= 2
    return all_of_them


def main():
    options = arguments()
    steps, common, variants = COMPARISONS[options.comparison]
    options.steps = options.steps or steps
    variants = {name: [each.format(half=options.steps // 2) for each in settings] for name, settings in variants.items()}
    overrides = [each for each in options.set if each.startswith("data.sequence=")]
    lengths = {name: lengths_of([*common, *overrides], settings) for name, settings in variants.items()}
    ms, record = milliseconds(options, common, variants, lengths)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        trained = {(name, seed): pool.submit(train, options, common, name, settings, lengths[name][-1], seed)
                   for name, settings in variants.items() for seed in options.seeds}
        curves = {key: curve(future.result(), ms[key[0]]) for key, future in trained.items()}
    end = min(points[-1][0] for points in curves.values())
    result = {"comparison": options.comparison, "input": options.input, "steps": options.steps, "seeds": options.seeds,
              "settings": [*common, *options.set], "seconds": end, "machine": record["machine"], "build": record["build"],
              "variants": [{"name": name, "settings": variants[name], "ms_per_step": ms[name],
                            "loss_at_equal_tokens": [curves[name, seed][-1][1] for seed in options.seeds],
                            "loss_at_equal_time": [at_time(curves[name, seed], end) for seed in options.seeds]} for name in variants]}
    options.results.mkdir(parents=True, exist_ok=True)
    file = options.results / f"{options.comparison}.json"
    file.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(f"{file}: written")


if __name__ == "__main__":
    main()
