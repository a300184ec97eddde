# SPDX-License-Identifier: Apache-2.0
"""Progress on a terminal of 40, 80 and 200 columns: a line per log.every stays in the scroll-back, a live line below it is redrawn after
other lines and erased at the end, and no line wraps, also when the terminal becomes narrower. Colours: not with NO_COLOR, a dumb
terminal or in a file. With --json the progress is on standard error.

terminal_test.py WEFT
"""
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import termios

import program

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


def set_columns(terminal, columns):
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 25, columns, 0, 0))


def on_terminal(columns, *command, stdout=None, narrower=None, **environment):
    """What the command prints on a terminal of so many columns. `narrower`: its columns after the first progress line."""
    own, other = pty.openpty()
    set_columns(other, columns)
    variables = {**os.environ, "TERM": "xterm", **environment}
    with subprocess.Popen(list(map(str, command)), stdin=other, stdout=stdout or other, stderr=other, env=variables) as process:
        os.close(other)
        output = b""
        while True:
            try:
                part = os.read(own, 4096)
            except OSError:  # the last process has closed the terminal
                break
            output += part
            if narrower and b"step 5/" in output:
                set_columns(own, narrower)
                narrower = None
            if not part:
                break
    os.close(own)
    assert process.returncode == 0, output.decode()
    return output.decode()


class Screen:
    """A terminal of unlimited height: its lines, and the lengths of what was written into each without wrapping."""

    def __init__(self, output):
        self.lines, self.widths, line, column = [], [], [], 0
        for piece in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", output):
            if piece == "\n":
                self.lines.append("".join(line))
                line, column = [], 0
            elif piece == "\r":
                column = 0
            elif piece == "\x1b[K":
                del line[column:]
            elif piece.startswith("\x1b["):
                assert re.fullmatch(r"\x1b\[\d*m", piece), repr(piece)        # colours
            else:
                line[column:column + len(piece)] = piece
                column += len(piece)
                self.widths.append((column, piece))
        self.last = "".join(line)


def check(weft):
    source = weft.folder / "input.toml"
    source.write_text(INPUT.format(folder=weft.folder))
    weft.run("synth", source)
    runs = iter(range(100))

    def train(columns, *options, **more):
        run = weft.folder / f"run_{next(runs)}"
        return on_terminal(columns, weft.binary, "train", source, "--output", run, *options, **more), run

    for columns in (40, 80, 200):
        output, run = train(columns)
        screen = Screen(output)
        logged = [line for line in screen.lines if re.match(r"step \d+/30  loss", line)]
        assert [line.split("/")[0] for line in logged] == [f"step {step}" for step in range(5, 31, 5)], (columns, output)
        assert all(len(line) < columns for line in logged), logged
        live = [(width, text) for width, text in screen.widths if re.match(r"step \d+/30  +\d+ %", text)]
        assert live and all(width < columns for width, _ in live), live
        assert not screen.last.strip() and not any(re.match(r"step \d+/30 .* %", line) for line in screen.lines), screen.lines
        # Redrawn after the line of a checkpoint, with which it shares no line of the screen.
        assert any(line.startswith("checkpoint step_00000020: ") for line in screen.lines), screen.lines
        assert re.search(r"checkpoint step_00000020[^\n]*\n\r?(\x1b\[\d+m)?\r?(\x1b\[\d+m)?step \d+/30", output), repr(output)
        if columns == 200:      # room for everything
            assert all("NMSE" in line and "L0" in line and "tokens/s" in line and "left" in line for line in logged), logged
        else:                   # whole fields
            assert all(re.fullmatch(r"step \d+/30  loss \S+(  NMSE \S+)?(  L0 \S+)?(  \S+ tokens/s)?(  \S+ left)?", line)
                       for line in logged), logged
        # The log has the whole lines, and no escape sequences.
        log = (run / "log.txt").read_text()
        assert re.search(r" step 30/30  loss \S+  NMSE \S+  L0 \S+  \S+ tokens/s", log) and "\x1b" not in log and not re.search(r"step \d+/30  +\d+ %", log), log

    # The width is that of the moment. The output is larger than what a terminal buffers: its end is written after the change.
    output, _ = train(200, "--set", "run.steps=1500", "--set", "log.every=1", narrower=50)
    assert len(output) > 100_000
    end = Screen(output[output.index("step 1400/"):])
    assert all(width < 50 for width, text in end.widths if text.startswith("step ")), end.widths

    # Colours.
    warns = ("--set", "optimizer.learning_rate=1e-9")
    assert "\x1b[33mwarning:\x1b[0m optimizer.learning_rate" in train(80, *warns)[0]
    for variables in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        output, _ = train(80, *warns, **variables)
        assert "warning: optimizer.learning_rate" in output and not re.search(r"\x1b\[\d+m", output), output
    assert "\x1b" not in output         # dumb: no live line either
    piped = weft.run("train", source, "--output", weft.folder / "piped", *warns)
    assert "\x1b" not in piped and "\r" not in piped and not re.search(r"step \d+/30  +\d+ %", piped), piped

    # --quiet: nothing but warnings; --json: one document on standard output, the rest on the terminal.
    assert train(80, "--quiet")[0] == ""
    with open(weft.folder / "document.json", "w+b") as document:
        output, run = train(80, "--json", stdout=document)
        document.seek(0)
        assert json.load(document)["result"]["step"] == 30
    assert "step 30/30  loss" in output and re.search(r"step \d+/30  +\d+ %", output), output
    # --verbose: versions and phases, which are not in the way of the progress.
    output, _ = train(120, "--verbose")
    assert re.search(r"\d\.\d{3} s  weft \d", output) and re.search(r"\d\.\d{3} s  reading the headers of the data", output), output


program.main(check)
