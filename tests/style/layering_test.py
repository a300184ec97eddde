# SPDX-License-Identifier: Apache-2.0
"""Which module may include which: only downwards, and each library in its module only. Reads every #include line of src/ and kernels/.

layering_test.py REPOSITORY
"""
import re
import sys
from pathlib import Path

# From the top. A module may include modules of later lines and itself, never another module of its own line.
LEVELS = [
    ["main"],
    ["commands"],
    ["bench"],
    ["transcoder", "language_model"],
    ["privacy", "interchange"],
    ["training"],
    ["dataset", "checkpoint", "optimizer"],
    ["storage"],
    ["report"],
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
    (re.compile(r"^spdlog/"), {"base", "report"}),
    (re.compile(r"^openssl/"), {"storage"}),
    (re.compile(r"^pcre2"), {"language_model"}),
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
        "src/checkpoint/b.cpp": '#include "training/loop.hpp"',
        "src/transcoder/b.cpp": '#include "language_model/model.hpp"',
        "src/language_model/b.cpp": '#include "bench/benchmark.hpp"',
        "src/start.cpp": '#include "bench/benchmark.hpp"',
    }
    good = {
        "src/main.cpp": '#include "commands/run.hpp"\n#include <CLI/CLI.hpp>\n#include <vector>',
        "src/transcoder/a.hpp": '#include "dataset/settings.hpp"\n#include "transcoder/b.hpp"\n#include "kernels/array.hpp"',
        "kernels/a.cpp": '#include <Kokkos_Core.hpp>\n#include "base/error.hpp"',
    }
    for name, text in bad.items():
        assert len(problems_of(Path(name), text)) == 1, name
    for name, text in good.items():
        assert not problems_of(Path(name), text), name


def main():
    self_check()
    repository = Path(sys.argv[1])
    files = sorted(p for top in ("src", "kernels") for p in (repository / top).rglob("*")
                   if p.suffix in (".cpp", ".hpp", ".cu", ".cuh"))
    assert len(files) > 20, f"only {len(files)} sources under {repository}: is this the repository?"
    problems = [problem for path in files for problem in problems_of(path.relative_to(repository), path.read_text())]
    print("\n".join(problems) or f"{len(files)} files, every include goes down")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
