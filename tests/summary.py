# SPDX-License-Identifier: Apache-2.0
"""Adds up test results: summary.py REPORT... with REPORT either a JUnit file of ctest (name.xml) or one line
"passed|failed|skipped<TAB>name<TAB>reason" a stage (name.tsv).

Prints each skipped and failed test with its reason, and last, alone on its line: N passed, N failed, N skipped.
"""
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def last_line(text):
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def results_of(path):
    """(state, name, reason) of each test."""
    if path.suffix == ".tsv":
        for line in path.read_text().splitlines():
            yield tuple(line.split("\t"))
        return
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name, output = f"{path.stem}: {case.get('name')}", last_line(case.findtext("system-out"))
        status = case.get("status")
        if status == "run":
            yield "passed", name, ""
        elif status in ("notrun", "disabled"):
            # A test skipped by exit code 77 prints the reason; a program that was not built does not.
            skipped = case.find("skipped")
            message = skipped.get("message", "") if skipped is not None else ""
            unable = "Unable to find" in message or "Not Run" in message
            yield ("failed" if unable else "skipped"), name, output or message
        else:
            yield "failed", name, output


def main():
    results = [result for argument in sys.argv[1:] for result in results_of(Path(argument))]
    count = {state: [r for r in results if r[0] == state] for state in ("passed", "failed", "skipped")}
    for state in ("skipped", "failed"):
        for _, name, reason in count[state]:
            print(f"{state}  {name}: {reason.removeprefix('skipped: ') or 'no reason given'}")
    print(", ".join(f"{len(found)} {state}" for state, found in count.items()))
    return 1 if count["failed"] or not count["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
