# SPDX-License-Identifier: Apache-2.0
"""Which file may include which. Reads every #include line of src/ and kernels/.

  modules   only downwards, and each library in its module only
  units     a header and its source; no cycle
  folders   no two that include each other
  names     no two files of one name

layering_test.py REPOSITORY
"""
import collections
import re
import sys
from pathlib import Path

# From the top. A module may include modules of later lines and itself, never another module of its own line.
LEVELS = [
    ["main"],
    ["commands"],
    ["bench"],
    ["polychromic"],
    ["transcoder", "language_model"],
    ["privacy", "interchange"],
    ["model"],
    ["run"],
    ["dataset", "checkpoint", "optimizer"],
    ["storage"],
    ["parallel"],
    ["device"],
    ["kernels"],
    ["input"],
    ["base"],
]
LEVEL = {module: number for number, modules in enumerate(LEVELS) for module in modules}

# Header (as written between the brackets) -> modules that may include it.
LIBRARIES = [
    (re.compile(r"^hdf5(_hl)?\.h$|^H5\w+\.h$"), {"storage"}),
    (re.compile(r"^mpi\.h$"), {"parallel"}),
    (re.compile(r"^nccl\.h$"), {"parallel"}),
    (re.compile(r"^toml\+\+/|^toml\.hpp$"), {"input"}),
    (re.compile(r"^CLI/"), {"commands", "main"}),
    (re.compile(r"^Kokkos_"), {"kernels"}),
    (re.compile(r"^(cuda|cublas|cub/|thrust/|nvtx3/)"), {"device", "parallel", "kernels"}),
    (re.compile(r"^cblas\.h$"), {"kernels"}),
    (re.compile(r"^spdlog/"), {"base", "run"}),
    (re.compile(r"^openssl/"), {"storage"}),
    (re.compile(r"^pcre2"), {"language_model", "polychromic"}),
    (re.compile(r"^utf8proc"), {"language_model"}),
    (re.compile(r"^kissfft"), {"privacy"}),
    (re.compile(r"^(zstd|lz4frame)\.h$"), {"storage"}),
]

INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]')


def module_of(path):
    """The module of a file given relative to the repository; src/main.cpp is a module of its own."""
    parts = path.parts
    if parts[0] == "kernels":
        return "kernels"
    return parts[1] if len(parts) > 2 else "main"


def problems_of(path, text, known_modules=LEVEL):
    module = module_of(path)
    if module not in known_modules:
        return [f"{path}: module \"{module}\" is not in the list of modules (tests/style/layering_test.py)"]
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        bracket, header = match.groups()
        where = f"{path}:{number}"
        if bracket == '"':
            if header.startswith(("src/", "./", "../")):
                found.append(f"{where}: \"{header}\" (includes are written from the repository root or from src/)")
                continue
            target = header.split("/")[0] if "/" in header else None
            if target is None:
                found.append(f"{where}: \"{header}\" names no module; write it as \"{module}/{header}\"")
            elif target not in known_modules:
                found.append(f"{where}: \"{header}\" is in no module; a library's header takes angle brackets")
            elif target == "bench" and module not in ("bench", "commands"):
                found.append(f"{where}: {module} includes \"{header}\" (only commands may); give it to the model at construction")
            elif target != module and known_modules[target] <= known_modules[module]:
                found.append(f"{where}: {module} includes \"{header}\" (an include that does not go down); move what is shared to a lower module")
        else:
            for pattern, modules in LIBRARIES:
                if pattern.search(header) and module not in modules:
                    found.append(f"{where}: <{header}> belongs in {', '.join(sorted(modules))}; use the functions of that module")
    return found


def unit_of(path):
    """"transcoder/step/step" of a header and its source."""
    parts = path.with_suffix("").parts
    return "/".join(parts[1:] if parts[0] == "src" else parts)


def cycles_of(edges):
    """Sets of several nodes of which each leads to all others: strongly connected components (Tarjan 1972)."""
    index, low, stack, found = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in edges.get(node, ()):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            component = stack[stack.index(node):]
            del stack[stack.index(node):]
            if len(component) > 1:
                found.append(frozenset(component))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return set(found)


def structure_of(texts):
    """Cycles of units, pairs of folders that include each other, and repeated names. texts: relative path -> contents."""
    units, folders, names = collections.defaultdict(set), collections.defaultdict(set), collections.Counter(p.name for p in texts)
    for path, text in texts.items():
        unit = unit_of(path)
        for match in filter(None, map(INCLUDE.match, text.splitlines())):
            if match.group(1) != '"':
                continue
            other = unit_of(Path("src") / match.group(2)) if not match.group(2).startswith("kernels/") else unit_of(Path(match.group(2)))
            if other != unit:
                units[unit].add(other)
            if Path(other).parent != Path(unit).parent:
                folders[str(Path(unit).parent)].add(str(Path(other).parent))
    mutual = {frozenset((a, b)) for a in folders for b in folders[a] if a in folders.get(b, ())}
    return cycles_of(units), mutual, {name for name, count in names.items() if count > 1}


def structure_problems(found, what, advice):
    return sorted(f"{what}: {each if isinstance(each, str) else ', '.join(sorted(each))} ({advice})" for each in found)


def self_check():
    """The rules find what they are written for."""
    bad = {
        "src/device/a.cpp": '#include "parallel/world.hpp"',
        "src/dataset/a.cpp": '#include "optimizer/schedule.hpp"',
        "src/checkpoint/a.hpp": "#include <hdf5.h>",
        "src/main.cpp": "#include <toml++/toml.h>",
        "kernels/decode/a.cpp": '#include "device/memory.hpp"',
        "src/report/a.cpp": '#include "../base/error.hpp"',
        "src/attic/a.cpp": "",
        "src/training/a.cpp": '#include "transcoder/parameters/model.hpp"',
        "src/checkpoint/b.cpp": '#include "run/loop.hpp"',
        "src/transcoder/b.cpp": '#include "language_model/step/transformer.hpp"',
        "src/language_model/b.cpp": '#include "bench/benchmark.hpp"',
        "src/start.cpp": '#include "bench/benchmark.hpp"',
    }
    good = {
        "src/main.cpp": '#include "commands/run.hpp"\n#include <CLI/CLI.hpp>\n#include <vector>',
        "src/transcoder/a.hpp": '#include "dataset/dataset_settings.hpp"\n#include "transcoder/b.hpp"\n#include "kernels/array.hpp"',
        "kernels/a.cpp": '#include <Kokkos_Core.hpp>\n#include "base/error.hpp"',
    }
    for name, text in bad.items():
        assert len(problems_of(Path(name), text)) == 1, name
    for name, text in good.items():
        assert not problems_of(Path(name), text), name
    cycles, mutual, names = structure_of({Path(path): text for path, text in {
        "src/a/one.hpp": '#include "b/two.hpp"', "src/b/two.cpp": '#include "a/three.hpp"', "src/a/three.hpp": '#include "a/one.hpp"',
        "src/a/four.cpp": '#include "a/four.hpp"', "kernels/four.cpp": "", "src/a/four.hpp": ""}.items()})
    assert cycles == {frozenset(("a/one", "b/two", "a/three"))} and mutual == {frozenset(("a", "b"))} and names == {"four.cpp"}


def main():
    self_check()
    repository = Path(sys.argv[1])
    files = sorted(p for top in ("src", "kernels") for p in (repository / top).rglob("*")
                   if p.suffix in (".cpp", ".hpp", ".cu", ".cuh"))
    assert len(files) > 20, f"only {len(files)} sources under {repository}: is this the repository?"
    texts = {path.relative_to(repository): path.read_text() for path in files}
    problems = [problem for path, text in texts.items() for problem in problems_of(path, text)]
    cycles, mutual, names = structure_of(texts)
    problems += structure_problems(cycles, "a cycle of units", "move what they share to a lower one")
    problems += structure_problems(mutual, "folders that include each other", "move what they share")
    problems += structure_problems(names, "several files have one name", "a name says which file it is")
    print("\n".join(problems) or f"{len(files)} files, every include goes down")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
