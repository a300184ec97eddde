#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time of each stage of polychromic fine-tuning, for several ways to compute the answers.

polychromic_stages.py WEFT MODEL --text FILE [--steps 100] [--samples 3 8] [--output DIR] [--set table.key=value ...]

MODEL: a run of weft lm train or a directory of Hugging Face. Each case trains it for --steps steps with answers in every step: 4 prompts of
128 tokens, 100 new tokens. Prints Markdown: milliseconds per step as a whole and of each stage, memory, and how many times faster than
answers one by one.
"""
import argparse
import json
import subprocess
import sys
from pathlib import Path

STAGES = ("generate", "embed", "reward", "diversity and advantage", "policy backward")
# As one would begin: every answer and every embedding by itself, each kernel launched by the host.
CASES = {
    "one by one": ["polychromic.draw_together=1", "polychromic.embed_together=1", "device.graphs=false"],
    "answers together": ["polychromic.embed_together=1", "device.graphs=false"],
    "answers and embeddings together": ["device.graphs=false"],
    "the same, with graphs": [],
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weft")
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--samples", type=int, nargs="+", default=[3, 8])
    parser.add_argument("--output", type=Path, default=Path("runs/polychromic_stages"))
    parser.add_argument("--set", action="append", default=[], metavar="table.key=value")
    return parser.parse_args()


def run(given, command, name, settings):
    """run.json and the lines of metrics of a run, which is made unless it is there."""
    output = given.output / name
    tokenizer = given.model / "tokenizer.json"
    common = [f"data.train={given.text}", f"language_model.initial={given.model}", f"run.steps={given.steps}", "checkpoint.every=0",
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


def main():
    given = arguments()
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / "case.toml").write_text(
        "[run]\n[data]\nbatch_tokens = 8192\nsequence = 1024\n[language_model]\npreset = \"gpt2\"\nlayers = 12\nheads = 12\nd_model = 768\n"
        "[optimizer]\nlearning_rate = 1e-5\nwarmup_steps = 0\n[device]\nprecision = \"bf16\"\n")
    _, lines = run(given, "train", "supervised", [])
    supervised = step_ms(lines)
    print("| answers per prompt | case | ms per step | " + " | ".join(STAGES) + " | memory, GiB | times faster |")
    print("|---:|---|" + "---:|" * (len(STAGES) + 3))
    print(f"| 0 | supervised only | {supervised:.1f} |" + " |" * (len(STAGES) + 2))
    for samples in given.samples:
        first = None
        for name, settings in CASES.items():
            record, lines = run(given, "polychromic", f"{''.join(c if c.isalnum() else '_' for c in name)}_{samples}",
                                ["polychromic.every=1", "polychromic.prompts=4", f"polychromic.samples={samples}",
                                 f"polychromic.set_size={samples // 2}" if samples > 3 else "polychromic.set_size=2",
                                 "polychromic.prompt_tokens=128", "polychromic.max_new_tokens=100", "polychromic.evaluation_prompts=0",
                                 *settings])
            time = step_ms(lines)
            first = first or time
            stages = [record["timings"].get(stage, {}).get("mean", 0) * 1e3 / given.steps for stage in STAGES]
            memory = record["device"].get("peak_bytes", 0) / 2**30
            print(f"| {samples} | {name} | {time:.1f} | " + " | ".join(f"{ms:.1f}" for ms in stages) +
                  f" | {memory:.1f} | {first / time:.1f} |", flush=True)


if __name__ == "__main__":
    main()
