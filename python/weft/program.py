# SPDX-License-Identifier: Apache-2.0
"""The program `weft`, started by the package's own programs."""
import ctypes
import os
import shutil
import signal
import subprocess

from weft.errors import IO, USAGE, WeftError

PR_SET_PDEATHSIG = 1


def path_of_weft():
    """The program that started this one (WEFT_PROGRAM), or the one in PATH."""
    path = os.environ.get("WEFT_PROGRAM") or shutil.which("weft")
    if not path or not os.access(path, os.X_OK):
        raise WeftError(USAGE, f"{path or 'weft'}: no such program (runs are trained by it); put it into PATH, as build/cpu-release/env.sh does")
    return path


def started_by_launcher():
    """True in a process of mpirun or srun."""
    return (any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK")) or
            os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1")


def start(arguments, variables, log):
    """A process in a group of its own, so that an interrupt of the terminal reaches this one alone, which passes it on once. Its output is
    appended to `log`. It receives SIGTERM when this process has ended, also when that was killed: a training run then writes its checkpoint
    and stops."""
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def tie():
        os.setpgid(0, 0)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:      # it has ended before the request
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        with open(log, "ab") as file:
            return subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                                    env={**os.environ, **variables}, preexec_fn=tie)
    except OSError as failure:
        if failure.filename == str(log):
            raise WeftError(IO, f"{log}: cannot be written ({failure.strerror}); check the directory") from None
        raise WeftError(IO, f"{arguments[0]}: cannot be started ({failure.strerror}); is it installed?") from None


def exit_code(process):
    """Of a process that has ended, or 128 + the signal that ended it; None while it runs."""
    code = process.poll()
    return code if code is None or code >= 0 else 128 - code


def gpu_of_slot(slot):
    """Variables that give job slot `slot` a GPU of its own; empty without a GPU, and with a single one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    try:
        gpus = visible.split(",") if visible else [str(i) for i in range(len(os.listdir("/proc/driver/nvidia/gpus")))]
    except OSError:
        gpus = []
    return {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if len(gpus) > 1 else {}


def exit_reason(code):
    reasons = {0: "finished", 1: "internal error", 2: "wrong input or usage", 3: "damaged or unsuitable data", 4: "a number is not finite",
               5: "a rank is lost or hangs", 6: "a file cannot be read or written, or no valid checkpoint", 75: "stopped cleanly, more to do",
               93: "no progress since the last start"}
    if 128 < code < 193:
        return f"stopped by signal {code - 128}, resumable"
    return reasons.get(code, f"unknown exit code {code}")
