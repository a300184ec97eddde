# SPDX-License-Identifier: Apache-2.0
"""Static checks of the container definition: its shell sections parse, the files that it copies exist and are all that a build
needs, and its steps are those of setup.sh and of the presets. Building it needs Apptainer and a network and is not done here.

container_test.py REPOSITORY
"""
import json
import re
import subprocess
import sys
from pathlib import Path


def sections(text):
    """{name: body} of a definition file; the part before the first section is "head"."""
    parts = re.split(r"^%(\w+)[^\n]*\n", text, flags=re.M)
    return {"head": parts[0], **dict(zip(parts[1::2], parts[2::2]))}


def problems(repository, text):
    part = sections(text)
    if not re.search(r"^Bootstrap: docker\nFrom: \S+:\S+$", part["head"], re.M):
        yield "head: Bootstrap and a pinned From are missing"
    for name in ("post", "environment", "test", "runscript"):
        shell = ["bash", "-n"] if name == "post" else ["sh", "-n"]
        checked = subprocess.run(shell, input=part.get(name, "("), text=True, capture_output=True, check=False)
        if checked.returncode:
            yield f"%{name}: {checked.stderr.strip()}"
    copied = [line.split() for line in part["files"].splitlines() if line.strip()]
    yield from (f"%files: {source} is not in the repository" for source, _ in copied if not (repository / source).exists())
    yield from (f"%files: {source} goes to {target}" for source, target in copied if target != f"/opt/weft/{source}")
    # Files that the top-level CMakeLists.txt and the scripts read.
    needed = {"CMakeLists.txt", "CMakePresets.json", "cmake", "inputs", "jobscripts", "scripts"}
    for names in re.findall(r"^install\((?:FILES|DIRECTORY) ([^)]*?) DESTINATION", (repository / "cmake" / "WeftInstall.cmake").read_text(), re.M):
        needed |= {name.partition("/")[0] for name in names.split() if not name.startswith("$")}
    needed |= set(re.findall(r"^add_subdirectory\((\w+)\)", (repository / "CMakeLists.txt").read_text(), re.M))
    yield from (f"%files: {name} is missing" for name in needed - {source for source, _ in copied})
    if "scripts/setup.sh" not in part["post"]:
        yield "%post: does not use scripts/setup.sh"
    presets = {preset["name"] for preset in json.loads((repository / "CMakePresets.json").read_text())["configurePresets"]}
    used = re.findall(r"(?:--preset |build/)([\w-]+)", part["post"])
    if not used or len(set(used)) != 1 or used[0] not in presets:
        yield f"%post: presets {used}"
    options = set(re.findall(r"\b(WEFT_\w+)", "\n".join(path.read_text() for path in [
        repository / "CMakeLists.txt", *(repository / "cmake").glob("*.cmake"), *(repository / "kernels").glob("CMakeLists.txt")])))
    yield from (f"%post: CMake knows no {name}" for name in re.findall(r"-D(WEFT_\w+)", part["post"]) if name not in options)


def main():
    repository = Path(sys.argv[1])
    text = (repository / "container" / "weft.def").read_text()
    for change in (("set -euo", "set -euo ("), ("    kernels /opt", "    kernel /opt"), ("scripts/setup.sh", "apt-get"),
                   ("--preset cuda-release", "--preset cuda"), ("-DWEFT_CPU_TARGET", "-DWEFT_CPU")):
        assert change[0] in text and list(problems(repository, text.replace(*change))), change
    found = list(problems(repository, text))
    print("\n".join(found) or "no problems")
    return 1 if found else 0


sys.exit(main())
