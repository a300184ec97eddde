# SPDX-License-Identifier: Apache-2.0
"""An HTML page as data: a title, tiles with the main figures, sections of paragraphs, figures and tables.

A page is one file: style and SVG are inline, nothing is fetched, and it is also well-formed XML. All texts are escaped here, so they may
come from files. Charts come from weft.charts."""
import json
from dataclasses import dataclass, field
from pathlib import Path

import weft
from weft.text import escaped


class Section:
    def __init__(self, title):
        self.title, self.parts = title, []

    @property
    def body(self):
        return "".join(self.parts)

    def paragraph(self, text, tone=""):
        """tone: "", "state" (faint), "bad" (failed or damaged) or "missing" (why a part of the page is absent)."""
        self.parts.append(f"<p{_class(tone)}>{escaped(text)}</p>\n")

    def links(self, entries):
        """[(text, address)]; addresses are relative."""
        self.parts.append("<ul>\n" + "".join(f'<li><a href="{escaped(address)}">{escaped(text)}</a></li>\n' for text, address in entries) + "</ul>\n")

    def figure(self, title, chart, caption):
        """chart: of weft.charts."""
        self.parts.append(f"<figure>\n<h3>{escaped(title)}</h3>\n{chart}<figcaption>{escaped(caption)}</figcaption>\n</figure>\n")

    def table(self, head, rows, numbers_from):
        """An empty head makes a table without one. Columns from `numbers_from` on are aligned right."""
        self.parts.append(f'<div class="wide"><table{_class("" if head else "facts")}>\n')
        if head:
            self.parts.append("<thead>" + _row(head, "th", numbers_from) + "</thead>\n")
        self.parts.append("<tbody>\n" + "".join(_row(row, "td", numbers_from) for row in rows) + "</tbody></table></div>\n")

    def listing(self, text, columns=False):
        """Text with its line breaks, in a font of fixed width; columns: short lines, in as many columns as fit the page."""
        self.parts.append(f"<pre{_class('columns' if columns else '')}>{escaped(text)}</pre>\n")

    def application(self, data, script):
        """A part that a script draws: it finds the data in `data` and its element in `root`."""
        # In an element of script HTML interprets nothing but its end tag, and XML the usual characters.
        text = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
        for one in "<>&":
            text = text.replace(one, f"\\u{ord(one):04x}")
        self.parts.append(f'<div id="application"></div>\n<script type="application/json" id="data">{text}</script>\n'
                          f"<script>/*<![CDATA[*/\n(function (root, data) {{\n{script}}})(document.getElementById('application'), "
                          "JSON.parse(document.getElementById('data').textContent));\n/*]]>*/</script>\n")

    def begin_columns(self):
        """Blocks until end_columns stand side by side where the window is wide enough."""
        self.parts.append('<div class="figures">\n')

    def begin_block(self):
        """What follows until end_block is one block of the columns."""
        self.parts.append("<div>\n")

    def end_columns(self):
        self.parts.append("</div>\n")

    end_block = end_columns


def _class(name):
    return f' class="{name}"' if name else ""


def _row(cells, kind, numbers_from):
    """Names in a head, as of settings, may be broken after a dot or an underscore."""
    text = "<tr>"
    for i, cell in enumerate(cells):
        shown = escaped(cell)
        if kind == "th":
            shown = shown.replace(".", ".<wbr/>").replace("_", "_<wbr/>")
        text += f"<{kind}{_class('n' if i >= numbers_from else '')}>{shown}</{kind}>"
    return text + "</tr>\n"


@dataclass
class Page:
    title: str
    subtitle: str = ""              # what it is about, also in the title of the window
    kind: str = "weft report"       # in the title of the window
    source: str = "from the files of the run directory"     # what the page was written from
    state: str = ""                 # how the run ended: a short statement and what follows it
    state_detail: str = ""
    state_is_bad: bool = False
    tiles: list = field(default_factory=list)       # (value, name)
    notes: list = field(default_factory=list)       # problems with the page's sources
    sections: list = field(default_factory=list)
    style: str = ""                 # of this kind of page alone

    def html(self):
        style = (Path(__file__).parent / "page.css").read_text(encoding="utf-8") + self.style
        about = f" ({escaped(self.subtitle)})" if self.subtitle else ""
        subtitle = f"<p>{escaped(self.subtitle)}</p>\n" if self.subtitle else ""
        tiles = "".join(f"<li><b>{escaped(value)}</b><span>{escaped(name)}</span></li>\n" for value, name in self.tiles)
        notes = "".join(f'<p class="bad">{escaped(note)}</p>\n' for note in self.notes)
        sections = "".join(f"<section>\n<h2>{escaped(section.title)}</h2>\n{section.body}</section>\n" for section in self.sections)
        return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta name="color-scheme" content="light dark"/>
<title>{escaped(self.title)}{about}: {escaped(self.kind)}</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{escaped(self.title)}</h1>
{subtitle}<p class="state"><span{_class("bad" if self.state_is_bad else "")}>{escaped(self.state)}</span>{escaped(self.state_detail)}</p>
{f'<ul class="tiles">{tiles}</ul>' if tiles else ""}
{notes}</header>
{sections}<footer>Written by weft {weft.__version__} {escaped(self.source)}; nothing in this page is fetched.</footer>
</body>
</html>
"""
