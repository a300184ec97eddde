# SPDX-License-Identifier: Apache-2.0
"""Every figure of README.md with a unit is in a page that README.md links next to it, with a date and the hardware.

claims_test.py REPOSITORY      lists each figure with the page and heading that holds it

The page is one of the links of the same row, list item or paragraph, or else of the same section. Of a link with an anchor, only that
section counts. The page has the figure and its unit in one table or paragraph; README.md may round it: "370,000" is 369,900. Date and hardware
are in the section of the figure or in the first text of a section around it.
"""
import re
import sys
import tempfile
from pathlib import Path

WORDS = {word: str(value) for value, word in enumerate("two three four five six seven eight nine ten".split(), 2)}
NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?"
ANY = rf"(?<![\w.])(?:{NUMBER}|{'|'.join(WORDS)})"
UNIT = rf"tokens/s\b|[KMG]i?B\b|TFLOP/s\b|[mµ]?s\b|%|times\b|seconds?\b|minutes?\b|hours?\b|of the speed\b|(?=in (?:{NUMBER}) Gi?B\b)"
CLAIM = re.compile(rf"({ANY}(?:(?:,|;| to| and| or) {ANY})*) ?({UNIT})", re.I)
# What a table may have in place of a unit.
LIKE = {"": "tokens/s", "times": r"times\b|speed-up", "of the speed": "speed"}
DATE, HARDWARE = re.compile(r"\b20\d\d-\d\d-\d\d\b"), re.compile(r"\b(?:[HAB]\d{2,3}0|EPYC|Xeon|cores?)\b")


def value(number):
    return float(WORDS.get(number.lower(), number).replace(",", ""))


def rounds_to(exact, number):
    """True if `number`, as README.md writes it, is `exact` rounded to the digits of `number`."""
    digits = WORDS.get(number.lower(), number).replace(",", "")
    step = 10.0 ** -len(digits.partition(".")[2]) if "." in digits else 10.0 ** (len(digits) - len(digits.rstrip("0")))
    return abs(exact - value(number)) <= step / 2 + 1e-9


def sections(text):
    """(level, title, anchor, text up to the next heading) of each heading; level 0 is what stands before the first."""
    found, fenced = [[0, "", "", []]], False
    for line in text.splitlines():
        fenced ^= line.lstrip().startswith("```")
        heading = None if fenced else re.match(r"(#+) +(.*)", line)
        if heading:
            title = heading[2].strip()
            found.append([len(heading[1]), title, re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-"), []])
        else:
            found[-1][3].append(line)
    return [(level, title, anchor, "\n".join(lines)) for level, title, anchor, lines in found]


def blocks(text):
    """Rows of tables, list items, paragraphs and comments of commands."""
    text = re.sub(r"^```.*?^```", lambda block: "\n".join(re.findall(r" (# .*)", block[0])), text, flags=re.S | re.M)
    return re.split(r"\n\s*\n|\n(?=[|\-#] ?)", re.sub(r"<!--.*?-->", "", text, flags=re.S))


def holders(page, anchor, number, unit):
    """(title, complete) of each section of `page` that has the figure; complete: with a date and hardware."""
    around = []
    unit = LIKE.get(unit, rf"(?<![A-Za-z]){re.escape(unit)}(?![A-Za-z])")
    for level, title, name, text in sections(page.read_text()):
        around = [each for each in around if each[0] < level]
        around.append((level, name, title, text))
        if anchor and all(each[1] != anchor for each in around):
            continue
        if any(re.search(unit, block) and any(rounds_to(value(each), number) for each in re.findall(rf"(?<![\w.,])(?:{NUMBER})", block))
               for block in re.split(r"\n\s*\n", text)):
            context = "\n".join(part for each in around for part in each[2:])
            yield title, bool(DATE.search(context) and HARDWARE.search(context))


def claims(repository):
    """Lines of the list, and problems."""
    lines, problems = [], []
    link = re.compile(r"\]\((docs/[\w.-]+\.md)#?([\w-]*)\)")
    for _, section, _, text in sections((repository / "README.md").read_text()):
        for block in blocks(text):
            targets = list(dict.fromkeys(link.findall(block) or link.findall(text)))
            plain = re.sub(r"\]\([^)]*\)", "]", " ".join(block.split()))
            for numbers, unit in CLAIM.findall(plain):
                for number in re.findall(ANY, numbers, re.I):
                    found = [(f'{path} "{title}"', complete) for path, anchor in targets
                             for title, complete in holders(repository / path, anchor, number, unit)]
                    good = [place for place, complete in found if complete]
                    claim = f"{number} {unit or 'tokens/s'}"
                    lines.append(f"{claim}: {good[0] if good else '-'}")
                    if not good:
                        searched = ", ".join(f"{path}#{anchor}" if anchor else path for path, anchor in targets)
                        reason = (f"{found[0][0]} has no date or no hardware" if found else
                                  f"not in {searched}" if searched else "no link to a page that has it")
                        problems.append(f'README.md, "{section}": {claim}: {reason}')
    return lines, problems


def check_itself():
    with tempfile.TemporaryDirectory(prefix="weft_test_") as folder:
        root = Path(folder)
        (root / "docs").mkdir()
        (root / "docs/a.md").write_text("# A\n\nOne H200, 2026-01-02.\n\n## Speed\n\n369,900 tokens/s in 10.2 GiB, 7.1 times\n\n# B\n\n55 ms\n")
        (root / "README.md").write_text(
            "370,000 in 10.2 GiB, seven times: [a](docs/a.md#speed)\n\n- 55 ms, 8 % [a](docs/a.md)\n- 36,990 tokens/s [a](docs/a.md)\n- 5 s\n")
        lines, problems = claims(root)
        assert len(lines) == 7
        assert lines[:3] == [f'{claim}: docs/a.md "Speed"' for claim in ("370,000 tokens/s", "10.2 GiB", "seven times")], lines
        assert [re.sub(r".*\": (.*?):.*", r"\1", each) for each in problems] == ["55 ms", "8 %", "36,990 tokens/s", "5 s"], problems


def main():
    check_itself()
    lines, problems = claims(Path(sys.argv[1]))
    assert len(lines) > 5, f"only {len(lines)} figures found"
    print("\n".join(lines))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
