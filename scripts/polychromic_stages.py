#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time of each stage of polychromic fine-tuning, for several methods to compute the answers.

polychromic_stages.py WEFT MODEL --text FILE [--steps 100] [--slow-steps 100] [--samples 3 8] [--output DIR] [--diversity PROGRAM]
                      [--set table.key=value ...]

MODEL: a run of weft lm train or a directory of Hugging Face. Each case trains it for --steps steps (answers one by one: --slow-steps), at
least 4, with answers in every step: 4 prompts of 128 tokens, 100 new tokens. Prints Markdown: milliseconds per step as a whole and of each
stage with its share of the step, memory, part of the rate of a memory copy at which generation moves weights, keys and values, and how
many times faster than answers one by one. Answers before the first step are not counted.

Two tables follow: a supervised step and the generation of the answers with flash attention and with the matrix of scores in memory
(benchmark.attention), by weft benchmark; and, with --diversity build/cuda-release/tests/gpu/gpu_diversity_benchmark, the fused kernel of
diversity and advantages against a kernel per operation.
"""
import argparse
import json
import subprocess
import sys
from pathlib import Path

STAGES = ("generate", "embed", "reward", "diversity and advantage", "policy backward")
# Naive baseline first: every answer and every embedding by itself, each kernel launched by the host.
CASES = {
    "one by one": ["polychromic.draw_together=1", "polychromic.embed_together=1", "device.graphs=false"],
    "answers together": ["polychromic.embed_together=1", "device.graphs=false"],
    "answers and embeddings together": ["device.graphs=false"],
    "the same, with graphs": [],
}
PROMPTS, PROMPT_TOKENS, NEW_TOKENS, SEQUENCE = 4, 128, 100, 1024
LAYERS, HEADS, WIDTH = 12, 12, 768


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weft")
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--slow-steps", type=int, metavar="STEPS")
    parser.add_argument("--samples", type=int, nargs="+", default=[3, 8])
    parser.add_argument("--output", type=Path, default=Path("runs/polychromic_stages"))
    parser.add_argument("--diversity", type=Path, metavar="PROGRAM")
    parser.add_argument("--set", action="append", default=[], metavar="table.key=value")
    given = parser.parse_args()
    given.slow_steps = given.slow_steps or given.steps
    if min(given.steps, given.slow_steps) < 4:
        parser.error("--steps and --slow-steps are at least 4 (the median of the second half of the steps counts)")
    return given


def run(given, command, name, steps, settings):
    """run.json and the lines of metrics of a run, which is made unless it is there."""
    output = given.output / name
    tokenizer = given.model / "tokenizer.json"
    common = [f"data.train={given.text}", f"language_model.initial={given.model}", f"run.steps={steps}", "checkpoint.every=0",
              "log.every=1", "log.evaluate_every=0", "log.sample_tokens=0", *([f"data.tokens={tokenizer}"] if tokenizer.exists() else [])]
    if not (output / "run.json").exists():
        words = [given.weft, "lm", command, given.output / "case.toml", "--quiet", "--output", output]
        for setting in [*common, *settings, *given.set]:
            words += ["--set", setting]
        if subprocess.run(list(map(str, words)), check=False).returncode != 0:
            sys.exit(f"polychromic_stages.py: {' '.join(map(str, words))} failed; see {output}/log.txt")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return json.loads((output / "run.json").read_text()), [line for line in lines if "loss" in line]


def step_ms(lines):
    """Median of the second half of the steps: graphs are recorded and memory is warm."""
    times = [b["seconds"] - a["seconds"] for a, b in zip(lines, lines[1:])][len(lines) // 2:]
    return 1e3 * sorted(times)[len(times) // 2]


def benchmark(given):
    """benchmark.json of steps and of generation, with both forms of attention."""
    output = given.output / "attention"
    if not (output / "benchmark.json").exists():
        cases = []
        for attention in ("flash", "matrix"):
            cases.append(f"a supervised step, {attention}: benchmark.attention={attention}")
            for name, rows, samples in [("1 answer", 1, 1)] + [(f"{PROMPTS} x {n} answers", PROMPTS * n, n) for n in given.samples]:
                cases.append(f"{name}, {attention}: benchmark.attention={attention}, benchmark.generate_prompt={PROMPT_TOKENS}, "
                             f"benchmark.generate_tokens={NEW_TOKENS}, benchmark.generate_rows={rows}, "
                             f"benchmark.generate_samples={samples}")
        words = [given.weft, "benchmark", given.output / "case.toml", "--quiet", "--output", output, "--set",
                 "benchmark.cases=[" + ", ".join(f'"{case}"' for case in cases) + "]", "--set", "benchmark.loss_tolerance=1e9"]
        for setting in given.set:
            words += ["--set", setting]
        if subprocess.run(list(map(str, words)), check=False, stdout=subprocess.DEVNULL).returncode != 0:
            sys.exit(f"polychromic_stages.py: {' '.join(map(str, words))} failed")
    return json.loads((output / "benchmark.json").read_text())


def main():
    given = arguments()
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / "case.toml").write_text(
        f"[run]\n[data]\nbatch_tokens = 8192\nsequence = {SEQUENCE}\n[language_model]\npreset = \"gpt2\"\nlayers = {LAYERS}\n"
        f"heads = {HEADS}\nd_model = {WIDTH}\n[optimizer]\nlearning_rate = 1e-5\nwarmup_steps = 0\n[device]\nprecision = \"bf16\"\n")
    attention = benchmark(given)
    copy = attention["machine"]["copy_gb_per_second"]
    # What generation must move: weights for each token, keys and values that it reads and writes.
    gigabytes = {case["name"]: 1e-9 * sum(phase["bytes"] for phase in case["phases"]) for case in attention["cases"]}
    record, lines = run(given, "train", "supervised", given.steps, [])
    supervised = step_ms(lines)
    print(f"Steps: {given.steps}, answers one by one {given.slow_steps}.\n")
    print("| answers per prompt | case | ms per step | " + " | ".join(f"{stage}, ms (share)" for stage in STAGES) +
          " | memory, GiB | generate: of bandwidth | times faster |")
    print("|---:|---|" + "---:|" * (len(STAGES) + 4))
    memory = record["device"].get("peak_bytes", 0) / 2**30
    print(f"| 0 | supervised only | {supervised:.1f} |" + " |" * len(STAGES) + f" {memory:.1f} | | |", flush=True)
    for samples in given.samples:
        first = None
        for name, settings in CASES.items():
            steps = given.slow_steps if name == "one by one" else given.steps
            record, lines = run(given, "polychromic", f"{''.join(c if c.isalnum() else '_' for c in name)}_{samples}", steps,
                                ["polychromic.every=1", f"polychromic.prompts={PROMPTS}", f"polychromic.samples={samples}",
                                 f"polychromic.set_size={samples // 2}" if samples > 3 else "polychromic.set_size=2",
                                 f"polychromic.prompt_tokens={PROMPT_TOKENS}", f"polychromic.max_new_tokens={NEW_TOKENS}",
                                 f"polychromic.evaluation_prompts={PROMPTS}", *settings])
            time = step_ms(lines)
            first = first or time
            stages = [record["timings"].get(stage, {}).get("mean", 0) * 1e3 / steps for stage in STAGES]
            memory = record["device"].get("peak_bytes", 0) / 2**30
            moved = (PROMPTS * samples * gigabytes["1 answer, flash"] if name == "one by one" else
                     gigabytes[f"{PROMPTS} x {samples} answers, flash"])
            print(f"| {samples} | {name} | {time:.1f} | " + " | ".join(f"{ms:.1f} ({ms / time:.0%})" for ms in stages) +
                  f" | {memory:.1f} | {1e3 * moved / stages[0] / copy:.0%} | {first / time:.1f} |", flush=True)
    print(f"\n| with flash attention or the matrix of scores (memory copy {copy:.0f} GB/s) | ms | memory, GiB |\n|---|---:|---:|")
    for case in attention["cases"]:
        print(f"| {case['name']} | {case['ms_per_step']:.2f} | {case['peak_bytes'] / 2**30:.2f} |")
    if given.diversity:
        print("\nDiversity and advantages in one kernel, against a kernel per operation:\n\n```", flush=True)
        subprocess.run([given.diversity], check=True)
        print("```")


if __name__ == "__main__":
    main()
