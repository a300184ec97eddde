# SPDX-License-Identifier: Apache-2.0
"""A rank that stops, dies or throws ends the job, with a message that names it, and without leaving processes: at any time
between MPI_Init and MPI_Finalize. A suspended job is not ended.

hang_test.py WEFT
"""
import os
import re
import shutil
import signal
import subprocess
import time
import typing

import files
import jobs
import program

TIMEOUT = 5
LANGUAGE = """\
[run]
steps = 100000
[data]
train = "{folder}/text.txt"
batch_tokens = 32
sequence = 8
[language_model]
layers = 2
heads = 2
d_model = 16
[parallel]
timeout = {timeout}
shard = "full"
[checkpoint]
every = 25
[log]
every = 1000
"""
INPUT = program.SYNTHETIC + """\
[run]
steps = 100000
[data]
train = "{folder}/data/train"
batch_tokens = 64
[transcoder]
features = 40
k = 3
[parallel]
timeout = {timeout}
[checkpoint]
every = 25
[log]
every = 1000
"""


def check_launch(weft):
    """Copies of a world of one rank, as started by the launcher of another MPI."""
    for variable in ("PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        done = subprocess.run([str(weft.binary), "--version"], env=dict(os.environ, **{variable: "4"}), text=True, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert done.returncode == 2 and f"{variable} says that 4" in done.stdout and "srun --mpi=pmix" in done.stdout, done.stdout
    # In a batch script SLURM_NTASKS is set too, but does not apply to a program started without a launcher.
    weft.run("--version")
    subprocess.run([str(weft.binary), "--version"], env=dict(os.environ, SLURM_NTASKS="4"), check=True, stdout=subprocess.DEVNULL)


STOPPED = r'rank {rank} on \S+: no progress for (\d+) s in "[^"]+"{step} \(dead or stopped: it does not respond\)'
IN_STEP = r", at step {step}"
WAITING = r'rank \d on \S+: no progress for (\d+) s in "MPI_Finalize".* \(it waits for another rank, which may be dead or stopped\)'


class Case(typing.NamedTuple):
    """One rank meets a fault; the job must end."""
    ranks: int
    point: str
    rank: int
    kind: str
    words: str  # regular expression for the output
    code: typing.Optional[int]  # None: that of the launcher, not 0
    step: str = "25"
    command: str = "train"
    arguments: tuple = ()


STOP_IN_STEP = STOPPED.replace("{step}", IN_STEP)
STOP_ELSEWHERE = STOPPED.replace("{step}", "(, at step \\d+)?")
CASES = (
    Case(2, "step", 1, "stop", STOP_IN_STEP, 5),
    Case(3, "data-wait", 0, "stop", STOP_IN_STEP, 5),
    Case(2, "collective", 1, "stop", STOP_IN_STEP, 5),
    Case(2, "mid-dataset", 1, "stop", STOP_IN_STEP.replace("{step}", r"\d+"), 5),
    Case(2, "step", 1, "throw", r"error on rank 1 \(\S+\) at step 25: injected fault", 1),
    Case(3, "collective@2", 1, "kill", "", None),
    Case(4, "data-wait", 3, "kill", "", None),
    Case(2, "step", 1, "exit", "", None),
    Case(2, "step", 0, "segfault", "", None),
    # A language model whose weights the ranks gather in every pass.
    Case(2, "collective@9", 1, "stop", STOP_IN_STEP, 5, command="lm train"),
    Case(2, "collective@9", 1, "kill", "", None, command="lm train"),
    # Before the first step: reading the input is over, and the run directory is there or not.
    *(Case(2, f"collective@{n}", rank, "stop", STOP_ELSEWHERE, 5, step="0") for n, rank in ((15, 1), (31, 0), (46, 1))),
    # After the last step: in the last checkpoint, the conclusion, and the end of the program.
    Case(2, "collective@12", 1, "stop", STOP_ELSEWHERE, 5, step="3", arguments=("--set", "run.steps=3")),
    Case(2, "before-manifest", 0, "stop", STOP_ELSEWHERE, 5, step="3", arguments=("--set", "run.steps=3")),
    Case(3, "leave", 2, "stop", STOP_ELSEWHERE, 5, step="3", arguments=("--set", "run.steps=3")),
    Case(2, "finalize", 0, "stop", WAITING, 5, step="3", arguments=("--set", "run.steps=3")),
    # Other commands. `evaluate` has the timeout of its checkpoint.
    Case(2, "collective@21", 1, "stop", STOP_ELSEWHERE, 5, step="0", command="evaluate"),
    Case(2, "collective@9", 1, "stop", STOP_ELSEWHERE, 5, step="0", command="synth"),
    Case(2, "collective@13", 0, "stop", STOP_ELSEWHERE, 5, step="0", command="benchmark"),
)


def gone(path):
    """True if no process with this path in its command line is left, after a while."""
    end = time.monotonic() + 30
    while jobs.alive(path) and time.monotonic() < end:
        time.sleep(0.2)
    return not jobs.alive(path)


def check_case(weft, source, trained, case, output):
    what = f"{case.kind} of rank {case.rank} of {case.ranks} at {case.point}, step {case.step} of {case.command}"
    subject = {"evaluate": [trained, "--data", weft.folder / "data/validation"],
               "lm train": [weft.folder / "language.toml"]}.get(case.command, [source])
    if case.command == "synth":
        subject += ["--set", f"synthetic.output={output}/data"]
    command = ["mpiexec", "-n", str(case.ranks), "--oversubscribe", "--bind-to", "none", str(weft.binary), *case.command.split(),
               *map(str, subject), "--output", str(output), *case.arguments]
    # A machine that is so busy that no rank proceeds for TIMEOUT seconds ends a run before its fault: then once more.
    for _ in range(3):
        shutil.rmtree(output, ignore_errors=True)
        done = subprocess.run(command, env=dict(os.environ, WEFT_FAULT=f"{case.point}:{case.rank}:{case.step}:{case.kind}"), text=True,
                              check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
        if not re.search(r"error: rank \d+ on \S+: no progress for \d+ s in .* \(it responds, but makes no progress\)", done.stdout):
            break
    assert done.returncode != 0 if case.code is None else done.returncode == case.code, (what, done.returncode, done.stdout)
    words = case.words.format(rank=case.rank, step=case.step)
    found = re.search(words, done.stdout)
    assert found, f"{what}: no \"{case.words}\" in\n{done.stdout}"
    assert gone(output), f"{what}: left running: {jobs.alive(output)}"
    if case.code == 5:
        # Counted by the program: how long it took on a busy machine says nothing.
        assert TIMEOUT <= int(found[1]) <= TIMEOUT + 5, (what, found[0])
        check_record(output, [match[0] for match in re.finditer(words, done.stdout)], what)
    print(f"{what}: code {done.returncode}; {found[0]}")


def check_record(output, reasons, what):
    """run.json and log.txt say why the run ended, whichever rank ended it. A run that had recorded its end keeps it. Ranks may
    have noticed at different times, and each prints its own."""
    if not (output / "run.json").exists():
        assert "train" not in what or "step 0" in what, what
        return
    end = program.record(output)["exit"]
    assert end["code"] in ((0, 5) if "leave" in what or "finalize" in what else (5,)), (what, end)
    if end["code"] == 5:
        recorded = [reason for reason in reasons if reason in end["reason"]]
        assert recorded, (what, reasons, end)
        log = (output / "log.txt").read_text()
        assert any(reason in log for reason in recorded), (what, recorded, log)


def check_suspended(weft, source):
    """A job that is suspended for longer than the timeout, as schedulers do, goes on when it is resumed."""
    output = weft.folder / "suspended"
    process = subprocess.Popen(["mpiexec", "-n", "2", "--oversubscribe", "--bind-to", "none", str(weft.binary), "train",
                                str(source), "--output", str(output)], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def checkpoints():
        return set(files.checkpoints(output)) if (output / "checkpoints").exists() else set()

    def wait(condition, what):
        end = time.monotonic() + 120
        while not condition():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < end, what
            time.sleep(0.1)

    wait(checkpoints, "no checkpoint")
    ranks = [int(one) for one in jobs.alive(output) if int(one) != process.pid]
    assert len(ranks) == 2, ranks
    for one in ranks:
        os.kill(one, signal.SIGSTOP)
    time.sleep(2 * TIMEOUT)
    before = checkpoints()
    for one in ranks:
        os.kill(one, signal.SIGCONT)
    wait(lambda: max(checkpoints()) > max(before) + 100, "no progress after the suspension")
    process.send_signal(signal.SIGUSR1)
    text = process.communicate(timeout=120)[0]
    assert process.returncode == 75, text


def check(weft):
    check_launch(weft)
    source = weft.folder / "input.toml"
    source.write_text(INPUT.format(folder=weft.folder, timeout=TIMEOUT))
    (weft.folder / "language.toml").write_text(LANGUAGE.format(folder=weft.folder, timeout=TIMEOUT))
    (weft.folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    weft.run("synth", source)
    trained = weft.folder / "trained"
    weft.run("train", source, "--output", trained, "--set", "run.steps=3")
    for number, case in enumerate(CASES):
        check_case(weft, source, trained, case, weft.folder / f"run_{number}")
    check_suspended(weft, source)


program.main(check)
