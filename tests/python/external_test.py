# SPDX-License-Identifier: Apache-2.0
"""`weft NAME` starts weft-NAME from PATH: arguments, environment and exit code are passed on, under a launcher by rank 0 alone. Without the
Python package the message says how to install it.

external_test.py WEFT
"""
import os
import subprocess

import program


def script(folder, name, body):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def check(weft):
    folder = weft.folder / "programs"
    folder.mkdir()
    script(folder, "weft-show", 'echo "$WEFT_PROGRAM|$#|$1|$2"; exit 7')
    script(folder, "weft-train", 'echo "in place of the command"')
    script(folder, "weft-harvest", 'echo "a process of harvest"')
    (folder / "weft-plain").write_text("not executable")
    path = f"{folder}:{os.environ['PATH']}"
    weft.environment["PATH"] = path

    said = weft.run("show", "a b", "--set=x", code=7)
    assert said == f"{weft.binary}|2|a b|--set=x\n", said
    assert weft.run("help", "show", code=7) == f"{weft.binary}|1|--help|\n"
    # A command of the program is that of the program; options and paths are no names; a file that cannot be executed is no program.
    assert "weft train needs its INPUT" in weft.run("train", code=2)
    assert "unknown command \"plain\"" in weft.run("plain", code=2)
    for arguments in (("--version",), ("--help",), ("help",), ("lm", "--help")):
        assert f"{weft.binary}|" not in weft.run(*arguments)
    assert "unknown command \"../programs/weft-show\"" in weft.run("../programs/weft-show", code=2)

    # It replaces the process: no watchdog of the program ends it, however long it takes.
    script(folder, "weft-number", "echo $$")
    started = subprocess.Popen([weft.binary, "number"], env=weft.environment, stdout=subprocess.PIPE, text=True)
    assert int(started.communicate(timeout=60)[0]) == started.pid

    # Under a launcher rank 0 alone starts it; harvest divides its work.
    assert weft.run("show", ranks=2, code=None).count("|") == 3
    assert weft.run("harvest", ranks=2).count("a process of harvest") == 2

    # Not installed: which package, and how.
    for name in program.PROGRAMS:
        assert f"weft {name} " in weft.run("--help")
    weft.environment["PATH"] = "/usr/bin:/bin"
    for name in ("report", "sweep", "serve", "follow", "harvest", "prepare", "neuronpedia", "score"):
        said = weft.run(name, "runs/a", code=2)
        assert f"no weft-{name} in PATH" in said and "pip install ./python" in said and said.startswith("error: "), said
    assert '(did you mean "report"?)' in weft.run("reprot", code=2)
    said = weft.run("report", "runs/a", ranks=2, code=None)
    assert said.count("pip install ./python") == 1, said

    # The package itself, through PATH.
    if weft.has_package():
        for name in program.PROGRAMS:
            assert f"usage: weft {name}" in weft.run(name, "--help") == weft.run("help", name)
        assert "see weft report --help" in weft.run("report", "--outpt", "x", code=2)
        done = subprocess.run([weft.binary, "report", "nowhere"], cwd=weft.folder, env=weft.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("error: nowhere: no such directory"), done
    print("programs in PATH are commands; a missing package is named")


program.main(check)
