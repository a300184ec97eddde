# SPDX-License-Identifier: Apache-2.0
"""What the studies of this directory share: commands of weft next to one another on the GPUs, results that are kept, tables.

weft is taken from PATH. The jobs take the GPUs of CUDA_VISIBLE_DEVICES in turn. A command that fails or exceeds --minutes ends its own point
alone: the table shows what is there, and the same command continues. Needs the standard library alone.
"""
import argparse
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev

REPOSITORY = Path(__file__).resolve().parent.parent


class Failed(Exception):
    """A point has no result; the message says why."""


def parser_of(description):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="commands at a time (default 1)")
    parser.add_argument("--minutes", type=float, metavar="M", help="end commands that still run after this time")
    return parser


def sets(values):
    return [word for value in values for word in ("--set", value)]


def kept(path):
    return json.loads(path.read_text()) if path.exists() else {}


def keep(path, record):
    """Replaces the file as a whole: a study that is killed leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(json.dumps(record, indent=1) + "\n")
    temporary.replace(path)


def table(labels, columns, rows):
    """Markdown of rows ([label, …], [record, …]): mean and standard deviation over the records that have a value. `columns`: {name: format}."""
    def cell(values, text):
        spread = f" ± {text.format(stdev(values))}" if len(values) > 1 else ""
        return text.format(mean(values)) + spread if values else "-"

    lines = ["| " + " | ".join([*labels, "runs", *(name.replace("_", " ") for name in columns)]) + " |",
             "|" + "---|" * len(labels) + "---:|" * (1 + len(columns))]
    for names, records in rows:
        records = [record for record in records if record]
        cells = [cell([record[name] for record in records if record.get(name) is not None], text) for name, text in columns.items()]
        lines.append("| " + " | ".join([*map(str, names), str(len(records)), *cells]) + " |")
    return "\n".join(lines) + "\n"


def summary(labels, columns, points):
    """What `report` of a Study returns, of points ([label, …], file of its record): those with the same labels are a row."""
    rows = {}
    for names, path in points:
        rows.setdefault(names, []).append(kept(path))
    return table(labels, columns, rows.items()), [record for records in rows.values() for record in records if record]


class Study:
    def __init__(self, name, given, report):
        """`report()` returns the Markdown and the JSON of what is there; both are written after every task."""
        self.program = shutil.which("weft")
        if not self.program:
            sys.exit(f"{name}: weft: no such program (it makes the runs); put it into PATH, as build/cpu-release/env.sh does")
        if given.jobs < 1:
            sys.exit(f"{name}: --jobs {given.jobs} is less than 1")
        self.gpus = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
        self.name, self.directory, self.jobs, self.report = name, given.directory, given.jobs, report
        self.deadline = time.monotonic() + 60 * given.minutes if given.minutes else float("inf")
        self.failures, self.local, self.lock = {}, threading.local(), threading.Lock()
        self.directory.mkdir(parents=True, exist_ok=True)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.stop)

    def stop(self, *_):
        self.deadline = 0

    def weft(self, log, *words):
        """Standard output of a command, which must succeed; its log is appended to the file `log`."""
        if time.monotonic() > self.deadline:
            raise Failed("not started: the time is over")
        environment = dict(os.environ)
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus[getattr(self.local, "slot", 0) % len(self.gpus)]
        environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // self.jobs)))
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as file:
            file.write(f"$ weft {' '.join(map(str, words))}\n".encode())
            file.flush()
            process = subprocess.Popen([self.program, *map(str, words)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=file,
                                       text=True, env=environment, start_new_session=True)
            while True:
                try:
                    output, _ = process.communicate(timeout=0.5)
                    break
                except subprocess.TimeoutExpired:
                    if time.monotonic() > self.deadline:
                        process.kill()
        if time.monotonic() > self.deadline and process.returncode:
            raise Failed(f"weft {words[0]} ended: the time is over")
        if process.returncode:
            raise Failed(f"weft {words[0]} ended with exit code {process.returncode}; see {log}")
        return output

    def run(self, tasks):
        """Calls the functions of (name, function) in this order, --jobs at a time."""
        slots = queue.SimpleQueue()
        for slot in range(self.jobs):
            slots.put(slot)

        def work(task):
            name, function = task
            begin = time.monotonic()
            try:
                function()
                print(f"{self.name}: {name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
            except Exception as failure:    # whatever it is, the other points go on
                self.failures[name] = f"{type(failure).__name__}: {failure}" if not isinstance(failure, Failed) else str(failure)
                print(f"{self.name}: {name}: {self.failures[name]}", file=sys.stderr, flush=True)
            self.write()

        with ThreadPoolExecutor(self.jobs, initializer=lambda: setattr(self.local, "slot", slots.get())) as pool:
            list(pool.map(work, tasks))

    def write(self):
        with self.lock:
            text, results = self.report()
            (self.directory / "table.md").write_text(text)
            keep(self.directory / "results.json", {"results": results, "failures": self.failures})
            return text

    def finish(self):
        """Prints the table. The exit code: 1 if points have no result."""
        print(self.write(), end="")
        if self.failures:
            print(f"{self.name}: {len(self.failures)} without a result; the same command continues", file=sys.stderr)
        return 1 if self.failures else 0
