# SPDX-License-Identifier: Apache-2.0
"""The points that are not finished as one array of jobs of Slurm or PBS."""
import re
import shlex
import subprocess
from pathlib import Path

from weft.errors import USAGE, WeftError, read_bytes, write_atomically
from weft.program import path_of_weft


def _shipped_script(name):
    """In the repository, or where the program is installed."""
    here = Path("jobscripts") / name
    installed = Path(path_of_weft()).resolve().parent.parent / "share/weft/jobscripts" / name
    return installed if not here.exists() and installed.exists() else here


def job_script(path, scheduler, points, of_language_model):
    """The job script with the lines that take input and run of its array index from points.txt."""
    if not path.is_file():
        raise WeftError(USAGE, f"{path}: no such file (the job script of this site); name it with --script")
    text = read_bytes(path, 1 << 20).decode("utf-8", "replace")
    place = shlex.quote(str(points.absolute()))
    if scheduler == "slurm":
        added = ("# weft sweep: the input and the run directory of this point.\n"
                 f'eval "set -- $(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {place})"\n')
    else:
        added = ("# weft sweep: the input and the run directory of this point; a resubmitted job has them already.\n"
                 "if [[ -n ${PBS_ARRAY_INDEX:-} ]]; then\n"
                 f'  eval "set -- $(sed -n "$((PBS_ARRAY_INDEX + 1))p" {place})"\n'
                 "  export WEFT_INPUT=$1 WEFT_RUN=$2\n  shift 2\nfi\n" + ("export WEFT_COMMAND='lm train'\n" if of_language_model else ""))
    # After the header of comments, whose directives end at the first command.
    header = re.match(r"(?:#.*\n|\n)*", text).end()
    if header == len(text):
        raise WeftError(USAGE, f"{path}: has no command; is it a job script?")
    text = text[:header] + added + text[header:]
    if of_language_model and "${command[@]}" not in text:
        raise WeftError(USAGE, f'{path}: has no "${{command[@]}}" (a language model needs a script that starts the command that it is given, '
                        "here lm train); take a shipped script")
    return text


def submit(directory, jobs, scheduler, script, at_a_time, of_language_model):
    """Submits the jobs; returns their number."""
    points, job = directory / "points.txt", directory / "sweep.job"
    words = ["lm", "train"] if scheduler == "slurm" and of_language_model else []
    lines = [shlex.join([*words, str(one.input), str(one.run)]) for one in jobs if not one.finished]
    path = Path(script) if script else _shipped_script("slurm.sbatch" if scheduler == "slurm" else "pbs.pbs")
    write_atomically(job, job_script(path, scheduler, points, of_language_model))
    write_atomically(points, "\n".join(lines) + "\n")
    throttle = f"%{at_a_time}" if at_a_time > 1 else ""
    if scheduler == "slurm":
        command = ["sbatch", f"--array=0-{len(lines) - 1}{throttle}", str(job)]
    elif len(lines) > 1:
        command = ["qsub", "-J", f"0-{len(lines) - 1}{throttle}", str(job)]
    else:       # PBS has no array of one job; its index is then a variable of the submission
        command = ["qsub", "-v", "PBS_ARRAY_INDEX=0", str(job)]
    try:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
    except OSError as failure:
        raise WeftError(USAGE, f"{command[0]}: cannot be started ({failure.strerror}); is it installed?") from None
    if code:
        raise WeftError(USAGE, f"{command[0]} ended with {code} (its message is above); {job} can be submitted by hand")
    return len(lines)
