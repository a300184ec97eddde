# SPDX-License-Identifier: Apache-2.0
"""Several runs of one model family side by side: the settings in which they differ, their results, best first, and their curves in
common charts. For `weft report RUN RUN …` and at the end of `weft sweep`."""
import csv
import io
import math
from dataclasses import dataclass
from os.path import normpath
from pathlib import Path

from weft import charts
from weft.errors import USAGE, WeftError
from weft.page import Page, Section
from weft.report.facts import RunFacts, result_of
from weft.report.families import family_of
from weft.report.family import styles_of
from weft.text import member, short_number, text_of

MOST_KEYS = 24      # columns of settings
# Results that runs of every family have.
COMMON_RESULTS = [("epsilon", ("privacy", "epsilon")), ("steps", ("step",)), ("tokens", ("tokens",)),
                  ("tokens per second", ("tokens_per_second",))]


@dataclass
class ComparedRun:
    facts: RunFacts
    name: str           # the path without what all paths have in common
    settings: dict      # of the compared keys; "" where the run has no such key
    results: list       # NaN: none


@dataclass
class Comparison:
    family: object
    keys: list          # of the input, "table.key": those that differ between runs
    results: list       # names, those that any run has
    ranked: bool        # the first result is a loss or an error: smaller is better
    runs: list          # if ranked by the first result, runs without it last; then by name


def _settings_of(facts):
    """"table.key" -> value, of all tables of the input but for the directory of the run."""
    tables = facts.of("input")
    settings = {f"{table}.{key}": text_of(value) for table, keys in tables.items() if isinstance(keys, dict) for key, value in keys.items()}
    settings.pop("run.output", None)
    return settings


def _names_of(runs):
    """The paths without the components that all of them begin with; of the same path, the path and a number."""
    parts = [Path(normpath(run.path)).parts for run in runs]
    common = 0
    while all(len(own) > common + 1 and own[common] == parts[0][common] for own in parts):
        common += 1
    names = []
    for i, own in enumerate(parts):
        name = "/".join(own[common:]) or str(runs[i].path)
        names.append(f"{name} ({i + 1})" if name in names else name)
    return names


def compare(runs):
    """Raises WeftError if runs belong to different families, whose losses measure different things, or to none."""
    families = [family_of(run) for run in runs]
    for run, family in zip(runs, families):
        if family is None:
            raise WeftError(USAGE, f"{run.path}: cannot be compared (its run.json has no input: it ended before it was accepted); leave it out")
        if family is not families[0]:
            raise WeftError(USAGE, f"{runs[0].path} and {run.path} cannot be compared (one of {families[0].name}, one of {family.name}: their "
                            "losses measure different things); give runs of one kind")
    family = families[0]
    settings = [_settings_of(run) for run in runs]
    keys = sorted(key for key in set().union(*settings) if len({own.get(key, "") for own in settings}) > 1)
    columns = [(name, path) for name, path in [*family.results, *COMMON_RESULTS] if any(math.isfinite(result_of(run, path)) for run in runs)]
    ranked = bool(columns) and columns[0] in family.results
    compared = []
    for run, name, own in zip(runs, _names_of(runs), settings):
        compared.append(ComparedRun(run, name, {key: own.get(key, "") for key in keys}, [result_of(run, path) for _, path in columns]))
        later = [column for column, path in columns
                 if path[0] != "replacement" and not math.isfinite(run.number("result", *path)) and math.isfinite(result_of(run, path))]
        if later:       # results of `weft evaluate` can be of any data
            run.notes.append(f"{', '.join(later)}: of evaluation.json, on {text_of(member(run.evaluation, 'data'))}")

    def order(run):
        known = ranked and math.isfinite(run.results[0])
        return not known, run.results[0] if known else 0, run.name

    return Comparison(family, keys, [name for name, _ in columns], ranked, sorted(compared, key=order))


def _table(comparison):
    """Head and rows: name, settings, results, state."""
    keys = comparison.keys[:MOST_KEYS]
    rows = [[run.name, *(run.settings[key] or "-" for key in keys),
             *(short_number(value) if math.isfinite(value) else "-" for value in run.results), run.facts.state] for run in comparison.runs]
    return ["run", *keys, *comparison.results, "state"], rows


def _table_section(comparison):
    section = Section("Settings and results")
    section.paragraph("No run has a result yet." if not comparison.results else f"Sorted by {comparison.results[0]}." if comparison.ranked
                      else "No run has a validation or training loss: sorted by name.")
    if not comparison.keys:
        section.paragraph("The inputs are the same, but for the directory.", "state")
    elif len(comparison.keys) > MOST_KEYS:
        section.paragraph(f"The first {MOST_KEYS} of {len(comparison.keys)} settings that differ are shown.", "state")
    section.table(*_table(comparison), 1)
    return section


def _sparsity_section(comparison):
    """Errors are comparable at equal L0 only: a point for each run. Absent if fewer than two runs have an L0."""
    if "L0" not in comparison.results or comparison.results[0] == "L0":
        return []
    section, at = Section("Against L0"), comparison.results.index("L0")
    section.begin_columns()
    drawn = False
    for name in (comparison.results[0], "loss recovered"):
        if name not in comparison.results:
            continue
        place = comparison.results.index(name)
        points = [(run.name, [run.results[at]], [run.results[place]]) for run in comparison.runs
                  if math.isfinite(run.results[at]) and math.isfinite(run.results[place])]
        if len(points) > 1:
            drawn = True
            section.figure(name, charts.overlay("L0", name, points), "A point for each run: of two with the same L0 the "
                           f"{'higher' if name == 'loss recovered' else 'lower'} is the better.")
    section.end_columns()
    return [section] if drawn else []


def _curves_section(comparison, parts):
    section, styles = Section("Curves"), {}
    for run, part in zip(comparison.runs, parts):       # all metrics that any of the runs has, in the order of its page
        for style in styles_of(run.facts.curves, part.curves):
            styles.setdefault(style.metric, style)
    section.begin_columns()
    any_drawn = False
    for style in styles.values():
        lines, drawn = [], False
        for run in comparison.runs:
            curve = run.facts.curves.metrics.get(style.metric)
            values = [style.factor * value for value in curve.mean] if curve else []
            drawn = drawn or any(math.isfinite(value) and (not style.skip_if_zero or value > 0) for value in values)
            lines.append((run.name, run.facts.curves.step if curve else [], values))
        if drawn:
            any_drawn = True
            section.figure(style.title, charts.overlay("step", style.y_label, lines, style.from_zero), style.caption)
    section.end_columns()
    if not any_drawn:
        section.paragraph("No curves: the runs have no records in metrics.jsonl.", "missing")
    elif len(comparison.runs) > len(charts.PALETTE):
        section.paragraph(f"The {len(charts.PALETTE)} best of {len(comparison.runs)} runs are drawn.", "state")
    return section


def comparison_page(comparison):
    """One self-contained page."""
    parts = [comparison.family.part(run.facts, with_sections=False) for run in comparison.runs]
    best, keys = comparison.runs[0], comparison.keys
    finished = sum(run.facts.state == "finished" for run in comparison.runs)
    page = Page(f"{len(comparison.runs)} {comparison.family.name}", source="from the files of the run directories",
                state=f"{finished} of {len(comparison.runs)} finished.")
    if keys:
        page.subtitle = f"differ in {', '.join(keys[:6])}{', …' if len(keys) > 6 else ''}"
    if comparison.ranked and math.isfinite(best.results[0]):
        page.tiles = [(best.name, "best run"), (short_number(best.results[0]), comparison.results[0])]
    page.notes = [f"{run.name}: {note}" for run in comparison.runs for note in run.facts.notes]
    runs = Section("Runs")
    runs.table(["run", "directory", "what"], [[run.name, str(run.facts.path), part.about] for run, part in zip(comparison.runs, parts)], 3)
    page.sections = [_table_section(comparison), *_sparsity_section(comparison), _curves_section(comparison, parts), runs]
    return page.html()


def to_text(comparison):
    """A table of fixed columns."""
    head, rows = _table(comparison)
    rows.insert(0, head)
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    last = len(head) - 1
    return "\n".join("  ".join(cell.ljust(width) if i in (0, last) else cell.rjust(width)
                               for i, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in rows)


def to_csv(comparison):
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["run", "path", *comparison.keys, *comparison.results, "state"])
    for run in comparison.runs:
        writer.writerow([run.name, run.facts.path, *run.settings.values(),
                         *(f"{value:.9g}" if math.isfinite(value) else "" for value in run.results), run.facts.state])
    return out.getvalue()


def to_json(comparison):
    """{"family", "sorted_by", "runs": [{"name", "path", "state", "exit_code", "settings": {key: value}, "results": {…}}]}"""
    return {"family": comparison.family.table, "sorted_by": comparison.results[0] if comparison.ranked else None,
            "runs": [{"name": run.name, "path": str(run.facts.path), "state": run.facts.state, "exit_code": run.facts.of("exit", "code"),
                      "settings": {key: run.facts.of("input", *key.split(".", 1)) for key in comparison.keys},
                      "results": {name: value if math.isfinite(value) else None for name, value in zip(comparison.results, run.results)}}
                     for run in comparison.runs]}
