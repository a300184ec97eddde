# SPDX-License-Identifier: Apache-2.0
"""Charts: inline SVG whose colours are those of the page, with a tooltip for every mark, whatever the values and names are."""
import math
import re
import sys
import xml.etree.ElementTree as ElementTree

import program

sys.path.insert(0, str(program.PACKAGE))
try:
    from weft import charts
    from weft.page import Page, Section
except ImportError as missing:
    program.skip(f"{missing.name} is not installed (scripts/setup.sh --tests installs it)")

NAN = math.nan
HOSTILE = "<b>&\"'$x_1$ \\frac{1}{2}\x00\x1b é"


def parsed(chart):
    """The elements of a chart; fails unless it is well-formed and carries no script, link, identifier, or colour of its own."""
    root = ElementTree.fromstring(f"<figure>{chart}</figure>")
    for element in root.iter():
        assert element.tag in ("figure", "svg", "g", "path", "text", "title", "circle", "ul", "li"), element.tag
        assert not {"id", "href", "clip-path"} & set(element.keys()), element.attrib
        for value in element.attrib.values():
            assert "nan" not in value.split() and "inf" not in value and "url(" not in value, value
        for colour in re.findall(r"#\w+", element.get("style", "")):
            assert colour in charts.PALETTE, colour
    svg = root.find("svg")
    assert svg.get("viewBox").startswith(f"0 0 {charts.WIDTH} ") and svg.get("width") is None
    return root


def titles(root):
    return [element.text for element in root.iter("title")]


def texts(root):
    return ["".join(element.itertext()) for element in root.iter("text")]


def check_lines():
    x = list(range(10))
    root = parsed(charts.line_chart("step", "loss", x, [1, 2, NAN, 4, math.inf, 5, NAN, 7, 8, 9], "mean", [0] * 10, [NAN] * 5 + [20] * 5, "band",
                                    [3, 99], "restart", 2.5, "level", False))
    found = [element.get("d") for element in root.iter("path") if "stroke-width: 2" in element.get("style", "") and element.get("d")]
    assert max(path.count("M") for path in found) == 4, "a line breaks at a value that is not finite"
    assert titles(root).count("step 3: 4") == 1 and not [one for one in titles(root) if "not finite" in (one or "")]
    assert [one for one in ("mean", "band", "restart", "level") if one not in "".join(root.itertext())] == []
    # A logarithmic axis where values span decades, round numbers on it.
    root = parsed(charts.line_chart("step", "loss", [1, 2, 3], [1e-3, 1, 1e3]))
    assert "loss (logarithmic)" in texts(root) and {"0.001", "1", "1,000"} <= set(texts(root)), texts(root)
    # Ticks that are close to each other differ.
    root = parsed(charts.line_chart("step", "loss", [1, 2], [5.0001, 5.0002]))
    ticks = [text for text in texts(root) if text.startswith("5.000")]
    assert len(ticks) >= 2 and len(set(ticks)) == len(ticks), texts(root)
    for y in ([], [NAN], [0], [-1, -1], [1e99, -1e99], [1e-300, 1e-299], [1e-320, 1e-300]):
        parsed(charts.line_chart("step", "loss", list(range(len(y))), y))
        parsed(charts.line_chart("step", "loss", list(range(len(y))), y, from_zero=True))


def check_overlay():
    lines = [(f"run {i}", list(range(3000)), [i + 1 / (j + 1) for j in range(3000)]) for i in range(20)]
    chart = charts.overlay("step", "loss", lines)
    root = parsed(chart)
    drawn = [element.get("style") for element in root.iter("path") if "stroke-width: 1.8" in element.get("style", "")]
    assert len(drawn) == len(charts.PALETTE) == len(set(drawn)), "curves that look the same"
    assert len(chart) < 400_000 and "run 3, step 3,000: 3" in titles(root)
    parsed(charts.overlay("step", "loss", [("one", [3], [4]), ("none", [], [])]))


def check_bars():
    root = parsed(charts.bar_chart("layer", "error", ["0", "1", "2"], [1, NAN, 3], 2, "mean 2"))
    assert {"layer 0: 1", "layer 2: 3"} <= set(titles(root)) and "?" in texts(root) and "mean 2" in "".join(root.itertext())
    root = parsed(charts.bar_chart("x", "y", [f"a long name {i}" for i in range(40)], [1] * 40))
    assert len(titles(root)) == 40
    root = parsed(charts.horizontal_bars("ms", [{"name": "encode", "value": 3, "text": "3 ms", "limit": 2, "low": 1, "high": 4},
                                                {"name": "rest", "value": NAN, "text": "?"}], "limit", "whisker"))
    assert titles(root).count("encode: 3 ms") == 2 and "rest: ?" in titles(root)
    root = parsed(charts.stacked_bars("ms", [("a", 3, "3 ms", [("x", 1, "x of a"), ("y", 2, "y of a")]), ("b", 0, "0 ms", [])]))
    assert titles(root).count("x of a") == 2, "one on the common scale, one as a share"
    for empty in (charts.bar_chart("x", "y", [], []), charts.horizontal_bars("x", []), charts.stacked_bars("x", []),
                  charts.time_line("x", 0, [], [], "none"), charts.heat_map("x", "y", [[NAN]], [[""]])):
        parsed(empty)


def check_maps():
    root = parsed(charts.heat_map("target", "source", [[1, 2], [NAN, -3]], [["a", "b"], ["", "d"]]))
    assert {"a", "b", "d"} <= set(titles(root)) and {"1", "2", "-3"} <= set(texts(root))
    root = parsed(charts.time_line("step", 30, [("start 1", 0, 10, True, "good"), ("start 2", 10, 10, False, "bad")], [10, 20], "kept"))
    assert titles(root).count("good") == 1 and titles(root).count("bad") == 3 and titles(root).count("step 20") == 1


def check_names():
    """Names are text: no mark-up, no mathematics, nothing that XML cannot hold."""
    for chart in (charts.line_chart(HOSTILE, HOSTILE, [1, 2], [1, 2], level=1, level_name=HOSTILE), charts.overlay("x", HOSTILE, [(HOSTILE, [1], [2])]),
                  charts.bar_chart(HOSTILE, "y", [HOSTILE], [1]), charts.horizontal_bars("x", [{"name": HOSTILE, "value": 1, "text": HOSTILE}])):
        root = parsed(chart)
        assert any("$x_1$ \\frac{1}{2}" in "".join(element.itertext()) for element in root.iter()), chart
        assert "\ufffd" in chart and "<b>" not in chart
    section = Section(HOSTILE)
    section.paragraph(HOSTILE, "bad")
    section.table([HOSTILE], [[HOSTILE]], 0)
    section.listing(HOSTILE, columns=True)
    section.application({"text": HOSTILE + "</script>]]>"}, "")
    page = Page(HOSTILE, HOSTILE, state=HOSTILE, tiles=[(HOSTILE, HOSTILE)], notes=[HOSTILE], sections=[section]).html()
    ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    assert "<b>" not in page[page.index("<body>"):].replace("<li><b>", "") and page.count("</script>") == 2, page
    assert "http" not in page


for check in (check_lines, check_overlay, check_bars, check_maps, check_names):
    check()
print("charts are well-formed, with tooltips, in the colours of the page")
