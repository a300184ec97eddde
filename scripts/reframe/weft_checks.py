# SPDX-License-Identifier: Apache-2.0
"""Checks of an installed Weft with ReFrame, after an update of the system (docs/clusters.md, "Checks with ReFrame").

    reframe -C scripts/reframe/settings.py -c scripts/reframe/weft_checks.py -r

The launcher of the partition starts every command. The checks read files of the clone, or of the installation that contains them.
"""
import filecmp
import json
import re
from pathlib import Path

import reframe as rfm
import reframe.utility.sanity as sn
from reframe.core.builtins import run_before, sanity_function, variable

HERE = Path(__file__).resolve().parent


def shipped(name):
    """A file of the clone, or of the installation, where this folder is share/weft/reframe."""
    places = [HERE.parents[1] / name, HERE.parent / name, HERE.parents[1] / "doc/weft" / name]
    return str(next((path for path in places if path.exists()), places[0]))


QUICKSTART = shipped("inputs/quickstart.toml")


class WeftCheck(rfm.RunOnlyRegressionTest):
    """What the checks share."""

    executable = "weft"
    valid_systems = ["*"]
    valid_prog_environs = ["*"]
    sourcesdir = None
    time_limit = "10m"
    tags = {"weft"}

    def launched(self, *words):
        """A line of the job script that starts a command before the last one."""
        # ReFrame sets these later, for the last command.
        for name in ("num_tasks", "num_tasks_per_node", "num_cpus_per_task"):
            setattr(self.job, name, getattr(self, name))
        return " ".join([self.job.launcher.run_command(self.job), *words])

    def errors(self):
        """Messages of errors with which the program has ended."""
        return re.findall(r"^error: (.*)", Path(self.stagedir, self.job.stderr).read_text(), re.M)

    def check_errors(self, errors):
        sn.evaluate(sn.assert_false("; ".join(dict.fromkeys(errors)), "the program ended with an error: {0}"))

    def written(self, name):
        """The text of a file that the program writes."""
        sn.evaluate(sn.assert_true(Path(self.stagedir, name).is_file(), f"the program has not written {name}"))
        return Path(self.stagedir, name).read_text()

    def skip_without_gpu(self):
        """Skips the check if the program has found no GPU, in a partition whose settings state none either."""
        without = [error for error in self.errors() if 'device.backend = "cuda" is not available' in error]
        self.skip_if(without and not self.current_partition.select_devices("gpu"), next(iter(without), ""))


@rfm.simple_test
class WeftVersion(WeftCheck):
    """The program starts, has the version of these checks, and names its libraries."""

    descr = "version and libraries"
    executable_opts = ["--version"]
    version = variable(str, value=re.search(r"^version: (\S+)", Path(shipped("CITATION.cff")).read_text(), re.M)[1])

    @sanity_function
    def version_and_libraries(self):
        found = sn.extractsingle(r"^weft (\S+) \(", self.stdout, 1)
        return sn.all([sn.assert_eq(found, self.version, "the program has version {0}, expected {1}"),
                       *(sn.assert_found(rf"^  {library}: \S", self.stdout, f"the program does not name {library}")
                         for library in ("HDF5", "MPI", "kernels"))])


@rfm.simple_test
class WeftQuickstart(WeftCheck):
    """The shipped quickstart, shortened: planted data, training, evaluation."""

    descr = "quickstart, 200 of 1500 steps"
    executable_opts = ["train", QUICKSTART, "--output", "run", "--set", "run.steps=200"]
    # Several times the differences between seeds and numbers of ranks (docs/clusters.md).
    loss, nmse, tolerance = 1.1, 0.28, 0.05

    @run_before("run")
    def write_data(self):
        self.prerun_cmds = [self.launched(self.executable, "synth", QUICKSTART)]

    @sanity_function
    def loss_and_nmse(self):
        self.check_errors(self.errors())
        record = json.loads(self.written("run/run.json"))

        def in_range(what, value, expected):
            return sn.assert_reference(value, expected, -self.tolerance, self.tolerance,
                                       f"{what} is {value:.4g}, expected {expected} within {self.tolerance:.0%}")

        return sn.all([sn.assert_eq(record["exit"]["code"], 0, "the training ended with code {0}"),
                       in_range("the loss", record["result"]["train"]["loss"], self.loss),
                       in_range("the NMSE", record["result"]["validation"]["nmse_standardised_mean"], self.nmse)])


@rfm.simple_test
class WeftResume(WeftCheck):
    """On 2 ranks, a run that is stopped and resumed ends with the checkpoint of an undisturbed run, bit for bit.

    Rank 1 receives USR1 at step 13, as before a time limit; both ranks write a checkpoint at step 15 and end. The shards of a checkpoint
    contain parameters, moments and counters, but no times or paths: equal runs write equal bytes."""

    descr = "resume on 2 ranks, bit for bit"
    num_tasks = 2
    num_tasks_per_node = 2
    settings = []

    @run_before("run")
    def write_data_and_train(self):
        settings = ["synthetic.tokens=8192", "synthetic.validation_tokens=1024", "run.steps=30", *self.settings]
        options = [QUICKSTART, *(word for setting in settings for word in ("--set", setting))]
        resumed = [self.executable, "train", *options, "--output", "resumed"]
        self.prerun_cmds = [self.launched(self.executable, "synth", *options),
                            self.launched(self.executable, "train", *options, "--output", "undisturbed"),
                            self.launched("env", "WEFT_FAULT=step:1:13:usr1", *resumed)]
        self.executable_opts = resumed[1:]

    @sanity_function
    def same_bits(self):
        self.skip_without_gpu()
        self.check_errors(self.errors())
        return sn.all([sn.assert_in("resuming after step 15 of 30", self.written("resumed/log.txt"), "the run was not stopped at step 15 and resumed"),
                       *(sn.assert_true(self.same_file(f"checkpoints/step_00000030/rank_{rank:05}.h5"),
                                        f"rank {rank}: the checkpoint of the resumed run differs from that of the undisturbed run")
                         for rank in range(self.num_tasks))])

    def same_file(self, name):
        files = [Path(self.stagedir, run, name) for run in ("undisturbed", "resumed")]
        return all(file.is_file() for file in files) and filecmp.cmp(*files, shallow=False)


@rfm.simple_test
class WeftResumeGPU(WeftResume):
    """The same with the kernels for GPUs and the exchange between two of them."""

    descr = "resume on 2 GPUs, bit for bit"
    num_gpus_per_node = 2
    settings = ["device.backend=cuda", "device.precision=bf16", "optimizer.state=8bit"]


@rfm.simple_test
class WeftSpeed(WeftCheck):
    """The time per step on a GPU, compared with that of the same type of GPU in a file of references."""

    descr = "speed of GPT-2 small"
    num_gpus_per_node = 1
    exclusive_access = True
    time_limit = "20m"
    references = variable(str, value=shipped("docs/reference_speeds.json"))
    slower = variable(float, value=0.1)     # the largest accepted excess, of the reference
    keep_files = ["run"]

    @run_before("run")
    def compare(self):
        # Without a GPU this backend is an error, at once.
        self.executable_opts = ["benchmark", shipped("inputs/benchmark_gpt2_small.toml"), "--output", "run", "--compare", self.references,
                                "--set", f"benchmark.compare_ratio={1 + self.slower}", "--set", "device.backend=cuda"]

    def recorded(self, result):
        """{case: ms/step} of the references."""
        cases = json.loads(Path(self.references).read_text())["gpus"][result["machine"]["gpu"]][result["input"]]
        return {case["name"]: case["ms_per_step"] for case in cases if case["ranks"] == result["ranks"]}

    @sanity_function
    def measured(self):
        self.skip_without_gpu()
        for error in self.errors():
            self.skip_if(error.startswith("--compare: there are no speeds of"), error)
        # The performance stage names the cases that are slower.
        self.check_errors([error for error in self.errors() if not error.startswith("slower than")])
        result = json.loads(self.written("run/benchmark.json"))
        missing = self.recorded(result).keys() - {case["name"] for case in result["cases"]}
        return sn.assert_false(missing, "not measured: {0}")

    @run_before("performance")
    def take_references(self):
        if self.is_dry_run():
            return
        result = json.loads(self.written("run/benchmark.json"))
        self.reference = {"*": {name: (ms, None, self.slower, "ms/step") for name, ms in self.recorded(result).items()}}
        self.perf_variables = {case["name"]: sn.make_performance_function(sn.defer(case["ms_per_step"]), "ms/step")
                               for case in result["cases"]}
