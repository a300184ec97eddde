# SPDX-License-Identifier: Apache-2.0
"""Runs weft from a test: each run in its own folder; its output is printed if it ends unexpectedly."""
import contextlib
import importlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

SKIPPED = 77
KILLED = "any exit code but 0"
PACKAGE = Path(__file__).resolve().parents[2] / "python"
# Programs of the Python package; an installation has the same (python/pyproject.toml).
PROGRAMS = {"report": "weft.report.command", "sweep": "weft.sweep.command", "serve": "weft.serve.command", "follow": "weft.follow",
            "harvest": "weft.harvest", "prepare": "weft.prepare", "neuronpedia": "weft.neuronpedia", "score": "weft.score"}

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
# Text for small language models.
TEXT = "".join(f"The {animal} sat on the {place}; the {animal} did not see the {other}.\n"
               for animal in ("cat", "dog", "fox", "owl") for place in ("mat", "log", "hill") for other in ("moon", "river", "king"))


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

    def start(self, *arguments, ranks=None, fault="", wrapper=(), **options):
        """A Popen whose output and errors are one text. `fault`: WEFT_FAULT; `wrapper`: a command that starts the program on every rank."""
        command = [*wrapper, str(self.binary), *map(str, arguments)]
        if ranks and ranks > 1:
            command = ["mpiexec", "-n", str(ranks), "--oversubscribe", "--bind-to", "none", *command]
        environment = dict(self.environment, WEFT_FAULT=fault) if fault else self.environment
        return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                **{"cwd": self.folder, "env": environment, **options})

    def run(self, *arguments, code=0, timeout=None, **options):
        """Standard output and error together. Fails unless the exit code is `code` (None: any; KILLED: any but 0)."""
        process = self.start(*arguments, **options)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        if process.returncode != code and code is not None and not (code == KILLED and process.returncode != 0):
            print(output)
            raise AssertionError(f"{' '.join(map(str, arguments))} ended with {process.returncode}, expected {code}")
        return output

    def call(self, name, *arguments, code=0):
        """As run(name, *arguments) of a program of the package, in this process: starting Python with the libraries takes half a second. The
        start itself, PATH and standard output as a file are for `run`."""
        said, before = io.StringIO(), os.getcwd()
        if str(PACKAGE) not in sys.path:
            sys.path.insert(0, str(PACKAGE))
        main = importlib.import_module(PROGRAMS[name]).main
        os.chdir(self.folder)
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), \
                    mock.patch.dict(os.environ, self.environment | {"WEFT_PROGRAM": str(self.binary)}):
                ended = main([str(argument) for argument in arguments])
        finally:
            os.chdir(before)
        if ended != code:
            print(said.getvalue())
            raise AssertionError(f"{name} {' '.join(map(str, arguments))} ended with {ended}, expected {code}")
        return said.getvalue()

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


def sets(*changes):
    """--set A --set B …"""
    return [word for change in changes for word in ("--set", change)]


def shard(run, step, rank=0):
    """The bytes of a shard of a checkpoint."""
    return (Path(run) / "checkpoints" / f"step_{step:08d}" / f"rank_{rank:05}.h5").read_bytes()


def validation(directory):
    """What evaluate has written there."""
    return json.loads((Path(directory) / "evaluation.json").read_text())["validation"]


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
