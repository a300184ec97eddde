#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Training steps of GPT-2-shaped models on the CPU by Weft and by PyTorch, in tokens/s: docs/language_performance.md, "CPU".

cpu_language.py WEFT [--threads 2] [--models small gpt2] [--precisions fp32 bf16] [--rounds 3] [--steps 4] [--output DIR]

Needs an interpreter with torch, such as that of scripts/peers.sh (.deps/peers/transformers4/bin/python), and for torch.compile a C++ compiler.
The programs alternate, --rounds times, with the same number of threads: weft benchmark, PyTorch, and PyTorch with torch.compile, each with one
step of warm-up and --steps measured ones: forward and backward pass, clipping of the global norm and AdamW (fused in PyTorch), on random ids,
with fp32 state. PyTorch takes scaled_dot_product_attention, and for bf16 torch.autocast. Prints medians over the rounds, and their range; the
benchmark.json of every round, with the phases of Weft, are in DIR (runs/cpu_language).
"""
import argparse
import datetime
import json
import os
import statistics
import subprocess
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

INPUT = Path(__file__).resolve().parent.parent / "inputs/lm_benchmark_cpu.toml"
VOCABULARY = 50304
# Layers, heads, width, length of sequences, sequences per step.
MODELS = {"small": (6, 6, 384, 256, 8), "gpt2": (12, 12, 768, 1024, 1)}


class Block(nn.Module):
    def __init__(self, heads, width):
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, dim=-1))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.second(x)), approximate="tanh"))


class Model(nn.Module):
    """GPT-2 with a tied head: ids [sequences, length + 1] -> the loss."""

    def __init__(self, layers, heads, width, length):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks, self.norm = nn.Sequential(*(Block(heads, width) for _ in range(layers))), nn.LayerNorm(width)
        for values in self.parameters():
            if values.ndim == 2:
                nn.init.normal_(values, std=0.02)

    def forward(self, ids):
        x = self.norm(self.blocks(self.tokens(ids[:, :-1]) + self.positions.weight))
        return functional.cross_entropy(functional.linear(x, self.tokens.weight).flatten(0, 1), ids[:, 1:].flatten())


def torch_seconds(options, shape, precision, compiled):
    layers, heads, width, length, sequences = shape
    model = Model(layers, heads, width, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    torch.compiler.reset()      # otherwise models after the eighth would not be compiled
    loss_of = torch.compile(model) if compiled else model
    ids, times = torch.randint(VOCABULARY, (sequences, length + 1)), []
    for _ in range(1 + options.steps):
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_of(ids)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def weft_seconds(options, shape, precision, folder):
    layers, heads, width, length, sequences = shape
    settings = {"benchmark.cases": '["input"]', "benchmark.vocabulary": VOCABULARY, "benchmark.warmup": 1, "benchmark.steps": options.steps,
                "benchmark.batches": 1, "data.batch_tokens": length * sequences, "data.sequence": length, "device.precision": precision,
                "language_model.layers": layers, "language_model.heads": heads, "language_model.d_model": width}
    subprocess.run([options.weft, "benchmark", INPUT, "--output", folder, *(f"--set={key}={value}" for key, value in settings.items())],
                   check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": str(options.threads)})
    return json.loads((folder / "benchmark.json").read_text())["cases"][0]["ms_per_step"] / 1000


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weft")
    for option, default in (("threads", 2), ("rounds", 3), ("steps", 4)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--output", type=Path, default=Path("runs/cpu_language"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cpu = Path("/proc/cpuinfo").read_text().split("model name\t: ")[1].split("\n")[0]
    kernels = subprocess.run([options.weft, "--version"], text=True, capture_output=True, check=True).stdout.split("kernels: ")[1].strip()
    print(f"{datetime.date.today()}, {cpu}, {options.threads} threads; PyTorch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()}); "
          f"Weft: {kernels}, OPENBLAS_CORETYPE {os.environ.get('OPENBLAS_CORETYPE', 'not set')}\n\n"
          "| model | precision | Weft, tokens/s | PyTorch, tokens/s | torch.compile, tokens/s | Weft / fastest PyTorch |\n|---|---|---:|---:|---:|---:|")
    for name in options.models:
        for precision in options.precisions:
            shape, rounds = MODELS[name], []
            for i in range(options.rounds):
                seconds = [weft_seconds(options, shape, precision, options.output / f"{name}_{precision}_{i}"),
                           torch_seconds(options, shape, precision, False), torch_seconds(options, shape, precision, True)]
                rounds.append([shape[3] * shape[4] / each for each in seconds])
            weft, *others = medians = [statistics.median(rates) for rates in zip(*rounds)]
            cells = [f"{median:,.0f} ({min(rates):,.0f}-{max(rates):,.0f})" for median, rates in zip(medians, zip(*rounds))]
            print(f"| {name} | {precision} | {' | '.join(cells)} | {weft / max(others):.2f} |", flush=True)


if __name__ == "__main__":
    main()
