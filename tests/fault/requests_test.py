# SPDX-License-Identifier: Apache-2.0
"""Stop requests (signals to the process and to mpiexec, files, the wall-time limit) in all phases of a run: a valid
checkpoint, the correct exit code, and a restart that resumes from it.

requests_test.py WEFT
"""
import signal
import time

import jobs
import program

ENDLESS = 10_000_000


def stopped(output):
    """The program's last line; mpiexec may add words of its own."""
    return [line for line in output.splitlines() if line.startswith("stopped by ")][-1]


class Run:
    """A run in progress, after some steps."""

    def __init__(self, job, name, ranks=1, *arguments):
        self.job, self.name, self.ranks, self.path = job, name, ranks, job.folder / name
        self.process = job.start(name, "--set", "log.every=10", "--set", "checkpoint.every=0", *arguments, ranks=ranks)
        self.wait(lambda: (self.path / "metrics.jsonl").exists() and (self.path / "metrics.jsonl").stat().st_size > 0, "a step")

    def wait(self, condition, what):
        end = time.monotonic() + 240
        while not condition():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < end, f"no {what} within four minutes"
            time.sleep(0.02)

    def end(self, code, cause=""):
        """The run ends with the code (None: any but 0), a record of it, a line that names the cause, and a checkpoint from which it can be
        resumed."""
        output, _ = self.process.communicate(timeout=240)
        # Ranks may outlive the launcher for a moment, in which they may publish another checkpoint.
        deadline = time.monotonic() + 60
        while jobs.alive(self.path) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not jobs.alive(self.path), self.name
        got = self.process.returncode
        assert got == code if code is not None else got != 0, (self.name, got, output)
        if code is not None and cause:
            step, line = max(self.job.steps_of(self.name)), stopped(output)
            assert line.startswith(f"stopped by {cause} after step {step} of {ENDLESS}; its state is in ") and f"step_{step:08d}" in line, line
            assert line.endswith(f"the same command continues the run (exit code {code})"), line
        record = program.record(self.path)
        step = max(self.job.steps_of(self.name))
        if code is not None:
            assert record["exit"]["code"] == code and record["result"]["step"] == step, record["exit"]
        again = self.job.run(self.name, "--set", f"run.steps={step + 3}", ranks=self.ranks)
        assert f"resuming after step {step} " in again and "rejected" not in again, again
        return output, record


def check_process(job):
    """One process, without a launcher: its own exit codes."""
    for name, signals, code in (("usr1", [signal.SIGUSR1], 75), ("term", [signal.SIGTERM], 143), ("int", [signal.SIGINT], 130),
                                ("hup", [signal.SIGHUP], 129), ("xcpu", [signal.SIGXCPU], 152),
                                ("term_twice", [signal.SIGTERM, signal.SIGTERM], 143),
                                ("usr1_and_cont", [signal.SIGUSR1, signal.SIGCONT, signal.SIGUSR1], 75),
                                ("term_over_usr1", [signal.SIGUSR1, signal.SIGTERM], 143)):
        run = Run(job, name)
        for number in signals:
            run.process.send_signal(number)
        run.end(code, "SIGINT" if name == "int" else "")
    # Repeated signals until the end change nothing.
    run = Run(job, "usr1_again_and_again")
    while run.process.poll() is None:
        run.process.send_signal(signal.SIGUSR1)
        time.sleep(0.001)
    run.end(75)


def check_pipe(job):
    """weft train | head: output to the closed pipe is lost, the run and log.txt continue."""
    run = Run(job, "pipe")
    run.process.stdout.readline()
    run.process.stdout.close()
    log = run.path / "log.txt"
    before = log.stat().st_size
    run.wait(lambda: log.stat().st_size > before + 1000, "line in log.txt")
    run.process.send_signal(signal.SIGUSR1)
    assert run.process.wait(timeout=240) == 75
    assert program.record(run.path)["exit"]["code"] == 75


def check_launcher(job):
    """Through mpiexec: it forwards USR1 and USR2. On TERM and INT it ends the job itself, with its own code; the ranks may or
    may not have time for a checkpoint."""
    for name, number, code in (("mpi_usr1", signal.SIGUSR1, 75), ("mpi_term", signal.SIGTERM, None), ("mpi_int", signal.SIGINT, None)):
        run = Run(job, name, 2, "--set", "checkpoint.every=10")
        run.wait(lambda run=run: job.steps_of(run.name), "checkpoint")
        run.process.send_signal(number)
        run.end(code)
    run = Run(job, "mpi_usr2", 2)
    run.process.send_signal(signal.SIGUSR2)
    run.wait(lambda: job.steps_of(run.name), "checkpoint on request")
    run.process.send_signal(signal.SIGUSR1)
    run.end(75)


def check_files(job):
    run = Run(job, "files", 2)
    (run.path / "CHECKPOINT").touch()
    run.wait(lambda: job.steps_of(run.name), "checkpoint on request")
    assert not (run.path / "CHECKPOINT").exists()
    (run.path / "STOP").touch()
    run.end(75, "the file STOP")
    assert not (run.path / "STOP").exists()


def check_walltime(job):
    # Only the limit ends ten million steps. A slow machine may spend all of it on starting, and still stops cleanly.
    output = job.run("walltime", "--walltime", "00:00:02", "--set", "log.every=1000", ranks=2, code=75)
    record, step = program.record(job.folder / "walltime"), max(job.steps_of("walltime"))
    assert "checkpoint step_" in output and record["exit"]["reason"] == "stopped cleanly, more to do", output
    assert record["result"]["step"] == step > 0, (record["result"], step)
    assert stopped(output).startswith(f"stopped by run.walltime after step {step} of {ENDLESS}"), output


def check_moments(job):
    """In the step, while waiting for data, in the loader thread, in a collective, while a checkpoint is written."""
    for point in ("step:{}:15", "data-wait:{}:15", "data-read:{}:15", "collective:{}:15", "mid-dataset:{}:10", "before-rename:{}:10"):
        for ranks, kind, code in ((1, "term", 143), (2, "usr1", 75)):
            name = f"{point.split(':')[0]}_{kind}"
            job.run(name, ranks=ranks, fault=f"{point.format(ranks - 1)}:{kind}", code=code)
            job.run(name, ranks=ranks)
            assert job.outcome(name) == job.outcome(f"whole_{ranks}"), name


def check(weft):
    job = jobs.Jobs(weft, steps=30)
    for ranks in (1, 2):
        job.run(f"whole_{ranks}", ranks=ranks)
    check_moments(job)
    endless = jobs.Jobs(weft, steps=ENDLESS)
    check_process(endless)
    check_pipe(endless)
    check_launcher(endless)
    check_files(endless)
    check_walltime(endless)


program.main(check)
