# SPDX-License-Identifier: Apache-2.0
"""Charts as inline SVG, drawn by matplotlib: a function per kind of chart returns the picture and its legend for weft.page.

matplotlib is drawn with colours that stand for roles; they become variables of the page's style, so that one picture serves a light, a
dark and a printed page. Two series never differ by colour alone. Marks have tooltips (<title>). Values that are not finite are left
out: a line breaks there. There is no script."""
import io
import logging
import math
import re
import warnings
import xml.etree.ElementTree as ElementTree

from weft.text import cleaned, escaped, grouped, short_number

logging.getLogger("matplotlib").setLevel(logging.ERROR)     # "building the font cache"
import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

WIDTH, HEIGHT = 480, 240    # of a picture, in the units of its view box
FONT = 12
MOST_TOUCHED, MOST_TOUCHED_OVERLAID, MOST_LINE_POINTS = 400, 1200, 512      # limit the size of the page
LONGEST_NAME = 60

# Colours that are told apart on a light and on a dark page: pairs differ by at least 33 in CIE L*a*b*, and each has a contrast of at
# least 2.4 with both pages.
PALETTE = ["#1f77b4", "#e98f35", "#14b814", "#dc1818", "#ac75d1", "#7a6a29", "#e935a1", "#14b897",
           "#8ea923", "#3559e9", "#ed5a68", "#1c8731", "#993366", "#396a65", "#dc18dc", "#bf8888"]
DASHES = ["none", "8 3", "2 3", "10 3 2 3"]
ROLES = {"ink": "#010203", "faint": "#010204", "rule": "#010205", "blue": "#010206", "orange": "#010207", "paper": "#010208"}
INK, FAINT, RULE, BLUE, ORANGE, PAPER = ROLES.values()
SVG = "{http://www.w3.org/2000/svg}"


def _text(text):
    """For matplotlib, which reads $...$ as mathematics."""
    return cleaned(str(text)).replace("$", r"\$")


class Picture:
    """A figure of matplotlib with one pair of axes."""

    def __init__(self, label, height=HEIGHT):
        self.label, self.height = label, height
        self.titles, self.touches = {}, []
        self.figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72)
        self.figure.patch.set_visible(False)
        FigureCanvasSVG(self.figure)
        self.axes = self.figure.add_axes((0, 0, 1, 1), facecolor="none")
        self.axes.tick_params(length=0, labelsize=FONT - 1, labelcolor=FAINT, pad=4)
        self.axes.tick_params(which="minor", length=0)
        for side in ("top", "right"):
            self.axes.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            self.axes.spines[side].set_color(FAINT)
        self.axes.set_axisbelow(True)

    def place(self, left, right, top, bottom):
        """Margins of the axes in the picture."""
        self.axes.set_position((left / WIDTH, bottom / self.height, (WIDTH - left - right) / WIDTH, (self.height - top - bottom) / self.height))

    def labels(self, x_label, y_label):
        if x_label:
            self.figure.text(1, 4 / self.height, _text(x_label), ha="right", va="bottom", fontsize=FONT, color=FAINT)
        if y_label:
            self.figure.text(0, 1 - 2 / self.height, _text(y_label), ha="left", va="top", fontsize=FONT, color=FAINT)

    def write(self, x, y, text, **options):
        """Text at a place of the data."""
        options = {"fontsize": FONT - 1, "color": INK, "clip_on": False, **options}
        self.axes.text(x, y, _text(text), **options)

    def title(self, artist, text):
        """A tooltip."""
        artist.set_gid(f"weft-{len(self.titles)}")
        artist.set_clip_on(False)
        self.titles[artist.get_gid()] = text

    def patch(self, artist, title=""):
        self.axes.add_patch(artist)
        artist.set_clip_on(False)
        if title:
            self.title(artist, title)

    def box(self, x, y, width, height, colour, title="", alpha=None, **options):
        self.patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="none", alpha=alpha, **options), title)

    def touch(self, x, y, title):
        """An invisible spot of the data with a tooltip."""
        self.touches.append((x, y, title))

    def svg(self):
        """Without identifiers, scripts and links; colours of roles are variables of the page."""
        out = io.StringIO()
        with warnings.catch_warnings(), matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "weft", "path.simplify": True,
                                                               "axes.unicode_minus": False}):
            warnings.simplefilter("ignore")     # a letter that the font for measuring lacks
            self.figure.canvas.print_svg(out, metadata={"Date": None})
            spots = [(self.axes.transData.transform((x, y)), title) for x, y, title in self.touches]
        root = ElementTree.fromstring(re.sub(r"<!DOCTYPE[^>]*>", "", out.getvalue()))
        inner = "".join(self._element(child) for child in root)
        for (x, y), title in spots:
            if math.isfinite(x) and math.isfinite(y):
                inner += f'<circle class="touch" cx="{x:.1f}" cy="{self.height - y:.1f}" r="5"><title>{escaped(title)}</title></circle>\n'
        return (f'<svg class="chart" role="img" aria-label="{escaped(self.label)}" viewBox="0 0 {WIDTH} {self.height:.0f}">\n'
                f"{inner}</svg>\n")

    def _element(self, element):
        name = element.tag.replace(SVG, "") if isinstance(element.tag, str) else ""
        if name == "text":
            return _text_element(element)
        if name == "path":
            return f'<path d="{_short_path(element.get("d"))}" style="{_style(element)}"/>\n' if _visible(element) else ""
        if name != "g":
            return ""
        inner = "".join(self._element(child) for child in element)
        title = self.titles.get(element.get("id"))
        if title is None or not inner:
            return inner
        return f"<g><title>{escaped(title)}</title>{inner}</g>\n"


def _styles(element):
    return dict(part.split(":", 1) for part in (element.get("style") or "").replace(" ", "").split(";") if ":" in part)


def _visible(element):
    styles = _styles(element)
    return bool(element.get("d")) and (styles.get("fill") != "none" or styles.get("stroke", "none") != "none")


def _colours(text):
    for role, colour in ROLES.items():
        text = text.replace(colour, f"var(--{role})")
    return text


def _style(element):
    kept = [f"{name}: {value}" for name, value in _styles(element).items() if name not in ("stroke-linecap", "stroke-linejoin")]
    return escaped(_colours("; ".join(kept)))


def _text_element(element):
    style = re.search(r"text-anchor:\s*(\w+)", element.get("style") or "")
    fill = re.search(r"fill:\s*(#\w+)", element.get("style") or "")
    rotated = re.search(r"rotate\((-?[\d.]+)", element.get("transform") or "")
    turn = f' transform="{escaped(element.get("transform"))}"' if rotated and float(rotated[1]) else ""
    place = [element.get("x"), element.get("y")]
    if place[0] is None:        # as a translation, where the text has no anchor
        shift = re.search(r"translate\((-?[\d.]+) (-?[\d.]+)\)", element.get("transform") or "")
        place = list(shift.groups()) if shift else ["0", "0"]
        turn = ""
    colour = f' style="fill: {_colours(fill[1])}"' if fill else ""
    anchor = f' text-anchor="{style[1]}"' if style else ""
    return f'<text x="{float(place[0]):.1f}" y="{float(place[1]):.1f}"{anchor}{colour}{turn}>{escaped("".join(element.itertext()))}</text>\n'


def _short_path(path):
    """Tenths of a unit are enough."""
    return re.sub(r"-?\d+\.\d+(e-?\d+)?", lambda match: f"{float(match[0]):.1f}", path.replace("\n", ""))


def _legend(entries):
    """entries: (kind, colour, dashes, name, full name); kind "line" or "box"."""
    items = ""
    for kind, colour, dashes, name, full in entries:
        if kind == "line":
            mark = f'<path d="M0 5 L22 5" style="stroke: {_colours(colour)}; stroke-width: 2; fill: none; stroke-dasharray: {dashes}"/>'
        else:
            mark = f'<path d="M2 1 L20 1 L20 9 L2 9 Z" style="fill: {_colours(colour)}; fill-opacity: {dashes}"/>'
        items += f'<li><svg viewBox="0 0 22 10" aria-hidden="true"><title>{escaped(full)}</title>{mark}</svg>{escaped(name)}</li>\n'
    return f'<ul class="legend">\n{items}</ul>\n' if items else ""


# --- Axes -----------------------------------------------------------------------------------------------------------------


def tick_texts(ticks):
    """Ticks with as many digits as tell them from their neighbours."""
    if len(ticks) < 2:
        return [short_number(tick) for tick in ticks]

    def power(value):
        return math.floor(math.log10(abs(value) * (1 + 1e-9)))

    last = power(ticks[1] - ticks[0])
    texts = []
    for tick in ticks:
        digits = power(tick) - last if tick else 0
        small = abs(tick) < 1e-4        # short_number then has an exponent, and one digit less
        if tick == 0 or digits < (2 if small else 3) or abs(tick) >= 1e15:
            texts.append(short_number(tick))
        elif last >= 0:
            texts.append(grouped(round(tick)))
        else:
            texts.append(f"{tick:.{digits}e}" if small or last < -9 else f"{tick:.{-last}f}")
    return texts


def _linear(axis, low, high, whole=False):
    """Ticks at round numbers between the limits."""
    locator = MaxNLocator(nbins=5, steps=[1, 2, 5, 10], integer=whole, min_n_ticks=1 if whole else 2)
    ticks = [0.0 if abs(tick) < 1e-9 * (high - low) else float(tick) for tick in locator.tick_values(low, high)]
    ticks = [tick for tick in ticks if low - 1e-9 * (high - low) <= tick <= high + 1e-9 * (high - low)]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(FixedFormatter(tick_texts(ticks)))
    axis.set_minor_locator(NullLocator())
    return ticks


def _range(values, low=math.inf, high=-math.inf):
    for value in values:
        if math.isfinite(value):
            low, high = min(low, value), max(high, value)
    if not low <= high:
        return 0.0, 1.0
    if not high - low > 1e-12 * max(abs(low), abs(high)):
        margin = 0.1 * abs(high) or 1.0
        return (low - margin if low else 0.0), high + margin
    return low, high


def _value_axis(picture, values, from_zero):
    """The y axis: logarithmic when all values are positive and span more than a factor of 30, unless `from_zero`. Returns a remark for
    its label."""
    low, high = _range([*values, 0] if from_zero else values)
    axes = picture.axes
    axes.grid(axis="y", color=RULE, linewidth=1)
    if not from_zero and low > 0 and high > 30 * low:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.05, high * 1.05)
        few = math.log10(high / low) <= 3
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,), numticks=9))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_formatter(NullFormatter())
        return " (logarithmic)"
    if from_zero and low == 0:
        high *= 1.05        # keeps a constant line off the edge
    else:
        margin = 0.04 * (high - low)
        low, high = low - margin, high + margin
    axes.set_ylim(low, high)
    _linear(axes.yaxis, low, high)
    return ""


def _step_axis(picture, values):
    low, high = _range([*values, 0])
    picture.axes.set_xlim(low, high)
    _linear(picture.axes.xaxis, low, high, whole=True)


def _measure_axis(picture, values):
    low, high = _range(values)
    margin = 0.04 * (high - low)
    picture.axes.set_xlim(low - margin, high + margin)
    _linear(picture.axes.xaxis, low - margin, high + margin)


def _dash(pattern):
    return "solid" if pattern == "none" else (0, tuple(float(one) / 1.8 for one in pattern.split()))


# --- Charts ---------------------------------------------------------------------------------------------------------------


def line_chart(x_label, y_label, x, y, line_name="", low=(), high=(), band_name="", marks=(), marks_name="", level=-1, level_name="",
               from_zero=False):
    """A curve, with a band around it, dashed vertical lines at `marks`, and a horizontal line at `level` (< 0: none)."""
    picture = Picture(y_label)
    picture.place(58, 8, 24, 40)
    axes = picture.axes
    remark = _value_axis(picture, [*y, *low, *high, *([level] if level >= 0 else [])], from_zero)
    _step_axis(picture, x)
    picture.labels(x_label, y_label + remark)
    entries = [("line", BLUE, "none", line_name, line_name)] if line_name else []
    if len(low):
        axes.fill_between(x, low, high, where=[math.isfinite(a) and math.isfinite(b) for a, b in zip(low, high)], color=BLUE, alpha=0.22,
                          linewidth=0, clip_on=False)
        entries.append(("box", BLUE, 0.22, band_name, band_name))
    if level >= 0:
        axes.axhline(level, color=ORANGE, linewidth=1.5, linestyle=_dash("7 4"), clip_on=False)
        entries.append(("line", ORANGE, "7 4", level_name, level_name))
    left, right = axes.get_xlim()
    shown = [mark for mark in marks if left <= mark <= right]
    for mark in shown:
        axes.axvline(mark, color=INK, linewidth=1, linestyle=_dash("2 3"), clip_on=False)
    if shown:
        entries.append(("line", INK, "2 3", marks_name, marks_name))
    axes.plot(x, y, color=BLUE, linewidth=2, clip_on=False)
    stride = len(x) // MOST_TOUCHED + 1
    spot = picture_units(picture)
    for i, (at, value) in enumerate(zip(x, y)):
        if not math.isfinite(value):
            continue
        if (i == 0 or not math.isfinite(y[i - 1])) and (i + 1 == len(x) or not math.isfinite(y[i + 1])):
            _dot(picture, at, value, BLUE, spot)
        if i % stride == 0 or i + 1 == len(x):
            picture.touch(at, value, f"{x_label} {short_number(at)}: {short_number(value)}")
    return picture.svg() + _legend(entries)


def picture_units(picture):
    """A function (x, y, dx, dy) -> the place of the data that is dx, dy units of the picture away from x, y."""
    data = picture.axes.transData

    def moved(x, y, dx, dy):
        at = data.transform((x, y))
        return data.inverted().transform((at[0] + dx, at[1] + dy))

    return moved


def _dot(picture, x, y, colour, moved, radius=2.5):
    corners = [moved(x, y, radius * math.cos(0.25 * math.pi * i), radius * math.sin(0.25 * math.pi * i)) for i in range(8)]
    picture.patch(Polygon(corners, closed=True, facecolor=colour, edgecolor="none"))


def overlay(x_label, y_label, lines, from_zero=False, steps=True):
    """Curves (name, x, y) of several runs; neighbours differ in colour and in dashes. At most len(PALETTE) are drawn. steps: x are steps,
    from 0."""
    lines = lines[:len(PALETTE)]
    finite = []
    for name, x, y in lines:
        points = [(at, value) for at, value in zip(x, y) if math.isfinite(value)]
        finite.append((name, points))
    picture = Picture(y_label)
    picture.place(58, 8, 24, 40)
    remark = _value_axis(picture, [value for _, points in finite for _, value in points], from_zero)
    (_step_axis if steps else _measure_axis)(picture, [at for _, points in finite for at, _ in points])
    picture.labels(x_label, y_label + remark)
    spot, entries = picture_units(picture), []
    for i, (name, points) in enumerate(finite):
        stride, touched = len(points) // MOST_LINE_POINTS + 1, len(points) // (MOST_TOUCHED_OVERLAID // len(lines)) + 1
        drawn = [point for j, point in enumerate(points) if j % stride == 0 or j + 1 == len(points)]
        picture.axes.plot([at for at, _ in drawn], [value for _, value in drawn], color=PALETTE[i], linewidth=1.8,
                          linestyle=_dash(DASHES[i % len(DASHES)]), clip_on=False)
        if len(points) == 1:
            _dot(picture, *points[0], PALETTE[i], spot, 3.5)
            right = points[0][0] > sum(picture.axes.get_xlim()) / 2     # the name goes to the side with room
            picture.write(*spot(*points[0], -6 if right else 6, -4), name if len(name) <= 24 else "…" + name[-23:], fontsize=FONT - 2,
                          ha="right" if right else "left")
        for j, (at, value) in enumerate(points):
            if j % touched == 0 or j + 1 == len(points):
                picture.touch(at, value, f"{name}, {x_label} {short_number(at)}: {short_number(value)}")
        shown = name if len(name) <= LONGEST_NAME else "…" + name[1 - LONGEST_NAME:]
        entries.append(("line", PALETTE[i], DASHES[i % len(DASHES)], shown, name))
    return picture.svg() + _legend(entries)


def bar_chart(x_label, y_label, categories, values, level=-1, level_name=""):
    """Vertical bars, one per category; the axis begins at 0."""
    picture = Picture(y_label)
    longest = max((len(name) for name in categories), default=1)
    slot = (WIDTH - 66) / max(1, len(values))
    every = math.ceil((7 * longest + 4) / slot)     # names that would overlap are put in two rows, or some are left out
    rows = 2 if every > 1 else 1
    picture.place(58, 8, 24, 40 + 14 * (rows - 1))
    low, high = _range([*values, 0, *([level] if level >= 0 else [])])
    axes = picture.axes
    axes.grid(axis="y", color=RULE, linewidth=1)
    low, high = min(low, 0.0), high * 1.08 if high > 0 else high
    axes.set_ylim(low, high)
    axes.set_xlim(0, max(1, len(values)))
    _linear(axes.yaxis, low, high)
    picture.labels(x_label, y_label)
    named = -(-every // rows)
    ticks = range(0, len(values), named)
    axes.xaxis.set_major_locator(FixedLocator([i + 0.5 for i in ticks]))
    axes.xaxis.set_major_formatter(FixedFormatter(
        [("\n" if rows == 2 and i // named % 2 else "") + _text(categories[i] if i < len(categories) else "") for i in ticks]))
    if level >= 0:
        axes.axhline(level, color=ORANGE, linewidth=1.5, linestyle=_dash("7 4"), clip_on=False)
    width, spot = min(0.72, 60 / slot), picture_units(picture)
    for i, value in enumerate(values):
        name = categories[i] if i < len(categories) else ""
        if not math.isfinite(value):
            picture.write(i + 0.5, 0, "?", ha="center", va="bottom")
            continue
        picture.box(i + 0.5 - width / 2, min(0, value), width, abs(value), BLUE, f"{x_label} {name}: {short_number(value)}")
        if slot > 34:
            picture.write(i + 0.5, spot(i + 0.5, max(value, 0), 0, 2)[1], short_number(value), ha="center", va="bottom", color=FAINT)
    return picture.svg() + _legend([("line", ORANGE, "7 4", level_name, level_name)] if level >= 0 else [])


def _horizontal(label, names, texts, row=24, top=22, bottom=6):
    """A picture with a row for each name on its left and a text on its right: (picture, left, right, function of the row's middle)."""
    picture = Picture(label, top + bottom + row * max(1, len(names)))
    left = min(170, 12 + 7 * max((len(name) for name in names), default=1))
    right = min(170, 12 + 7 * max((len(text) for text in texts), default=1))
    picture.place(left, right, top, bottom)
    axes = picture.axes
    axes.set_ylim(max(1, len(names)), 0)
    axes.spines["bottom"].set_visible(False)
    axes.xaxis.set_major_locator(NullLocator())
    axes.yaxis.set_major_locator(FixedLocator([i + 0.5 for i in range(len(names))]))
    axes.yaxis.set_major_formatter(FixedFormatter([_text(name if len(name) <= 24 else name[:23] + "…") for name in names]))
    axes.tick_params(axis="y", labelcolor=INK)
    return picture


def horizontal_bars(x_label, bars, limit_name="", whisker_name=""):
    """bars: dictionaries with name, value, text (at the end of the bar), and optionally low and high (a whisker) and limit (the value at
    the hardware's limit, drawn solid)."""
    picture = _horizontal(x_label, [bar["name"] for bar in bars], [bar["text"] for bar in bars])
    picture.labels("", x_label)
    largest = max((value for bar in bars for value in (bar["value"], bar.get("high", -1)) if math.isfinite(value)), default=0)
    largest = largest if largest > 0 else 1.0
    picture.axes.set_xlim(0, largest)
    spot = picture_units(picture)
    for i, bar in enumerate(bars):
        value = bar["value"] if math.isfinite(bar["value"]) else 0.0
        title = f"{bar['name']}: {bar['text']}"
        picture.box(0, i + 0.17, value, 0.66, BLUE, title, alpha=0.3 if limit_name else None)
        if limit_name and bar.get("limit", -1) >= 0:
            picture.box(0, i + 0.17, min(bar["limit"], value), 0.66, BLUE, title)
        low, high, end = bar.get("low", -1), bar.get("high", -1), value
        if 0 <= low < high < math.inf:
            for xs, ys in (((low, high), (i + 0.5, i + 0.5)), ((low, low), (i + 0.35, i + 0.65)), ((high, high), (i + 0.35, i + 0.65))):
                picture.axes.plot(xs, ys, color=INK, linewidth=1.2, clip_on=False)
            end = max(end, high)
        picture.write(spot(end, i + 0.5, 6, 0)[0], i + 0.5, bar["text"], va="center_baseline", color=FAINT)
    entries = [("box", BLUE, 1, limit_name, limit_name), ("box", BLUE, 0.3, "the rest", "the rest")] if limit_name else []
    if whisker_name:
        entries.append(("line", INK, "none", whisker_name, whisker_name))
    return picture.svg() + _legend(entries)


def heat_map(x_label, y_label, values, notes):
    """A matrix of cells [row][column], dark where the value is large; cells without a value (NaN) are empty. notes: tooltips."""
    rows, columns = len(values), len(values[0]) if values else 0
    largest = max((value for row in values for value in row if math.isfinite(value)), default=0)
    cell = min(56.0, (WIDTH - 46 - 80) / max(1, columns))
    top, bottom = 24, 40
    picture = Picture(f"{y_label}, {x_label}", max(top + bottom + cell * rows, 150))
    width, height = cell * columns, cell * rows
    picture.place(40, WIDTH - 40 - width, top, picture.height - top - height)
    axes = picture.axes
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    every = max(1, math.ceil(16 / cell))
    for axis, count in ((axes.xaxis, columns), (axes.yaxis, rows)):
        axis.set_major_locator(FixedLocator([i + 0.5 for i in range(0, count, every)]))
        axis.set_major_formatter(FixedFormatter([str(i) for i in range(0, count, every)]))

    def shade(value):
        return 0.06 + 0.94 * max(0.0, value) / largest if largest > 0 else 0.06

    for row in range(rows):
        for column in range(columns):
            value = values[row][column]
            if not math.isfinite(value):
                continue
            picture.box(column, row, 1, 1, BLUE, notes[row][column], alpha=shade(value))
            if cell >= 36:
                picture.write(column + 0.5, row + 0.5, short_number(value), ha="center", va="center_baseline",
                              color=PAPER if shade(value) > 0.55 else INK)
    # The scale, right of the map.
    for i in range(6):
        value, y = largest * (5 - i) / 5, 20 * i / cell
        picture.box(columns + 18 / cell, y, 16 / cell, 20 / cell, BLUE, alpha=shade(value))
        picture.write(columns + 40 / cell, y + 10 / cell, short_number(value), va="center_baseline", color=FAINT)
    picture.figure.text((40 + width) / WIDTH, 1 - (top + height + 36) / picture.height, _text(x_label), ha="right", va="bottom", fontsize=FONT,
                        color=FAINT)
    picture.labels("", y_label)
    return picture.svg()


def time_line(x_label, last, spans, points, points_name):
    """Spans of steps (name, begin, end, is clean, note), one row each, with a cross where one ended badly, and diamonds at `points` in a
    row below them."""
    names = [span[0] for span in spans] + ([points_name] if len(points) else [])
    picture = _horizontal(x_label, names, [], top=4, bottom=40)
    picture.labels(x_label, "")
    axes = picture.axes
    axes.set_xlim(0, max([1.0, last, *(span[2] for span in spans), *points]))
    axes.spines["bottom"].set_visible(True)
    _linear(axes.xaxis, *axes.get_xlim(), whole=True)
    for i in range(len(names)):
        axes.axhline(i + 0.5, color=RULE, linewidth=1, zorder=0)
    spot = picture_units(picture)
    for i, (_, begin, end, clean, note) in enumerate(spans):
        width = max(end - begin, spot(begin, i, 3, 0)[0] - begin)
        picture.box(begin, i + 0.25, width, 0.5, BLUE, note, alpha=None if clean else 0.3)
        if not clean:
            for sign in (-1, 1):
                line, = axes.plot(*zip(spot(begin + width, i + 0.5, -5, -5 * sign), spot(begin + width, i + 0.5, 5, 5 * sign)), color=ORANGE,
                                  linewidth=2.5, clip_on=False)
                picture.title(line, note)
    for point in points:
        corners = [spot(point, len(spans) + 0.5, dx, dy) for dx, dy in ((0, 6), (6, 0), (0, -6), (-6, 0))]
        picture.patch(Polygon(corners, closed=True, facecolor=ORANGE, edgecolor="none"), f"{x_label} {short_number(point)}")
    return picture.svg()


def stacked_bars(x_label, cases):
    """cases: (name, total, text, [(part, value, note)]). Each has two bars: its parts on the scale of the longest case, and its parts as
    shares of its own total. Parts of one name have one colour."""
    names = list(dict.fromkeys(part for _, _, _, parts in cases for part, _, _ in parts))
    longest = max((total for _, total, _, _ in cases), default=0) or 1.0
    picture = _horizontal(x_label, [case[0] for case in cases], [case[2] for case in cases], row=48)
    picture.labels("", x_label)
    picture.axes.set_xlim(0, longest)
    spot = picture_units(picture)
    for i, (_, total, text, parts) in enumerate(cases):
        for top, scale in ((0.08, 1.0), (0.5, longest / total if total > 0 else 0.0)):
            x = 0.0
            for part, value, note in parts:
                picture.box(x, i + top, value * scale, 0.36, PALETTE[names.index(part) % len(PALETTE)], note)
                x += value * scale
        picture.write(spot(total, i + 0.26, 6, 0)[0], i + 0.26, text, va="center_baseline", color=FAINT)
    return picture.svg() + _legend([("box", PALETTE[i % len(PALETTE)], 1, name, name) for i, name in enumerate(names)])
