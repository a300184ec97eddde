#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time and memory of a transcoder's step as the work grows: one figure per quantity, with the limit of the machine as a line.

work_growth.py WEFT DIR [--only features layers tokens k ranks] [--largest FEATURES] [--ranks 1 2 4] [--set KEY=VALUE]...
work_growth.py --draw DIR

Runs weft benchmark for every quantity and writes DIR/NAME/benchmark.json, DIR/NAME.svg and DIR/tables.md. Sizes of GPT-2 small (12 layers,
d_model 768, 32,768 features, 16 active, 4,096 tokens per step, 8-bit state) but for the quantity that grows; features grow in 2 layers,
so that 2^20 of them fit one GPU. A case that does not fit is left out and named. --draw: figures and tables of what DIR has.
"""
import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

INPUT = Path(__file__).resolve().parent.parent / "inputs" / "benchmark_gpt2_small.toml"
AXES = {    # name: (title, key, values, settings of all cases)
    "features": ("features per layer (2 layers)", "transcoder.features", [2 ** n for n in range(10, 21)], ["benchmark.layers=2"]),
    "layers": ("layers", "benchmark.layers", [1, 2, 4, 8, 12, 16, 24], []),
    "tokens": ("tokens per step", "data.batch_tokens", [2 ** n for n in range(9, 16)], []),
    "k": ("active features per token and layer", "transcoder.k", [4, 8, 16, 32, 64, 128], []),
    "ranks": ("GPUs, or processes", None, [1, 2, 4], []),
}


def run(weft, directory, name, ranks, cases, settings):
    """benchmark.json of one call of weft benchmark, which is not repeated where it exists."""
    folder = directory / name
    command = ["mpirun", "-n", str(ranks), "--oversubscribe", "--bind-to", "none"] if ranks > 1 else []
    command += [weft, "benchmark", str(INPUT), "--output", str(folder), "--set", f"benchmark.cases={json.dumps(cases)}"]
    for setting in settings:
        command += ["--set", setting]
    if not (folder / "benchmark.json").exists():
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / f"{name}.log", "w") as log:
            code = subprocess.run(command, check=False, stdout=log, stderr=subprocess.STDOUT).returncode
        if code != 0:
            print(f"work_growth.py: {' '.join(command)} ended with code {code}; see {directory}/{name}.log", file=sys.stderr)


def points(directory, axis):
    """(value, ms, ms of the limit, bytes) of every case that was measured, in ascending order."""
    found = []
    for path in directory.glob(f"{axis}_*/benchmark.json"):
        for case in json.loads(path.read_text())["cases"]:
            limit = sum(phase["ms"] * (phase["percent_of_limit"] or 0) / 100 for phase in case["phases"])
            found.append((int(case["name"]), case["ms_per_step"], limit, case["peak_bytes"]))
    return sorted(found)


def draw(directory):
    try:
        import matplotlib
    except ImportError:
        sys.exit(f"work_growth.py: no figures ({sys.executable} has no matplotlib); draw them elsewhere with --draw {directory}")
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "weft", "font.size": 9, "text.color": "#808080", "axes.labelcolor": "#808080",
                                "axes.edgecolor": "#808080", "xtick.color": "#808080", "ytick.color": "#808080"})
    from matplotlib import pyplot
    tables = []
    for axis, (title, *_) in AXES.items():
        measured = points(directory, axis)
        if not measured:
            continue
        values, times, limits, memory = zip(*measured)
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3), layout="constrained")
        left.loglog(values, times, "o-", color="#2a7fbf", label="measured")
        left.loglog(values, limits, "--", color="#c0662a", label="limit of the machine")
        left.set(xlabel=title, ylabel="ms per step")
        left.legend(frameon=False)
        right.loglog(values, [bytes_ / 2 ** 30 for bytes_ in memory], "o-", color="#2a7fbf")
        right.set(xlabel=title, ylabel="memory of a rank, GiB")
        for panel in (left, right):
            panel.set_facecolor("none")
            panel.grid(True, which="major", alpha=0.3)
        figure.savefig(directory / f"{axis}.svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)
        tables += [f"| {title} | ms/step | limit, ms | memory, GiB |", "|---:|---:|---:|---:|"]
        tables += [f"| {value:,} | {ms:.2f} | {limit:.2f} | {bytes_ / 2 ** 30:.2f} |" for value, ms, limit, bytes_ in measured] + [""]
    (directory / "tables.md").write_text("\n".join(tables))
    print("\n".join(tables))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weft", nargs="?")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--only", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--largest", type=int, default=2 ** 20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    if not given.draw:
        if given.weft is None:
            parser.error("WEFT, the program, is needed")
        os.environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        for axis in given.only:
            _, key, values, settings = AXES[axis]
            # A call per size: what does not fit ends its own call alone.
            for value in given.ranks if axis == "ranks" else values:
                if axis == "features" and value > given.largest:
                    continue
                case = f"{value}: {key}={value}" if key else f"{value}"
                run(given.weft, given.directory, f"{axis}_{value}", value if axis == "ranks" else 1, [case],
                    ["optimizer.state=8bit", *settings, *given.set])
    draw(given.directory)


if __name__ == "__main__":
    main()
