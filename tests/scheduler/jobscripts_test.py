# SPDX-License-Identifier: Apache-2.0
"""Static checks of the shipped job scripts; run.sh runs them.

jobscripts_test.py REPOSITORY

#PBS lines are checked against the grammar of PBS Pro's qsub, because no PBS server is available: this shows that they are
well-formed, not that a server grants the request.
"""
import difflib
import re
import sys
from pathlib import Path

WALLTIME = r"\d{1,3}:[0-5]\d:[0-5]\d"
COUNT = r"[1-9]\d*"
SIZE = r"\d+([kmgt]?[bw])"
# Resources of a chunk, and the format of their values.
CHUNK = {"ncpus": COUNT, "mpiprocs": COUNT, "ompthreads": COUNT, "ngpus": COUNT, "mem": SIZE, "host": r"[\w.-]+", "arch": r"\w+",
         "system": r"\w+"}
PLACE = {"free", "pack", "scatter", "vscatter", "excl", "exclhost", "shared", "group"}
NAME = r"[\w+@.-]+"
OPTIONS = {"-N": r"[A-Za-z][\w+-]{0,14}", "-j": "oe|eo|n", "-k": "(o|e|oe|eo)d?|n", "-r": "y|n", "-J": r"\d+-\d+(:\d+)?(%\d+)?",
           "-A": NAME, "-P": NAME, "-q": NAME, "-o": r"\S+", "-e": r"\S+", "-m": "[abe]+|n", "-M": r"\S+@\S+",
           "-v": r"\w+(=\S*)?(,\w+(=\S*)?)*", "-W": r"(depend=(after|afterok|afternotok|afterany):\S+|group_list=\S+|umask=\d+)"}


def problems_of_pbs_line(text):
    """Reasons why PBS Pro would refuse the options of a #PBS line; empty if it would not."""
    words = text.split()
    if len(words) != 2:
        return [f"\"{text}\" is not one option and its value"]
    option, value = words
    if option in OPTIONS:
        return [] if re.fullmatch(OPTIONS[option], value) else [f"{option} does not take \"{value}\""]
    if option != "-l":
        return [f"unknown option {option}"]
    name, _, setting = value.partition("=")
    if name == "walltime":
        return [] if re.fullmatch(WALLTIME, setting) else [f"walltime \"{setting}\" is not hours:minutes:seconds"]
    if name == "place":
        return [f"unknown placement \"{word}\"" for word in setting.split(":") if word.split("=")[0] not in PLACE]
    if name == "select":
        found = []
        for chunk in setting.split("+"):
            count, *resources = chunk.split(":")
            if not re.fullmatch(COUNT, count):
                found.append(f"chunk \"{chunk}\" does not begin with a count")
            for resource in resources:
                key, _, amount = resource.partition("=")
                if key not in CHUNK:
                    found.append(f"unknown resource \"{key}\" in a chunk")
                elif not re.fullmatch(CHUNK[key], amount):
                    found.append(f"resource {key} does not take \"{amount}\"")
        return found
    return [f"unknown resource \"{name}\" outside select"]


def problems_of_pbs(text):
    lines = [line.split("#PBS ", 1)[1] for line in text.splitlines() if re.match(r"#{1,2}PBS ", line)]
    found = [problem for line in lines for problem in problems_of_pbs_line(line)]
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
    if not re.search(r'\$code -eq 75 \]\]; then qsub "\$0"', text):
        found.append("code 75 does not submit the next job")
    return found


def problems_of_slurm(text, site=False):
    directives = re.findall(r"^#SBATCH (\S+)", text, re.M)
    signal = next((d for d in directives if d.startswith("--signal=")), "")
    by_srun = re.search(r"^srun ", text, re.M) is not None
    wanted = {
        "the log of a requeued job is appended": "--open-mode=append" in directives,
        "the job may be requeued": "--requeue" in directives,
        "every rank sees the GPUs of its node": "--gpu-bind=none" in directives and not any("gpus-per-task" in d for d in directives),
        "USR1 reaches the ranks": re.fullmatch(r"--signal=USR1@\d+" if by_srun else r"--signal=B:USR1@\d+", signal),
        "requeued only on 75 and while RUNNING":
            re.search(r'\$code -eq 75 && \$\(squeue [^)]*\) == RUNNING \]\]; then\s+(#.*\s+)*scontrol requeue', text),
        "a chain ends on any code but 75": '[[ $code -eq 75 ]] || scancel' in text,
    }
    if by_srun:
        wanted["srun --mpi=pmix"] = site or re.search(r"^srun --mpi=pmix ", text, re.M)
        wanted["ranks may exit one after the other"] = "--kill-on-bad-exit=0" in text
        wanted["srun in the foreground"] = not re.search(r"^srun .*(?:\\\n.*)*&\s*$", text, re.M)
    return [f"violated: {rule}" for rule, so in wanted.items() if not so]


def problems_of(text, site=False):
    found = []
    lines = text.splitlines()
    if len(lines) > 60:
        found.append(f"{len(lines)} lines, the limit is 60")
    if "# Edit:" not in "\n".join(lines[:6]):
        found.append("the first lines do not state what to edit")
    for trapped in re.findall(r"^\s*trap .*?([A-Z0-9]+)$", text, re.M):
        if trapped != "USR1":
            found.append(f"traps {trapped} (TERM must end the script; a trap of CONT loses a USR1)")
    if "mpirun" in re.sub(r"#.*", "", text) and "forward mpirun" not in text:
        found.append("mpirun in the foreground: the script would receive USR1 too late")
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


def self_check(generic):
    """The rules detect violations."""
    good = ["-l select=2:ncpus=64:mpiprocs=8:ngpus=8:mem=500gb+1:ncpus=1", "-l walltime=100:00:00", "-l place=scatter:excl", "-J 0-9%1",
            "-W depend=afterany:12.server", "-k oed"]
    bad = ["-l select=2:ncpu=64", "-l select=x:ncpus=4", "-l select=1:mem=4", "-l walltime=4h", "-l place=spread", "-j both", "-Z 1", "-r yes",
           "-l nodes=2:ppn=4", "-N 1weft", "-l walltime = 01:00:00"]
    for line in good:
        assert not problems_of_pbs_line(line), line
    for line in bad:
        assert problems_of_pbs_line(line), line
    slurm, mpirun, pbs = generic["slurm.sbatch"], generic["slurm_mpirun.sbatch"], generic["pbs.pbs"]
    for text, change in ((slurm, ("USR1@", "B:USR1@")), (slurm, ("exit=0", "exit=1")), (slurm, ("=append", "=truncate")),
                         (slurm, ("pmix", "none")), (slurm, ("set -eu", "trap : CONT\nset -eu")), (slurm, ("-eq 75 &&", "-ne 0 &&")),
                         (slurm, (" == RUNNING", "")), (slurm, ("|| code=$?\n#", "&\n#")), (mpirun, ("B:USR1", "USR1")),
                         (mpirun, ("forward mpirun", "mpirun")), (pbs, ("--walltime", "--wait")), (pbs, (":ngpus=4", ":ngpus=3")),
                         (pbs, ("-eq 75", "-ne 0"))):
        assert change[0] in text and problems_of(text.replace(*change)), change


def main():
    folder = Path(sys.argv[1]) / "jobscripts"
    text = {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*"))
            if path.suffix in (".sbatch", ".pbs", ".sh")}
    assert {"slurm.sbatch", "slurm_mpirun.sbatch", "apptainer.sbatch", "pbs.pbs", "chain.sh"} <= text.keys(), text.keys()
    self_check(text)
    found = [f"{name}: {problem}" for name, script in text.items() for problem in problems_of(script, site="/" in name)]

    # forward() is tested in slurm_mpirun.sbatch; it must be identical elsewhere.
    forward = re.compile(r"^forward\(\) \{.*?^\}", re.M | re.S)
    known = forward.search(text["slurm_mpirun.sbatch"])[0]
    found += [f"{name}: forward() differs from that of slurm_mpirun.sbatch" for name, script in text.items()
              if "forward" in script and forward.findall(script) != [known]]

    difference = list(difflib.unified_diff(without_site(text["slurm.sbatch"]).splitlines(),
                                           without_site(text["apptainer.sbatch"]).splitlines(), lineterm=""))
    found += [f"apptainer.sbatch differs from slurm.sbatch beyond \"This site\": {line}" for line in difference]
    found += [f"kestrel/train.sbatch: {line}" for line in
              unmarked(text["slurm.sbatch"], text["kestrel/train.sbatch"], r"#SBATCH --(nodes|cpus-per-task|account)=|usage=")]
    found += [f"abci/train.pbs: {line}" for line in unmarked(text["pbs.pbs"], text["abci/train.pbs"], r'  echo "train\.pbs:')]
    print("\n".join(found) or f"{len(text)} job scripts, no problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
