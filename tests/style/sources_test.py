# SPDX-License-Identifier: Apache-2.0
"""Static checks of every file of the repository.

sources_test.py REPOSITORY CHECK
  licence   each source has an SPDX line at the top
  paths     no file contains a path of a specific machine or user
  shell     each script passes bash -n and shellcheck (skipped without shellcheck)
  format    each C++ source is formatted by clang-format 14 (skipped without it)
"""
import re
import shutil
import subprocess
import sys
from pathlib import Path

SKIPPED = 77
AT_ONCE = 200    # files of one start of clang-format: its start takes most of the time of a file
CPP = {".cpp", ".hpp", ".cu", ".cuh"}
TEXT = CPP | {".py", ".sh", ".cmake", ".toml", ".md", ".txt", ".json", ".yaml", ".yml", ".sbatch", ".pbs", ".def"}


def files_of(repository):
    """Files tracked by git; in an unpacked archive, all files except outputs of builds and runs."""
    listed = subprocess.run(["git", "-C", repository, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                            capture_output=True, text=True, check=False) if shutil.which("git") else None
    if listed and listed.returncode == 0:
        names = [name for name in listed.stdout.split("\0") if name]
    else:
        left_behind = {"build", ".deps", "runs", ".git", "__pycache__"}
        names = [str(p.relative_to(repository)) for p in repository.rglob("*")
                 if p.is_file() and not left_behind & set(p.relative_to(repository).parts)]
    return sorted(repository / name for name in names if (repository / name).is_file())


def is_script(path):
    if path.suffix in (".sh", ".sbatch", ".pbs"):
        return True
    with open(path, "rb") as file:
        return re.match(rb"#!.*\b(ba)?sh\b", file.readline(200)) is not None


def licence(files):
    for path in files:
        source = path.suffix in CPP | {".py", ".cmake"} or path.name == "CMakeLists.txt" or is_script(path)
        if source and "SPDX-License-Identifier: Apache-2.0" not in "\n".join(path.read_text().splitlines()[:3]):
            yield f"{path}: no line \"SPDX-License-Identifier: Apache-2.0\" among the first three"


def paths(files):
    # Home and work folders of a machine or user; /usr, /opt, /tmp and the like exist everywhere.
    own = re.compile(r"(?<![\w.$}{/-])/(home|root|Users|work|scratch|workspace)/\w")
    for path in files:
        if path.suffix in TEXT or is_script(path):
            if "jobscripts" in path.parts or path.name == Path(__file__).name:
                continue        # jobscripts/ contains machine-specific folders
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if own.search(line):
                    yield f"{path}:{number}: a machine-specific path: {line.strip()}"


def shell(files):
    scripts = [path for path in files if is_script(path)]
    assert scripts, "no scripts found"
    for path in scripts:
        checked = subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False)
        if checked.returncode:
            yield f"{path}: bash -n: {checked.stderr.strip()}"
    if not shutil.which("shellcheck"):
        raise SkipTest("shellcheck is not installed")
    for path in scripts:
        checked = subprocess.run(["shellcheck", "--shell=bash", path], capture_output=True, text=True, check=False)
        if checked.returncode:
            yield f"{path}:\n{checked.stdout}"


def format_(files):
    tool = shutil.which("clang-format-14") or shutil.which("clang-format")
    version = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False).stdout if tool else ""
    if not re.search(r"version 14\.", version):
        raise SkipTest("clang-format 14 is not installed (other versions format differently)")
    sources = [path for path in files if path.suffix in CPP]
    for first in range(0, len(sources), AT_ONCE):
        checked = subprocess.run([tool, "--dry-run", "--Werror", *sources[first:first + AT_ONCE]], capture_output=True, text=True, check=False)
        wrong = dict.fromkeys(re.findall(r"^(.+?):\d+:\d+: error:", checked.stderr, re.M))
        assert bool(wrong) == bool(checked.returncode), checked.stderr
        yield from (f"{path}: not formatted by clang-format" for path in wrong)


class SkipTest(Exception):
    pass


def main():
    repository, check = Path(sys.argv[1]), sys.argv[2]
    checks = {"licence": licence, "paths": paths, "shell": shell, "format": format_}
    files = files_of(repository)
    assert len(files) > 20, f"only {len(files)} files under {repository}: is this the repository?"
    problems = []
    try:
        for problem in checks[check](files):
            problems.append(problem.replace(f"{repository}/", ""))
    except SkipTest as reason:
        if not problems:
            print(f"skipped: {reason}")
            return SKIPPED
    print("\n".join(problems) or f"{len(files)} files, no problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
