# SPDX-License-Identifier: Apache-2.0
"""The contents of a run directory, for any model. Files are only read, and the run may still be active. They are not trusted: texts are
bounded before they are read, and no size is taken from a file without a check against the bytes that exist."""
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

from weft import checkpoints
from weft.errors import DATA, LARGEST_JSON, USAGE, WeftError, read_bytes
from weft.report.curves import Curves, lines_of, read_curves
from weft.text import member, number, parse_json, short_number, text_of

LARGEST_INPUT = 1 << 20
MOST_STARTS, MOST_CHECKPOINTS = 10_000, 50


@dataclass
class Start:
    """One start of the run, of starts.jsonl."""
    begin: float
    end: float = -1         # -1: no orderly end was recorded
    changed: dict = None    # key -> [before, after]


@dataclass
class CheckpointFact:
    """A checkpoint as its manifest describes it; shards are not opened."""
    step: int
    written: str = ""       # UTC
    manifest: checkpoints.Manifest = None
    problem: str = ""       # why the manifest cannot be used


@dataclass
class RunFacts:
    path: Path
    record: dict            # run.json
    benchmark: dict = None  # benchmark.json, evaluation.json, answers.json of the same directory
    evaluation: dict = None
    answers: dict = None
    input: str = ""         # input.toml
    curves: Curves = field(default_factory=Curves)
    starts: list = field(default_factory=list)
    checkpoints: list = field(default_factory=list)     # the newest ones, ascending
    checkpoints_kept: int = 0                           # all of them
    notes: list = field(default_factory=list)           # files that could not be used, and why

    def of(self, *names):
        """A member of run.json."""
        return member(self.record, *names)

    def number(self, *names):
        return number(self.of(*names))

    def text(self, *names):
        return text_of(self.of(*names))

    @property
    def name(self):
        return self.path.resolve().name or str(self.path)

    @property
    def state(self):
        """How the run ended: "finished", "running, or killed", "exit code 75"."""
        code = self.of("exit", "code")
        if isinstance(code, bool) or not isinstance(code, (int, float)):
            return "running, or killed"
        return "finished" if code == 0 else f"exit code {short_number(number(code))}"

    def setting(self, table, key, word):
        """`word value` of a key of the input, as "k 8"; "" where the run has none."""
        value = self.text("input", table, key)
        return f"{word} {value}" if value else ""


def _optional_json(path, required, notes):
    """A JSON file that a run directory may or may not have."""
    if not path.exists():
        return None
    try:
        value = parse_json(read_bytes(path, LARGEST_JSON).decode("utf-8", "replace"))
    except WeftError as failure:
        notes.append(f"{failure}; it was left out")
        return None
    if isinstance(value, dict) and required in value:
        return value
    notes.append(f'{path.name} has no "{required}"; it was left out')
    return None


def _read_starts(path):
    starts = []
    for line in lines_of(path):
        record = parse_json(line)
        begin, end, changed = number(member(record, "start")), number(member(record, "end")), member(record, "changed")
        if begin >= 0:
            starts.append(Start(min(begin, 1e15)))
            del starts[:-MOST_STARTS]
        elif end >= 0 and starts:
            starts[-1].end = min(end, 1e15)
        elif isinstance(changed, dict) and starts:
            starts[-1].changed = changed
    return starts


def _describe(directory, step):
    fact = CheckpointFact(step)
    try:
        fact.written = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime((directory / "manifest.json").stat().st_mtime))
    except OSError:
        pass
    try:
        fact.manifest = checkpoints.read_manifest(directory)
    except checkpoints.Damaged as damage:
        fact.problem = str(damage) if str(damage).startswith("its format") else f"manifest.json: {damage}"
    return fact


def read_facts(path):
    """Raises WeftError if the path is no run directory, or its run.json is not the record of a run."""
    path = Path(path)
    if not path.is_dir():
        raise WeftError(USAGE, f"{path}: {'not a directory' if path.exists() else 'no such directory'}; name the directory of a run (run.output)")
    if not (path / "run.json").exists():
        raise WeftError(USAGE, f"{path}: not a run directory (run.json is missing; weft train writes it); name the directory of a run")
    record = parse_json(read_bytes(path / "run.json", LARGEST_JSON).decode("utf-8", "replace"))
    if not isinstance(record, dict) or "exit" not in record:
        raise WeftError(DATA, f'{path / "run.json"}: not the record of a run (no JSON object with "exit"); is it damaged?')
    facts = RunFacts(path, record)
    facts.benchmark = _optional_json(path / "benchmark.json", "cases", facts.notes)
    facts.evaluation = _optional_json(path / "evaluation.json", "validation", facts.notes)
    facts.answers = _optional_json(path / "answers.json", "checkpoints", facts.notes)
    if (path / "input.toml").exists():
        try:
            facts.input = read_bytes(path / "input.toml", LARGEST_INPUT).decode("utf-8", "replace")
        except WeftError as failure:
            facts.notes.append(str(failure))
    facts.curves = read_curves(path / "metrics.jsonl")
    if facts.curves.unreadable:
        facts.notes.append(f"metrics.jsonl: {facts.curves.unreadable} of {facts.curves.records} lines are not records; they were left out")
    facts.starts = _read_starts(path / "starts.jsonl")
    steps = checkpoints.steps_in(path / "checkpoints")
    facts.checkpoints_kept = len(steps)
    facts.checkpoints = [_describe(path / "checkpoints" / checkpoints.directory_name(step), step) for step in steps[-MOST_CHECKPOINTS:]]
    return facts


def result_of(facts, path):
    """A number of the run's own result, else of evaluation.json, whose members have the same names."""
    own = facts.number("result", *path)
    return own if math.isfinite(own) else number(member(facts.evaluation, *path))
