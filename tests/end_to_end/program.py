# SPDX-License-Identifier: Apache-2.0
"""Runs weft from a test: each run in its own folder; its output is printed if it ends unexpectedly."""
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SKIPPED = 77

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
        self.binary, self.folder = Path(binary).resolve(), Path(folder)

    def run(self, *arguments, code=0, ranks=None):
        """Standard output and error together. Fails unless the exit code is `code` (None: any)."""
        command = [str(self.binary), *map(str, arguments)]
        if ranks:
            command = ["mpiexec", "-n", str(ranks), "--oversubscribe", "--bind-to", "none", *command]
        done = subprocess.run(command, cwd=self.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              check=False)
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


def needs_gpu():
    """Skips the test if the driver reports no GPU."""
    if not shutil.which("nvidia-smi") or subprocess.run(["nvidia-smi"], capture_output=True, check=False).returncode != 0:
        skip("no GPU")


def main(test):
    """Runs test(program) with the binary named on the command line, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="weft_test_") as folder:
        test(Program(sys.argv[1], folder))
