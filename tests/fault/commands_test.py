# SPDX-License-Identifier: Apache-2.0
"""Commands that write files, under faults: each ends with a documented exit code, leaves nothing incomplete under the name of the
output, and writes the bytes of an undisturbed command when it is repeated. The table is in docs/trust.md.

commands_test.py WEFT     The full and the read-only disk need a mount in a separate namespace; otherwise the test counts as skipped.
"""
import concurrent.futures
import random
import re
import resource
import signal
import time

import disks
import jobs
import program

# Text of Open MPI when it cannot start.
NOT_WEFT = ("MPI_INIT", "MPI_Init", "orte_", "ORTE", "PMIX ERROR", "mca_", "opal_")
# Name -> arguments; {} is the output.
COMMANDS = {
    "synth": "synth input.toml --output {} --set synthetic.tokens=4000",
    "encode": "encode run --output {}",
    "features": "features run --output {}",
    "convert": "convert run --output {}",
    "export": "export converted {} --to circuit-tracer",
    "import": "import exported --output {}",
    "lm tokenize": "lm tokenize text.txt --tokens bytes --output {}",
    "lm harvest": "lm harvest words --tokens 512 --rows-per-file 128 --output {}",
    "lm export": "lm export words --output {}",
    "lm merge": "lm merge adapted --output {}",
    "attribute": "attribute words --transcoder replacement --prompt The,cat,sat,on,the,mat --matrix --output {}/graph.json",
    "evaluate": "evaluate run --output {}",
    "lm evaluate": "lm evaluate words --text text.txt --output {}",
    "benchmark": "benchmark benchmark.toml --output {}",
}
# They publish several files one after the other; what is published is complete.
SEVERAL = ("lm harvest", "attribute", "benchmark")
# They replace their files. Of two at a time the last one does.
REPLACING = ("evaluate", "lm evaluate", "benchmark")

# Phase of a command -> point of src/base/fault.hpp.
PHASES = {"start": None, "reading": "input-open", "computing": "output-begin", "writing": "output-open", "complete": "before-publish"}

LANGUAGE = """
[run]
steps = 4
[data]
train = "{folder}/text.txt"
tokens = "bytes"
batch_tokens = 64
sequence = 32
[language_model]
layers = 2
d_model = 32
heads = 2
d_mlp = 64
[optimizer]
warmup_steps = 1
"""
REPLACEMENT = """
[run]
steps = 4
[data]
model = "words"
batch_tokens = 64
[transcoder]
features = 24
k = 3
"""
BENCHMARK = """
[data]
batch_tokens = 16
[transcoder]
features = 16
k = 2
[benchmark]
layers = 1
d_model = 8
warmup = 1
steps = 1
"""


class Commands:
    def __init__(self, weft):
        self.weft, self.folder = weft, weft.folder
        self.job = jobs.Jobs(weft, steps=8, every=0)
        self.job.run("run", *program.sets(f"data.validation={self.folder}/data/validation"))
        (self.folder / "text.txt").write_text(program.TEXT * 20)
        (self.folder / "language.toml").write_text(LANGUAGE.format(folder=self.folder))
        weft.run("lm", "train", "language.toml", "--output", "words")
        (self.folder / "replacement.toml").write_text(REPLACEMENT)
        weft.run("train", "replacement.toml", "--output", "replacement")
        weft.run("lm", "train", "language.toml", "--output", "adapted", *program.sets("language_model.initial=words", "lora.rank=2"))
        weft.run("convert", "run", "--output", "converted")
        weft.run("export", "converted", "exported", "--to", "circuit-tracer")
        (self.folder / "benchmark.toml").write_text(BENCHMARK)
        (self.folder / "whole").mkdir()
        self.expected = {}
        for name in COMMANDS:
            output = self.folder / "whole" / name
            weft.run(*self.arguments(name, output))
            self.expected[name] = contents(output)
            assert self.expected[name], name

    def arguments(self, name, output):
        return [word.format(output) if "{" in word else word for word in COMMANDS[name].split()]

    def start(self, name, output, **options):
        return self.weft.start(*self.arguments(name, output), **options)

    def run(self, name, output, **options):
        """Exit code (minus the number of a signal) and output."""
        process = self.start(name, output, **options)
        text, _ = process.communicate(timeout=120)
        for part in NOT_WEFT:
            assert part not in text, (name, text)
        return process.returncode, text

    def place(self, fault, name):
        """An output that does not exist, in a folder without other files."""
        folder = self.folder / fault / name
        folder.mkdir(parents=True)
        return folder / "output"

    def complete(self, name, output, written_to=None):
        """The output is that of the undisturbed command, and nothing else is left. `written_to`: its name when it was written."""
        found = contents(output, written_to)
        differing = [file for file in found.keys() | self.expected[name].keys() if found.get(file) != self.expected[name].get(file)]
        assert not differing, (name, sorted(differing))
        assert [path.name for path in output.parent.iterdir()] == [output.name], list(output.parent.iterdir())

    def nothing_incomplete(self, name, output):
        """Nothing is under the name of the output, or complete files if there are several."""
        found = contents(output) if output.exists() else {}
        files = published(output)
        assert name in SEVERAL or not files, (name, files)
        differing = [file for file in files if found[file] != self.expected[name].get(file)]
        assert not differing, (name, differing)

    def repeated(self, name, output):
        """The same command again, undisturbed."""
        code, text = self.run(name, output)
        assert code == 0, (name, code, text)
        self.complete(name, output)


def contents(folder, written_to=None):
    """Name -> bytes of all files, without the name of the folder, which the input in a manifest has, the digest of that text, and the
    numbers of a benchmark."""
    files = {str(path.relative_to(folder)): path.read_bytes().replace(str(written_to or folder).encode(), b"")
             for path in sorted(folder.rglob("*")) if path.is_file()}
    for name, data in files.items():
        if name.endswith("manifest.json"):
            files[name] = re.sub(rb'"sha256": *"[^"]*"', b"", data, count=1)
        elif name.startswith("benchmark."):
            files[name] = re.sub(rb"[-+.\de]+", b"", data)
    return files


def published(output):
    """Files under the name of the output; those that are being written have other names."""
    return [name for name in contents(output) if ".tmp/" not in name] if output.exists() else []


def stopped(process):
    """Waits until the process has stopped itself."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with open(f"/proc/{process.pid}/stat", encoding="ascii", errors="replace") as file:
            state = file.read().rsplit(")", 1)[1].split()[0]
        if state == "T":
            return
        assert process.poll() is None and state != "Z", process.communicate()[0]
        time.sleep(0.01)
    raise AssertionError("the process did not stop")


def check_second(commands, name):
    """A second command while the first one writes: 6. The first is then killed, at the end of its writing."""
    output = commands.place("second", name)
    # The last of two files of a benchmark.
    point = "before-publish@2" if name == "benchmark" else "before-publish"
    first = commands.start(name, output, fault=f"{point}:0:*:stop")
    try:
        stopped(first)
        commands.nothing_incomplete(name, output)
        code, text = commands.run(name, output)
        if name in REPLACING:
            assert code == 0, (name, code, text)
        else:
            assert code == 6 and "another process is writing it" in text, (name, code, text)
    finally:
        first.kill()
        first.communicate()
    if name not in REPLACING:
        commands.nothing_incomplete(name, output)
    commands.repeated(name, output)


def check_kill(commands, name, moment):
    """SIGKILL at any moment after the first file was begun."""
    output = commands.place("kill", name)
    process = commands.start(name, output)
    while process.poll() is None and not list(output.parent.rglob("*.tmp")) and not output.exists():
        time.sleep(0.0005)
    time.sleep(moment)
    process.kill()
    process.communicate()
    if published(output) == [] or name in SEVERAL:
        commands.repeated(name, output)
    else:
        commands.complete(name, output)


def check_pipe(commands, name):
    """Standard output and error without a reader: the command completes, or SIGPIPE ends it (141 in a shell)."""
    output = commands.place("pipe", name)
    process = commands.start(name, output)
    process.stdout.close()
    code = process.wait(timeout=120)
    assert code in (0, -signal.SIGPIPE), (name, code)
    if published(output) == []:
        commands.repeated(name, output)
    elif code == 0 or name not in SEVERAL:
        commands.complete(name, output)
    else:
        commands.repeated(name, output)


def check_descriptors(commands, name):
    """Twenty files: what is not enough for MPI or for the command is an error of Weft."""
    output = commands.place("descriptors", name)
    code, text = commands.run(name, output, wrapper=("prlimit", "--nofile=20:20"))
    assert code in (0, 2, 6), (name, code, text)
    if code == 0:
        commands.complete(name, output)
    else:
        assert "error" in text, (name, text)
        commands.nothing_incomplete(name, output)
        commands.repeated(name, output)


def check_address_space(commands, name):
    """Below the address space of the program: an error before anything is created. Above it the command succeeds."""
    output = commands.place("address_space", name)
    code, text = commands.run(name, output, wrapper=("prlimit", "--as=100000000"))
    assert code == 2 and "the address space of this process is limited to 95 MiB" in text, (name, code, text)
    assert not list(output.parent.iterdir()), list(output.parent.iterdir())
    needed = int(re.search(r"(\d+) MiB are needed", text)[1]) + (1024 if name == "benchmark" else 0)  # which measures copies
    code, text = commands.run(name, output, wrapper=("prlimit", f"--as={needed << 20}"))
    if code == 2:  # it computes, and needs more
        needed = int(re.search(r"(\d+) MiB are needed", text)[1])
        code, text = commands.run(name, output, wrapper=("prlimit", f"--as={needed << 20}"))
    assert code == 0, (name, code, text)
    commands.complete(name, output)


def check_memory(commands, name, point):
    """No more memory from a point of the command on: it completes with what it has, or says what is missing."""
    output = commands.place(f"memory_{point}", name)
    process = commands.start(name, output, fault=f"{point}:0:*:stop")
    stopped(process)
    with open(f"/proc/{process.pid}/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.prlimit(process.pid, resource.RLIMIT_AS, (mapped, mapped))
    process.send_signal(signal.SIGCONT)
    text, _ = process.communicate(timeout=120)
    assert process.returncode in (0, 2, 6), (name, point, process.returncode, text)
    if process.returncode == 0:
        commands.complete(name, output)
    else:
        assert "error: " in text, (name, text)
        commands.nothing_incomplete(name, output)
        commands.repeated(name, output)


def check_signal(commands, name, phase, number):
    """TERM or INT in a phase: the process ends at once, and nothing incomplete is under the name of the output."""
    output = commands.place(f"signal_{phase}_{number}", name)
    if phase == "start":
        process = commands.start(name, output)
        process.send_signal(number)
    else:
        process = commands.start(name, output, fault=f"{PHASES[phase]}:0:*:{'term' if number == signal.SIGTERM else 'int'}")
    text, _ = process.communicate(timeout=120)
    assert process.returncode == -number, (name, phase, process.returncode, text)
    commands.nothing_incomplete(name, output)
    commands.repeated(name, output)


def check_file_size(commands, name):
    """RLIMIT_FSIZE: as a full disk."""
    output = commands.place("file_size", name)
    code, text = commands.run(name, output, wrapper=("prlimit", "--fsize=100:"))
    assert code == 6, (name, code, text)
    assert "File too large" in text, (name, text)
    commands.nothing_incomplete(name, output)
    commands.repeated(name, output)


def check_full_disk(commands, name):
    """A disk with space for a page or two, or for the temporary directory alone: 6, and nothing is left on it. With more space the same
    command succeeds."""
    output = commands.place("full", name)
    place, space = output.parent, "nr_inodes=3" if name in REPLACING else "size=8k"
    script = (f'mount -t tmpfs -o {space} tmpfs "{place}" && "$@"; echo "code $?"; ls -A "{place}" | sed "s/^/left /"; '
              f'mount -o remount,size=64m,nr_inodes=1000 "{place}" && "$@"; echo "code $?"; cp -a "{place}" "{place}.rescued"')
    _, text = commands.run(name, output, wrapper=("unshare", "--mount", "sh", "-c", script, "sh"))
    assert re.findall(r"^code (\d+)", text, re.M) == ["6", "0"], (name, text)
    assert not re.search(r"^left (?!output$)", text, re.M) and re.search("No space left on device|the disk has .* free", text), (name, text)
    commands.complete(name, place.with_name(place.name + ".rescued") / "output", output)


def check_read_only(commands, name):
    """A read-only disk: 6."""
    output = commands.place("read_only", name)
    code, text = commands.run(name, output, wrapper=disks.inside("-t tmpfs -o ro,size=64k", output.parent))
    assert code == 6 and str(output) in text, (name, code, text)
    commands.repeated(name, output)


def check_start(commands, moment):
    """SIGXCPU while a training starts: it ends at once, or with a checkpoint after its first steps if it handles the signal already."""
    process = commands.job.start(f"start_{moment}", "--set", "run.steps=100000")
    time.sleep(moment)
    process.send_signal(signal.SIGXCPU)
    text, _ = process.communicate(timeout=55)
    assert process.returncode in (-signal.SIGXCPU, 128 + signal.SIGXCPU), (moment, process.returncode, text)


def check(weft):
    commands = Commands(weft)
    moments = random.Random(1)
    mounts = disks.mounts_are_possible(weft.folder)
    cells = [check_second, check_pipe, check_descriptors, check_address_space, check_file_size, *([check_full_disk, check_read_only] if mounts else [])]
    # The commands mostly wait: for the disk, for MPI, for the other process.
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = [pool.submit(cell, commands, name) for name in COMMANDS for cell in cells]
        results += [pool.submit(check_kill, commands, name, moments.choice((0, 0.001, 0.005, 0.02))) for name in COMMANDS]
        # Each command and each phase has both signals.
        results += [pool.submit(check_signal, commands, name, phase, (signal.SIGTERM, signal.SIGINT)[(i + j) % 2])
                    for i, name in enumerate(COMMANDS) for j, phase in enumerate(PHASES)]
        results += [pool.submit(check_memory, commands, name, "output-open") for name in COMMANDS]
        results += [pool.submit(check_start, commands, moment) for moment in (0, 0.1, 0.3, 0.6, 1, 2)]
    for result in results:
        result.result()
    if not mounts:
        program.skip("full and read-only disks (this process may not mount); the other faults were tested")


program.main(check)
