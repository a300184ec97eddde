# SPDX-License-Identifier: Apache-2.0
"""Who may include whom: only downwards, and each library only in its room. Reads every #include line of src/ and kernels/.

layering_test.py REPOSITORY
"""
import re
import sys
from pathlib import Path

# From the top. A room may include rooms of later lines and itself, never another room of its own line.
LEVELS = [
    ["main"],
    ["commands"],
    ["transcoder", "language_model", "privacy"],
    ["training"],
    ["dataset", "checkpoint", "interchange", "optimizer"],
    ["storage", "input"],
    ["report"],
    ["parallel"],
    ["device"],
    ["kernels"],
    ["base"],
]
LEVEL = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}

# Header (as written between the brackets) -> rooms that may include it.
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
]

INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]')


def room_of(path):
    """The room of a file given relative to the repository; src/main.cpp is a room of its own."""
    parts = path.parts
    if parts[0] == "kernels":
        return "kernels"
    return parts[1] if len(parts) > 2 else "main"


def problems_of(path, text, known_rooms=LEVEL):
    room = room_of(path)
    if room not in known_rooms:
        return [f"{path}: room \"{room}\" is not in the list of rooms (tests/style/layering_test.py)"]
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
                found.append(f"{where}: \"{header}\" names no room; write it as \"{room}/{header}\"")
            elif target not in known_rooms:
                found.append(f"{where}: \"{header}\" is in no room; a library's header takes angle brackets")
            elif target != room and known_rooms[target] <= known_rooms[room]:
                found.append(f"{where}: {room} includes \"{header}\" (an arrow that does not go down); move what is shared to a lower room")
        else:
            for pattern, rooms in LIBRARIES:
                if pattern.search(header) and room not in rooms:
                    found.append(f"{where}: <{header}> belongs in {', '.join(sorted(rooms))}; use that room's functions")
    return found


def self_check():
    """The rules catch what they are for."""
    bad = {
        "src/device/a.cpp": '#include "parallel/world.hpp"',
        "src/dataset/a.cpp": '#include "optimizer/schedule.hpp"',
        "src/checkpoint/a.hpp": "#include <hdf5.h>",
        "src/main.cpp": "#include <toml++/toml.h>",
        "kernels/decode/a.cpp": '#include "device/memory.hpp"',
        "src/report/a.cpp": '#include "../base/error.hpp"',
        "src/attic/a.cpp": "",
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
    print("\n".join(problems) or f"{len(files)} files, every arrow goes down")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
