# SPDX-License-Identifier: Apache-2.0
"""weft sweep: every point of a grid is trained, finished points are skipped, stopped ones resumed, failed ones listed; the table at
the end is that of the runs. Submission to PBS is tested with commands that only pretend; tests/scheduler/sweep.sh has a Slurm, pbs.sh a PBS.

sweep_test.py WEFT REPOSITORY
"""
import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import program

INPUT = program.SYNTHETIC + """
[run]
steps = 12
[data]
train = "{folder}/data/train"
validation = "{folder}/data/validation"
batch_tokens = 64
[transcoder]
features = 40
k = 3
[checkpoint]
every = 5
[log]
every = 1
"""
GRID = ("--grid", "optimizer.learning_rate=1e-3,3e-3", "--grid", "transcoder.k=2,3")
NAMES = {f"learning_rate={rate}_k={k}": (float(rate), k) for rate in ("1e-3", "3e-3") for k in (2, 3)}
JOB_SCRIPTS = Path(sys.argv[2]) / "jobscripts"


def table(folder):
    with open(folder / "sweep.csv", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def check_grid(weft, source):
    folder = weft.folder / "grid"
    said = weft.run("sweep", source, *GRID, "--output", folder, "--dry-run")
    assert "4 points, 0 finished" in said and not folder.exists(), said
    weft.run("sweep", source, *GRID, "--output", folder, "--jobs", 2)
    assert {path.name for path in folder.iterdir() if path.is_dir()} == set(NAMES)
    rows = table(folder)
    errors = [float(row["validation NMSE (standardised)"]) for row in rows]
    assert len(rows) == 4 and errors == sorted(errors), rows
    of_json = {one["name"]: one for one in json.loads((folder / "sweep.json").read_text())["runs"]}
    for row in rows:
        record = program.record(folder / row["run"])
        # The point has its values, and nothing else differs.
        assert (record["input"]["optimizer"]["learning_rate"], record["input"]["transcoder"]["k"]) == NAMES[row["run"]]
        assert (float(row["optimizer.learning_rate"]), float(row["transcoder.k"])) == NAMES[row["run"]]
        assert not [key for key in row if "." in key and key not in ("optimizer.learning_rate", "transcoder.k")], row.keys()
        wanted = record["result"]["validation"]["nmse_standardised_mean"]
        assert abs(float(row["validation NMSE (standardised)"]) - wanted) < 1e-8 * wanted     # nine digits
        assert of_json[row["run"]]["results"]["validation NMSE (standardised)"] == wanted
        assert row["state"] == "finished"
        # Two processes share the cores: a run of its own uses all of them.
        assert record["input"]["device"]["threads"] == max(1, len(os.sched_getaffinity(0)) // 2)
    assert "optimizer.learning_rate" in (folder / "sweep.html").read_text()

    # Again: nothing runs. More steps: all runs continue. Other values: refused before anything runs.
    before = {path: path.stat().st_mtime_ns for name in NAMES for path in (folder / name).rglob("*")}
    said = weft.run("sweep", source, *GRID, "--output", folder)
    assert "4 points, 4 finished" in said and "started" not in said, said
    assert before == {path: path.stat().st_mtime_ns for path in before}
    said = weft.run("sweep", source, *GRID, "--output", folder, "--set", "transcoder.features=41", code=2)
    assert "features was 40, now 41" in said, said
    weft.run("sweep", source, *GRID, "--output", folder, "--set", "run.steps=14")
    for name in NAMES:
        assert program.record(folder / name)["result"]["step"] == 14 and program.record(folder / name)["start_number"] == 2


def check_failures(weft, source):
    """A point that fails does not stop the others; its code is that of the sweep."""
    folder = weft.folder / "failing"
    grid = ("--grid", f"data.train={weft.folder}/none,{weft.folder}/data/train")
    said = weft.run("sweep", source, *grid, "--output", folder, code=2)
    failed, = [line for line in said.splitlines() if "exit code 2" in line]
    assert "none.log" in failed and sum("finished" in line and "[" in line for line in said.splitlines()) == 1, said
    assert len(table(folder)) == 1
    assert "no such directory" in next(folder.glob("*none.log")).read_text()

    # A process that cannot be started is such a point as well: here its log is a directory.
    folder = weft.folder / "without_log"
    (folder / "k=2.log").mkdir(parents=True)
    said = weft.run("sweep", source, "--grid", "transcoder.k=2,3", "--output", folder, "--jobs", 2, code=6)
    assert "k=2.log: cannot be written" in said and not (folder / "k=2").exists(), said
    assert program.record(folder / "k=3")["exit"]["code"] == 0 and len(table(folder)) == 1


def check_threads(weft, source):
    """Processes side by side share the cores, unless the input or a point gives their number."""
    folder = weft.folder / "threads"
    weft.run("sweep", source, "--grid", "device.threads=1,2", "--output", folder, "--jobs", 2)
    assert [program.record(folder / f"threads={n}")["input"]["device"]["threads"] for n in (1, 2)] == [1, 2]


def check_stop(weft, source):
    """A request to stop reaches the runs, which write checkpoints; the next start resumes them."""
    folder = weft.folder / "stopped"
    command = [str(weft.binary), "sweep", str(source), "--grid", "transcoder.k=2,3", "--output", str(folder)]
    running = subprocess.Popen([*command, "--set", "run.steps=1000000"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               env=weft.environment)
    first = folder / "k=2"
    while not (first / "metrics.jsonl").exists() or len(program.metrics(first)) < 2:
        assert running.poll() is None, running.stdout.read()
        time.sleep(0.02)
    running.send_signal(signal.SIGTERM)
    said = running.communicate()[0]
    assert running.returncode == 143 and "each run writes a checkpoint" in said, (running.returncode, said)
    record = program.record(first)
    assert record["exit"]["code"] == 143 and not (folder / "k=3").exists()
    reached = record["result"]["step"]
    weft.run(*command[1:], "--set", f"run.steps={reached + 3}")
    assert program.record(first)["result"]["step"] == reached + 3 and program.record(first)["start_number"] == 2
    assert program.record(folder / "k=3")["result"]["step"] == reached + 3


def check_kill(weft, source):
    """A sweep that is killed takes its run with it: the run stops as on request, and the same command continues it."""
    folder = weft.folder / "killed"
    command = [str(weft.binary), "sweep", str(source), "--grid", "transcoder.k=2", "--output", str(folder)]
    with subprocess.Popen([*command, "--set", "run.steps=1000000"], stdout=subprocess.DEVNULL, env=weft.environment) as running:
        run = folder / "k=2"
        while not (run / "metrics.jsonl").exists() or len(program.metrics(run)) < 2:
            assert running.poll() is None
            time.sleep(0.02)
        running.kill()
    deadline = time.monotonic() + 60
    while program.record(run)["exit"]["code"] is None:
        assert time.monotonic() < deadline, "the run of a killed sweep goes on"
        time.sleep(0.05)
    record = program.record(run)
    assert record["exit"]["code"] == 143 and record["result"]["step"] > 0, record["exit"]
    weft.run(*command[1:], "--set", f"run.steps={record['result']['step'] + 3}")
    assert program.record(run)["start_number"] == 2


def check_language_models(weft):
    (weft.folder / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    source = weft.folder / "model.toml"
    source.write_text('[run]\nsteps = 2\n[data]\ntrain = "text.txt"\nbatch_tokens = 64\nsequence = 16\n'
                      "[language_model]\nlayers = 1\nheads = 1\nd_model = 8\n[optimizer]\nwarmup_steps = 1\n[log]\nevery = 1\n")
    weft.run("sweep", source, "--grid", "optimizer.learning_rate=1e-3,1e-2", "--output", "models")
    rows = table(weft.folder / "models")
    assert len(rows) == 2 and all(float(row["training loss"]) > 0 for row in rows), rows


def pretend(weft, name, body):
    path = weft.folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/bash\n" + body)
    path.chmod(0o755)


def check_submission(weft, source):
    """The job script that is submitted is the shipped one, with the input and the run of each index."""
    pretend(weft, "qsub", f'printf "%s " qsub "$@" >>"{weft.folder}/submitted"; echo >>"{weft.folder}/submitted"\n')
    pretend(weft, "qstat", 'echo "    Resource_List.walltime = 01:00:00"\n')
    # Notes what is started, and that it has ended with 75.
    pretend(weft, "mpirun", f'printf "%s|" "$@" >>"{weft.folder}/launched"; echo >>"{weft.folder}/launched"\n'
            f'while [ "$1" != --output ]; do shift; done; run=$2; while [ "$1" != --start-id ]; do shift; done\n'
            'mkdir -p "$run"; printf "{\\n  \\"start_id\\": \\"%s\\",\\n  \\"code\\": 75,\\n  \\"steps\\": 9\\n}\\n" "$2" >"$run/run.json"; exit 75\n')
    path = f"{weft.folder / 'bin'}:{weft.binary.parent}:{weft.environment['PATH']}"

    def sweep(*arguments, **options):
        done = subprocess.run([str(weft.binary), "sweep", str(source), *arguments], cwd=weft.folder, text=True, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=dict(os.environ, PATH=path), **options)
        return done.returncode, done.stdout

    folder = weft.folder / "a 'b"    # a name that a shell would split
    weft.run("sweep", source, "--grid", "transcoder.k=2", "--output", folder)       # this point is finished
    code, said = sweep("--grid", "transcoder.k=2,3,4", "--output", str(folder), "--pbs", "--jobs", "3", "--script", str(JOB_SCRIPTS / "pbs.pbs"))
    assert code == 0 and "2 points submitted" in said, said
    assert (weft.folder / "submitted").read_text().startswith("qsub -J 0-1%3 ")
    job = folder / "sweep.job"
    directives = lambda text: [line for line in text.splitlines() if line.startswith("#PBS")]
    lines = job.read_text().splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and line[0] != "#")
    assert directives("\n".join(lines[:first_command])) == directives((JOB_SCRIPTS / "pbs.pbs").read_text())
    for number, k in ((0, 3), (1, 4)):
        environment = dict(os.environ, PATH=path, PBS_JOBID=f"7[{number}].server", PBS_O_WORKDIR=str(weft.folder), PBS_NODEFILE="/dev/null",
                           PBS_ARRAY_INDEX=str(number))
        done = subprocess.run(["bash", str(job)], cwd=weft.folder, env=environment, text=True, check=False, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)
        assert done.returncode == 75, done.stdout
        launched = (weft.folder / "launched").read_text().splitlines()[-1]
        assert f"|train|{folder}/k={k}.toml|--output|{folder}/k={k}|" in launched, launched
    # Submitted again with the input and the run of its index.
    assert "-v WEFT_COMMAND,WEFT_INPUT,WEFT_RUN" in (weft.folder / "submitted").read_text()
    for arguments, words in ((("--slurm", "--pbs"), "exclude each other"), (("--slurm", "--script", "none"), "none: no such file")):
        code, said = sweep("--grid", "transcoder.k=3,4", "--output", str(folder), *arguments)
        assert code == 2 and words in said, said


def check_messages(weft, source):
    (weft.folder / "run").mkdir()
    (weft.folder / "run" / "run.json").write_text("{}")
    for arguments, words in (((), "needs --grid"), (("--grid", "transcoder.k=2"), "needs --output"),
                             (("--grid", "k=2", "--output", "x"), "not a key with its values"),
                             (("--grid", "transcoder.k=2,,3", "--output", "x"), "a value is empty"),
                             (("--grid", "run.output=a,b", "--output", "x"), "the sweep names the directory of each point"),
                             (("--grid", "transcoder.k=2", "--output", "x", "--script", "y"), "without --slurm or --pbs"),
                             (("--grid", "transcoder.k=2,2", "--output", "x"), "the value 2 is repeated"),
                             (("--grid", "transcoder.k=2", "--grid", "transcoder.k=3", "--output", "x"), "given twice"),
                             (("--grid", "transcoder.kk=2", "--output", "x"), '--grid transcoder.kk=2: unknown key "kk"'),
                             (("--grid", "transcoder.k=2", "--output", "run"), "is the directory of a run"),
                             (("--grid", "transcoder.k=2,-3", "--output", "x"), "out of range")):
        said = weft.call("sweep", source, *arguments, code=2)
        assert words in said, (words, said)
    assert not (weft.folder / "x").exists(), "something was written before the grid was checked"
    said = weft.run("sweep", source, *GRID, "--output", "x", ranks=2, code=None)
    assert "start it without a launcher" in said, said


def check_json(weft, source):
    """One document on standard output; --quiet keeps the result alone."""
    sweep = ("sweep", source, "--grid", "transcoder.k=2,3", "--output", "swept")
    assert [point["finished"] for point in json.loads(weft.run(*sweep, "--dry-run", "--json", "--quiet"))["points"]] == [False, False]
    swept = json.loads(weft.run(*sweep, "--json", "--quiet"))
    assert len(swept["runs"]) == 2 and (weft.folder / swept["directory"] / "sweep.json").is_file()
    compared = json.loads(weft.run("report", "swept/k=2", "swept/k=3", "--output", "compared.html", "--json", "--quiet"))
    assert compared["runs"] == swept["runs"] and (weft.folder / compared["page"]).is_file(), compared
    lines = weft.run(*sweep, "--quiet").splitlines()
    assert len(lines) == 3 and sum(line.endswith("finished") for line in lines) == 2, lines


def check(weft):
    program.needs_package(weft)
    weft.environment.pop("OMP_NUM_THREADS", None)   # a sweep divides the cores
    source = weft.folder / "input.toml"
    source.write_text(INPUT.format(folder=weft.folder))
    weft.run("synth", source)
    check_messages(weft, source)
    check_json(weft, source)
    check_grid(weft, source)
    check_failures(weft, source)
    check_threads(weft, source)
    check_stop(weft, source)
    check_kill(weft, source)
    check_language_models(weft)
    check_submission(weft, source)


program.main(check)
