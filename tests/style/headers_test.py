# SPDX-License-Identifier: Apache-2.0
"""Each header compiles alone. A header that is the first include of a source is proven by the compilation of that source, without
precompiled headers and not in a group; a C++ source with a header of its own includes that first. The other headers are compiled here, with
the flags of a source beside them, up to the end of syntax: in a CUDA build those for nvcc, in another one all others.

headers_test.py REPOSITORY [BUILD]     without BUILD only the order of includes is checked. `test.sh --full` has a build and compiles each source
                                       by itself, so that both halves of the proof belong to it.
"""
import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"][^">]+)', re.M)
SKIPPED = 77


def name_of(header):
    """As it is written in an include: from the root of the repository, or from src/."""
    return str(header).removeprefix("src/")


def is_for_nvcc(header):
    return header.suffix == ".cuh" or header.stem.endswith("_cuda")


def first_includes(repository, sources):
    return {path: (INCLUDE.findall((repository / path).read_text()) or [""])[0].lstrip('"') for path in sources}


def order_problems(first, headers):
    """Sources that include another header before their own. (clang-format sorts the includes of .cu files in another order.)"""
    for path, included in first.items():
        own = path.suffix == ".cpp" and [header for header in (path.with_suffix(".hpp"), path.with_suffix(".cuh")) if header in headers]
        if own and included not in map(name_of, own):
            yield f"{path}: includes {included} before its own header {name_of(own[0])}"


def plain(entry):
    """The command of an entry of the database, without its files, precompiled headers and compiler cache."""
    words, kept, skip = shlex.split(entry["command"]), [], False
    for position, word in enumerate(words):
        if skip:
            skip = False
        elif word in ("-o", "-c", "-MF", "-MT", "-MQ") or (word == "-include" and "cmake_pch" in words[position + 1]):
            skip = True
        elif word not in ("-MD", "-Winvalid-pch", "-Werror") and not word.endswith("ccache") and not word.startswith("-include=cmake_pch"):
            kept.append(word)
    return kept


def flags_for(header, commands):
    """The command of the source that shares the longest path with the header, without its files and precompiled headers."""
    def shared(entry):
        return len(os.path.commonpath([str(header), entry["path"]]))
    return plain(max(commands, key=shared))


def compile_alone(header, commands, directory, cuda):
    kept = flags_for(header, commands)
    if cuda:
        kept = [word for word in kept if word not in ("-x", "cu") and not word.startswith(("-forward-unknown", "--generate-code"))]
        call = [*kept, "-forward-unknown-to-host-compiler", "-arch=sm_90", "-x", "cu", "--cuda", "-o", os.devnull, "-"]
    else:
        call = [*kept, "-w", "-fsyntax-only", "-x", "c++", "-"]
    done = subprocess.run(call, cwd=directory, text=True, input=f'#include "{name_of(header)}"\n', check=False,
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if done.returncode == 0:
        return ""
    errors = [line for line in done.stderr.splitlines() if "error" in line][:3] or done.stderr.splitlines()[:3]
    return f"{header}: does not compile alone:\n  " + "\n  ".join(errors)


def main():
    repository = Path(sys.argv[1]).resolve()
    files = [path.relative_to(repository) for top in ("src", "kernels", "tests") for path in sorted((repository / top).rglob("*"))]
    headers = [path for path in files if path.suffix in (".hpp", ".cuh")]
    sources = [path for path in files if path.suffix in (".cpp", ".cu") and path.parts[0] != "tests"]
    assert len(headers) > 100 and len(sources) > 100, (len(headers), len(sources))
    first = first_includes(repository, sources)
    assert list(order_problems({Path("src/base/text.cpp"): "base/log.hpp"}, headers)), "the rule of order finds nothing"
    problems = list(order_problems(first, headers))
    if len(sys.argv) < 3:
        print("\n".join(problems) or f"{len(sources)} sources, no problems")
        return 1 if problems else 0

    build = Path(sys.argv[2]).resolve()
    database = build / "compile_commands.json"
    if not database.is_file():
        print(f"skipped: {database} is missing (its generator writes none)")
        return SKIPPED
    entries = json.loads(database.read_text())
    for entry in entries:
        entry["path"] = os.path.relpath(entry["file"], repository)
    cuda = any("nvcc" in entry["command"].split()[0] or "nvcc" in entry["command"].split(" -")[0] for entry in entries)
    proven = set(first.values())
    left = [header for header in headers if name_of(header) not in proven and is_for_nvcc(header) == cuda
            and not (header.parts[:2] == ("tests", "gpu") and not cuda)]
    if cuda:
        commands = [entry for entry in entries if entry["path"].endswith(".cu")]
    else:
        commands = [entry for entry in entries if entry["path"].startswith(("src/", "kernels/", "tests/")) and entry["path"].endswith(".cpp")]
        if not any(entry["path"].startswith("tests/") for entry in commands):
            left = [header for header in left if header.parts[0] != "tests"]
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda header: compile_alone(header, commands, build, cuda), left)
    problems += [problem for problem in found if problem]
    print("\n".join(problems) or f"{len(headers)} headers: {len(headers) - len(left)} come first in a source, "
          f"or are for another build; {len(left)} compiled alone")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
