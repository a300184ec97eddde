# SPDX-License-Identifier: Apache-2.0
"""The curves of metrics.jsonl, whatever metrics the run has: each number of a record is a point of the metric of that name, and a list
`layer_NAME` gives the extremes over layers of the metric NAME. Records are thinned while they are read, so that memory does not grow
with the length of the run."""
import math
from dataclasses import dataclass, field

from weft.text import number, parse_json

MOST_POINTS = 2048      # a few per pixel
MOST_METRICS = 64       # a record of Weft has about 15
LONGEST_LINE = 1 << 20


@dataclass
class Curve:
    """One value per point; NaN where the records of the point have none that is finite."""
    metric: str
    mean: list = field(default_factory=list)
    low: list = field(default_factory=list)     # extremes over layers and records; NaN if the metric is not by layer
    high: list = field(default_factory=list)


class Curves:
    def __init__(self):
        self.step = []              # last step of each point
        self.metrics = {}           # name -> Curve, in the order in which they first appear
        self.records = self.unreadable = self.not_finite = 0
        self.records_per_point = 1  # at most

    @property
    def last_step(self):
        return self.step[-1] if self.step else 0


def lines_of(path):
    """The complete lines of a file; a torn last one is left out. Ends at a line longer than 1 MiB."""
    try:
        with open(path, "rb") as file:
            while (line := file.readline(LONGEST_LINE)).endswith(b"\n"):
                yield line[:-1].decode("utf-8", "replace")
    except FileNotFoundError:
        return


class Summary:
    """Mean and extremes of the finite values that were added."""
    __slots__ = ("sum", "count", "low", "high")

    def __init__(self):
        self.sum, self.count, self.low, self.high = 0.0, 0, math.inf, -math.inf

    def add(self, value):
        if math.isfinite(value):
            self.sum, self.count = self.sum + value, self.count + 1
            self.low, self.high = min(self.low, value), max(self.high, value)

    def merge(self, other):
        self.sum, self.count = self.sum + other.sum, self.count + other.count
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)


class Point:
    """The records that one point summarises: {(metric, is by layer): Summary}."""

    def __init__(self):
        self.step, self.values = -math.inf, {}

    def merge(self, other):
        self.step = max(self.step, other.step)
        for key, summary in other.values.items():
            self.values.setdefault(key, Summary()).merge(summary)


def _point_of(record, step, names):
    point = Point()
    point.step = step
    for name, value in record.items():
        by_layer = isinstance(value, list) and name.startswith("layer_")
        if not by_layer and not math.isfinite(number(value)):
            continue
        metric = name[len("layer_"):] if by_layer else name
        if metric not in names and len(names) == MOST_METRICS:
            continue
        names.setdefault(metric)
        summary = point.values.setdefault((metric, by_layer), Summary())
        for one in value if by_layer else [value]:
            summary.add(number(one))
    return point


def read_curves(path):
    """Without points when the file does not exist."""
    curves, names, points, pending = Curves(), {}, [], 0
    for line in lines_of(path):
        curves.records += 1
        record = parse_json(line)
        step = number(record.get("step")) if isinstance(record, dict) else math.nan
        if not math.isfinite(step):
            curves.unreadable += 1
            continue
        if "loss" in record and not math.isfinite(number(record["loss"])):
            curves.not_finite += 1
        if pending == 0:
            points.append(Point())
        points[-1].merge(_point_of(record, step, names))
        pending = (pending + 1) % curves.records_per_point
        if pending == 0 and len(points) == MOST_POINTS:     # neighbours are merged, later points take twice as many records
            for i in range(0, MOST_POINTS, 2):
                points[i].merge(points[i + 1])
            points, curves.records_per_point = points[::2], 2 * curves.records_per_point
    curves.step = [point.step for point in points]
    nothing = Summary()
    for metric in names:
        curve = curves.metrics[metric] = Curve(metric)
        for point in points:
            value, layers = point.values.get((metric, False), nothing), point.values.get((metric, True), nothing)
            curve.mean.append(value.sum / value.count if value.count else math.nan)
            curve.low.append(layers.low if layers.count else math.nan)
            curve.high.append(layers.high if layers.count else math.nan)
    return curves
