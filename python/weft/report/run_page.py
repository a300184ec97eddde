# SPDX-License-Identifier: Apache-2.0
"""The page of one run: sections that every run has, and those of the model family. Missing information is stated in its place."""
import math

from weft import charts, checkpoints
from weft.page import Page, Section
from weft.report.families import family_of
from weft.report.family import MOST_ROWS, FamilyPart, styles_of
from weft.text import (binary_bytes, decimal_bytes, duration, is_finite, member, number, percent, plural, short_number, text_of, whole)

MOST_STARTS_DRAWN, MOST_RESTARTS_MARKED, MOST_CASES = 24, 100, 8


def _training_section(facts, family):
    section, curves = Section("Training"), facts.curves
    if not curves.step:
        section.paragraph("No curves: metrics.jsonl is missing or has no records (the run ended before its first logged step).", "missing")
        return section
    restarts = sorted({start.begin for start in facts.starts[1:]} - {0})[-MOST_RESTARTS_MARKED:]
    section.begin_columns()
    for style in styles_of(curves, family.curves):
        curve = curves.metrics.get(style.metric)
        if curve is None or not any(map(math.isfinite, curve.mean)) or (style.skip_if_zero and not any(value > 0 for value in curve.mean)):
            continue
        x, y, low, high = curves.step, [style.factor * value for value in curve.mean], [], []
        with_band = style.band_name and any(map(math.isfinite, curve.low))
        if with_band:
            low, high = ([style.factor * value for value in values] for values in (curve.low, curve.high))
        if "." in style.metric and not with_band:   # metrics of a group are in some records only: points without a value are no gaps
            x, y = zip(*((at, value) for at, value in zip(x, y) if math.isfinite(value)))
        section.figure(style.title, charts.line_chart(
            "step", style.y_label, list(x), list(y), style.line_name if with_band or style.level >= 0 else "", low, high,
            style.band_name, restarts, "restart", style.level, style.level_name, style.from_zero), style.caption)
    section.end_columns()
    if curves.records_per_point > 1:
        section.paragraph(f"The {whole(curves.records)} records are drawn as means of up to {curves.records_per_point} neighbours.")
    if curves.not_finite:
        section.paragraph(f"{plural(curves.not_finite, 'logged step')} had a loss that is not finite; curves break there.", "bad")
    return section


def _phases(section, facts):
    timings = facts.of("timings")
    if not isinstance(timings, dict) or not timings:
        section.paragraph("No timings were recorded: the run ended before its steps did.", "missing")
        return
    means = {name: number(member(phase, "mean")) for name, phase in timings.items()}
    total = sum(mean for mean in means.values() if mean > 0)
    several = facts.number("ranks") > 1
    bars = []
    for name, mean in sorted(means.items(), key=lambda one: -one[1] if one[1] >= 0 else 0):
        if mean >= 0 and len(bars) < MOST_ROWS:
            bars.append({"name": name, "value": mean, "text": f"{short_number(mean)} s, {percent(mean / total if total > 0 else 0)}"})
            if several:
                bars[-1].update(low=number(member(timings[name], "min")), high=number(member(timings[name], "max")))
    seconds = facts.number("seconds")
    more = ("The benchmark compares the phases of a step with the hardware's limits." if facts.benchmark else
            "weft benchmark INPUT --output RUN adds a comparison with the hardware's limits.")
    of_program = f" of the program's {short_number(seconds)} s" if math.isfinite(seconds) else ""
    section.figure("Phases of the step", charts.horizontal_bars(
        "seconds, mean over ranks", bars, whisker_name="fastest to slowest rank, mean at the end of the bar" if several else ""),
        f"Steps of the last start: {short_number(total)} s{of_program}. {more}")


def benchmark_figures(section, benchmark):
    """Each case of benchmark.json against the hardware's limits, and all of them side by side."""
    cases, machine = member(benchmark, "cases"), member(benchmark, "machine")
    cases = [one for one in cases[:MOST_CASES] if isinstance(member(one, "phases"), list)] if isinstance(cases, list) else []
    stacked = []
    for case in cases:
        bars, parts = [], []
        name, total = text_of(case.get("name")), number(case.get("ms_per_step"))
        for phase in case["phases"]:
            ms, share = number(member(phase, "ms")), number(member(phase, "percent_of_limit"))
            if not ms >= 0 or len(bars) == MOST_ROWS:
                continue
            bars.append({"name": text_of(member(phase, "name")), "value": ms, "text": f"{short_number(ms)} ms"})
            note = f"{bars[-1]['name']}: {short_number(ms)} ms"
            if total > 0:
                note += f", {100 * ms / total:.1f} %"
            if share >= 0:
                bars[-1].update(limit=ms * share / 100, text=f"{short_number(ms)} ms; {short_number(share)} % of limit")
                note += f", {short_number(share)} % of the limit"
            parts.append((bars[-1]["name"], ms, note))
        section.figure(f"Benchmark, case {name}", charts.horizontal_bars("ms/step, median", bars, "time at the hardware's limit"),
                       f"{short_number(total)} ms/step, {whole(number(case.get('tokens_per_second')))} tokens/s on batches in memory. Limits: "
                       f"memory copy {short_number(number(member(machine, 'copy_gb_per_second')))} GB/s, encoder product "
                       f"{short_number(number(member(machine, 'gemm_gflops')))} GFLOP/s.")
        if total > 0:
            stacked.append((name, total, f"{total:.1f} ms", parts))
    if len(stacked) > 1:
        section.figure("Benchmark, phases of all cases", charts.stacked_bars("ms/step", stacked),
                       "Upper bar: milliseconds on a common scale; lower bar: share of the step.")


def _profile(section, facts):
    """The figures of --profile."""
    def of(key):
        return facts.number("profile", key)

    rows = [("time per step", of("ms_per_step"), lambda value: f"{short_number(value)} ms"),
            ("device memory, peak", of("device_peak_bytes"), lambda value: binary_bytes(min(max(value, 0), 1e18))),
            ("utilisation", of("utilisation_percent"), lambda value: f"{short_number(value)} %"),
            ("kernel time per step", of("kernel_ms_per_step"), lambda value: f"{short_number(value)} ms"),
            ("memory bandwidth, of the measured limit", of("bandwidth_percent_of_limit"), lambda value: f"{short_number(value)} %")]
    rows = [(name, shown(value)) for name, value, shown in rows if math.isfinite(value)]
    if rows:
        section.begin_block()
        section.table(["profile", ""], rows, 1)
        section.paragraph("From the traced steps of --profile; profile.json shows them in Perfetto.", "state")
        section.end_block()


def _time_section(facts):
    section = Section("Time")
    section.begin_columns()
    _phases(section, facts)
    _profile(section, facts)
    benchmark_figures(section, facts.benchmark)
    section.end_columns()
    return section


def _spans(facts, first):
    """Drawn spans of the starts from index `first` on."""
    running = facts.state.startswith("running")
    spans = []
    for i, start in enumerate(facts.starts[first:], first):
        newest = i + 1 == len(facts.starts)
        # The step of an abnormal end is not recorded; it is at least the step from which the next start resumed.
        end = start.end if start.end >= 0 else max(start.begin, facts.curves.last_step if newest else facts.starts[i + 1].begin)
        how = "" if start.end >= 0 else ", not ended yet" if newest and running else " at least, ended without an orderly stop"
        spans.append((f"start {i + 1}", start.begin, end, start.end >= 0 or (newest and running),
                      f"start {i + 1}: from step {whole(start.begin)} to step {whole(end)}{how}"))
    return spans


def _changes(section, facts):
    """Settings that a restart changed, with the step from which they apply."""
    rows, last = [], None
    for i, start in enumerate(facts.starts):
        # A start that died before its first checkpoint is followed by one with the same change.
        if start.changed is None or (last == start.changed and start.begin == facts.starts[i - 1].begin):
            continue
        last = start.changed
        rows += [[key, text_of(values[0]), text_of(values[1]), whole(start.begin), str(i + 1)] for key, values in last.items()
                 if isinstance(values, list) and len(values) == 2]
    if rows:
        section.paragraph("Settings that changed when the run was started again:")
        section.table(["setting", "before", "after", "from step", "start"], rows[:MOST_ROWS], 3)


def _starts_section(facts):
    section = Section("Starts and checkpoints")
    first = max(0, len(facts.starts) - MOST_STARTS_DRAWN)
    planned, spans = facts.number("input", "run", "steps"), _spans(facts, first)
    points = [fact.step for fact in facts.checkpoints if fact.manifest]
    section.begin_columns()
    if not spans and not points:
        section.paragraph("No starts and no checkpoints were recorded.", "missing")
    else:
        drawn = f" (the last {MOST_STARTS_DRAWN} are drawn)" if first else ""
        section.figure("Course of the run", charts.time_line(
            "step", max(planned if math.isfinite(planned) else 0, facts.curves.last_step), spans, points, "checkpoints kept"),
            f"{plural(len(facts.starts), 'start')}{drawn}; a cross is a start that ended without an orderly stop (killed, or an error). "
            f"{plural(facts.checkpoints_kept, 'checkpoint')} kept.")
    rows = [[checkpoints.directory_name(fact.step), fact.written, fact.manifest.grid_text if fact.manifest else "-",
             decimal_bytes(fact.manifest.bytes) if fact.manifest else "-", fact.problem or "manifest valid"] for fact in facts.checkpoints]
    if rows:
        section.table(["checkpoint", "written (UTC)", "grid", "bytes", "state"], rows, 5)
    else:
        section.paragraph("The run has no checkpoint.", "missing")
    section.end_columns()
    _changes(section, facts)
    return section


def _environment_section(facts):
    section = Section("Environment")
    rows = [("directory", str(facts.path)), *((name, facts.text(name)) for name in ("command", "started", "ended"))]
    build = facts.of("build")
    if isinstance(build, dict):
        cuda = text_of(build.get("cuda"))
        rows.append(("program", f"weft {text_of(build.get('version'))}, revision {text_of(build.get('revision'))}"
                     f"{' (modified)' if build.get('modified') is True else ''}, {text_of(build.get('compiler'))}, "
                     f"{text_of(build.get('build_type'))}{f', CUDA {cuda}' if cuda else ''}"))
    libraries = facts.of("libraries")
    if isinstance(libraries, dict):
        rows += [(name, text_of(version)) for name, version in libraries.items()][:MOST_ROWS]
    for name, value in (("host memory, peak", facts.number("host_peak_bytes")), ("device memory, peak", facts.number("device", "peak_bytes"))):
        if value > 0:
            rows.append((name, binary_bytes(min(value, 1e18))))
    section.table([], [row for row in rows if row[1]], 2)
    hosts = facts.of("hosts")
    if not isinstance(hosts, list) or not hosts:
        section.paragraph("Hosts and devices were not recorded.", "missing")
        return section
    rows = []
    for host in hosts[:MOST_ROWS]:
        ranks = member(host, "ranks")
        shown = text_of(ranks) if isinstance(ranks, list) and len(ranks) <= 16 else f"{len(ranks) if isinstance(ranks, list) else 1} ranks"
        rows.append([text_of(member(host, "host")), text_of(member(host, "device")), shown])
    if len(hosts) > MOST_ROWS:
        rows.append([f"… and {len(hosts) - MOST_ROWS} more", "", ""])
    section.table(["host", "device", "ranks"], rows, 3)
    return section


def _input_section(facts):
    section = Section("Input")
    tables = facts.of("input")
    if facts.input:
        section.paragraph("Every key as the run used it (input.toml).")
        section.listing(facts.input, columns=True)
    elif isinstance(tables, dict):
        section.paragraph("Every key, from run.json (input.toml is missing: the run ended before it began to train).")
        lines = [f"[{table}]\n" + "".join(f"{key} = {text_of(value)}\n" for key, value in keys.items()) if isinstance(keys, dict)
                 else f"{table} = {text_of(keys)}\n" for table, keys in tables.items()]
        section.listing("\n".join(lines), columns=True)
    else:
        section.paragraph("The input was not recorded: the run ended before it was accepted.", "missing")
    return section


def _describe_end(facts, page):
    code = facts.of("exit", "code")
    if facts.state.startswith("running"):
        page.state = "The record says that the run is still active (or was killed without a record)."
    elif code == 0:
        page.state = "Finished."
    else:
        step = facts.number("exit", "step")
        page.state = f"Ended with exit code {short_number(number(code))}"
        page.state_detail = f"{f' in step {whole(step)}' if math.isfinite(step) else ''}: {facts.text('exit', 'reason')}"
        page.state_is_bad = code != 75 and not code > 128       # those are stops on request, resumable


def _tiles(facts):
    reached, planned = facts.number("result", "step"), facts.number("input", "run", "steps")
    tiles = [(whole(reached if is_finite(reached) else facts.curves.last_step), f"of {whole(planned)} steps" if is_finite(planned) else "steps")]
    for names, shown, name in ((("result", "tokens"), whole, "training tokens"), (("result", "tokens_per_second"), short_number, "tokens per second"),
                               (("seconds",), duration, "h:mm:ss, last start")):
        if math.isfinite(value := facts.number(*names)):
            tiles.append((shown(value), name))
    return [*tiles, (whole(facts.number("ranks")), "ranks")]


def _links_section(pages):
    if not pages:
        return []
    section = Section("Other pages of the run")
    section.links(pages)
    return [section]


def run_page(facts, pages=()):
    """One self-contained HTML document. pages: [(name, address)] of others that it leads to."""
    family = family_of(facts)
    part = family.part(facts) if family else FamilyPart()
    page = Page(facts.name, part.about, notes=facts.notes)
    _describe_end(facts, page)
    page.tiles = [*_tiles(facts), *part.tiles]
    page.sections = [*_links_section(pages), _training_section(facts, part), *part.sections, _time_section(facts), _starts_section(facts), _environment_section(facts),
                     _input_section(facts)]
    return page.html()
