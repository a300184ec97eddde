#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Records the results of short runs bit for bit, and compares another build with the record.

For changes that must not change results. The runs are short trainings on planted activations and on a shipped text:
  transcoder   every pair of values of decoder, activation, scope, state, precision, grid, clipping and optional loss terms
               occurs in at least one run
  language     GPT-2, Llama, Qwen3, OLMo 2 and Gemma 2 layouts, precisions, state policies, recomputation, adapters, and grids
  private      transcoders and language models in every mode
  polychromic  fine-tuning on drawn answers
Recorded are the sha256 of every tensor of the checkpoints, the exit code of inputs that are an error, and tokens of greedy generation.

  compare_builds.py record WEFT FILE.json     runs every case with WEFT, and writes FILE.json
  compare_builds.py compare WEFT FILE.json    runs the cases of FILE.json with WEFT, and lists the differences
      --only TEXT      only cases whose name contains TEXT
      --except TEXT    leaves out tensors whose name contains TEXT
      --backend cuda   on a GPU (record and compare): wider layers, precision "bf16"
      --keep DIR       keep runs and data in DIR

A record holds for one machine: other processors and libraries add up in other orders. RENAMED maps keys of older records.
Exit codes: 0 no differences; 1 differences, or a run failed.
"""
import argparse
import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import h5py

ROOT = Path(__file__).resolve().parent.parent
TEXT = ROOT / "inputs" / "text" / "genesis_to_ruth.txt"
# Key of a record -> key of this version.
RENAMED = {}
ENVIRONMENT = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1",
               "OMP_WAIT_POLICY": "passive"}

# Values of each dimension of the transcoder cases; the first is the default. A value is a list of settings.
TRANSCODER = {
    "decoder": [[], ["decoder=per_layer"], ["decoder=tied"], ["decoder=tied_target"],
                ["decoder=tied_target", "decoder_affine=true"]],
    "activation": [["activation=batch_topk"], ["activation=topk"], ["activation=relu"], ["activation=jumprelu", "threshold=0.05"],
                   ["activation=jumprelu", "threshold=0.05", "pseudo_derivative=goreg"],
                   ["activation=batch_topk", "ranking=decoder_norm"], ["activation=topk", "ranking=z_score"],
                   ["activation=batch_topk", "k_initial=12"]],
    "scope": [["scope=layer"], ["scope=all_layers"]],
    "state": [["optimizer.state=fp32"], ["optimizer.state=bf16"], ["optimizer.state=8bit"]],
    "precision": [["device.precision=fp32"], ["device.precision=bf16"]],
    "grid": [["parallel.data=1", "ranks=1"], ["parallel.data=1", "ranks=2"], ["parallel.data=2", "ranks=2"], ["parallel.data=2", "ranks=4"]],
    "clip": [["optimizer.clip_norm=0.0"], ["optimizer.clip_norm=0.05", "optimizer.clip_mode=exact"],
             ["optimizer.clip_norm=0.05", "optimizer.clip_mode=previous"]],
    "skip": [[], ["skip=linear"]],
    "auxiliary": [[], ["auxk=0.03", "auxk_features=8", "dead_window=300"]],
    "penalty": [[], ["sparsity=0.001"], ["sparsity=0.001", "sparsity_form=linear", "sparsity_begin=0.2"]],
    "error": [[], ["error=raw"], ["error=unexplained", "error_reduction=all"]],
    "bias": [[], ["decoder_bias=pair"], ["encoder_bias_initial=data", "initially_active=8"]],
    "resample": [[], ["resample_every=15", "dead_window=300"]],
    "data": [[], ["data.micro_tokens=64"], ["data.normalise=scalar"], ["data.targets=inputs"]],
}

LANGUAGE = {
    "gpt2": [],
    "gpt2, bf16 state": ["optimizer.state=bf16", "device.precision=bf16"],
    "gpt2, 8-bit state, dropout": ["optimizer.state=8bit", "device.precision=bf16", "language_model.dropout=0.1"],
    "gpt2, fp16": ["device.precision=fp16"],
    "gpt2, two micro-batches": ["data.micro_tokens=128"],
    "gpt2, relu2, window, post": ["language_model.mlp=relu2", "language_model.window=8", "language_model.norm_position=post"],
    "gpt2, fp8": ["device.precision=bf16", "device.fp8=true", "language_model.layers=4"],
    "llama, fp8, recompute norms": ["language_model.preset=llama", "memory.recompute=norm", "device.precision=bf16", "device.fp8=true",
                                    "language_model.layers=4"],
    "llama": ["language_model.preset=llama"],
    "llama, recompute blocks": ["language_model.preset=llama", "memory.recompute=block"],
    "llama, recompute norms": ["language_model.preset=llama", "memory.recompute=norm", "device.precision=bf16"],
    "llama, head in chunks": ["language_model.preset=llama", "memory.head_chunk=64"],
    "qwen3": ["language_model.preset=llama", "language_model.kv_heads=2", "language_model.qk_norm=head", "language_model.tied=true"],
    "olmo2": ["language_model.preset=llama", "language_model.norm_position=post", "language_model.qk_norm=width"],
    "gemma2": ["language_model.preset=llama", "language_model.kv_heads=2", "language_model.head_size=16", "language_model.mlp=geglu",
               "language_model.norm_position=both", "language_model.tied=true", "language_model.attention_softcap=5.0",
               "language_model.logit_softcap=8.0", "language_model.window=8", "language_model.full_every=2"],
    "gpt_neox": ["language_model.position=rope", "language_model.rope_columns=4", "language_model.residual=parallel",
                 "language_model.mlp=gelu_exact", "language_model.tied=false"],
    "qwen2, yarn": ["language_model.preset=llama", "language_model.biases=[\"query\", \"key\", \"value\"]",
                    "language_model.rope_method=yarn", "language_model.rope_factor=2.0", "language_model.rope_length=16"],
    "llama, scaled queries": ["language_model.preset=llama", "language_model.qk_norm=scaled", "language_model.bias=true"],
    "gpt2, curriculum": ["data.order=curriculum", "data.curriculum_steps=20"],
    "gpt2, sequential": ["data.order=sequential", "optimizer.clip_norm=0.5"],
}
GRIDS = {"data 2": (["ranks=2"]), "tensor 2": (["ranks=2", "parallel.tensor=2"]), "data 2, tensor 2": (["ranks=4", "parallel.tensor=2"])}
PRIVATE = ["privacy.enabled=true", "privacy.noise_multiplier=0.8", "privacy.delta=1e-5", "privacy.noise_key=test", "optimizer.clip_norm=0.0"]
MODES = {"materialise": ["privacy.mode=materialise"], "book_keeping": ["privacy.mode=book_keeping"], "two_pass": ["privacy.mode=two_pass"],
         "naive": ["privacy.algorithm=naive"]}


def setting(text):
    key, value = text.split("=", 1)
    key = RENAMED.get(key, key)
    try:
        json.loads(value)
    except ValueError:
        value = json.dumps(value)
    return f"{key}={value}"


class Program:
    def __init__(self, path, scratch):
        self.path, self.scratch = str(Path(path).resolve()), scratch

    def run(self, ranks, *arguments):
        launcher = ["mpirun", "-n", str(ranks), "--oversubscribe", "--bind-to", "none"] if ranks > 1 else []
        return subprocess.run([*launcher, self.path, *map(str, arguments)], env=ENVIRONMENT, capture_output=True, text=True, cwd=self.scratch)

    def case(self, command, settings, output, *more):
        """Runs a command with `settings`; "ranks=N" among them is the number of processes."""
        ranks = next((int(s[6:]) for s in settings if s.startswith("ranks=")), 1)
        options = [part for s in settings if not s.startswith("ranks=") for part in ("--set", setting(s))]
        return self.run(ranks, *command, *options, "--output", output, *more)


def digests(run):
    """{"step/shard/dataset": sha256} of every tensor of the checkpoints of a run."""
    found = {}
    for checkpoint in sorted((run / "checkpoints").glob("step_*")):
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        for shard in manifest["shards"]:
            with h5py.File(checkpoint / shard["file"], "r") as file:
                def visit(name, item, prefix=f"{checkpoint.name}/{shard['file']}"):
                    if isinstance(item, h5py.Dataset):
                        value = item[()]
                        text = f"{item.dtype}{item.shape}".encode() + (value.tobytes() if hasattr(value, "tobytes") else bytes(value))
                        found[f"{prefix}/{name}"] = hashlib.sha256(text).hexdigest()
                file.visititems(visit)
    return found


def transcoder_cases(accepted):
    """Settings of transcoder runs such that every pair of values that `accepted` allows together occurs. Repeatable."""
    draw = random.Random(5)
    names = list(TRANSCODER)
    missing = {(a, i, b, j) for a, b in itertools.combinations(names, 2) for i in range(len(TRANSCODER[a])) for j in range(len(TRANSCODER[b]))}
    pairs = lambda chosen: {(a, chosen[a], b, chosen[b]) for a, b in itertools.combinations(names, 2)}
    cases = []
    for pair in sorted(missing):
        if pair not in missing:
            continue
        a, i, b, j = pair
        # With many other values first; in the end with the defaults alone, which tells whether the pair is possible.
        for others in (0.5, 0.35, 0.2, 0.2, 0.1, 0):
            drawn = [{n: draw.randrange(len(TRANSCODER[n])) if draw.random() < others else 0 for n in names} | {a: i, b: j}
                     for _ in range(10)]
            chosen = max(drawn, key=lambda each: len(pairs(each) & missing))
            settings = [s if "." in s or s.startswith("ranks=") else f"transcoder.{s}" for n in names for s in TRANSCODER[n][chosen[n]]]
            if accepted(settings):
                cases.append(settings)
                missing -= pairs(chosen)
                break
    return cases


class Cases:
    """All cases of a backend: name -> (kind, settings)."""

    def __init__(self, program, scratch, backend):
        cuda = backend == "cuda"
        self.program, self.scratch, self.backend = program, scratch, backend
        # Kernels of a GPU compute in 16 bits: cases that say nothing of the precision have bf16, those of fp32 are left out.
        self.common = [f"device.backend={backend}", "device.algorithms="] + (["device.precision=bf16"] if cuda else [])
        self.transcoder = scratch / "transcoder.toml"
        self.transcoder.write_text(f"""
[run]
steps = 50
seed = 7
[data]
train = "{scratch}/data/train"
batch_tokens = 256
block_rows = 16
window_rows = 512
[transcoder]
features = {512 if cuda else 100}
k = 4
capacity = {64 if cuda else 0}
[optimizer]
learning_rate = 1e-3
[checkpoint]
every = 25
keep = 10
[synthetic]
output = "{scratch}/data"
layers = 3
d_model = {64 if cuda else 24}
features = 160
k = 6
tokens = 6000
validation_tokens = 1000
rows_per_file = 2000
""")
        self.language = scratch / "language.toml"
        self.language.write_text(f"""
[run]
steps = 50
seed = 7
[data]
train = "{TEXT}"
validation_fraction = 0.1
tokens = "character"
batch_tokens = 512
sequence = 32
[language_model]
layers = 2
heads = 4
d_model = {128 if cuda else 32}
[optimizer]
learning_rate = 3e-3
warmup_steps = 5
[checkpoint]
every = 25
keep = 10
[polychromic]
every = 5
prompts = 2
samples = 3
set_size = 2
max_new_tokens = 8
prompt_tokens = 8
evaluation_prompts = 2
reward = "likelihood"
""")

    def accepted(self, settings):
        settings = self.common + [s for s in settings if not s.startswith("ranks=")]
        done = self.program.case(["train", self.transcoder, "--dry-run"], settings, self.scratch / "none")
        return done.returncode == 0

    def listed(self, only):
        """Cases whose name contains `only`. Those of transcoders are sought with dry runs: about a minute."""
        cuda = self.backend == "cuda"
        ranks_of = lambda settings: next((int(s[6:]) for s in settings if s.startswith("ranks=")), 1)
        if self.program.run(1, "synth", self.transcoder).returncode != 0:
            sys.exit("weft synth failed")
        cases = {}
        for number, settings in enumerate(transcoder_cases(self.accepted) if only in "transcoder" or "transcoder" in only else []):
            if not cuda or ranks_of(settings) == 1:
                cases[f"transcoder {number}"] = ("transcoder", settings)
        for name, settings in LANGUAGE.items():
            cases[f"language {name}"] = ("language", settings)
        if not cuda:
            for (name, grid), base in itertools.product(GRIDS.items(), ("gpt2", "llama", "gemma2")):
                cases[f"language {base}, {name}"] = ("language", LANGUAGE[base] + grid)
        for (mode, settings), (base, grid) in itertools.product(MODES.items(), (("gpt2", []), ("qwen3", []), ("llama", ["ranks=2"]))):
            if not (cuda and grid):
                cases[f"private language {base} {mode}{' 2 ranks' if grid else ''}"] = ("language", LANGUAGE[base] + PRIVATE + settings + grid)
        cases["private transcoder"] = ("transcoder", ["transcoder.activation=relu", "privacy.unit=token",
                                                      f"data.validation={self.scratch / 'data' / 'validation'}"] + PRIVATE)
        cases["lora"] = ("after gpt2", ["lora.rank=4", "lora.dropout=0.1"])
        cases["polychromic"] = ("polychromic", [])
        cases["polychromic, distinct"] = ("polychromic", ["polychromic.diversity=distinct", "polychromic.kl=0.1", "polychromic.epochs=2"])
        computed = lambda settings: not cuda or "device.precision=fp32" not in settings
        return {name: case for name, case in cases.items() if only in name and computed(case[1])}

    def result(self, name, kind, settings):
        """What a case gives: {"exit": code, "tensors": {...}, "text": greedy continuation}."""
        run = self.scratch / "runs" / name.replace(" ", "_").replace(",", "")
        settings = self.common + settings
        if kind == "transcoder":
            done = self.program.case(["train", self.transcoder], settings, run)
        else:
            command = ["lm", "polychromic" if kind == "polychromic" else "train", self.language]
            if kind != "language":
                settings = [f"language_model.initial={self.scratch / 'runs' / 'language_gpt2'}"] + settings
            done = self.program.case(command, settings, run)
        answer = {"exit": done.returncode, "settings": settings}
        if done.returncode != 0:
            answer["message"] = (done.stdout + done.stderr)[-300:]
            return answer
        answer["tensors"] = digests(run)
        if kind == "language" and "private" not in name:
            text = self.program.run(1, "lm", "generate", run, "--prompt", "And the", "--max-new-tokens", "24", "--temperature", "0", "--jsonl")
            answer["text"] = text.stdout
        return answer


def differences(old, new, left_out):
    if old["exit"] != new["exit"]:
        return f"ended with {new['exit']} instead of {old['exit']}: {new.get('message', '')}"
    if "tensors" not in old:
        return ""
    a, b = old["tensors"], new["tensors"]
    if a.keys() != b.keys():
        return f"tensors only in one: {sorted(a.keys() ^ b.keys())[:4]}"
    unequal = [name for name in a if a[name] != b[name] and not (left_out and left_out in name)]
    if unequal:
        return f"{len(unequal)} of {len(a)} tensors differ, first {unequal[0]}"
    return "" if old.get("text") == new.get("text") else "greedy generation differs"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("weft")
    parser.add_argument("file")
    parser.add_argument("--only", default="")
    parser.add_argument("--except", default="", dest="left_out")
    parser.add_argument("--backend", default="portable", choices=["portable", "cuda"])
    parser.add_argument("--keep")
    options = parser.parse_args()
    scratch = Path(options.keep or tempfile.mkdtemp(prefix="weft_compare_")).resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    cases = Cases(Program(options.weft, scratch), scratch, options.backend)
    if options.action == "record":
        recorded = {}
        for name, (kind, settings) in cases.listed(options.only).items():
            recorded[name] = {"kind": kind, "case": settings, **cases.result(name, kind, settings)}
            end = recorded[name]
            print(f"{name}: {len(end['tensors']) if 'tensors' in end else end['message']} tensors" if end["exit"] == 0 else
                  f"{name}: exit {end['exit']}: {end['message'].strip()}", flush=True)
            Path(options.file).write_text(json.dumps(recorded, indent=1))
        return 0
    recorded = json.loads(Path(options.file).read_text())
    if cases.program.run(1, "synth", cases.transcoder).returncode != 0:
        sys.exit("weft synth failed")
    failed = compared = 0
    for name, old in recorded.items():
        if options.only not in name:
            continue
        problem = differences(old, cases.result(name, old["kind"], old["case"]), options.left_out)
        compared += 1
        failed += bool(problem)
        print(f"{name}: {problem or 'equal'}", flush=True)
    print(f"{compared - failed} of {compared} cases equal bit for bit")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
