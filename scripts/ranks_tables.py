# SPDX-License-Identifier: Apache-2.0
"""Tables of the results of scripts/benchmark_ranks.sh and benchmark_several.sh: scaling of a step over ranks, and the cost of each exchange.

ranks_tables.py FOLDER      reads FOLDER/*/benchmark.json; writes Markdown to standard output
"""
import json
import sys
from pathlib import Path


def number(value, digits=1):
    return "-" if value is None else f"{value:,.{digits}f}"


def row(*cells):
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def head(*titles, texts=1):
    return row(*titles) + "\n|" + "|".join("---" if i < texts else "---:" for i in range(len(titles))) + "|"


def read(folder):
    """(case's name, ranks, grid, the case) of every run, by case and number of ranks. A grid is "data x feature" or "data x tensor"."""
    found = []
    for path in sorted(Path(folder).glob("*/benchmark.json")):
        result = json.loads(path.read_text())
        for case in result["cases"]:
            grid = case["grid"]
            found.append((case["name"], result["ranks"], f"{grid['data']} x {grid.get('feature', grid.get('tensor'))}", case))
    order = list(dict.fromkeys(base(name) for name, *_ in found))
    return sorted(found, key=lambda one: (order.index(base(one[0])), one[1], one[2]))


def base(name):
    """A name without "[…]", by which cases differ that are compared with the same run on the fewest ranks."""
    return name.split(" [")[0]


def main():
    runs = read(sys.argv[1])
    if not runs:
        sys.exit(f"{sys.argv[1]}: no benchmark.json in its subfolders")
    first = {}      # per case: the run on the fewest ranks, the reference of the others
    for name, ranks, _, case in runs:
        first.setdefault(base(name), (ranks, case["tokens_per_second"]))

    print(head("case", "ranks", "data x feature or tensor", "ms/step", "tokens/s", "speed-up", "efficiency", "exchanges, ms", "exposed, ms",
               "shortest wait of a rank, ms", "exposed, % of exchanges", "exposed, % of step", "required reading rate, GB/s", texts=3))
    for name, ranks, grid, case in runs:
        of_ranks, of_tokens = first[base(name)]
        speed_up = case["tokens_per_second"] / of_tokens
        exchange = case.get("communication", {"ms": 0.0, "exposed_ms": 0.0})
        ms, exposed = exchange["ms"], exchange["exposed_ms"]
        share = None if exposed is None or not ms else 100 * exposed / ms
        print(row(name, ranks, grid, number(case["ms_per_step"]), number(case["tokens_per_second"], 0),
                  number(speed_up, 2) + ("" if of_ranks == 1 else f" (of {of_ranks})"),
                  f"{100 * speed_up * of_ranks / ranks:.0f} %", number(ms, 2), number(exposed, 2),
                  number(exchange.get("exposed_least_ms"), 2), number(share, 0),
                  number(None if exposed is None else 100 * exposed / case["ms_per_step"]),
                  number(1e-9 * case["tokens_per_second"] * case["row_bytes"])))

    print("\nEach kind of exchange measured alone, per rank and step (bus bandwidth as in nccl-tests):\n")
    print(head("case", "data x feature or tensor", "exchange", "calls", "MB sent", "ms", "GB/s", texts=3))
    for name, _, grid, case in runs:
        for one in case.get("communication", {}).get("exchanges", []):
            print(row(name, grid, one["name"], number(one["calls_per_step"]),
                      number(1e-6 * one["bytes_per_step"], 2), number(one["ms"], 3), number(one["gb_per_second"])))


main()
