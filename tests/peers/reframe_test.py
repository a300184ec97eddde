# SPDX-License-Identifier: Apache-2.0
"""ReFrame runs scripts/reframe as administrators do: with the program, where every check passes or is skipped with the reason, and with
programs that do one thing wrong, where every check fails with the message that says so.

There is no GPU in this test: a speed is that of a benchmark.json with other names and times."""
import json
import os
import subprocess
import sys
from pathlib import Path

import program

ROOT = Path(__file__).resolve().parents[2]
CHECKS = ROOT / "scripts/reframe"
SPEEDS = ROOT / "docs/reference_speeds.json"
GPU, INPUT = "NVIDIA H200", "benchmark_gpt2_small"
NO_GPU = 'device.backend = "cuda" is not available'
SMALL = ("benchmark.layers=2", "benchmark.d_model=16", "benchmark.warmup=0", "benchmark.steps=1", "transcoder.features=64",
         "data.batch_tokens=64", "device.precision=fp32", "optimizer.state=fp32")

# Shell scripts in place of the program: "$weft" is the program, "$json" a benchmark.json, "$run" a run of the
# quickstart. A command of one check is known by its options.
OTHER = {
    "version, steps, damage, slower": """
case "$*" in
  --version) "$weft" --version | sed 's/^weft [0-9.]*/weft 9.9.9/' ;;
  *run.steps=200*) exec "$weft" "$@" --set run.steps=20 ;;
  *"--output resumed"*)
    "$weft" "$@" || exit
    shard=resumed/checkpoints/step_00000030/rank_00001.h5
    if [[ ${OMPI_COMM_WORLD_RANK:-0} == 1 && -f $shard ]]; then printf x | dd of=$shard bs=1 seek=9000 conv=notrunc status=none; fi ;;
  benchmark*) mkdir run; cp "$json" run/benchmark.json ;;
  *) exec "$weft" "$@" ;;
esac""",
    "libraries, record, not stopped, missing": """
case "$*" in
  --version) "$weft" --version | head -n 1 ;;
  *run.steps=200*) cp -r "$run" run && sed -i 's/"nmse_standardised_mean": 0/"nmse_standardised_mean": 1/' run/run.json ;;
  *"--output resumed"*) WEFT_FAULT= exec "$weft" "$@" ;;
  benchmark*) mkdir run; cp "$json" run/benchmark.json ;;
  *) exec "$weft" "$@" ;;
esac""",
    "errors, another GPU": f"""
case "$*" in
  benchmark*) exec "$weft" "$@" --set device.backend=portable --set 'benchmark.cases=["fp32"]' {" ".join(program.sets(*SMALL))} ;;
  *) exec "$weft" "$@" --set run.step=1 ;;
esac""",
    "as recorded": """
case "$*" in
  benchmark*) mkdir run; cp "$json" run/benchmark.json ;;
esac""",
}


class Suite:
    def __init__(self, weft):
        self.weft, self.runs = weft, 0
        self.quickstart = weft.folder / "run_1/stage/local/host/weft/WeftQuickstart/run"
        weft.environment.pop("PYTHONPATH", None)
        weft.environment |= {"CUDA_VISIBLE_DEVICES": "-1", "TMPDIR": str(weft.folder)}      # for the log of ReFrame

    def run(self, *options, action="-r", settings=CHECKS / "settings.py"):
        """{check: its entry in the report of ReFrame}"""
        self.runs += 1
        place = self.weft.folder / f"run_{self.runs}"
        command = [Path(sys.executable).parent / "reframe", "-C", settings, "-c", CHECKS / "weft_checks.py", action, "--prefix", place,
                   "--report-file", place / "report.json", *options]
        place.mkdir()
        done = subprocess.run(command, cwd=place, env=self.weft.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        assert (place / "report.json").exists(), done.stdout
        cases = {case["name"]: case for case in json.loads((place / "report.json").read_text())["runs"][-1]["testcases"]}
        # What a job of an administrator evaluates.
        assert (done.returncode != 0) == any(case["result"] == "fail" for case in cases.values()), (done.returncode, done.stdout)
        self.output = done.stdout
        print(*options, {name: case["result"] for name, case in cases.items()}, flush=True)
        return cases

    def expect(self, cases, expected):
        """`expected`: {check: (result, part of the message)}"""
        assert cases.keys() == expected.keys(), (cases.keys(), expected.keys(), self.output)
        for name, (result, message) in expected.items():
            said = f"{cases[name].get('fail_reason')} {self.output if result == 'skip' else ''}"
            assert cases[name]["result"] == result and message in said, (name, expected[name], cases[name]["result"], said, self.output)

    def other(self, name, benchmark):
        """Options for a program of OTHER."""
        path = self.weft.folder / "other"
        path.write_text(f"#!/bin/bash\nweft={self.weft.binary} json={self.weft.folder / 'benchmark.json'} run={self.quickstart}{OTHER[name]}\n")
        path.chmod(0o755)
        (self.weft.folder / "benchmark.json").write_text(json.dumps(benchmark))
        return ["-S", f"executable={path}"]


def benchmark_of_gpu(weft):
    """A benchmark.json of this machine with the name of a GPU, and the cases and times that are recorded for it."""
    weft.run("benchmark", ROOT / f"inputs/{INPUT}.toml", "--output", "measured", *program.sets('benchmark.cases=["fp32"]', *SMALL))
    document = json.loads((weft.folder / "measured/benchmark.json").read_text())
    recorded = json.loads(SPEEDS.read_text())["gpus"][GPU][INPUT]
    document["machine"]["gpu"] = GPU
    document["cases"] = [{**document["cases"][0], "name": case["name"], "ms_per_step": case["ms_per_step"]} for case in recorded]
    return document


def check(weft):
    suite = Suite(weft)
    measured = benchmark_of_gpu(weft)
    weft.environment["PATH"] = f"{weft.binary.parent}:{os.environ['PATH']}"

    # The program, found in PATH.
    suite.expect(suite.run("--keep-stage-files"), {"WeftVersion": ("pass", ""), "WeftQuickstart": ("pass", ""), "WeftResume": ("pass", ""),
                               "WeftResumeGPU": ("skip", NO_GPU), "WeftSpeed": ("skip", NO_GPU)})

    # A partition with GPUs, of which the program finds none.
    with_gpus = weft.folder / "settings.py"
    text = (CHECKS / "settings.py").read_text()
    with_gpus.write_text(text.replace('"local", "mpirun", ', '"local", "mpirun", devices=GPUS, '))
    assert with_gpus.read_text() != text
    suite.expect(suite.run("-n", "WeftResumeGPU|WeftSpeed", settings=with_gpus),
                 {"WeftResumeGPU": ("fail", NO_GPU), "WeftSpeed": ("fail", NO_GPU)})

    # A case 1.2 times as slow as recorded; with a larger limit it passes.
    slower = {**measured, "cases": [dict(case) for case in measured["cases"]]}
    slower["cases"][-1]["ms_per_step"] *= 1.2
    options = suite.other("version, steps, damage, slower", slower)
    suite.expect(suite.run(*options, "-n", "WeftVersion|WeftQuickstart|WeftResume$|WeftSpeed"), {
        "WeftVersion": ("fail", "the program has version 9.9.9, expected "), "WeftQuickstart": ("fail", "the loss is "),
        "WeftResume": ("fail", "rank 1: the checkpoint of the resumed run differs"), "WeftSpeed": ("fail", f"{slower['cases'][-1]['name']}=")})
    suite.expect(suite.run(*options, "-n", "WeftSpeed", "-S", "slower=0.3"), {"WeftSpeed": ("pass", "")})

    # A case that is recorded and was not measured.
    options = suite.other("libraries, record, not stopped, missing", {**measured, "cases": measured["cases"][:-1]})
    suite.expect(suite.run(*options, "-n", "WeftVersion|WeftQuickstart|WeftResume$|WeftSpeed"), {
        "WeftVersion": ("fail", "the program does not name HDF5"), "WeftQuickstart": ("fail", "the NMSE is 1."),
        "WeftResume": ("fail", "the run was not stopped"), "WeftSpeed": ("fail", "not measured: ")})

    # Errors of the program; a type of GPU without speeds, here none at all.
    options = suite.other("errors, another GPU", measured)
    suite.expect(suite.run(*options, "-n", "WeftQuickstart|WeftResume$|WeftSpeed"), {
        "WeftQuickstart": ("fail", "the program ended with an error: "), "WeftResume": ("fail", "the program ended with an error: "),
        "WeftSpeed": ("skip", "there are no speeds of ")})

    # A program that writes nothing but the recorded speeds.
    cases = suite.run(*suite.other("as recorded", measured), "-n", "WeftVersion|WeftQuickstart|WeftResume$|WeftSpeed")
    suite.expect(cases, {"WeftVersion": ("fail", ""), "WeftQuickstart": ("fail", "has not written run/run.json"),
                         "WeftResume": ("fail", "has not written resumed/log.txt"), "WeftSpeed": ("pass", "")})

    # The job scripts of the examples: what they request.
    for system, requested in (("slurm", ("#SBATCH --partition=gpu", "#SBATCH --ntasks=2", "#SBATCH --gpus-per-node=2", "srun env WEFT_FAULT=")),
                              ("pbs", ("#PBS -q gpu", "#PBS -l select=1:mpiprocs=2:ncpus=2:ngpus=2", "mpirun -np 2 env WEFT_FAULT="))):
        suite.run(f"--system={system}", action="--dry-run")
        script = (weft.folder / f"run_{suite.runs}/stage/{system}/gpu/weft/WeftResumeGPU/rfm_job.sh").read_text()
        assert all(line in script for line in requested), script


program.main(check)
