#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""docs/experiments.md: what each optimisation of language-model training brings, from the results of weft benchmark.

experiments.py RESULTS      RESULTS/cpu.json, gpu.json, combined/SIZE_TOKENS.json and affinity_{auto,none}.json are benchmark.json
                            files, RESULTS/activations.json, growth.json, sparse.json and tuning.json are written by
                            compare_trainings.py, RESULTS/operations.json by tests/gpu/operations_benchmark.cu; one that is not there is
                            "not measured". Writes Markdown to standard output.
"""
import json
import sys
from pathlib import Path

MACHINES = {
    "cpu": ("CPU", "`weft benchmark inputs/lm_benchmark_cpu.toml`"),
    "gpu": ("GPU", "`weft benchmark inputs/lm_gpt2_small.toml`"),
}
# Case -> (what it is, the key that switches it on; "": there is none).
TECHNIQUES = {
    "bf16": ("activations and products in bf16, sums in fp32", 'device.precision = "bf16"'),
    "fp16": ("fp16 with dynamic loss scaling", 'device.precision = "fp16"'),
    "TF32": ("products of fp32 operands rounded to TF32", 'device.precision = "tf32"'),
    "fp8": ("products of the blocks in 8 bits", "device.fp8 = true"),
    "hand-written kernels": ("CUDA kernels instead of Kokkos; fused norm and residual, tensor cores", "device.backend"),
    "bf16 + hand-written kernels": ("CUDA kernels instead of Kokkos, which need bf16", "device.backend"),
    "bf16 + fp8": ("products of the blocks in 8 bits, which need bf16", "device.fp8 = true"),
    "flash attention": ("attention without the matrix of scores", "always"),
    "chunked head": ("logits of a part of the rows at a time", "memory.head_chunk"),
    "recompute activation": ("outputs of the MLP's activation are computed again", 'memory.recompute = "activation"'),
    "recompute norms": ("these and outputs of norms", 'memory.recompute = "norm"'),
    "recompute blocks": ("everything of a block but its input", 'memory.recompute = "block"'),
    "bf16 state": ("weights and moments in bf16, stochastic rounding", 'optimizer.state = "bf16"'),
    "8-bit state": ("weights in bf16, moments in 8 bits", 'optimizer.state = "8bit"'),
    "host-resident state": ("optimizer state in host memory, copied block by block in the update", "memory.offload_optimizer = true"),
    "activation swapping": ("activations in host memory until the backward pass", "memory.swap_activations = true"),
    "graphs": ("the step recorded once and replayed", "device.graphs"),
    "accumulation": ("four micro-batches per step", "data.micro_tokens"),
    "8-bit state + recompute blocks": ("both", ""),
    "A": ("graphs + accumulation + bf16", ""),
    "B": ("flash attention + recompute blocks + 8-bit state", ""),
    "safe": ("the defaults: flash attention + chunked head + graphs", ""),
    "all": ("every optimisation that does not exclude another", ""),
}


# Rows whose effect other tables or pages state: technique -> (status, effect).
ELSEWHERE = {
    "tensor parallelism: ranks share every matrix": (
        "`parallel.tensor`", "two H200, 65,536 tokens per step: GPT-2 1.56B 1.67, sizes of Llama 3.2 1B 1.79 times one GPU "
        "([measured 2026-11-24](scaling.md#language-models)); a GPU holds its part of the weights alone"),
    "automatic learning rate: range test, plateau, greedy": ("`optimizer.tuning`", "[trainings](#trainings)"),
}
COMBINED = ("baseline", "A", "B", "safe", "all")

# Results of compare_trainings.py -> title and what is compared.
COMPARISONS = {
    "activations": ("Activations of the MLP", "GELU and ReLU² with an MLP of 4 C, SwiGLU and GEGLU of 8/3 C: equal parameters."),
    "growth": ("Growing sequences and curriculum", "Sequences of 2,048 tokens from the first step, or growing to them in the first half of "
               "the steps (`data.sequence_start`); random windows, or the easiest part of the text first (`data.order`)."),
    "sparse": ("Sparse attention at T = 8,192", "Dense attention, and blocks of 64 queries that read their own and the last blocks of keys and "
               "those with the largest product of means (`language_model.sparse_blocks`)."),
    "tuning": ("Automatic learning rate", "The learning rate of the input and a tenth of it, which `optimizer.tuning` raises (range test, "
               "greedy) or lowers (plateau)."),
}


def grouped(number):
    return f"{round(number):,}"


def mib(bytes_):
    return f"{bytes_ / 2**20:,.0f}"


def drift(cases):
    """Largest relative difference in time that says nothing: twice that of the two runs of the baseline, at least 3 %."""
    again = cases.get("baseline again")
    return max(0.03, 2 * abs(again["times_faster"] - 1) if again else 0)


def conclusion(case, baseline, noise):
    if not case["valid"]:
        return f"not valid: {case['problem']}"
    faster, memory = case["times_faster"], case["peak_bytes"] / baseline["peak_bytes"]
    words = []
    if faster > 1 + noise:
        words.append(f"{faster:.2f} times as fast")
    elif faster < 1 - noise:
        words.append(f"{1 / faster:.2f} times the time")
    else:
        words.append("time unchanged")
    if abs(memory - 1) < 0.01:
        words.append("memory unchanged")
    else:
        words.append(f"{100 * abs(1 - memory):.0f} % {'less' if memory < 1 else 'more'} memory")
    if case["left_out"]:
        words.append(f"without {case['left_out']}")
    return "; ".join(words)


def section(machine, result, described):
    """The table of a machine; adds the techniques that it describes to `described`, which later tables only name."""
    title, command = MACHINES[machine]
    lines = [f"## {title}", ""]
    if result is None:
        lines += [f"Not measured. {command} writes the results.", ""]
    cases = {case["name"]: case for case in result["cases"]} if result else {}
    missing = {case["name"]: case["reason"] for case in result["not_measured"]} if result else {}
    baseline = cases.get("baseline")
    if result:
        note = result.get("note", "")
        device = result["machine"]
        lines += [f"{command}{': ' + note if note else ''}. {device['device']}; memory copy {device['copy_gb_per_second']:.1f} GB/s, "
                  f"product {grouped(device['gemm_gflops'])} GFLOP/s; revision {result['build']['revision'][:12]}. "
                  f"Loss: nats per token after {result['steps']} steps.", ""]
        if baseline is None:
            lines += [f"The baseline could not be measured ({missing.get('baseline', 'it is not among the cases')}): no row is valid.", ""]
        else:
            lines += [f"Baseline: {baseline['ms_per_step']:.0f} ms/step, {grouped(baseline['tokens_per_second'])} tokens/s, "
                      f"{mib(baseline['peak_bytes'])} MiB, loss {baseline['loss']:.4f}. Differences in time below "
                      f"{100 * drift(cases):.0f} % are noise of this measurement.", ""]
    lines += ["| technique | tokens/s | MiB | loss differs by | conclusion |", "|---|---:|---:|---:|---|"]
    unmeasured = {}  # reason -> techniques
    for name, (what, key) in TECHNIQUES.items():
        if name in cases and baseline:
            case = cases[name]
            switch = f" ({key if key == 'always' else f'`{key}`'})" if key else ""
            what = "" if name in described else f": {what}{switch}"
            described.add(name)
            row = [f"**{name}**{what}", grouped(case["tokens_per_second"]), mib(case["peak_bytes"]),
                   f"{case['loss_difference']:.0e}" if case["loss_difference"] else "0", conclusion(case, baseline, drift(cases))]
            lines.append("| " + " | ".join(row) + " |")
        else:
            unmeasured.setdefault(missing.get(name, "no result"), []).append(name)
    if result and unmeasured:
        lines += ["", "Not measured: " + "; ".join(f"{', '.join(names)} ({reason})" for reason, names in unmeasured.items()) + "."]
    return lines + [""]


def affinity(folder):
    """What device.affinity brings: the same case with and without it."""
    files = [folder / f"affinity_{name}.json" for name in ("auto", "none")]
    if not all(file.exists() for file in files):
        return "not measured"
    auto, none = (json.loads(file.read_text()) for file in files)
    before, after = none["cases"][0], auto["cases"][0]
    return (f"{auto['ranks']} ranks, {before['name']}: {grouped(before['tokens_per_second'])} tokens/s without, "
            f"{grouped(after['tokens_per_second'])} with it{'; ' + auto['note'] if 'note' in auto else ''}")


def elsewhere(folder):
    rows = {"CPU affinity: ranks keep to CPUs of their own, near their GPU": ("`device.affinity`", affinity(folder)), **ELSEWHERE}
    return ["## Techniques that other measurements show", "", "| technique | status | effect |", "|---|---|---|",
            *(f"| {name} | {status} | {effect} |" for name, (status, effect) in rows.items()), ""]


def combined(folder):
    """Combinations at several sizes and batches: a table per size, with the columns of its batches."""
    lines = ["## Combined techniques", "", "`inputs/lm_combined.toml`, whose head has the commands: tokens/s, and times the speed of the "
             "baseline of the same size and batch.", ""]
    runs = {}
    for file in sorted((folder / "combined").glob("*_*.json")):
        size, tokens = file.stem.rsplit("_", 1)
        runs.setdefault(size, {})[int(tokens)] = json.loads(file.read_text())
    if not runs:
        return lines + ["Not measured.", ""]
    for size, batches in runs.items():
        tokens = sorted(batches)
        first = batches[tokens[0]]
        lines += [f"{size}: {first['machine'].get('gpu') or first['machine']['device']}; revision {first['build']['revision'][:12]}"
                  f"{'; ' + first['note'] if 'note' in first else ''}.", "",
                  "| | " + " | ".join(f"{grouped(each)} tokens per step | faster | MiB" for each in tokens) + " |",
                  "|---|" + "---:|" * 3 * len(tokens)]
        for name in COMBINED:
            row = [f"**{name}**"]
            for each in tokens:
                cases = {case["name"]: case for case in batches[each]["cases"]}
                case = cases.get(name)
                valid = case and case["valid"]
                row += [grouped(case["tokens_per_second"]) if case else "-", f"{case['times_faster']:.2f}" if valid else "-",
                        mib(case["peak_bytes"]) if case else "-"]
            lines.append("| " + " | ".join(row) + " |")
        lines.append("")
    return lines


def operations(folder):
    """Single operations: a fused kernel, and a kernel per operation."""
    lines = ["## Single operations", "", "Kernels alone, bf16, median: the fused kernel of the program, and the same formula with a kernel and an "
             "array in memory per operation (`gpu_operations_benchmark`, `tests/gpu/operations_benchmark.cu`). GB/s: the least bytes of the "
             "operation over the time of the fused kernel. *Differs*: both results, relative; the baseline rounds to bf16 after each operation.", ""]
    file = folder / "operations.json"
    if not file.exists():
        return lines + ["Not measured. `gpu_operations_benchmark > docs/experiments/operations.json` writes the results.", ""]
    result = json.loads(file.read_text())
    lines += [f"{result['gpu']}{'; ' + result['note'] if result['note'] else ''}.", "",
              "| operation | rows x columns | unfused, µs | fused, µs | times as fast | GB/s | differs |", "|---|---|---:|---:|---:|---:|---:|"]
    for one in result["operations"]:
        fused = one["fused_us"]
        lines.append(f"| {one['operation']} | {one['shape']} | {one['unfused_us']:,.1f} | {fused:,.1f} | {one['unfused_us'] / fused:.2f} | "
                     f"{grouped(one['bytes'] / fused / 1000)} | {one['differs']:.0e} |")
    return lines + [""]


def mean(losses):
    """Mean over the seeds, and half of the distance between the best and the worst."""
    return f"{sum(losses) / len(losses):.4f} ± {(max(losses) - min(losses)) / 2:.4f}"


def comparison(name, result):
    title, what = COMPARISONS[name]
    if result is None:
        return [f"Not measured. {title}: `scripts/compare_trainings.py WEFT {name}` writes the results.", ""]
    lines = [f"### {title}", "", what, ""]
    settings = ", ".join(f"`{each}`" for each in result["settings"])
    lines += [f"`{result['input']}` with {settings}; {grouped(result['steps'])} steps, seeds {', '.join(map(str, result['seeds']))}. "
              f"{result['machine']['device']}; revision {result['build']['revision'][:12]}{'; ' + result['note'] if 'note' in result else ''}.", "",
              f"| | ms/step | validation loss at equal tokens | at equal time ({result['seconds']:.1f} s) |", "|---|---:|---:|---:|"]
    for variant in result["variants"]:
        ms = variant["ms_per_step"]
        times = f"{next(iter(ms.values())):.2f}" if len(ms) == 1 else ", ".join(f"{each:.2f} (T = {length})" for length, each in ms.items())
        lines.append(f"| {variant['name']} | {times} | {mean(variant['loss_at_equal_tokens'])} | {mean(variant['loss_at_equal_time'])} |")
    return lines + [""]


TRAININGS = """## Trainings

`scripts/compare_trainings.py`: validation loss in nats per token, mean over the seeds and half of the distance between the best and the
worst. *At equal time*: after the time in which the fastest variant trains all steps, from the time of a step measured alone.
"""

HEAD = """# Experiments

What each optimisation of language-model training brings: time, memory, and whether the training is the same. This page is generated
by `scripts/experiments.py` from results of `weft benchmark`; [language_models.md](language_models.md) describes the cases.

- The baseline has every optimisation off: fp32, attention with the matrix of scores in memory (of one layer at a time), logits of the
  whole batch, all activations kept, fp32 state, one micro-batch, no graphs, portable kernels. Each technique is switched on alone.
- In parentheses: how an input switches it on. *MiB*: the largest amount allocated at once where the kernels run.
- A row is valid if the loss after the same steps on the same batches differs from the baseline's by at most
  `benchmark.loss_tolerance`, and if the baseline fits in memory. *0*: the same bits.
"""


def main():
    folder = Path(sys.argv[1])
    lines = HEAD.splitlines() + [""]
    described = set()
    for machine in MACHINES:
        path = folder / f"{machine}.json"
        lines += section(machine, json.loads(path.read_text()) if path.exists() else None, described)
    lines += elsewhere(folder) + operations(folder) + combined(folder)
    lines += TRAININGS.splitlines() + [""]
    for name in COMPARISONS:
        path = folder / f"{name}.json"
        lines += comparison(name, json.loads(path.read_text()) if path.exists() else None)
    print("\n".join(lines).rstrip())


if __name__ == "__main__":
    main()
