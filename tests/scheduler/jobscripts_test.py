# SPDX-License-Identifier: Apache-2.0
"""Checks of the shipped job scripts without a scheduler: their text, and what they do after ends of the program that a private Slurm
does not produce, with launchers and scheduler commands that only pretend. run.sh and nodes.sh run them under a real Slurm, pbs.sh under
a real OpenPBS, where one is installed.

jobscripts_test.py REPOSITORY
"""
import difflib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

def problems_of_pbs(text):
    found = []
    active = [line for line in text.splitlines() if line.startswith("#PBS ")]
    for wanted in ("-l select=", "-l walltime=", "-r y"):
        if not any(wanted in line for line in active):
            found.append(f"no line \"#PBS {wanted}\"")
    chunk = re.search(r"select=\d+(\S*)", text)
    amounts = {key: int(amount) for key, amount in re.findall(r":(\w+)=(\d+)", chunk[1])} if chunk else {}
    if "ngpus" in amounts and amounts["ngpus"] != amounts.get("mpiprocs"):
        found.append("a chunk needs as many processes as GPUs")
    if "ncpus" in amounts and amounts["ncpus"] != amounts.get("mpiprocs", 1) * amounts.get("ompthreads", 1):
        found.append("ncpus is not mpiprocs times ompthreads")
    if "--walltime" not in text:
        found.append("PBS sends no notice: the program needs --walltime")
    return found


def problems_of_slurm(text, site=False):
    """What run.sh and nodes.sh, which have neither GPUs nor real sites, would not notice."""
    directives = re.findall(r"^#SBATCH (\S+)", text, re.M)
    wanted = {"every rank sees the GPUs of its node": "--gpu-bind=none" in directives and not any("gpus-per-task" in d for d in directives),
              "the log of a requeued job is appended": "--open-mode=append" in directives, "the job may be requeued": "--requeue" in directives}
    if re.search(r"^srun ", text, re.M):
        wanted["srun --mpi=pmix"] = site or re.search(r"^srun --mpi=pmix ", text, re.M)
        wanted["ranks may exit one after the other"] = "--kill-on-bad-exit=0" in text
        wanted["ranks are bound to adjacent cores"] = "--cpu-bind=cores --distribution=block:block" in text
    return [f"violated: {rule}" for rule, so in wanted.items() if not so]


def problems_of(text, site=False):
    found = []
    lines = text.splitlines()
    if len(lines) > 130:
        found.append(f"{len(lines)} lines, the limit is 130")
    if "# Edit:" not in "\n".join(lines[:6]):
        found.append("the first lines do not state what to edit")
    for trapped in re.findall(r"^\s*trap .*?([A-Z0-9]+)$", text, re.M):
        if trapped != "USR1":
            found.append(f"traps {trapped} (TERM must end the script; a trap of CONT loses a USR1)")
    if re.search(r"^mpirun=", text, re.M):
        # PBS signals the login shell above the script too, and USR1 would end it; shells ignore URG.
        if f'forward {"URG" if "#PBS " in text else "USR1"} "${{mpirun[@]}}"' not in text:
            found.append("mpirun in the foreground (the script would receive the signal too late), or another signal")
        passed = r"-x PATH \$\{LD_LIBRARY_PATH:\+-x LD_LIBRARY_PATH\} \$\{OPENBLAS_CORETYPE:\+-x OPENBLAS_CORETYPE\} "
        if not re.search(r"^mpirun=\(env --block-signal=TERM mpirun " + passed + "--map-by ", text, re.M):
            found.append("mpirun does not pass the search paths and OpenBLAS's kernels on, or kills the ranks two seconds after TERM")
    if "weft=" in text and ('--start-id "$start"' not in text or 'code=$(confirmed "$code")' not in text):
        found.append("the launcher's code is not compared with the record of this start")
    if re.search(r"^#SBATCH ", text, re.M):
        found += problems_of_slurm(text, site)
    if re.search(r"^#PBS ", text, re.M):
        found += problems_of_pbs(text)
    return found


def unmarked(generic, special, free):
    """Lines of a worked example that are not in the generic script, outside its header, and not marked as site-specific."""
    generic_lines, found, marked = set(generic.splitlines()), [], False
    for line in special.splitlines()[5:]:
        marked = line.startswith("# site:") or (marked and line not in generic_lines and line.strip() != "")
        if line not in generic_lines and not marked and "# site" not in line and not re.match(free, line):
            found.append(f"neither in the generic script nor marked \"# site\": {line}")
    return found


def without_site(text):
    """A script after its header, without the lines under "This site"."""
    text = "\n".join(line for line in text.splitlines()[5:] if not line.startswith("usage="))
    return re.sub(r"(# --- This site -+\n).*?(?=# --- )", r"\1", text, flags=re.S)


# A launcher: writes run.json as the program would, with the start's id or another one, and returns its own code.
LAUNCHER = r"""
echo "$*" >launched
while [ $# -gt 0 ]; do
  case $1 in --output) run=$2 ;; --start-id) id=$2 ;; esac
  shift
done
[ "$OWN" = True ] || id=another
mkdir -p "$run"
[ "$WRITTEN" = False ] || printf '{\n  "start_id": "%s",\n  "input": {\n    "steps": 600\n  },\n  "exit": {\n    "code": %s\n  },\n  "step": %s\n}\n' \
  "$id" "$RECORDED" "$STEP" >"$run/run.json"
exit "$RETURNED"
"""
# A scheduler command: notes its arguments and variables; fails as often as FAILURES says.
COMMAND = r"""
name=${0##*/}
before=$(grep -cs "^$name" called)
echo "$name $* WEFT_COMMAND=$WEFT_COMMAND WEFT_INPUT=$WEFT_INPUT WEFT_RUN=$WEFT_RUN WEFT_NOTICE=$WEFT_NOTICE WEFT_REQUEUES=$WEFT_REQUEUES" >>called
case $name in
  squeue | qsub | qstat) [ "${before:-0}" -ge "${FAILURES:-0}" ] || exit 1 ;;
esac
[ "$name" != qstat ] || echo "    Resource_List.walltime = ${WALLTIME:-01:00:00}"
[ "$name" != squeue ] || echo "${STATE:-RUNNING}"
"""


class Rehearsal:
    """Runs the scripts with such commands first in PATH."""

    def __init__(self, folder, scratch):
        self.folder, self.scratch, self.found = folder, scratch, []
        (scratch / "bin").mkdir()
        for names, body in ((("srun", "mpirun"), LAUNCHER), (("squeue", "scontrol", "scancel", "qstat", "qsub", "qselect"), COMMAND),
                            (("sleep", "module", "weft"), "")):
            for name in names:
                path = scratch / "bin" / name
                path.write_text(f"#!/bin/sh\n{body}")
                path.chmod(0o755)

    def run(self, script, launcher, recorded, own=True, written=True, step=300, command=(), nodes="n1\nn1\n", **variables):
        """The exit code, the output and the scheduler's commands of a job whose launcher returned one code while the program
        recorded another (None: still running)."""
        for name in ("called", "launched"):
            (self.scratch / name).unlink(missing_ok=True)
        (self.scratch / "nodes").write_text(nodes)
        environment = {"PATH": f"{self.scratch / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1", "SLURM_NTASKS": "2",
                       "PBS_JOBID": "7.server", "PBS_O_WORKDIR": str(self.scratch), "PBS_NODEFILE": str(self.scratch / "nodes"),
                       "RETURNED": str(launcher), "RECORDED": "null" if recorded is None else str(recorded), "OWN": str(own), "WRITTEN": str(written),
                       "STEP": str(step), **variables}
        text = (self.folder / script).read_text().replace("source /etc/profile.d/modules.sh", "")
        copy = self.scratch / "script"
        copy.write_text(text)
        done = subprocess.run(["bash", str(copy), *command, "in.toml", "runs/a"], cwd=self.scratch, env=environment, capture_output=True, text=True,
                              check=False, timeout=60)
        called = (self.scratch / "called").read_text() if (self.scratch / "called").exists() else ""
        return done.returncode, done.stdout + done.stderr, called

    def expect(self, what, got, code, commands=(), without=()):
        returned, output, called = got
        if returned != code or not all(c in called for c in commands) or any(c in called for c in without):
            self.found.append(f"{what}: ended with {returned} (expected {code}), commands:\n{called}{output}")

    def starts(self, script, run, words, options):
        """The script starts the program with these words."""
        self.expect(f"{script} {options}", run(0, 0, **options), 0)
        launched = (self.scratch / "launched").read_text()
        if f" {words} " not in launched:
            self.found.append(f"{script} {options}: started \"{launched.strip()}\", without \"{words}\"")

    def problems(self):
        chain = {"WEFT_CHAIN": "c"}
        for script in ("apptainer.sbatch", "kestrel/train.sbatch"):   # the same functions as in slurm.sbatch, see main
            self.expect(f"{script}: stopped with more to do", self.run(script, 75, 75), 75, ["requeue 7"])
            self.expect(f"{script}: node lost, the launcher returns 0", self.run(script, 0, None), 5, without=["requeue"])
        for script in ("slurm.sbatch", "slurm_mpirun.sbatch"):
            run = lambda *arguments, script=script, **options: self.run(script, *arguments, **options)
            say = lambda what, script=script: f"{script}: {what}"
            self.expect(say("stopped, ranks killed while they exited"), run(137, 75), 75, ["requeue 7"])
            self.expect(say("node lost, the launcher returns 0"), run(0, None), 5, without=["requeue"])
            self.expect(say("never started, the launcher returns 0"), run(0, 0, own=False), 5, without=["requeue"])
            self.expect(say("no record at all"), run(0, 0, written=False), 5, without=["requeue"])
            self.expect(say("refused before a record"), run(2, 75, own=False), 2, without=["requeue"])
            self.expect(say("task of an array"), run(75, 75, SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3"), 75, ["requeue 7_3"])
            self.expect(say("scheduler unreachable twice"), run(75, 75, FAILURES="2"), 75, ["requeue 7"])
            self.expect(say("scheduler unreachable"), run(75, 75, FAILURES="99"), 75, ["squeue"], without=["requeue"])
            self.expect(say("ten requeues, little progress"), run(75, 75, step=5, SLURM_RESTART_COUNT="10"), 93, without=["requeue"])
            self.expect(say("twenty requeues, enough progress"), run(75, 75, step=150, SLURM_RESTART_COUNT="20"), 75, ["requeue 7"])
            self.expect(say("chain, node lost"), run(0, None, **chain), 5, without=["scancel", "requeue"])
            self.expect(say("chain, killed"), run(143, 143, **chain), 143, without=["scancel", "requeue"])
            launched = (self.scratch / "launched").read_text()
            if "--start-id 7." not in launched:
                self.found.append(f"{script}: the start has no id: {launched}")
            self.starts(script, run, "weft train in.toml --output runs/a", {})
            self.starts(script, run, "weft train in.toml --output runs/a", {"command": ["train"]})
            for family in ("train", "polychromic"):
                self.starts(script, run, f"weft lm {family} in.toml --output runs/a", {"command": ["lm", family]})
            if list((self.scratch / "runs" / "a").glob(".*")):
                self.found.append(f"{script}: files are left in the run directory")
        for script in ("pbs.pbs", "abci/train.pbs"):
            run = lambda *arguments, script=script, **options: self.run(script, *arguments, **options)
            again = ["qsub -v WEFT_COMMAND,WEFT_INPUT,WEFT_RUN,WEFT_NOTICE,WEFT_REQUEUES", "WEFT_INPUT=my.toml", "WEFT_RUN=runs/b", "WEFT_NOTICE=100"]
            mine = {"WEFT_INPUT": "my.toml", "WEFT_RUN": "runs/b", "WEFT_NOTICE": "100"}
            self.starts(script, run, "weft train my.toml --output runs/b", mine)
            self.starts(script, run, "weft lm train my.toml --output runs/b", {**mine, "WEFT_COMMAND": "lm train"})
            self.expect(f"{script}: the next job has the same command", run(75, 75, WEFT_COMMAND="lm polychromic", **mine), 75,
                        [*again, "WEFT_COMMAND=lm polychromic"])
            self.expect(f"{script}: finished", run(0, 0, **mine), 0, without=["qsub"])
            self.expect(f"{script}: stopped", run(75, 75, **mine), 75, [*again, "WEFT_REQUEUES=1"])
            self.expect(f"{script}: node lost", run(0, None, **mine), 5, without=["qsub"])
            self.expect(f"{script}: server unreachable twice", run(75, 75, FAILURES="2", **mine), 75, again)
            self.expect(f"{script}: little progress", run(75, 75, step=5, WEFT_REQUEUES="10", **mine), 93, without=["qsub"])
            self.expect(f"{script}: server unreachable", run(75, 75, FAILURES="99", **mine), 75, ["qstat"], without=["qsub"])
            self.expect(f"{script}: shorter than the notice", run(75, 75, WALLTIME="00:01:40", **mine), 2, without=["qsub"])
            self.expect(f"{script}: a link, stopped", run(75, 75, **chain, **mine), 75, without=["qsub", "qselect"])
            self.expect(f"{script}: a link, finished", run(0, 0, **chain, **mine), 0, ["qselect", "-N c -s H"], without=["qsub"])
            self.starts(script, run, "-n 3 -host n1:2,n2:1", {**mine, "nodes": "n1\nn1\nn2\n"})
        return self.found


def main():
    folder = Path(sys.argv[1]) / "jobscripts"
    text = {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*"))
            if path.suffix in (".sbatch", ".pbs", ".sh")}
    assert {"slurm.sbatch", "slurm_mpirun.sbatch", "apptainer.sbatch", "pbs.pbs", "chain.sh"} <= text.keys(), text.keys()
    found = [f"{name}: {problem}" for name, script in text.items() for problem in problems_of(script, site="/" in name)]

    # Scripts are copied one by one, so each has its own functions: identical ones.
    for function in ("forward", "confirmed", "worthwhile", "recorded", "requeue"):
        pattern = re.compile(rf"^{function}\(\) \{{(?: .* \}}$|.*?^\}})", re.M | re.S)
        known = pattern.search(text["slurm_mpirun.sbatch"])[0]
        found += [f"{name}: {function}() differs from that of slurm_mpirun.sbatch" for name, script in text.items()
                  if name != "chain.sh" and re.search(rf"\b{function}\b", re.sub(r"#.*", "", script)) and pattern.findall(script) != [known]]

    difference = list(difflib.unified_diff(without_site(text["slurm.sbatch"]).splitlines(),
                                           without_site(text["apptainer.sbatch"]).splitlines(), lineterm=""))
    found += [f"apptainer.sbatch differs from slurm.sbatch beyond \"This site\": {line}" for line in difference]
    found += [f"kestrel/train.sbatch: {line}" for line in
              unmarked(text["slurm.sbatch"], text["kestrel/train.sbatch"], r"#SBATCH --(nodes|cpus-per-task|account)=|usage=")]
    found += [f"abci/train.pbs: {line}" for line in unmarked(text["pbs.pbs"], text["abci/train.pbs"], r"$.")]
    with tempfile.TemporaryDirectory(prefix="weft_jobscripts_") as scratch:
        found += Rehearsal(folder, Path(scratch)).problems()
    print("\n".join(found) or f"{len(text)} job scripts, no problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
