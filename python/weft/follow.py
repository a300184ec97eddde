# SPDX-License-Identifier: Apache-2.0
"""Hands the metrics of runs to TensorBoard, Weights & Biases or a table, also while they train.

    weft follow RUN... --to tensorboard DIR
    weft follow RUN... --to wandb [PROJECT]
    weft follow RUN... --to csv [DIR]

Reads metrics.jsonl of each run as it grows, by polling: the directory may be mounted over a network (sshfs, NFS). A line counts when
its end has been written. A run that resumes from a checkpoint writes some steps again: the later line of a step replaces the earlier
one. Ends when all runs have ended (--once: after one pass; --every SECONDS between two passes), or with Ctrl-C.

Targets (only the chosen one needs its library):

  tensorboard DIR   event files in DIR/RUN (package tensorboard, tensorboardX or PyTorch)
  wandb [PROJECT]   one W&B run per run, resumed under the same id; PROJECT is "weft" unless given (package wandb)
  csv [DIR]         DIR/RUN.csv, or RUN/metrics.csv; replaced as a whole, so that it is always complete

Can be stopped and started again: CSV files are written again; .follow_TARGET.json (in DIR, for wandb in the current directory) records
the steps that TensorBoard or W&B have received, and only newer ones are sent. W&B keeps the first line of a step, TensorBoard also
has the later one if the step was written again while this program ran.

Layers are columns "l0.3" (layer_l0 of layer 3), members of a group "communication.bytes_sent". Exit codes: 0 done, 2 usage.
"""
import argparse
import csv
import io
import json
import math
import os
import sys
import time
from pathlib import Path

from weft.errors import USAGE, WeftError, run as run_program, write_atomically


# --- Reading --------------------------------------------------------------------------------------------------------------


def number(value):
    """A float, or None for what is no number; "nan", "inf" and "-inf" are numbers that are not finite."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return value
    return float(value) if value in ("nan", "inf", "-inf") else None


def flat(record):
    """{column: number}"""
    values = {}
    for name, value in record.items():
        if isinstance(value, dict):
            values.update({f"{name}.{member}": inner for member, inner in flat(value).items()})
        elif isinstance(value, list):
            base = name.removeprefix("layer_")
            values.update({f"{base}.{layer}": number(item) for layer, item in enumerate(value) if number(item) is not None})
        elif number(value) is not None:
            values[name] = number(value)
    return values


class Followed:
    """metrics.jsonl of one run, read as far as it has whole lines."""

    def __init__(self, path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise WeftError(USAGE, f"{path}: no such directory; name the directory of a run")
        self.name = self.path.resolve().name
        self.steps = {}             # step -> record, of the newest line
        self.offset, self.identity, self.last_line = 0, None, b""

    def read(self):
        """Steps that are new, or were written again, ascending."""
        path = self.path / "metrics.jsonl"
        try:
            with open(path, "rb") as file:
                # The file was replaced (another inode), or cut and written again by a start that resumed: the line before the offset is
                # another one, or none.
                identity = os.fstat(file.fileno()).st_ino
                file.seek(max(0, self.offset - len(self.last_line)))
                if identity != self.identity or file.read(len(self.last_line)) != self.last_line:
                    self.offset, self.last_line = 0, b""
                self.identity = identity
                file.seek(self.offset)
                text = file.read()
        except FileNotFoundError:
            return []
        end = text.rfind(b"\n") + 1
        again = self.offset == 0 and bool(self.steps)
        before, new = dict(self.steps) if again else {}, []
        if again:
            self.steps = {}
        lines = text[:end].splitlines(keepends=True)
        for line in lines:
            try:
                record = json.loads(line)
                step = int(record["step"])
            except (ValueError, KeyError, TypeError):
                continue        # damaged; the program reports and removes such lines
            # A start that resumed has left out the steps after its own.
            for later in [one for one in self.steps if one > step]:
                del self.steps[later]
            self.steps[step] = record
            if before.get(step) != record:
                new.append(step)
        if lines:
            self.last_line = lines[-1]
        self.offset += end
        return sorted(set(new) & set(self.steps))

    def ended(self):
        """True if run.json says so. A killed run looks like a running one."""
        try:
            record = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
            return record["exit"]["code"] is not None
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def input(self):
        try:
            return json.loads((self.path / "run.json").read_text(encoding="utf-8")).get("input", {})
        except (OSError, ValueError):
            return {}


def names_of(paths):
    """Names of the runs, distinct: the last component of the path, with its parents where two are the same."""
    parts = [Path(path).resolve().parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["-".join(own[-depth:]).replace("/", "") for own in parts]
        if len(set(names)) == len(names):
            return names
    raise WeftError(USAGE, "a run is named twice; name each once")


# --- Targets --------------------------------------------------------------------------------------------------------------


class Csv:
    """As all targets: put(run, new) hands over the steps `new` of a run, as far as the target has not got them, and returns them."""

    def __init__(self, where):
        self.directory = Path(where) if where else None
        if self.directory:
            self.directory.mkdir(parents=True, exist_ok=True)

    def put(self, run, new):
        path = self.directory / f"{run.name}.csv" if self.directory else run.path / "metrics.csv"
        rows = [flat(run.steps[step]) for step in sorted(run.steps)]
        columns = list(dict.fromkeys(["step", *(name for row in rows for name in row)]))
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(path, text.getvalue())
        return new

    def close(self):
        pass


class Sent:
    """What a target has received: {run: last step}, kept in a file between two starts."""

    def __init__(self, path):
        self.path = Path(path)
        try:
            self.last = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self.last = {}
        self.handed = {}

    def last_of(self, run):
        return self.last.get(str(run.path.resolve()), -1)

    def unsent(self, run, new):
        """Of the new steps those to hand over: after the last one of an earlier start, or written again since."""
        key = str(run.path.resolve())
        first = key not in self.handed
        self.handed[key] = True
        return [step for step in new if not first or step > self.last_of(run)]

    def note(self, run, step):
        self.last[str(run.path.resolve())] = step
        write_atomically(self.path, json.dumps(self.last, indent=1) + "\n")


def summary_writer():
    """A class SummaryWriter(directory): of PyTorch, tensorboardX, or written here with the package tensorboard alone."""
    try:
        from torch.utils.tensorboard import SummaryWriter
        return SummaryWriter
    except ImportError:
        pass
    try:
        from tensorboardX import SummaryWriter
        return SummaryWriter
    except ImportError:
        pass
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise WeftError(USAGE, "--to tensorboard needs a library that writes event files (none is installed); "
                         "pip install tensorboard, or take --to csv") from None

    class SummaryWriter:
        def __init__(self, directory):
            self.file = EventFileWriter(directory)

        def add_scalar(self, name, value, step, walltime=None):
            summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
            self.file.add_event(Event(summary=summary, step=step, wall_time=time.time() if walltime is None else walltime))

        def flush(self):
            self.file.flush()

        def close(self):
            self.file.close()

    return SummaryWriter


class TensorBoard:
    def __init__(self, where):
        if not where:
            raise WeftError(USAGE, "--to tensorboard needs a directory; for example --to tensorboard runs/tensorboard")
        self.make, self.writers, self.directory = summary_writer(), {}, Path(where)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.sent = Sent(self.directory / ".follow_tensorboard.json")

    def put(self, run, new):
        steps = self.sent.unsent(run, new)
        if not steps:
            return steps
        if run.name not in self.writers:
            self.writers[run.name] = self.make(str(self.directory / run.name))
        writer = self.writers[run.name]
        for step in steps:
            for name, value in flat(run.steps[step]).items():
                if name != "step":
                    writer.add_scalar(name.replace("validation.", "validation/", 1), value, step)
        writer.flush()
        self.sent.note(run, steps[-1])
        return steps

    def close(self):
        for writer in self.writers.values():
            writer.close()


class Wandb:
    def __init__(self, where):
        try:
            import wandb
        except ImportError:
            raise WeftError(USAGE, "--to wandb needs the package wandb (it is not installed); pip install wandb, or use --to csv") from None
        self.wandb, self.project, self.runs = wandb, where or "weft", {}
        self.sent = Sent(".follow_wandb.json")

    def put(self, run, new):
        import hashlib
        # W&B's own step, the axis of its charts, cannot go back: it would drop a step that is written again.
        steps = [step for step in new if step > self.sent.last_of(run)]
        if not steps:
            return steps
        if run.name not in self.runs:
            key = hashlib.sha256(str(run.path.resolve()).encode()).hexdigest()[:16]
            self.runs[run.name] = self.wandb.init(project=self.project, name=run.name, id=key, resume="allow", config=run.input(),
                                                  reinit="create_new")
        for step in steps:
            values = {name: value for name, value in flat(run.steps[step]).items() if math.isfinite(value)}
            self.runs[run.name].log(values, step=step, commit=True)
        self.sent.note(run, steps[-1])
        return steps

    def close(self):
        for run in self.runs.values():
            run.finish()


TARGETS = {"csv": Csv, "tensorboard": TensorBoard, "wandb": Wandb}


# --- The loop -------------------------------------------------------------------------------------------------------------


def follow(paths, target, every, once):
    runs = [Followed(path) for path in paths]
    for run, name in zip(runs, names_of(paths)):
        run.name = name
    try:
        while True:
            ended = [run.ended() for run in runs]       # before reading: the last lines are then there
            for run in runs:
                if (new := run.read()) and (handed := target.put(run, new)):
                    print(f"{run.name}: {len(handed)} new records, up to step {handed[-1]}", flush=True)
            if once or all(ended):
                return
            time.sleep(every)
    except KeyboardInterrupt:
        print("stopped; the same command continues", flush=True)
    finally:
        target.close()


def parse(arguments):
    parser = argparse.ArgumentParser(prog="weft follow", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="directories of runs")
    parser.add_argument("--to", nargs="+", required=True, metavar=("TARGET", "WHERE"), help="tensorboard DIR, wandb [PROJECT] or csv [DIR]")
    parser.add_argument("--every", type=float, default=5, metavar="SECONDS", help="time between two passes (default %(default)s)")
    parser.add_argument("--once", action="store_true", help="end after one pass")
    given = parser.parse_args(arguments)
    if given.to[0] not in TARGETS or len(given.to) > 2:
        parser.error(f"--to {' '.join(given.to)}: not a target (tensorboard DIR, wandb [PROJECT] or csv [DIR])")
    if not given.every > 0:
        parser.error("--every must be positive")
    return given


def command(arguments):
    given = parse(arguments)
    target = TARGETS[given.to[0]](given.to[1] if len(given.to) > 1 else None)
    follow(given.runs, target, given.every, given.once)


def main(arguments=None):
    return run_program(command, arguments)


if __name__ == "__main__":
    sys.exit(main())
