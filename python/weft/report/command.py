# SPDX-License-Identifier: Apache-2.0
"""weft report RUN: one HTML page of a run. weft report RUN RUN …: one page that compares runs. weft report DIR with the results of
`weft benchmark` alone: a page of these."""
import os
import sys
from pathlib import Path
from urllib.parse import quote

from weft.errors import DATA, LARGEST_JSON, Output, Parser, WeftError, read_bytes, require_page_path, run, write_atomically
from weft.page import Page, Section
from weft.report.comparison import compare, comparison_page, to_json, to_text
from weft.report.facts import read_facts
from weft.report.run_page import benchmark_figures, run_page
from weft.text import parse_json

MOST_PAGES = 20
DESCRIPTION = """Writes one HTML page of a run: curves, settings, results and timings. Several runs of one kind of model are compared on
one page. A directory of `weft benchmark` gives a page of its cases."""


def benchmark_page(directory):
    benchmark = parse_json(read_bytes(directory / "benchmark.json", LARGEST_JSON).decode("utf-8", "replace"))
    if not isinstance(benchmark, dict) or not isinstance(benchmark.get("cases"), list):
        raise WeftError(DATA, f'{directory / "benchmark.json"}: not the result of a benchmark (no list "cases"); is it damaged?')
    section = Section("Cases")
    section.begin_columns()
    benchmark_figures(section, benchmark)
    section.end_columns()
    return Page(directory.resolve().name, kind="weft benchmark", source="from benchmark.json", sections=[section]).html()


def pages_near(directory, page):
    """[(name, address)] of other pages in a directory and its folders, as links of `page`. report.html is this page, perhaps an older one."""
    found = [one for one in (*sorted(directory.glob("*.html")), *sorted(directory.glob("*/*.html")))
             if one.is_file() and one.resolve() not in (page.resolve(), (directory / "report.html").resolve())]
    return [(str(one.relative_to(directory)), quote(os.path.relpath(one, page.parent))) for one in found[:MOST_PAGES]]


def report(arguments):
    parser = Parser("report", description=DESCRIPTION)
    parser.add_argument("runs", metavar="RUN", nargs="*", help="a run directory; several are compared")
    parser.add_argument("--output", metavar="FILE", help="the page (default RUN/report.html; of several runs comparison.html)")
    Output.add_options(parser)
    given = parser.parse_args(arguments)
    if not given.runs:
        parser.error("weft report needs its RUN")
    output = Output(given.json, given.quiet)
    if len(given.runs) > 1:
        comparison = compare([read_facts(path) for path in given.runs])
        page = Path(given.output or "comparison.html")
        require_page_path(page)
        write_atomically(page, comparison_page(comparison))
        output.info(f"{page}: open it in a browser")
        output.result(to_text(comparison), {**to_json(comparison), "page": str(page)})
        return
    directory = Path(given.runs[0])
    only_benchmark = (directory / "benchmark.json").is_file() and not (directory / "run.json").exists()
    facts = None if only_benchmark else read_facts(directory)
    page = Path(given.output or directory / "report.html")
    require_page_path(page)
    write_atomically(page, benchmark_page(directory) if only_benchmark else run_page(facts, pages_near(directory, page)))
    output.written(f"{page}: open it in a browser", {"page": str(page)})


def main(arguments=None):
    return run(report, arguments)


if __name__ == "__main__":
    sys.exit(main())
