#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time of each stage of polychromic fine-tuning, for several methods to compute the answers.

polychromic_stages.py WEFT MODEL --text FILE [--steps 100] [--slow-steps 100] [--samples 3 8] [--cases one answers embeddings graphs]
                      [--tokenizer FILE] [--output DIR] [--diversity PROGRAM] [--set table.key=value ...]

MODEL: a run of weft lm train, a directory of Hugging Face, or qwen3-0.6b or qwen3-8b, which stand for random weights of these sizes, written
to DIR in bf16 with the tokeniser of --tokenizer (1.2 and 16 GB). Each case trains it for --steps steps (answers one by one: --slow-steps), at
least 4, with answers in every step: 4 prompts of 128 tokens, 100 new tokens; --set data.sequence=512 --set lora.rank=16 --set lora.base=nf4
trains adapters. Prints Markdown: milliseconds per step as a whole and of each
stage with its share of the step, memory, hours of 1,000 steps with answers in every fifth, and how many times faster than answers one by
one. Limits: generation as part of the rate of a memory copy, at which it moves weights, keys and values; embeddings and backward pass as
part of the rate of a large product. Answers before the first step are not counted. The first row is computed: answers one by one, with the
attention of the supervised step and of the answers replaced by that with a matrix of scores.

Two tables follow: a supervised step and the generation of the answers with flash attention and with the matrix of scores in memory
(benchmark.attention), by weft benchmark; and, with --diversity build/cuda-release/tests/gpu/gpu_diversity_benchmark, the fused kernel of
diversity and advantages against a kernel per operation.
"""
import argparse
import array
import json
import math
import random
import subprocess
import sys
from pathlib import Path

STAGES = ("generate", "embed", "reward", "diversity and advantage", "policy backward")
# Naive baseline first: every answer and every embedding by itself, each kernel launched by the host.
CASES = {
    "one": ("one by one", ["polychromic.draw_together=1", "polychromic.embed_together=1", "device.graphs=false"]),
    "answers": ("answers together", ["polychromic.embed_together=1", "device.graphs=false"]),
    "embeddings": ("answers and embeddings together", ["device.graphs=false"]),
    "graphs": ("answers and embeddings together, graphs", []),
}
SHAPES = {
    "qwen3-0.6b": dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
                       intermediate_size=3072, vocab_size=151936, tie_word_embeddings=True),
    "qwen3-8b": dict(hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
                     intermediate_size=12288, vocab_size=151936, tie_word_embeddings=False),
}
PROMPTS, PROMPT_TOKENS, NEW_TOKENS, SEQUENCE = 4, 128, 100, 1024
EVERY = 5           # steps from one batch of answers to the next, in the hours


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weft")
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--slow-steps", type=int, metavar="STEPS")
    parser.add_argument("--samples", type=int, nargs="+", default=[3, 8])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--tokenizer", type=Path, metavar="FILE")
    parser.add_argument("--output", type=Path, default=Path("runs/polychromic_stages"))
    parser.add_argument("--diversity", type=Path, metavar="PROGRAM")
    parser.add_argument("--set", action="append", default=[], metavar="table.key=value")
    given = parser.parse_args()
    given.slow_steps = given.slow_steps or given.steps
    if min(given.steps, given.slow_steps) < 4:
        parser.error("--steps and --slow-steps are at least 4 (the median of the second half of the steps counts)")
    if given.model in SHAPES and not given.tokenizer:
        parser.error(f"{given.model}: needs --tokenizer FILE, the tokenizer.json of a model")
    return given


def write_random(directory, shape, tokenizer):
    """A directory of Hugging Face with random weights: one block of numbers again and again, which takes no time to draw."""
    width, layers, mlp, head = shape["hidden_size"], shape["num_hidden_layers"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    block = {"input_layernorm": [width], "self_attn.q_proj": [queries, width], "self_attn.k_proj": [keys, width],
             "self_attn.v_proj": [keys, width], "self_attn.q_norm": [head], "self_attn.k_norm": [head], "self_attn.o_proj": [width, queries],
             "post_attention_layernorm": [width], "mlp.gate_proj": [mlp, width], "mlp.up_proj": [mlp, width], "mlp.down_proj": [width, mlp]}
    shapes = {"model.embed_tokens": [shape["vocab_size"], width], "model.norm": [width]}
    shapes.update({f"model.layers.{layer}.{name}": size for layer in range(layers) for name, size in block.items()})
    if not shape["tie_word_embeddings"]:
        shapes["lm_head"] = [shape["vocab_size"], width]
    header, at = {}, 0
    for name, size in shapes.items():
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": size, "data_offsets": [at, at + 2 * math.prod(size)]}
        at += 2 * math.prod(size)
    directory.mkdir(parents=True, exist_ok=True)
    numbers = random.Random(1)
    # The length is prime, so that no two rows are equal; the upper halves of fp32 are bf16.
    upper = array.array("H", array.array("f", (numbers.uniform(-0.035, 0.035) for _ in range(1048573))).tobytes())[1::2].tobytes() * 32
    one = array.array("H", [0x3F80]).tobytes()
    with open(directory / "model.safetensors", "wb") as file:
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text)
        for size in shapes.values():
            left, source = 2 * math.prod(size), one * size[0] if len(size) == 1 else upper
            while left:
                left -= file.write(memoryview(source)[:left])
    (directory / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    (directory / "config.json").write_text(json.dumps(
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16", "hidden_act": "silu", "rms_norm_eps": 1e-6,
         "max_position_embeddings": 40960, "rope_theta": 1e6, "attention_bias": False, "bos_token_id": None, "eos_token_id": None, **shape}))


def sizes(model):
    """[language_model] of a directory of Hugging Face for weft benchmark, and its numbers of parameters in the blocks and of ids; of a run
    those of GPT-2 small."""
    path = model / "config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    if "hidden_size" not in config:
        return 'preset = "gpt2"\nlayers = 12\nheads = 12\nd_model = 768\n', 12 * 12 * 768**2, 50257
    width, heads, mlp = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    head, keys = config.get("head_dim") or width // heads, config.get("num_key_value_heads", heads)
    table = (f'preset = "llama"\nlayers = {config["num_hidden_layers"]}\nheads = {heads}\nkv_heads = {keys}\nd_model = {width}\nd_mlp = {mlp}\n'
             f'head_size = {head}\ntied = {json.dumps(config.get("tie_word_embeddings", False))}\n')
    if config["model_type"] == "qwen3":
        table += 'qk_norm = "head"\n'
    return table, config["num_hidden_layers"] * width * (2 * head * (heads + keys) + 3 * mlp), config["vocab_size"]


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
        words = [given.weft, "benchmark", given.output / "benchmark.toml", "--quiet", "--output", output, "--set",
                 "benchmark.cases=[" + ", ".join(f'"{case}"' for case in cases) + "]", "--set", "benchmark.loss_tolerance=1e9",
                 "--set", "benchmark.warmup=1", "--set", "benchmark.steps=3"]
        for setting in given.set:
            words += ["--set", setting]
        if subprocess.run(list(map(str, words)), check=False, stdout=subprocess.DEVNULL).returncode != 0:
            sys.exit(f"polychromic_stages.py: {' '.join(map(str, words))} failed")
    return json.loads((output / "benchmark.json").read_text())


def main():
    given = arguments()
    given.output.mkdir(parents=True, exist_ok=True)
    shape, given.model = SHAPES.get(given.model), given.output / "model" if given.model in SHAPES else Path(given.model)
    if shape and not (given.model / "config.json").exists():
        write_random(given.model, shape, given.tokenizer)
    table, parameters, ids = sizes(given.model)
    start = (f"[run]\n[data]\nbatch_tokens = 8192\nsequence = {SEQUENCE}\n[optimizer]\nlearning_rate = 1e-5\nwarmup_steps = 0\n"
             "[device]\nprecision = \"bf16\"\n")
    (given.output / "case.toml").write_text(start + (f"[language_model]\n{table}" if not (given.model / "config.json").exists() else ""))
    (given.output / "benchmark.toml").write_text(f"{start}[language_model]\n{table}[benchmark]\nvocabulary = {ids}\n")
    attention = benchmark(given)
    copy, product = attention["machine"]["copy_gb_per_second"], attention["machine"]["gemm_gflops"]
    # What generation must move: weights for each token, keys and values that it reads and writes.
    gigabytes = {case["name"]: 1e-9 * sum(phase["bytes"] for phase in case["phases"]) for case in attention["cases"]}
    milliseconds = {case["name"]: case["ms_per_step"] for case in attention["cases"]}
    record, lines = run(given, "train", "supervised", given.steps, [])
    supervised = step_ms(lines)
    adapters = any(one.startswith("lora.rank=") and one != "lora.rank=0" for one in given.set)

    def hours(answers, supervised=supervised):
        return (answers + (EVERY - 1) * supervised) / EVERY * 1000 / 3.6e6

    print(f"{parameters / 1e6:.0f} M parameters in the blocks. Steps: {given.steps}, answers one by one {given.slow_steps}.\n")
    print("| answers per prompt | case | ms per step | " + " | ".join(f"{stage}, ms (share)" for stage in STAGES) +
          " | memory, GiB | generate: of bandwidth | embed, backward: of products | hours per 1,000 steps | times faster |")
    print("|---:|---|" + "---:|" * (len(STAGES) + 6))
    memory = record["device"].get("peak_bytes", 0) / 2**30
    print(f"| 0 | supervised only | {supervised:.1f} |" + " |" * len(STAGES) + f" {memory:.1f} | | | {supervised / 3600:.3f} | |", flush=True)
    for samples in given.samples:
        first = None
        for case, (name, settings) in ((case, CASES[case]) for case in given.cases):
            steps = given.slow_steps if case == "one" else given.steps
            record, lines = run(given, "polychromic", f"{case}_{samples}", steps,
                                ["polychromic.every=1", f"polychromic.prompts={PROMPTS}", f"polychromic.samples={samples}",
                                 f"polychromic.set_size={samples // 2}" if samples > 3 else "polychromic.set_size=2",
                                 f"polychromic.prompt_tokens={PROMPT_TOKENS}", f"polychromic.max_new_tokens={NEW_TOKENS}",
                                 "polychromic.evaluation_prompts=0", *settings])
            time = step_ms(lines)
            if case == "one":
                matrix = milliseconds["a supervised step, matrix"] - milliseconds["a supervised step, flash"]
                first = time + matrix + PROMPTS * samples * (milliseconds["1 answer, matrix"] - milliseconds["1 answer, flash"])
                print(f"| {samples} | one by one, matrix of scores (computed) | {first:.1f} |" + " |" * (len(STAGES) + 3) +
                      f" {hours(first, supervised + matrix):.3f} | 1 |")
            stages = [record["timings"].get(stage, {}).get("mean", 0) * 1e3 / steps for stage in STAGES]
            memory = record["device"].get("peak_bytes", 0) / 2**30
            moved = (PROMPTS * samples * gigabytes["1 answer, flash"] if case == "one" else
                     gigabytes[f"{PROMPTS} x {samples} answers, flash"])
            # Operations of a forward pass, and of forward and backward pass; without those of the weights with adapters.
            gigaflop = [passes * 2e-9 * parameters * PROMPTS * samples * (PROMPT_TOKENS + NEW_TOKENS) for passes in (1, 2 if adapters else 3)]
            of_products = [1e3 * work / ms / product for work, ms in zip(gigaflop, (stages[1], stages[4])) if ms]
            print(f"| {samples} | {name} | {time:.1f} | " + " | ".join(f"{ms:.1f} ({ms / time:.0%})" for ms in stages) +
                  f" | {memory:.1f} | {1e3 * moved / stages[0] / copy:.0%} | {', '.join(f'{part:.0%}' for part in of_products)} | "
                  f"{hours(time):.3f} | {f'{first / time:.1f}' if first else ''} |", flush=True)
    print(f"\nMemory copy {copy:.0f} GB/s, product {product:.0f} GFLOP/s.\n\n| with flash attention or the matrix of scores | ms | memory, GiB |\n"
          "|---|---:|---:|")
    for case in attention["cases"]:
        print(f"| {case['name']} | {case['ms_per_step']:.2f} | {case['peak_bytes'] / 2**30:.2f} |")
    if given.diversity:
        print("\nDiversity and advantages in one kernel, against a kernel per operation:\n\n```", flush=True)
        subprocess.run([given.diversity], check=True)
        print("```")


if __name__ == "__main__":
    main()
