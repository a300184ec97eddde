# SPDX-License-Identifier: Apache-2.0
"""First use without a launcher and with an untouched environment: as the user of this test, and if that is root also as an ordinary
user. The MPI library prints nothing, and leaves nothing in the root directory. What does not calculate runs where MPI cannot start.

first_use_test.py WEFT
"""
import os
import shutil
import stat
import subprocess
from pathlib import Path

import program

INPUT = program.SYNTHETIC + """
[run]
steps = 3
[data]
train = "{folder}/data/train"
batch_tokens = 64
[transcoder]
features = 40
k = 3
"""
ORDINARY = 65534    # an ordinary user without files of its own


def clean_environment(folder):
    """That of a new login: nothing of Open MPI, OpenMP or this test."""
    return {"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C.UTF-8"}


def use(weft, folder, as_user=()):
    """The first commands of a new user; the folder belongs to that user."""
    def run(*arguments, code=0, **variables):
        process = subprocess.Popen([*as_user, str(weft.binary), *map(str, arguments)], cwd=folder, text=True, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, env={**clean_environment(folder), **variables})
        out, err = process.communicate()
        assert process.returncode == code, f"{arguments} ended with {process.returncode}, expected {code}: {out}{err}"
        if code == 0:
            assert err == "", f"{arguments} as {as_user or 'this user'} printed: {err}"
        left = [path.name for path in Path("/").iterdir() if path.name.endswith(f"_{process.pid}")]
        assert not left, f"{arguments} left {left} in the root directory"
        return out + err

    (folder / "input.toml").write_text(INPUT.format(folder=folder))
    run("synth", "input.toml")
    run("train", "input.toml", "--output", "run")

    # An MPI library that cannot start, as on some login nodes.
    broken = {"OMPI_MCA_pml": "none", "FI_PROVIDER": "none"}
    for arguments in (("--help",), ("train", "--help"), ("--version",), ("train", "--defaults"), ("train", "input.toml", "--print-config"),
                      ("train", "input.toml", "--dry-run"), ("inspect", "run"), ("inspect", "data/train"),
                      ("privacy", "--noise-multiplier", 1, "--delta", 1e-6, "--sample-rate", 0.01, "--steps", 10)):
        run(*arguments, **broken)
    said = run("trian", "input.toml", "--set", "run.steps=1", code=2, **broken)
    assert said == 'error: unknown command "trian" (did you mean "train"?); see weft --help\n', said


def under_launcher(weft):
    """Errors and texts are printed once by a job of several ranks, which ends with the code."""
    for arguments, code, wanted in ((("trian", "x"), 2, "unknown command"), (("--version",), 0, "HDF5: "), (("inspect", "nothing"), 2, "nothing: ")):
        said = weft.run(*arguments, ranks=3, code=code)
        assert said.count(wanted) == 1, said


def known_processor(weft):
    """OpenBLAS uses what the processor can do, also one that is newer than the library; a choice of the user stands."""
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}

    def version(**more):
        return subprocess.run([str(weft.binary), "--version"], env=environment | more, text=True, check=True, capture_output=True).stdout
    instructions = Path("/proc/cpuinfo").read_text().split()
    if "DYNAMIC_ARCH" not in version() or not {"avx2", "fma"} <= set(instructions):
        return
    assert " Prescott " not in version(), version()
    assert " Prescott " in version(OPENBLAS_CORETYPE="Prescott"), version()


def test(weft):
    under_launcher(weft)
    known_processor(weft)
    mine = weft.folder / "mine"
    mine.mkdir()
    use(weft, mine)
    if os.geteuid() != 0:
        return
    # The program and a folder within reach of everybody.
    reachable = all(path.stat().st_mode & stat.S_IXOTH for path in weft.binary.parents) and weft.binary.stat().st_mode & stat.S_IXOTH
    if not shutil.which("setpriv") or not reachable:
        program.skip("the program cannot be started as an ordinary user here (setpriv is missing, or its folder is private)")
    theirs = weft.folder / "theirs"
    theirs.mkdir()
    weft.folder.chmod(0o755)
    os.chown(theirs, ORDINARY, ORDINARY)
    use(weft, theirs, ("setpriv", f"--reuid={ORDINARY}", f"--regid={ORDINARY}", "--clear-groups", "--"))


program.main(test)
