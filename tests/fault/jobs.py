# SPDX-License-Identifier: Apache-2.0
"""Starts jobs with injected faults: shared by the fault tests."""
import os

import files
import program

INPUT = program.SYNTHETIC + """\
[run]
steps = {steps}
[data]
train = "{folder}/data/train"
batch_tokens = 60
block_rows = 16
window_rows = 256
[transcoder]
features = {features}
k = 3
[optimizer]
schedule = "cosine"
warmup_steps = 5
[parallel]
timeout = 120
[checkpoint]
every = {every}
[log]
every = 1
"""


class Jobs:
    """Starts one input repeatedly, with run directories in the folder of the test."""

    def __init__(self, weft, steps=60, every=10, features=40):
        self.weft, self.folder, self.steps = weft, weft.folder, steps
        self.source = weft.folder / "input.toml"
        self.source.write_text(INPUT.format(folder=weft.folder, steps=steps, every=every, features=features))
        if not (weft.folder / "data").exists():
            weft.run("synth", self.source)

    def start(self, name, *arguments, **options):
        return self.weft.start("train", self.source, "--output", self.folder / name, *arguments, **options)

    def run(self, name, *arguments, **options):
        """Returns the output of the completed job; see Program.run."""
        return self.weft.run("train", self.source, "--output", self.folder / name, *arguments, timeout=240, **options)

    def steps_of(self, name):
        """Steps of the checkpoints of a run, ascending."""
        return sorted(files.checkpoints(self.folder / name))

    def outcome(self, name):
        """Bytes of the shards of the last checkpoint, and the metrics without times."""
        run = self.folder / name
        last = files.checkpoints(run)[self.steps]
        return ({path.name: path.read_bytes() for path in sorted(last.glob("rank_*.h5"))},
                program.metrics_without_times(run))


def alive(path):
    """Processes with this path in their command line."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                if str(path).encode() in file.read() and entry != str(os.getpid()):
                    found.append(entry)
        except (OSError, ValueError):
            pass
    return found
