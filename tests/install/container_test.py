# SPDX-License-Identifier: Apache-2.0
"""Static checks of the container definition and of install.sh, its steps: shell sections parse, the files that it copies exist and are
all that a build needs, presets and options of CMake exist, debian.sh copies the same files and runs the same steps. debian_test.sh runs them.

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


def problems(repository, text, steps, debian):
    part = sections(text)
    defaults = dict(re.findall(r"^ *(\w+)=(\S+)$", part["arguments"], re.M))
    used = set(re.findall(r"\{\{ (\w+) \}\}", text))
    if used != set(defaults):
        yield f"%arguments: {sorted(defaults)}, used are {sorted(used)}"
    if "Bootstrap: {{ bootstrap }}\nFrom: {{ from }}\n" not in part["head"] or not re.match(r"\S+:\S+$", defaults.get("from", "")):
        yield "head: Bootstrap and a pinned From are missing"
    for name, shell, script in [(f"%{name}", "sh", part.get(name, "(")) for name in ("post", "environment", "test", "runscript")] + [("install.sh", "bash", steps)]:
        checked = subprocess.run([shell, "-n"], input=script, text=True, capture_output=True, check=False)
        if checked.returncode:
            yield f"{name}: {checked.stderr.strip()}"
    copied = [line.split() for line in part["files"].splitlines() if line.strip()]
    yield from (f"%files: {source} is not in the repository" for source, _ in copied if not (repository / source).exists())
    yield from (f"%files: {source} goes to {target}" for source, target in copied if target != f"/opt/weft/{source}")
    # Files that the top-level CMakeLists.txt and the scripts read.
    needed = {"CMakeLists.txt", "CMakePresets.json", "cmake", "container", "inputs", "jobscripts", "scripts"}
    for names in re.findall(r"^install\((?:FILES|DIRECTORY) ([^)]*?) DESTINATION", (repository / "cmake" / "WeftInstall.cmake").read_text(), re.M):
        needed |= {name.partition("/")[0] for name in names.split() if not name.startswith("$")}
    needed |= set(re.findall(r"^add_subdirectory\((\w+)\)", (repository / "CMakeLists.txt").read_text(), re.M))
    yield from (f"%files: {name} is missing" for name in needed - {source for source, _ in copied})
    if "/opt/weft/container/install.sh {{ preset }}" not in part["post"]:
        yield "%post: does not run install.sh"
    if not re.search(r"^inside .* /opt/weft/container/install\.sh cpu-release$", debian, re.M):
        yield "debian.sh: does not run install.sh"
    reads = re.search(r"<\(sed -n '([^']+)' \"\$repository/container/weft\.def\"\)", debian)
    listed = reads and subprocess.run(["sed", "-n", reads[1]], input=text, text=True, capture_output=True, check=False).stdout.split()
    if listed != [source for source, _ in copied]:
        yield f"debian.sh: copies {listed}"
    if "scripts/setup.sh" not in steps:
        yield "install.sh: does not use scripts/setup.sh"
    presets = {preset["name"] for preset in json.loads((repository / "CMakePresets.json").read_text())["configurePresets"]}
    named = {defaults.get("preset"), *re.findall(r"preset=([\w-]+)", part["head"])}
    yield from (f"preset {name} does not exist" for name in named - presets)
    options = set(re.findall(r"\b(WEFT_\w+)", "\n".join(path.read_text() for path in [
        repository / "CMakeLists.txt", *(repository / "cmake").glob("*.cmake"), *(repository / "kernels").glob("CMakeLists.txt")])))
    yield from (f"install.sh: CMake knows no {name}" for name in re.findall(r"-D(WEFT_\w+)", steps) if name not in options)


def main():
    repository = Path(sys.argv[1])
    text = (repository / "container" / "weft.def").read_text()
    steps, debian = ((repository / "container" / name).read_text() for name in ("install.sh", "debian.sh"))
    for old, new in (("weft --version\n    weft", "weft ( --version\n    weft"), ("    kernels /opt", "    kernel /opt"), ("preset=cuda-release", "preset=cuda"),
                     ("install.sh", "build.sh"), ("preset }}", "presets }}"), ("    from=", "    base=")):
        assert old in text and list(problems(repository, text.replace(old, new), steps, debian)), old
    for old, new in (("set -euo", "set -euo ("), ("scripts/setup.sh", "apt-get"), ("-DWEFT_CPU_TARGET", "-DWEFT_CPU")):
        assert old in steps and list(problems(repository, text, steps.replace(old, new), debian)), old
    for old, new in (("container/install.sh cpu", "container/build.sh cpu"), ("\\1|p", "\\1|")):
        assert old in debian and list(problems(repository, text, steps, debian.replace(old, new))), old
    found = list(problems(repository, text, steps, debian))
    print("\n".join(found) or "no problems")
    return 1 if found else 0


sys.exit(main())
