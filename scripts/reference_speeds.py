#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adds the speeds of a benchmark.json to docs/reference_speeds.json, which weft benchmark --compare reads.

reference_speeds.py BENCHMARK_JSON... [--source TEXT] [--date YYYY-MM-DD] [--file docs/reference_speeds.json]

Cases of the same GPU type, input, name and number of ranks are replaced; others stay.
"""
import argparse
import datetime
import json
import sys
from pathlib import Path


def text_of(speeds):
    """JSON with one line per case."""
    gpus = []
    for gpu, inputs in speeds["gpus"].items():
        blocks = []
        for name, cases in inputs.items():
            lines = ",\n".join("    " + json.dumps(case, ensure_ascii=False) for case in cases)
            blocks.append(f"   {json.dumps(name)}: [\n{lines}\n   ]")
        gpus.append(f"  {json.dumps(gpu)}: {{\n" + ",\n".join(blocks) + "\n  }")
    return f'{{\n "note": {json.dumps(speeds["note"], ensure_ascii=False)},\n "gpus": {{\n' + ",\n".join(gpus) + "\n }\n}\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--source", default="weft benchmark")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--file", type=Path, default=Path("docs/reference_speeds.json"))
    options = parser.parse_args()
    speeds = json.loads(options.file.read_text())
    for path in options.results:
        result = json.loads(path.read_text())
        gpu = result["machine"].get("gpu")
        if not gpu:
            sys.exit(f"{path}: measured without a GPU (reference speeds are those of a type of GPU)")
        known = speeds["gpus"].setdefault(gpu, {}).setdefault(result["input"], [])
        for case in result["cases"]:
            known[:] = [one for one in known if (one["name"], one["ranks"]) != (case["name"], result["ranks"])]
            known.append({"name": case["name"], "ranks": result["ranks"], "ms_per_step": round(case["ms_per_step"], 3),
                          "tokens_per_second": round(case["tokens_per_second"], 1), "source": options.source, "date": options.date,
                          "commit": result["build"]["revision"][:12]})
    options.file.write_text(text_of(speeds))


if __name__ == "__main__":
    main()
