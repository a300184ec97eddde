# SPDX-License-Identifier: Apache-2.0
"""Checks README.md and docs/ against the repository and the program.

docs_test.py REPOSITORY CHECK [WEFT]
  english    pages of the guide: short sentences, none of the phrases of PHRASES
  links      relative links point to existing files of the repository and to existing headings
  messages   the messages quoted in troubleshooting.md occur in the sources
  reference  input_reference.md equals the output of the program (--write after WEFT: updates the page)
  commands   every command of a console block, and every python block of docs/, runs

A block is fenced by ``` and its language. In `console`, lines after "$ " are commands ("\\" at the end continues), the rest is
their output, which is not compared; "# exit N" after a command is the expected exit code. Commands in other blocks (`sh`) are not run,
and a page of docs/ must give the reason in a line <!-- not run: reason --> before the block. Pages run in the order of their links in
docs/README.md, in one folder with a small copy of inputs/quickstart.toml, what the quickstart makes of it, and a part of inputs/text.
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import program

# Reduces the quickstart to a size that exercises every command; the features are not learned.
SMALLER = {"tokens            = 60_000": "tokens = 3000", "validation_tokens = 8192": "validation_tokens = 600",
           "steps  = 1500": "steps = 60", "every = 500": "every = 20", "every = 100": "every = 20"}
TEXT, CHARACTERS = "text/genesis_to_ruth.txt", 200_000     # of a million: models are evaluated on it, or on its last tenth


def pages(repository):
    """README.md, docs/README.md, the pages that it links in this order, and the rest of docs/."""
    docs = repository / "docs"
    linked = [docs / target for target in re.findall(r"\]\(([\w.-]+\.md)", (docs / "README.md").read_text())]
    ordered = [repository / "README.md", docs / "README.md", *linked, *sorted(docs.rglob("*.md"))]
    return [page for page in dict.fromkeys(ordered) if page.exists()]


def blocks(text):
    """(language, last non-empty line before the block, number of its first line, lines) of each fenced block."""
    language, content, before, begin = None, [], "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            if language is None:
                language, content, begin = line.strip()[3:].strip(), [], number + 1
            else:
                yield language, before, begin, content
                language, before = None, ""
        elif language is not None:
            content.append(line)
        elif line.strip():
            before = line.strip()
    assert language is None, f"the block that begins in line {begin} is not closed"


def without_blocks(text):
    return re.sub(r"^[ \t]*```.*?^[ \t]*```", "", text, flags=re.S | re.M)


# --- Links ----------------------------------------------------------------------------------------------------------------


def anchors(page):
    """Anchors of the headings of a page, as Markdown renderers generate them."""
    names = set()
    for heading in re.findall(r"^#+ +(.*)$", without_blocks(page.read_text()), flags=re.M):
        name = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        names.add(name)
    return names


def links(repository):
    problems, count = [], 0
    for page in pages(repository):
        for target in re.findall(r"\]\(([^)\s]+)\)", without_blocks(page.read_text())):
            if re.match(r"[a-z]+:", target):
                continue
            count += 1
            path, _, anchor = target.partition("#")
            found = (page.parent / path).resolve() if path else page
            where = f"{page.relative_to(repository)}: link to {target}:"
            if not found.exists():
                problems.append(f"{where} no such file")
            elif not found.is_relative_to(repository.resolve()):
                problems.append(f"{where} points outside the repository")
            elif anchor and found.suffix == ".md" and anchor not in anchors(found):
                problems.append(f"{where} no such heading")
    assert count > 5, f"only {count} links found"
    return problems, f"{count} links are valid"


# --- English --------------------------------------------------------------------------------------------------------------

# Phrases that have a plainer form. A match of the pattern is an error.
PHRASES = {
    r"(is|are|was|were|be) refused": "is an error: …, with the remedy",
    r"refuses": "is an error: …, with the remedy",
    r"(ms|µs|seconds|GB|tokens|steps) an? (step|token|second)": "ms/step, tokens/s, per step",
    r"nobody|somebody|anybody": "the rank, the program, the user",
    r"comes to mind": "naive baseline",
    r"(goes|go|went) by messages": "is sent over MPI",
    r"going on behind": "resuming after",
    r"suffers?": "name the fault",
    r"judges": "evaluates",
    r"what the largest of": "the quantity by which they are ranked",
}
# May be right, rarely: a match is printed and is no error.
DOUBTFUL = {r"beside": "besides, next to, as well as"}
MEAN_WORDS, MOST_WORDS = 25, 60


def without_code(text):
    """Text without fenced blocks and comments; inline code is one word, a link is its text."""
    text = re.sub(r"<!--.*?-->", "", without_blocks(text), flags=re.S)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"``.+?``|`[^`]*`", "CODE", text)
    return re.sub(r"<[^>\n]+>", "", text)


def sentences(text):
    """Sentences of prose: paragraphs, and items of lists one by one; headings and tables are left out."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*+]|\d+\.) )|\n(?=\s*[|#])", without_code(text)):
        paragraph = " ".join(paragraph.split())
        if not paragraph or paragraph[0] in "|#":
            continue
        paragraph = re.sub(r"^(?:[-*+>]|\d+\.) ", "", paragraph).replace("**", "")
        # The next sentence begins with a capital letter, a digit, code or a bracket.
        for sentence in re.split(r"(?<=[.!?])(?<!\b[A-Z]\.)(?<!et al\.)[\"”)*]* +(?=[\"“(*]*[A-Z0-9ΣÅ]|[\"“])", paragraph):
            words = [word for word in sentence.split() if re.search(r"\w", word)]
            if words:
                yield sentence, len(words)


def english(repository):
    problems, total = [], 0
    for page in [repository / "README.md", *sorted((repository / "docs").glob("*.md"))]:
        if page.name == "input_reference.md":  # generated: its rows are no sentences
            continue
        text, name = page.read_text(), page.relative_to(repository)
        found = list(sentences(text))
        total += len(found)
        mean = sum(words for _, words in found) / max(1, len(found))
        if mean > MEAN_WORDS:
            problems.append(f"{name}: {mean:.1f} words per sentence, at most {MEAN_WORDS}")
        problems += [f"{name}: a sentence of {words} words: {sentence[:90]}…" for sentence, words in found if words > MOST_WORDS]
        plain = " ".join(without_code(text).split())
        for phrases, fatal in ((PHRASES, True), (DOUBTFUL, False)):
            for phrase, better in phrases.items():
                for match in re.finditer(rf"\b(?:{phrase})\b", plain, flags=re.I):
                    said = f"{name}: …{plain[max(0, match.start() - 40):match.end() + 20]}…: write “{better}”"
                    if fatal:
                        problems.append(said)
                    else:
                        print(f"warning: {said}")
    assert total > 500, f"only {total} sentences found"
    return problems, f"{total} sentences"


# --- Messages -------------------------------------------------------------------------------------------------------------


def messages(repository):
    """Searches each quoted message, split at "…", in the string literals of the sources (joined; {} matches anything)."""
    sources = ""
    for path in sorted([*(repository / "src").rglob("*.cpp"), *(repository / "src").rglob("*.hpp"), *(repository / "python").rglob("*.py")]):
        sources += re.sub(r'"\s*\n\s*"', "", path.read_text()).replace('\\"', '"') + "\n"
    page = repository / "docs" / "troubleshooting.md"
    problems, count = [], 0
    for language, _, begin, content in blocks(page.read_text()):
        if language != "text":
            continue
        for number, line in enumerate(content, begin):
            count += 1
            for piece in line.split("…"):
                for part in re.split(r"\{[^}]*\}", piece.strip()):
                    # Very short fragments are not significant.
                    if len(part.strip()) > 3 and part.strip() not in sources:
                        problems.append(f"docs/troubleshooting.md:{number}: no message of the program contains {part.strip()!r}")
    assert count > 10, f"only {count} messages found"
    return problems, f"{count} messages occur in the sources"


# --- The input reference --------------------------------------------------------------------------------------------------


def reference(repository, weft):
    path = repository / "docs" / "input_reference.md"
    head, comment, present = path.read_text().partition("-->\n\n")
    printed = subprocess.run([weft, "--reference"], capture_output=True, text=True, check=True).stdout
    if "--write" in sys.argv:
        path.write_text(head + comment + printed)
    elif present != printed:
        return [f"docs/input_reference.md differs from the output of the program; {' '.join(sys.argv)} --write updates it"], ""
    return [], f"{printed.count(chr(10) + '| `')} keys equal the output of the program"


# --- Commands -------------------------------------------------------------------------------------------------------------


def workspace(folder, repository, weft):
    """Makes a folder like the root of the repository, with smaller inputs; returns the environment of the commands."""
    shutil.copytree(repository / "inputs", folder / "inputs")
    for name in ("python", "scripts", "docs"):
        (folder / name).symlink_to(repository / name)
    quickstart = folder / "inputs" / "quickstart.toml"
    text = quickstart.read_text()
    for long, short in SMALLER.items():
        assert text.count(long) == 1, f"inputs/quickstart.toml does not contain {long!r} any more: adapt this test"
        text = text.replace(long, short)
    quickstart.write_text(text)
    (folder / "inputs" / TEXT).write_text((repository / "inputs" / TEXT).read_text()[:CHARACTERS])
    (folder / "bin").mkdir()
    (folder / "bin" / "weft").symlink_to(weft)
    program.install_programs(folder / "bin")
    environment = dict(os.environ, PATH=f"{folder / 'bin'}:{os.environ['PATH']}", PYTHONPATH=f"{program.PACKAGE}:{os.environ['PYTHONPATH']}", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive",
                       OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMPI_MCA_rmaps_base_oversubscribe="1",
                       PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe", OMPI_MCA_hwloc_base_binding_policy="none")
    return environment


def commands_of(content, begin):
    """(line number, command) after each "$ "."""
    number = 0
    while number < len(content):
        if content[number].startswith("$ "):
            first, command = number, content[number][2:]
            while command.endswith("\\") and number + 1 < len(content):
                number += 1
                command += "\n" + content[number]
            yield begin + first, command
        number += 1


def commands(repository, weft):
    problems, ran, shown = [], 0, []
    with tempfile.TemporaryDirectory(prefix="weft_docs_") as name:
        folder = Path(name)
        environment = workspace(folder, repository, weft)

        def run(where, arguments, expected):
            done = subprocess.run(arguments, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True, check=False, timeout=120)
            if done.returncode != expected:
                problems.append(f"{where}: {arguments[-1]!r} ended with {done.returncode}, expected {expected}:\n{done.stdout}")

        for page in pages(repository):
            inside = page.parent != repository
            for language, before, begin, content in blocks(page.read_text()):
                where = f"{page.relative_to(repository)}:{begin}"
                if language in ("sh", "bash", "shell"):
                    reason = re.fullmatch(r"<!-- not run: (.+) -->", before)
                    shown.append(f"{where}: {reason.group(1) if reason else 'no reason given'}")
                    if inside and not reason:
                        problems.append(f"{where}: commands that no test runs: make it a console block, or give the reason in a line "
                                        "<!-- not run: reason --> before it")
                elif language == "python" and inside:
                    ran += 1
                    run(where, [sys.executable, "-c", "\n".join(content)], 0)
                elif language == "console":
                    for number, command in commands_of(content, begin):
                        ran += 1
                        code = re.search(r"# exit (\d+)\s*$", command)
                        run(f"{page.relative_to(repository)}:{number}", ["bash", "-euo", "pipefail", "-c", command],
                            int(code.group(1)) if code else 0)
                    if not any(line.startswith("$ ") for line in content):
                        problems.append(f"{where}: a console block without a command")
    if not problems:  # which are not to be lost among these lines
        print("\n".join(f"not run  {line}" for line in shown))
    assert ran > 5, f"only {ran} commands found"
    return problems, f"{ran} commands ran, {len(shown)} blocks are not run"


def main():
    repository, check = Path(sys.argv[1]).resolve(), sys.argv[2]
    if check in ("english", "links", "messages"):
        problems, fine = {"english": english, "links": links, "messages": messages}[check](repository)
    else:
        weft = Path(sys.argv[3]).resolve()
        if not weft.exists():
            program.skip("weft was not built")
        problems, fine = {"reference": reference, "commands": commands}[check](repository, weft)
    print("\n".join(problems) or fine)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
