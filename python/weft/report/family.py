# SPDX-License-Identifier: Apache-2.0
"""What a model family adds to the pages, and how curves are drawn."""
from dataclasses import dataclass, field
from typing import Callable

MOST_ROWS = 64      # of a table or bar chart


@dataclass
class CurveStyle:
    """How the curve of a metric is drawn."""
    metric: str                 # its name in metrics.jsonl
    title: str
    y_label: str
    caption: str
    line_name: str = ""         # legend; with a band over the layers of the metric
    band_name: str = ""
    factor: float = 1           # values are drawn times this
    from_zero: bool = False     # the y axis begins at 0
    skip_if_zero: bool = False  # not drawn when all values are 0 (not recorded)
    level: float = -1           # a horizontal line; < 0: none
    level_name: str = ""


@dataclass
class FamilyPart:
    about: str = ""                                 # one line: model, data, size, rate
    curves: list = field(default_factory=list)      # drawn first; other metrics follow
    tiles: list = field(default_factory=list)       # after those of the run
    sections: list = field(default_factory=list)    # between the training curves and the time by phase


@dataclass
class Family:
    table: str          # the table of the input (run.json, `input`) that marks its runs
    name: str           # "transcoders"
    part: Callable      # RunFacts, with sections or without -> FamilyPart
    results: list       # (name, path in `result`) by which runs are compared; smaller is better in the first one that any run has


# Metrics that every model has.
COMMON_CURVES = [
    CurveStyle("loss", "Training loss", "loss", "Of the logged step."),
    CurveStyle("learning_rate", "Learning rate", "learning rate", "Of the logged step.", from_zero=True),
    CurveStyle("gradient_norm", "Gradient norm", "norm", "Global norm of the logged step, before clipping.", skip_if_zero=True),
    CurveStyle("tokens_per_second", "Speed", "tokens per second", "All ranks together, since the previous logged step.", from_zero=True)]

# Numbers of a record that locate the step; they do not measure training.
NOT_DRAWN = {"step", "tokens", "epoch", "seconds", "data_wait_seconds", "skipped_steps"}


def styles_of(curves, of_family):
    """The styles of the family, the common ones, and one for each other metric of the curves."""
    styles = {style.metric: style for style in of_family}
    for style in COMMON_CURVES:
        styles.setdefault(style.metric, style)
    for metric in curves.metrics:
        if metric in styles or metric in NOT_DRAWN:
            continue
        group, dot, name = metric.replace("_", " ").rpartition(".")     # "answers.empty_fraction" is titled "Answers: empty fraction"
        title = f"{group}: {name}" if dot else name
        styles[metric] = CurveStyle(metric, title[:1].upper() + title[1:], name, "As logged.", "mean over layers", "lowest to highest layer")
    return list(styles.values())
