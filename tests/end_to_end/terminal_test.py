# SPDX-License-Identifier: Apache-2.0
"""Progress on a terminal: one line that is replaced, cut to the width of the terminal, and visible after the end.

terminal_test.py WEFT
"""
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios

import program

COLUMNS = 40
INPUT = program.SYNTHETIC + """\
[run]
steps = 30
[data]
train = "{folder}/data/train"
batch_tokens = 60
[transcoder]
features = 40
k = 3
[checkpoint]
every = 20
[log]
every = 5
"""


def on_terminal(*command):
    """What the command prints on a terminal of COLUMNS columns."""
    own, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 25, COLUMNS, 0, 0))
    with subprocess.Popen(command, stdin=other, stdout=other, stderr=other) as process:
        os.close(other)
        output = b""
        while True:
            try:
                part = os.read(own, 4096)
            except OSError:  # the last process has closed the terminal
                break
            output += part
            if not part:
                break
    assert process.returncode == 0, output.decode()
    return output.decode()


def screen(output):
    """The lines that are visible in the end: a carriage return goes back, ESC [ K erases the rest of the line."""
    return [re.sub(r".*\r(?=.)", "", line.replace("\r\r", "\r")).replace("\x1b[K", "").rstrip("\r") for line in output.split("\n")]


def check(weft):
    source = weft.folder / "input.toml"
    source.write_text(INPUT.format(folder=weft.folder))
    weft.run("synth", source)
    output = on_terminal(str(weft.binary), "train", str(source), "--output", str(weft.folder / "run"))
    shown = re.findall(r"\r(step \d+/30[^\x1b]*)\x1b\[K", output)
    assert [line.split("/")[0] for line in shown] == [f"step {step}" for step in range(5, 31, 5)], shown
    assert all(len(line) < COLUMNS for line in shown) and max(map(len, shown)) == COLUMNS - 1, shown
    left = [line for line in screen(output) if line.startswith("step ")]
    assert left and left[-1] == shown[-1], (left, output)
    # The log has the whole lines.
    log = (weft.folder / "run" / "log.txt").read_text()
    assert re.search(r" step 30/30  loss \S+  NMSE \S+  L0 \S+  \S+ tokens/s", log), log


program.main(check)
