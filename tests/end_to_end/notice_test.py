# SPDX-License-Identifier: Apache-2.0
"""A scheduler's notice (USR1) outside the steps: during start-up it is kept for the first steps, after the last step it is
ignored. Without a handler in both cases it would kill the program.

notice_test.py WEFT
"""
import signal
import subprocess

import program

INPUT = program.SYNTHETIC + """\
[run]
steps = {steps}
[data]
train = "{folder}/data/train"
validation = "{folder}/data/validation"
batch_tokens = 64
[transcoder]
features = 40
k = 3
"""


def train_with_notice(weft, name, moment, steps):
    """Trains, sends USR1 when a line that begins with `moment` appears; returns the exit code."""
    source = weft.folder / f"{name}.toml"
    source.write_text(INPUT.format(folder=weft.folder, steps=steps))
    if not (weft.folder / "data").exists():
        weft.run("synth", source, "--set", "synthetic.tokens=4000", "--set", "synthetic.validation_tokens=2000")
    with subprocess.Popen([str(weft.binary), "train", str(source), "--output", str(weft.folder / name)], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        sent = False
        for line in process.stdout:
            if line.startswith(moment) and not sent:
                process.send_signal(signal.SIGUSR1)
                sent = True
    assert sent, f"no line \"{moment}\""
    return process.returncode


def check(weft):
    # The plan is printed before the statistics of the data and the first step.
    code = train_with_notice(weft, "start", "plan:", steps=1_000_000)
    assert code == 75, code
    assert program.record(weft.folder / "start")["result"]["step"] > 0
    # The table of timings is printed between the last step and the evaluation.
    code = train_with_notice(weft, "end", "phase ", steps=20)
    assert code == 0, code
    assert "validation" in program.record(weft.folder / "end")["result"]


program.main(check)
