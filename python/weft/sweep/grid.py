# SPDX-License-Identifier: Apache-2.0
"""The points of `weft sweep`: every combination of the values of its --grid options."""
import re
from collections import Counter
from dataclasses import dataclass

from weft.errors import USAGE, WeftError

MOST_POINTS = 10_000
LONGEST_NAME = 200      # bytes; file systems allow 255


@dataclass
class Point:
    name: str       # of its directory: "learning_rate=1e-3_k=8", letters, digits and "=_.+-"
    sets: list      # "table.key=value", one per axis


def _split(text):
    """At commas outside quotes and brackets."""
    parts, quote, depth = [""], "", 0
    for one in text:
        if quote:
            quote = "" if one == quote else quote
        elif one in "\"'":
            quote = one
        elif one in "[]":
            depth += 1 if one == "[" else -1
        if one == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += one
    return parts


def parse_grid(grids):
    """{"table.key": [value, …]}, each value as TOML or as a bare word (as of --set)."""
    axes = {}
    for grid in grids:
        key, equals, text = grid.partition("=")
        if not equals or not re.fullmatch(r"[^.]+\.[^.].*", key):
            raise WeftError(USAGE, f"--grid {grid}: not a key with its values; write --grid table.key=VALUE,VALUE, for example "
                            "optimizer.learning_rate=1e-3,3e-3")
        if key == "run.output":
            raise WeftError(USAGE, f"--grid {grid}: the sweep names the directory of each point (within --output); leave it out")
        if key in axes:
            raise WeftError(USAGE, f"--grid {key}: the key is given twice; give all its values in one option")
        axes[key] = _split(text)
        for value in axes[key]:
            if not value or axes[key].count(value) > 1:
                raise WeftError(USAGE, f"--grid {grid}: {f'the value {value} is repeated' if value else 'a value is empty'}; give each value once")
    return axes


def points_of(axes):
    """In the order of the options; the last axis varies fastest."""
    words = Counter(key.rpartition(".")[2] for key in axes)
    points = [Point("", [])]
    for key, values in axes.items():
        word = key.rpartition(".")[2]
        shown = word if words[word] == 1 else key       # the key without its table, unless another axis ends in the same word
        if len(points) * len(values) > MOST_POINTS:
            raise WeftError(USAGE, f"--grid: more than {MOST_POINTS} points; give fewer values")
        points = [Point(f"{point.name}{'_' if point.name else ''}{shown}={_file_name(value)}", [*point.sets, f"{key}={value}"])
                  for point in points for value in values]
    for name, count in Counter(point.name for point in points).items():
        if count > 1 or len(name) > LONGEST_NAME:
            why = "it is too long" if len(name) > LONGEST_NAME else "two points have this name"
            raise WeftError(USAGE, f"--grid: {name} cannot name a directory ({why}); write the values in another form, or set some keys in the "
                            "input")
    return points


def _file_name(text):
    return re.sub(r"[^A-Za-z0-9.+]", "-", re.sub("[\"']", "", text))
