# SPDX-License-Identifier: Apache-2.0
"""weft sweep INPUT --grid KEY=VALUES … --output DIR: trains INPUT at every point of a grid, as processes of the program or as an array of
jobs, and compares the results. A second start skips finished points and resumes the others.

  DIR/NAME.toml   the resolved input of a point      DIR/NAME/   its run      DIR/NAME.log   its output
  DIR/sweep.{csv,json,html}   the comparison         DIR/points.txt, DIR/sweep.job   what is submitted"""
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from weft import program
from weft.errors import USAGE, Output, Parser, WeftError, read_bytes, run, write_atomically
from weft.reader import parse_toml
from weft.sweep.grid import Point, parse_grid, points_of
from weft.sweep.submission import submit
from weft.text import member, number, parse_json

DESCRIPTION = """Trains at every point of a grid of settings, each in a directory of its own, and writes a table and a page that compare
the runs. Finished points are left as they are and others resume when the same command is given again."""
POLL = 0.05         # seconds
LARGEST_INPUT = 1 << 20
STOPS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGXCPU)


@dataclass
class Job:
    """A point with its run."""
    point: Point
    run: Path
    resolved: str = ""      # the text of its input
    threads: int = 0        # device.threads; 0 = as many as the program may use
    finished: bool = False
    code: int = -1          # of this start; -1: not started

    @property
    def input(self):
        return self.run.with_name(f"{self.run.name}.toml")

    @property
    def log(self):
        return self.run.with_name(f"{self.run.name}.log")


class Sweep:
    def __init__(self, given, output):
        self.given, self.output, self.directory = given, output, Path(given.output)
        self.weft = program.path_of_weft()
        text = read_bytes(given.input, LARGEST_INPUT).decode("utf-8", "replace")
        self.of_language_model = re.search(r"^\s*\[?\s*language_model\s*[\].]", text, re.M) is not None
        self.train = [self.weft, *(["lm"] if self.of_language_model else []), "train"]
        self.jobs = [Job(point, self.directory / point.name) for point in points_of(parse_grid(given.grid))]

    # --- The inputs of the points -------------------------------------------------------------------------------------------

    def resolve(self, job):
        """Checks the input of a point, as the program does."""
        sets = [f"--set={one}" for one in [*self.given.set, *job.point.sets]]
        done = subprocess.run([*self.train, str(self.given.input), *sets, "--output", str(job.run), "--print-config"], stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, check=False, env={**os.environ, "NO_COLOR": "1"})
        if done.returncode:
            message = done.stderr.strip()
            for one in job.point.sets:
                message = message.replace(f"--set {one}", f"--grid {one}")
            raise WeftError(done.returncode if done.returncode > 0 else USAGE, message[len("error: "):] if message.startswith("error: ") else message)
        job.resolved, values = done.stdout, parse_toml(done.stdout)
        record = parse_json(read_bytes(job.run / "run.json", 64 << 20).decode("utf-8", "replace")) if (job.run / "run.json").exists() else None
        job.finished = member(record, "exit", "code") == 0 and number(member(record, "result", "step")) >= values["run"]["steps"]
        job.threads = values["device"]["threads"]

    def prepare(self):
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:       # waiting for the program
            for done in [threads.submit(self.resolve, job) for job in self.jobs]:
                done.result()
        for job in self.jobs:
            self.require_same_input(job)
        if not self.given.dry_run:
            self.directory.mkdir(parents=True, exist_ok=True)
            for job in self.jobs:
                write_atomically(job.input, job.resolved)

    def require_same_input(self, job):
        """A point that was trained continues with the same input, but for keys that any resumed run may change."""
        earlier = job.run / "input.toml"
        if not earlier.exists():
            return
        try:
            before, now = parse_toml(read_bytes(earlier, LARGEST_INPUT).decode("utf-8", "replace")), parse_toml(job.resolved)
        except ValueError as failure:
            raise WeftError(USAGE, f"{earlier}: cannot be read ({failure}); was it edited?") from None
        changed = [(f"{table}.{key}", before[table][key], value) for table, keys in now.items() for key, value in keys.items()
                   if key in member(before, table) or () if before[table][key] != value]
        if changed:
            free = self.free_keys()
            changed = [one for one in changed if one[0] not in free]
        if changed:
            listed = "".join(f"\n  {key} was {json.dumps(old)}, now {json.dumps(new)}" for key, old, new in changed)
            raise WeftError(USAGE, f"{job.run}: was trained with another input:{listed}\nrestore it, or start another sweep with another --output")

    def free_keys(self):
        """Keys that may change when a run resumes, from the program's own reference."""
        text = subprocess.run([self.weft, "--reference"], capture_output=True, text=True, check=False).stdout
        free, table = set(), ""
        transcoders, _, language_models = text.partition("\n# Language models\n")
        # Tables of language models that are equal to those of transcoders are given once.
        for line in (transcoders + (language_models if self.of_language_model else "")).splitlines():
            if header := re.fullmatch(r"## `\[(\w+)\]`", line):
                table = header[1]
            elif row := re.match(r"\| `(\w+)` \|", line):
                (free.add if "| free |" in line else free.discard)(f"{table}.{row[1]}")
        return free

    # --- Running ------------------------------------------------------------------------------------------------------------

    def command_of(self, job):
        command = [*self.train, str(job.input), "--output", str(job.run)]
        if self.given.jobs > 1 and job.threads == 0 and not os.environ.get("OMP_NUM_THREADS"):      # processes side by side share the cores
            command.append(f"--set=device.threads={max(1, len(os.sched_getaffinity(0)) // self.given.jobs)}")
        return command

    def run_jobs(self):
        """Runs what is not finished, at most --jobs at a time. Returns the exit code of a requested stop; 0 = none."""
        stop = 0

        def note(number, _):
            nonlocal stop
            if number == signal.SIGINT and stop:
                os._exit(128 + number)
            stop = stop or (75 if number == signal.SIGUSR1 else 128 + number)

        for number in (*STOPS, signal.SIGUSR1):
            if signal.getsignal(number) is not signal.SIG_IGN:      # a program started with nohup outlives its terminal
                signal.signal(number, note)
        waiting = [job for job in self.jobs if not job.finished]
        left, ended, stopping = len(waiting), 0, False
        slots = [None] * self.given.jobs        # (job, process)
        while True:
            for i, slot in enumerate(slots):
                if slot:
                    job, process = slot
                    code = program.exit_code(process)
                    if code is None:
                        continue
                    job.code, job.finished, slots[i], ended = code, code == 0, None, ended + 1
                    if code == 0:
                        self.output.info(f"[{ended}/{left}] {job.point.name}: finished")
                    else:
                        self.output.warning(f"[{ended}/{left}] {job.point.name}: {program.exit_reason(code)} (exit code {code}); see {job.log}")
                if stop or not waiting:
                    continue
                job = waiting.pop(0)
                try:
                    slots[i] = job, program.start(self.command_of(job), program.gpu_of_slot(i), job.log)
                    self.output.info(f"{job.point.name}: started")
                except WeftError as failure:        # as a point that fails: the others go on
                    job.code, ended = failure.code, ended + 1
                    self.output.warning(f"[{ended}/{left}] {job.point.name}: {failure}")
            running = [slot for slot in slots if slot]
            if not running and (stop or not waiting):
                return stop
            if stop and not stopping:
                stopping = True
                self.output.info("stopping: each run writes a checkpoint; the same command continues the sweep")
                for _, process in running:
                    process.send_signal(signal.SIGUSR1 if stop == 75 else stop - 128)
            time.sleep(POLL)

    # --- Results ------------------------------------------------------------------------------------------------------------

    def print_points(self):
        """Of a dry run, and if no point has a result."""
        self.output.result("\n".join(f"{job.run}{': finished' if job.finished else ''}" for job in self.jobs),
                           {"directory": str(self.directory), "points": [
                               {"name": job.point.name, "path": str(job.run), "finished": job.finished} for job in self.jobs]})

    def conclude(self):
        """The table of all points that have run, and the files of the comparison."""
        # The library of charts takes most of a second to load, which a check of the input need not wait for.
        from weft.report.comparison import compare, comparison_page, to_csv, to_json, to_text
        from weft.report.facts import read_facts
        from weft.report.families import family_of
        runs = [read_facts(job.run) for job in self.jobs if (job.run / "run.json").exists()]
        runs = [facts for facts in runs if family_of(facts)]
        if not runs:
            self.print_points()
            return
        comparison = compare(runs)
        write_atomically(self.directory / "sweep.csv", to_csv(comparison))
        write_atomically(self.directory / "sweep.json", json.dumps(to_json(comparison), indent=2) + "\n")
        write_atomically(self.directory / "sweep.html", comparison_page(comparison))
        self.output.info(f"results in {self.directory}: sweep.csv, sweep.json, sweep.html")
        self.output.result(to_text(comparison), {**to_json(comparison), "directory": str(self.directory)})


def parse(arguments):
    parser = Parser("sweep", description=DESCRIPTION)
    parser.add_argument("input", metavar="INPUT", nargs="?", help="a TOML file, of weft train or weft lm train")
    parser.add_argument("--grid", action="append", default=[], metavar="KEY=VALUE,VALUE",
                        help="values of a key, as in transcoder.k=8,16; repeatable")
    parser.add_argument("--output", metavar="DIR", help="directory for the runs of all points, the table and the page")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="replace a value of the input, as in run.steps=500; repeatable")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default 1)")
    parser.add_argument("--slurm", action="store_true", help="submit the points as an array of jobs of Slurm")
    parser.add_argument("--pbs", action="store_true", help="the same for PBS")
    parser.add_argument("--script", metavar="FILE", help="their job script (default: slurm.sbatch or pbs.pbs of jobscripts/)")
    parser.add_argument("--dry-run", action="store_true", help="check the input of every point; print the points")
    Output.add_options(parser)
    given = parser.parse_args(arguments)
    if program.started_by_launcher():
        raise WeftError(USAGE, "weft sweep starts the processes itself (it was started by mpirun or srun); start it without a launcher")
    if not given.input:
        parser.error("weft sweep needs its INPUT")
    if not given.grid or not given.output:
        parser.error(f"weft sweep needs {'--output DIR' if given.grid else '--grid table.key=VALUE,VALUE'}")
    if not 1 <= given.jobs <= 1024:
        parser.error(f"--jobs {given.jobs} is out of range (from 1 to 1024)")
    if given.slurm and given.pbs:
        raise WeftError(USAGE, "--slurm and --pbs exclude each other; give one of them")
    if given.script and not given.slurm and not given.pbs:
        raise WeftError(USAGE, f"--script {given.script} without --slurm or --pbs (nothing is submitted); give one")
    if not Path(given.input).is_file():
        raise WeftError(USAGE, f"{given.input}: no such file; give the path of an input file")
    if (Path(given.output) / "run.json").exists():
        raise WeftError(USAGE, f"--output {given.output} is the directory of a run; name another for the sweep")
    return given


def sweep(arguments):
    # 1. The points, each with its resolved input.
    given = parse(arguments)
    output = Output(given.json, given.quiet)
    points = Sweep(given, output)
    points.prepare()
    left = sum(not job.finished for job in points.jobs)
    output.info(f"{len(points.jobs)} points, {len(points.jobs) - left} finished")
    if given.dry_run:
        points.print_points()
        return 0
    # 2. What is not finished, here or as jobs.
    if left and (given.slurm or given.pbs):
        count = submit(points.directory, points.jobs, "slurm" if given.slurm else "pbs", given.script, given.jobs, points.of_language_model)
        output.result(f"{count} points submitted; when they have ended, the same command writes the table",
                      {"directory": str(points.directory), "submitted": count})
        return 0
    stop = points.run_jobs()
    # 3. The comparison. A stop is the result; else the first failure.
    points.conclude()
    return stop or next((job.code for job in points.jobs if job.code > 0), 0)


def main(arguments=None):
    return run(sweep, arguments)


if __name__ == "__main__":
    sys.exit(main())
