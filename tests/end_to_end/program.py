# SPDX-License-Identifier: Apache-2.0
"""Runs weft from a test: each run in its own folder; its output is printed if it ends unexpectedly."""
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SKIPPED = 77
PACKAGE = Path(__file__).resolve().parents[2] / "python"
# Programs of the Python package; an installation has the same (python/pyproject.toml).
PROGRAMS = {"report": "weft.report.command", "sweep": "weft.sweep.command", "serve": "weft.serve.command", "follow": "weft.follow",
            "harvest": "weft.harvest"}

# Small planted data in FOLDER/data: the beginning of an input, to be formatted with `folder`.
SYNTHETIC = """
[synthetic]
output = "{folder}/data"
layers = 2
d_model = 16
features = 32
k = 3
tokens = 2000
validation_tokens = 100
"""


class Program:
    def __init__(self, binary, folder):
        self.binary, self.folder, self.environment = Path(binary).resolve(), Path(folder), dict(os.environ)

    def has_package(self):
        """Puts the programs of the Python package into PATH; False, with a line that says so, if a library of theirs is missing."""
        missing = [name for name in ("numpy", "h5py", "matplotlib") if not importlib.util.find_spec(name)]
        if missing:
            print(f"not checked: the Python package ({', '.join(missing)} not installed; scripts/setup.sh --tests installs it)")
            return False
        self.environment["PATH"] = f"{install_programs(self.folder / 'package')}:{os.environ['PATH']}"
        return True

    def run(self, *arguments, code=0, ranks=None):
        """Standard output and error together. Fails unless the exit code is `code` (None: any)."""
        command = [str(self.binary), *map(str, arguments)]
        if ranks:
            command = ["mpiexec", "-n", str(ranks), "--oversubscribe", "--bind-to", "none", *command]
        done = subprocess.run(command, cwd=self.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              check=False, env=self.environment)
        if code is not None and done.returncode != code:
            print(done.stdout)
            raise AssertionError(f"{' '.join(command)} ended with {done.returncode}, expected {code}")
        return done.stdout

    def train(self, text, output, *arguments, **options):
        """Trains from the text of an input into folder/output; returns that path."""
        source = self.folder / f"{output}.toml"
        source.write_text(text)
        self.run("train", source, "--output", self.folder / output, *arguments, **options)
        return self.folder / output


def install_programs(folder):
    """A directory with the programs of the package, which run from the repository."""
    folder.mkdir(exist_ok=True)
    for name, module in PROGRAMS.items():
        path = folder / f"weft-{name}"
        path.write_text(f'#!/bin/sh\nPYTHONPATH="{PACKAGE}" exec "{sys.executable}" -m {module} "$@"\n')
        path.chmod(0o755)
    return folder


def record(run):
    return json.loads((Path(run) / "run.json").read_text())


def metrics(run):
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def skip(reason):
    print(f"skipped: {reason}")
    sys.exit(SKIPPED)


def metrics_without_times(run):
    """The metrics records without times and memory, which differ from run to run; everything else must be equal."""
    times = ("seconds", "tokens_per_second", "data_wait_seconds", "exposed_seconds", "memory")

    def without(record):
        return {key: without(value) if isinstance(value, dict) else value for key, value in record.items() if key not in times}

    return [without(line) for line in metrics(run)]


def needs_package(weft):
    """Skips the test if a library of the Python package is missing."""
    if not weft.has_package():
        skip("a library of the Python package is not installed")


def needs_gpu():
    """Skips the test if the driver reports no GPU."""
    if not shutil.which("nvidia-smi") or subprocess.run(["nvidia-smi"], capture_output=True, check=False).returncode != 0:
        skip("no GPU")


def main(test):
    """Runs test(program) with the binary named on the command line, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="weft_test_") as folder:
        test(Program(sys.argv[1], folder))
