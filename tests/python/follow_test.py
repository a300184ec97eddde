# SPDX-License-Identifier: Apache-2.0
"""weft follow: a table of a run while it trains, torn lines, steps that are written again, two starts of the tool itself.

follow_test.py WEFT
"""
import csv
import json
import os
import subprocess
import sys
import time

import program

sys.path.insert(0, str(program.PACKAGE))
from weft import follow

INPUT = program.SYNTHETIC + """
[run]
steps = 400
[data]
train = "{folder}/data/train"
batch_tokens = 64
[transcoder]
features = 40
k = 3
[checkpoint]
every = 100
[log]
every = 5
"""


def table(path):
    with open(path, encoding="utf-8") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def tool(*arguments, code=0, **options):
    environment = options.pop("env", os.environ)
    environment = dict(environment, PYTHONPATH=f"{environment.get('PYTHONPATH', '')}:{program.PACKAGE}")
    done = subprocess.run([sys.executable, "-m", "weft.follow", *map(str, arguments)], text=True, check=False, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, env=environment, **options)
    assert done.returncode == code, done.stdout
    return done.stdout


def expected(run):
    return [follow.flat(line) for line in program.metrics(run)]


def check_training(weft):
    """Started with the run, ended by its end; stopped by a signal and resumed in between."""
    source = weft.folder / "input.toml"
    source.write_text(INPUT.format(folder=weft.folder))
    weft.run("synth", source)
    run = weft.folder / "run"
    run.mkdir()
    following = subprocess.Popen([sys.executable, "-m", "weft.follow", str(run), "--to", "csv", "--every", "0.05"], stdout=subprocess.PIPE,
                                 text=True, env=dict(os.environ, PYTHONPATH=str(program.PACKAGE)))
    weft.run("train", source, "--output", run, fault="step:0:250:kill", code=program.KILLED)
    while not (run / "metrics.csv").exists():
        assert following.poll() is None
        time.sleep(0.02)
    assert following.poll() is None, "a killed run may be resumed: the tool waits"
    weft.run("train", source, "--output", run)
    said = following.communicate(timeout=60)[0]
    assert following.returncode == 0 and "up to step 400" in said, said
    assert table(run / "metrics.csv") == expected(run)
    assert [row["step"] for row in table(run / "metrics.csv")] == list(range(5, 401, 5))


def check_lines(weft):
    run = weft.folder / "written"
    run.mkdir()
    metrics = run / "metrics.jsonl"
    one = follow.Followed(run)
    assert one.read() == []
    metrics.write_text('{"step": 1, "loss": 5}\n{"step": 2, "lo')
    assert one.read() == [1]
    with open(metrics, "a", encoding="utf-8") as file:
        file.write('ss": "inf", "layer_l0": [3, 4], "group": {"a": 1}}\nnot a record\n{"step": 3, "loss": 3}\n')
    assert one.read() == [2, 3] and one.read() == []
    assert follow.flat(one.steps[2]) == {"step": 2, "loss": float("inf"), "l0.0": 3, "l0.1": 4, "group.a": 1}
    # A start resumes from step 1: the program cuts the file in place, and goes on.
    with open(metrics, "r+", encoding="utf-8") as file:
        file.truncate(len('{"step": 1, "loss": 5}\n'))
    with open(metrics, "a", encoding="utf-8") as file:
        file.write('{"step": 2, "loss": 8}\n')
    assert one.read() == [2] and sorted(one.steps) == [1, 2] and one.steps[2]["loss"] == 8
    # The same steps twice in one file: the later line.
    with open(metrics, "a", encoding="utf-8") as file:
        file.write('{"step": 3, "loss": 7}\n{"step": 4, "loss": 7}\n{"step": 3, "loss": 6}\n')
    assert one.read() == [3] and one.steps[3]["loss"] == 6 and sorted(one.steps) == [1, 2, 3]
    # Replaced by another file.
    other = run / "other"
    other.write_text('{"step": 1, "loss": 5}\n{"step": 2, "loss": 1}\n')
    other.rename(metrics)
    assert one.read() == [2] and sorted(one.steps) == [1, 2]

    # What a target has received is not handed over again by a later start, unless it is written again.
    sent = follow.Sent(weft.folder / "sent.json")
    assert sent.unsent(one, [1, 2]) == [1, 2]
    sent.note(one, 2)
    later = follow.Sent(weft.folder / "sent.json")
    assert later.unsent(one, [1, 2, 3]) == [3] and later.unsent(one, [2]) == [2]


def check_names_and_messages(weft):
    for place in ("a/run", "b/run"):
        (weft.folder / place).mkdir(parents=True)
        (weft.folder / place / "metrics.jsonl").write_text(f'{{"step": 1, "loss": {len(place)}}}\n')
    tool(weft.folder / "a" / "run", weft.folder / "b" / "run", "--once", "--to", "csv", weft.folder / "tables")
    assert {path.name for path in (weft.folder / "tables").iterdir()} == {"a-run.csv", "b-run.csv"}
    assert "no such directory" in tool(weft.folder / "none", "--to", "csv", code=2)
    assert "not a target" in tool(weft.folder, "--to", "paper", code=2)
    # A library is named only where its target is asked for: here they are hidden.
    (weft.folder / "hidden").mkdir()
    for name in ("torch", "tensorboardX", "tensorboard", "wandb"):
        (weft.folder / "hidden" / f"{name}.py").write_text("raise ImportError('hidden')\n")
    environment = dict(os.environ, PYTHONPATH=str(weft.folder / "hidden"))
    for target, words in ((("tensorboard", weft.folder / "events"), "pip install tensorboard"), (("wandb",), "pip install wandb")):
        assert words in tool(weft.folder / "written", "--to", *target, "--once", code=2, env=environment)
    tool(weft.folder / "written", "--to", "csv", "--once", env=environment)


FAKE_WANDB = """
import json
class Run:
    def log(self, values, step, commit):
        with open("logged.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps([step, values, commit]) + "\\n")
    def finish(self):
        pass
def init(id, **_):
    with open("ids", "a", encoding="utf-8") as file:
        file.write(id + "\\n")
    return Run()
"""


def check_wandb(weft):
    """A library that notes what it is given: over two starts each step once and under its own number, which is W&B's axis."""
    folder, run = weft.folder / "wandb", weft.folder / "followed"
    for made in (folder, run):
        made.mkdir()
    (folder / "wandb.py").write_text(FAKE_WANDB)
    lines = (weft.folder / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    for part in (lines[:30], lines, lines):
        (run / "metrics.jsonl").write_text("".join(part))
        said = tool(run, "--to", "wandb", "--once", cwd=folder, env=dict(os.environ, PYTHONPATH=str(folder)))
    assert said == "", "nothing is handed over twice: " + said
    logged = [json.loads(line) for line in (folder / "logged.jsonl").read_text().splitlines()]
    rows = expected(run)
    assert [step for step, _, _ in logged] == [row["step"] for row in rows]
    assert [values["loss"] for _, values, _ in logged] == [row["loss"] for row in rows] and all(commit for _, _, commit in logged)
    assert len(set((folder / "ids").read_text().split())) == 1, "another start is another run of W&B"


def check_tensorboard(weft):
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        return False
    for _ in range(2):      # the second start hands over nothing
        tool(weft.folder / "run", "--to", "tensorboard", weft.folder / "events", "--once")
    events = EventAccumulator(str(weft.folder / "events" / "run"))
    events.Reload()
    losses = events.Scalars("loss")
    assert [one.step for one in losses] == [row["step"] for row in expected(weft.folder / "run")]
    assert all(abs(one.value - row["loss"]) <= 1e-6 * row["loss"] for one, row in zip(losses, expected(weft.folder / "run")))
    return True


def check(weft):
    check_lines(weft)
    check_names_and_messages(weft)
    check_training(weft)
    check_wandb(weft)
    print("csv while a run trains" + ("" if check_tensorboard(weft) else "; event files were not tested: tensorboard is not installed"))


program.main(check)
