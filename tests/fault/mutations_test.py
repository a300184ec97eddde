# SPDX-License-Identifier: Apache-2.0
"""Commands on damaged files: time and memory stay within bounds that do not depend on the numbers in a file, the command ends with
a documented exit code, and a message about contents names the file.

mutations_test.py WEFT [--mutations N] [--seed S] [--only M [--save FOLDER]]
Each mutation has a number, which determines it together with the seed. A command may use 20 s of processor time (where an input asks
for long work, that may be a signal), and 2 GB of address space, of which the undamaged one needs at most 0.9. --only M repeats one
mutation, --save keeps its files.
"""
import argparse
import concurrent.futures
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import mutations
import program
import weights_files

import numpy as np

SOURCES = Path(__file__).resolve().parents[1]
PROCESSOR_SECONDS, ADDRESS_SPACE = 20, 2 << 30
SLOW = 5  # seconds: no undamaged command takes one
WORKERS = 2
DOCUMENTED = (0, 2, 3, 4, 6, 75)  # 1 and 5 are defects here

TRANSCODER = program.SYNTHETIC + """
[run]
steps = 4
[data]
train = "data/train"
validation = "data/validation"
batch_tokens = 60
block_rows = 16
window_rows = 256
[transcoder]
features = 40
k = 3
[checkpoint]
every = 2
[log]
every = 1
"""
LANGUAGE = """
[run]
steps = 4
[data]
train = "{train}"
tokens = "{tokens}"
batch_tokens = 64
sequence = 32
[language_model]
preset = "{preset}"
layers = 2
d_model = 32
heads = 2
d_mlp = 64
{more}
[optimizer]
warmup_steps = 1
"""
NEOX = 'position = "rope"\nrope_columns = 4\nrope_method = "yarn"\nrope_factor = 2\nrope_length = 16\nresidual = "parallel"\n' \
       'mlp = "gelu_exact"\ntied = false\n'
POLYCHROMIC = "[polychromic]\nprompts = 2\nsamples = 4\nset_size = 2\nprompt_tokens = 4\nmax_new_tokens = 4\n"
# Command -> the files that it reads, by patterns. {out} does not exist.
CASES = [
    ("train input.toml --output {out}", "input.toml data/train/* data/validation/*"),
    ("train input.toml --output {out} --dry-run", "input.toml data/train/*"),
    ("train input.toml --output run --set run.steps=6", "run/*.json run/*.jsonl run/checkpoints/*/*"),
    ("train gzip.toml --output {out}", "packed/*"),
    ("synth input.toml --output {out}", "input.toml"),
    ("inspect data/train", "data/train/* data/*"),
    ("inspect packed", "packed/*"),
    ("inspect run", "run/checkpoints/*/* run/*.json"),
    ("evaluate run", "run/checkpoints/*/* data/validation/* data/*.h5"),
    ("encode run --output {out}", "run/checkpoints/*/* data/validation/*"),
    ("features run --output {out}", "run/checkpoints/*/* data/validation/*"),
    ("convert run --output {out}", "run/checkpoints/*/* data/train/*"),
    ("export converted {out} --to circuit-tracer", "converted/*"),
    ("import exported --output {out}", "exported/*"),
    ("inspect exported", "exported/*"),
    ("import coding --output {out}", "coding/*"),
    ("import saelens --output {out}", "saelens/*/*"),
    ("import sparsify --output {out}", "sparsify/*/*"),
    ("import tracer_set --output {out}", "tracer_set/*"),
    ("train forge.toml --output {out}", "forge/ctx_8/*"),
    ("import cache/ctx_8 --output {out}", "cache/ctx_8/*"),
    ("lm tokenize text.txt --tokens bpe/tokenizer.json --output {out}", "text.txt bpe/*.json"),
    ("lm tokenize text.txt --tokens hf_tokenizer/tokenizer.json --output {out}", "hf_tokenizer/*"),
    ("lm tokenize rows.jsonl --tokens bytes --output {out}", "rows.jsonl"),
    ("lm train language.toml --output {out}", "language.toml bpe/*"),
    ("lm train language.toml --output {out} --dry-run", "language.toml bpe/*"),
    ("lm train words.toml --output words --set run.steps=6", "words/*.json words/*.jsonl words/checkpoints/*/*"),
    ("inspect bpe", "bpe/*"),
    ("inspect llmc", "llmc/*"),
    ("lm generate words --prompt The --max-new-tokens 4", "words/checkpoints/*/*"),
    ("lm generate gpt2 --prompt The --max-new-tokens 4", "gpt2/*"),
    ("lm generate llama --prompt The --max-new-tokens 4", "llama/*"),
    ("lm generate words --prompts prompts.jsonl --max-new-tokens 4", "prompts.jsonl"),
    ("inspect gpt2", "gpt2/*"),
    ("inspect llama", "llama/*"),
    ("inspect neox", "neox/*"),
    ("lm evaluate neox --text text.txt --set data.sequence=32", "neox/*"),
    ("lm evaluate llama --text text.txt --set data.sequence=32", "llama/*"),
    ("lm evaluate symbols --text bpe", "bpe/* symbols/checkpoints/*/*"),
    ("lm harvest gpt2 --text text.txt --tokens 256 --output {out}", "gpt2/*"),
    ("lm export words --output {out}", "words/checkpoints/*/*"),
    ("lm merge adapted --output {out}", "adapted/checkpoints/*/*"),
    ("lm train peft.toml --output {out}", "adapters/* gpt2/*"),
    ("lm train peft.toml --output {out} --dry-run", "adapters/*"),
    ("lm diversity answers.jsonl", "answers.jsonl"),
    ("lm polychromic polychromic.toml --output {out}", "polychromic.toml words/checkpoints/*/*"),
    ("privacy --input private.toml", "private.toml"),
    ("lm train private.toml --output {out} --dry-run", "private.toml"),
    ("lm train private.toml --output private", "private/*.json private/*.jsonl private/checkpoints/*/*"),
]


def prepare(weft):
    """The undamaged files, with relative names: a copy of the folder is another instance."""
    folder = weft.folder
    write = lambda name, text: (folder / name).write_text(text)
    write("input.toml", TRANSCODER.format(folder="."))
    weft.run("synth", "input.toml")
    weft.run("train", "input.toml", "--output", "run")
    weft.run("synth", "input.toml", "--output", "gzip", *program.sets('synthetic.compression="gzip"'))
    (folder / "gzip/train").rename(folder / "packed")
    write("gzip.toml", TRANSCODER.format(folder=".").replace("data/train", "packed"))
    weft.run("convert", "run", "--output", "converted")
    weft.run("export", "converted", "exported", "--to", "circuit-tracer")
    weft.run("export", "converted", "coding", "--to", "crosslayer-coding")
    for name, fixture in (("saelens", "saelens_topk"), ("sparsify", "sparsify_sae"), ("tracer_set", "circuit_tracer_set")):
        shutil.copytree(SOURCES / "interchange/fixtures" / fixture, folder / name)
    generator = np.random.default_rng(5)
    (folder / "forge/ctx_8").mkdir(parents=True)
    weights_files.write_safetensors(folder / "forge/ctx_8/activations_split_0.safetensors", {
        "act_in": generator.normal(size=(160, 2, 16)), "act_out": generator.normal(size=(160, 2, 16)), "tokens": np.arange(160) % 50})
    write("forge.toml", TRANSCODER.format(folder=".").replace("data/train", "forge/ctx_8"))
    (folder / "cache/ctx_8").mkdir(parents=True)
    shutil.copy(SOURCES / "fuzz/corpus/compressed_activations/zstd", folder / "cache/ctx_8/activations_ctx_8_split_0.bin")
    write("text.txt", program.TEXT * 20)
    write("prompts.jsonl", '{"prompt": "The cat"}\n{"prompt": "The dog"}\n')
    write("rows.jsonl", '{"prompt": "The cat", "completion": " sat"}\n{"segments": [{"text": "The", "loss": false}, {"text": " dog", "loss": true}]}\n')
    write("answers.jsonl", '{"prompt": "a", "text": "The cat"}\n{"prompt": "a", "text": "The dog"}\n{"prompt": "b", "answers": ["x y", "z"]}\n')
    weft.run("lm", "tokenize", "text.txt", "--train-bpe", 300, "--output", "bpe")
    (folder / "hf_tokenizer").mkdir()
    shutil.copy(SOURCES / "language_model/tokenizer/fixtures/llama3.json", folder / "hf_tokenizer/tokenizer.json")
    for name, values in (("words", dict(train="text.txt", tokens="bytes", preset="gpt2", more="")),
                         ("language", dict(train="bpe", tokens="bpe/tokenizer.json", preset="gpt2", more="")),
                         ("llama_run", dict(train="text.txt", tokens="bytes", preset="llama", more="")),
                         ("neox_run", dict(train="text.txt", tokens="bytes", preset="gpt2", more=NEOX)),
                         ("peft", dict(train="text.txt", tokens="bytes", preset="gpt2",
                                       more='initial = "gpt2"\n[lora]\nrank = 2\ninitial = "adapters"')),
                         ("adapted", dict(train="text.txt", tokens="bytes", preset="gpt2", more='initial = "gpt2"\n[lora]\nrank = 2'))):
        write(f"{name}.toml", LANGUAGE.format(**values))
    write("polychromic.toml", LANGUAGE.format(train="text.txt", tokens="bytes", preset="gpt2", more='initial = "words"') + POLYCHROMIC)
    write("private.toml", LANGUAGE.format(train="text.txt", tokens="bytes", preset="gpt2", more="")
          + "[privacy]\nenabled = true\nepsilon = 8\ndelta = 1e-4\nnoise_key = \"test\"\n")
    (folder / "llmc").mkdir()
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 4000
    (folder / "llmc/train.bin").write_bytes(header.tobytes() + (np.arange(4000) % 200).astype("<u2").tobytes())
    weft.run("lm", "train", "words.toml", "--output", "words")
    weft.run("lm", "train", "language.toml", "--output", "symbols")
    weft.run("lm", "train", "llama_run.toml", "--output", "llama_run")
    weft.run("lm", "export", "words", "--output", "gpt2")
    weft.run("lm", "export", "llama_run", "--output", "llama")
    weft.run("lm", "train", "neox_run.toml", "--output", "neox_run")
    weft.run("lm", "export", "neox_run", "--output", "neox")
    weft.run("lm", "train", "private.toml", "--output", "private", *program.sets("run.steps=4"))
    weft.run("lm", "train", "adapted.toml", "--output", "adapted")
    weft.run("lm", "export", "adapted", "--adapters", "--output", "adapters")


class Worker:
    """A copy of the files, in which one command at a time runs."""

    def __init__(self, weft, folder):
        self.folder = folder
        shutil.copytree(weft.folder, folder, ignore=shutil.ignore_patterns("instance_*"))
        self.weft = program.Program(weft.binary, folder)

    def run(self, command):
        """(exit code, output, processor seconds)"""
        def limit():
            resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_SECONDS, PROCESSOR_SECONDS + 5))
            resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
        output = self.folder.with_name(self.folder.name + ".txt")
        with open(output, "w", encoding="utf-8") as file:
            process = subprocess.Popen([self.weft.binary, *command.format(out="out").split()], cwd=self.folder, stdout=file,
                                       stderr=subprocess.STDOUT, preexec_fn=limit, env={**os.environ, "OMP_NUM_THREADS": "1"})
            _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        text = output.read_text(encoding="utf-8", errors="replace")
        return process.returncode, text, used.ru_utime + used.ru_stime


def judge(worker, number, seed, save):
    """Runs one mutation; returns (what, name of the file, code, seconds, text)."""
    draw = random.Random(seed * 1000003 + number)
    command, patterns = CASES[number % len(CASES)]
    files = sorted({path for pattern in patterns.split() for path in worker.folder.glob(pattern) if path.is_file()})
    path = draw.choice(files)
    kept = {item: item.read_bytes() for item in worker.folder.rglob("*") if item.is_file()}
    change, name = mutations.mutate(path, draw), path.relative_to(worker.folder)
    if save:
        shutil.copytree(worker.folder, save)
    code, text, seconds = worker.run(command)
    for item in sorted(worker.folder.rglob("*"), reverse=True):
        if item.is_dir() and not item.is_symlink() and not any(item.iterdir()):
            item.rmdir()
        elif not item.is_dir() and item not in kept:
            item.unlink()
    for item, data in kept.items():
        item.parent.mkdir(parents=True, exist_ok=True)
        if not item.exists() or item.stat().st_size != len(data) or item.read_bytes() != data:
            item.write_bytes(data)
    return f"{number}: weft {command}: {name}: {change}", name, code, seconds, text


def named(name, text):
    """True if a message names the file, or the directory to which it belongs. An input, also one in a manifest, is valid with many
    numbers; what does not fit it may be another file, or a key."""
    if name.suffix == ".toml" or name.name == "manifest.json":
        return "error: " in text
    parts = [name.name, name.parent.name] if name.parent.name else [name.name]
    return any(part in text for part in parts)


def check(weft):
    parser = argparse.ArgumentParser()
    parser.add_argument("weft")
    parser.add_argument("--mutations", type=int, default=90)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    prepare(weft)
    workers = [Worker(weft, weft.folder / f"instance_{i}") for i in range(WORKERS)]
    free, lock, findings = list(workers), threading.Lock(), []
    report = open(options.report, "w", encoding="utf-8") if options.report else sys.stdout

    def one(number):
        with lock:
            worker = free.pop()
        try:
            what, name, code, seconds, text = judge(worker, number, options.seed, options.save)
        finally:
            with lock:
                free.append(worker)
        wrong = []
        long_work = name.suffix == ".toml" and (code == 0 or seconds > SLOW)
        if code not in DOCUMENTED and not long_work:
            wrong.append(f"ended with {code}")
        if seconds > SLOW and not long_work:
            wrong.append(f"took {seconds:.1f} s")
        if "out of host memory" in text:
            wrong.append("out of memory")
        if code and not long_work and not named(name, text):
            wrong.append("does not name the file")
        with lock:
            print(f"{'FINDING ' + ', '.join(wrong) if wrong else 'ok'} [{code}, {seconds:.1f} s] {what}", file=report)
            if code:
                print("    " + "\n    ".join(text.strip().splitlines()[-4:]), file=report)
            report.flush()
            if wrong:
                findings.append(what)

    numbers = [options.only] if options.only is not None else range(options.mutations)
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(one, numbers))
    assert not findings, "\n".join(findings)


program.main(check)
