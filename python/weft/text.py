# SPDX-License-Identifier: Apache-2.0
"""Numbers and texts as pages and tables write them, and JSON that may hold anything."""
import html
import json
import math
import re

LARGEST = 1e100     # beyond it, sums and axes would overflow


def parse_json(text):
    """The value of a JSON text; None if it is none. Long integers become floats: converting them exactly takes quadratic time."""
    try:
        return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 25 else float(digits))
    except (ValueError, RecursionError):
        return None


def member(value, *names):
    """The member at the end of a path of names; None where there is none."""
    for name in names:
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value


def number(value):
    """A float; NaN for what is no finite number below LARGEST."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    return float(value) if abs(value) < LARGEST else math.nan


def numbers(value, most=256):
    """The numbers of a list, at most `most`; empty if it is none."""
    return [number(one) for one in value[:most]] if isinstance(value, list) else []


def text_of(value):
    """A string as it is, None as "", anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):  # a string of fixed length in an HDF5 attribute
        return value.decode(errors="replace")
    return "" if value is None else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def is_finite(value):
    return value is not None and math.isfinite(value)


def grouped(value):
    return f"{value:,}"


def short_number(value):
    """About three significant digits; thousands are grouped."""
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e15 or size < 1e-4:
        return f"{value:.2g}"
    if size >= 999.5:
        step = 10.0 ** (math.floor(math.log10(size)) - 2)
        return grouped(round(round(value / step) * step))
    decimals = max(0, 2 - math.floor(math.log10(size * (1 + 1e-12))))
    shown = f"{value:.{decimals}f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


def percent(fraction):
    return short_number(100 * fraction) + " %" if math.isfinite(fraction) else "not finite"


def fixed(value, decimals):
    return f"{value:.{decimals}f}" if math.isfinite(value) else "not finite"


def whole(value):
    return grouped(round(value)) if math.isfinite(value) and abs(value) < 1e18 else "unknown"


def duration(seconds):
    if not 0 <= seconds < 3.6e9:
        return "?"
    seconds = round(seconds)
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def binary_bytes(value):
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    unit, size = 0, float(value)
    while size >= 1024 and unit + 1 < len(units):
        size, unit = size / 1024, unit + 1
    return f"{int(value)} B" if unit == 0 else f"{size:.{2 if size < 10 else 1 if size < 100 else 0}f} {units[unit]}"


def decimal_bytes(value):
    units = ("B", "kB", "MB", "GB", "TB", "PB")
    unit = 0
    while abs(value) >= 999.5 and unit + 1 < len(units):
        value, unit = value / 1000, unit + 1
    return f"{short_number(value)} {units[unit]}"


def joined(parts):
    return ", ".join(part for part in parts if part)


def plural(count, word):
    return f"{count} {word}{'' if count == 1 else 's'}"


UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def cleaned(text):
    """The text with U+FFFD for characters that a page cannot hold: control characters and halves of surrogates."""
    return UNPRINTABLE.sub("\ufffd", text)


def escaped(text):
    """Safe inside an element or a quoted attribute of HTML and XML."""
    return html.escape(cleaned(str(text)), quote=True).replace("&#x27;", "&#39;")


def printable(text, most):
    """One line of at most `most` characters: line feeds and other control characters as escapes."""
    line = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text[:most + 1])
    return line if len(line) <= most else line[:most - 1] + "…"
