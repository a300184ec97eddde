#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the GPU tables of docs/performance.md, docs/language_performance.md and docs/scaling.md, each page in one call.

benchmark.py [SUBJECT]...        all subjects but the last three if none is given
    transcoder           one GPU: variants of the step, its phases, other sizes of models
    scaling              1, 2 and 4 GPUs: the same batch divided, the cost of each exchange
    language             one GPU: training steps of four language models, with the algorithms of --tune
    language_scaling     1, 2 and 4 GPUs: batch or matrices divided
    sharding             4 GPUs: parallel.shard
    adapters, memory     one GPU: adapters on frozen weights; settings that save memory
    generation           one GPU: GPT-2
    generation_scaling   1, 2 and 4 GPUs: a model of 8B parameters
    optimisations        most GPUs: effect of each optimisation of the work on several GPUs
    private              1, 2 and 4 GPUs: a private step of GPT-2
    affinity             most GPUs: device.affinity, for docs/experiments/
  --output DIR           (runs/benchmark) receives tables.md, conditions.txt, and benchmark.json and a log of every run; runs are added to it
  --ranks N...           numbers of GPUs (1 2 4, as far as there are GPUs); without GPUs numbers of processes
  --seconds S            (480) nothing is started later; --run-seconds S (150): a run that takes longer is stopped
  --dry-run              lists the runs and an estimate of their time
  --page FILE...         writes the tables of DIR into pages and measures nothing: what is between the lines
                         <!-- scripts/benchmark.py: TABLE --> and <!-- end --> is replaced; an error if DIR lacks a table of the page
For tests: --transcoder-set and --language-set KEY=VALUE…, of every run; --tokens N, per step, in place of the sizes below.

Runs of one GPU take place on all GPUs at the same time, each with its part of the cores; then runs of two and of four GPUs, one at a time
(--pairs: those of two GPUs two at a time).
WEFT: the program (build/cuda-release/weft). WEFT_CUDNN: the folder of libcudnn.so.9. Exit codes: 0 measured; 1 a run failed, was stopped or
not started (the tables contain the others); 2 nothing could be started.
"""
import argparse
import datetime
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SHORT = ["benchmark.warmup=4", "benchmark.steps=5", "benchmark.batches=1"]
LLAMA_8B = ["language_model.layers=32", "language_model.d_model=4096", "language_model.heads=32", "language_model.kv_heads=8",
            "language_model.d_mlp=14336", "language_model.tied=false"]
# Kinds of table row that are named by more than their case.
LABELS = {("benchmark_gpt2_small", "all together"): "**8-bit Adam, all together**", ("benchmark_llama_3_2_1b", "8bit"): "Llama-3.2-1B sizes, 8 bit",
          ("benchmark_gemma_2_2b", "8bit"): "Gemma-2-2B sizes, 8 bit", ("lm_gpt2_small", "input"): "GPT-2 124M",
          ("lm_gpt2_medium", "input"): "GPT-2 350M", ("lm_gpt2_xl", "input"): "GPT-2 1.56B", ("lm_llama_1b", "input"): "Llama-3.2-1B sizes"}
UNUSUAL = ["optimisations", "private", "affinity"]          # subjects that are measured when they are named
PHASES = ["all together", "fp32", "N=16384", "topk, layer"]     # cases whose phases are shown


@dataclass
class Run:
    subject: str
    name: str                   # of its folder, after that of the subject
    gpus: int
    input: str                  # without folder and suffix
    cases: list
    settings: list
    seconds: float              # estimate
    tune_tokens: int = 0        # > 0: first records algorithms, in steps of so many tokens

    @property
    def folder(self):
        return f"{self.subject}-{self.name}-{self.gpus}"


def named_cases(name):
    return tomllib.loads((REPOSITORY / f"inputs/{name}.toml").read_text())["benchmark"]["cases"]


def runs_of(ranks, tokens):
    """All runs, in the order of the rows of the tables. `tokens`: the function that gives the tokens of a step."""
    most, runs = max(ranks), []

    def add(subject, name, gpus, source, cases, settings, seconds, tune_tokens=0):
        if gpus in ranks and cases:
            runs.append(Run(subject, name, gpus, source, cases, settings, seconds, tune_tokens))

    # The optimisations alone and without CUDA graphs are of docs/experiments.md; dense gradients of thresholds are a baseline.
    left_out = {"baseline", "graphs alone", "large tiles alone", "8bit alone", "portable kernels", "jumprelu, wide window", "jumprelu, dense"}
    cases = [case for case in named_cases("benchmark_gpt2_small") if case.split(":")[0] not in left_out]
    for part in range(0, len(cases), 5):
        add("transcoder", f"gpt2_{part // 5}", 1, "benchmark_gpt2_small", cases[part:part + 5], [], 25)
    add("transcoder", "llama", 1, "benchmark_llama_3_2_1b", ["8bit"], ["benchmark.steps=30"], 20)
    add("transcoder", "gemma", 1, "benchmark_gemma_2_2b", ["8bit"], ["benchmark.steps=30"], 25)

    scaling = ["benchmark.warmup=20", "benchmark.steps=20"]
    small, large = tokens(4096), tokens(16384)
    for gpus in ranks:
        grids = [data for data in (1, 2, 4) if gpus % data == 0 and data <= gpus]
        add("scaling", "gpt2", gpus, "benchmark_gpt2_small",
            [f"GPT-2 small, N = {n:,}{f' [data {data}]' if data > 1 else ''}: data.batch_tokens={n}, parallel.data={data}"
             for n, data in dict.fromkeys([(small, 1), *((large, data) for data in grids)])], scaling, 10 + 6 * len(grids))
        add("scaling", "llama", gpus, "benchmark_llama_3_2_1b",
            [f"Llama-3.2-1B sizes, k = 32, N = {large:,}: data.batch_tokens={large}"], scaling, 20)
        add("scaling", "olmo", gpus, "benchmark_llama_3_2_1b",
            [f"OLMo-2-1B sizes, F = 100,000, k = 12.5, N = {large:,}: data.batch_tokens={large}, transcoder.features=100000, transcoder.k=12.5"],
            scaling, 25)
    if most > 1:
        add("optimisations", "gpt2", most, "benchmark_ranks", named_cases("benchmark_ranks"), ["benchmark.warmup=10", "benchmark.steps=10"], 40)

    for name, micro, steps, seconds in (("gpt2_small", 65536, 5, 40), ("gpt2_medium", 32768, 3, 55), ("gpt2_xl", 16384, 2, 115),
                                        ("llama_1b", 16384, 2, 95)):
        add("language", name, 1, f"lm_{name}", ["input"], ["benchmark.warmup=1", f"benchmark.steps={steps}", f"data.batch_tokens={tokens(524288)}"],
            seconds, tokens(2 * micro))

    medium = tokens(65536)
    for gpus in ranks:
        add("language_scaling", "gpt2_small", gpus, "lm_gpt2_small",
            [f"GPT-2 124M, {n:,} tokens: data.batch_tokens={n}" for n in dict.fromkeys((tokens(262144), medium))], SHORT, 18)
        for name, text, largest in (("llama_1b", "Llama-3.2-1B sizes", most), ("gpt2_xl", "GPT-2 1.56B", 2)):
            tensors = [tensor for tensor in (1, 2, 4) if tensor <= gpus <= largest and gpus % tensor == 0]
            add("language_scaling", name, gpus, f"lm_{name}",
                [f"{text}, {medium:,} tokens{f' [tensor {tensor}]' if tensor > 1 else ''}: data.batch_tokens={medium}, parallel.tensor={tensor}"
                 for tensor in tensors], [*SHORT, "benchmark.steps=3"], 12 + 8 * len(tensors))

    brief = [*SHORT, "benchmark.steps=2", f"data.batch_tokens={medium}"]
    add("sharding", "llama_1b", 4, "lm_llama_1b",
        ['`"state"`: parallel.shard=state', '`"gradients"`: parallel.shard=gradients', '`"full"`: parallel.shard=full',
         '`"full"`, 8-bit state: parallel.shard=full, optimizer.state=8bit'], [*brief, f"data.micro_tokens={tokens(16384)}"], 35)
    add("sharding", "llama_8b", 4, "lm_llama_1b",
        [f'8B, `"full"`, 8-bit state, `memory.recompute = "norm"`: optimizer.state=8bit, data.micro_tokens={tokens(16384)}, memory.recompute=norm',
         f'8B, `"full"`, 8-bit state, `memory.recompute = "block"`: optimizer.state=8bit, data.micro_tokens={tokens(16384)}, memory.recompute=block'],
        [*brief, *LLAMA_8B, "parallel.shard=full"], 45)

    lora = ["optimizer.state=bf16", "memory.recompute=block", *SHORT]
    bases = [f'adapters, `"{base}"`: lora.rank=16, lora.base={base}' for base in ("bf16", "int8", "nf4")]
    add("adapters", "1b", 1, "lm_llama_1b", ["1B, all parameters: lora.rank=0", *(f"1B, {case}" for case in bases)],
        [*lora, f"data.batch_tokens={tokens(16384)}"], 25)
    add("adapters", "8b", 1, "lm_llama_1b", [f"8B, {case}" for case in bases if "int8" not in case],
        [*lora, *LLAMA_8B, f"data.batch_tokens={tokens(8192)}"], 40)

    add("memory", "124m", 1, "lm_gpt2_small",
        [f"124M, {medium:,} tokens: memory.recompute=none", '124M, `memory.recompute = "block"`: memory.recompute=block'],
        [*SHORT, f"data.batch_tokens={medium}"], 10)
    add("memory", "85m", 1, "lm_character_85m",
        ["85M, micro-batches of 2,048 tokens: memory.recompute=none", '85M, `optimizer.state = "8bit"`: optimizer.state=8bit',
         '85M, `memory.recompute = "block"`: memory.recompute=block', "85M, both: optimizer.state=8bit, memory.recompute=block"],
        [*SHORT, f"data.micro_tokens={tokens(2048)}", "device.attention=own"], 15)

    add("generation", "gpt2", 1, "lm_generate_gpt2", named_cases("lm_generate_gpt2"), [], 15)
    for gpus in ranks:
        add("generation_scaling", "8b", gpus, "lm_generate_gpt2",
            [f"8B, {rows} row{'s' if rows > 1 else ''}: benchmark.generate_rows={rows}" for rows in (1, 8, 64)],
            ['language_model.preset="llama"', *LLAMA_8B[:-1], "benchmark.vocabulary=128256", "benchmark.generate_tokens=128", "benchmark.warmup=1",
             "benchmark.steps=3", f"parallel.tensor={gpus}"], 35)

    private = "privacy.enabled=true, privacy.epsilon=8, privacy.delta=1e-6"
    for gpus in ranks:
        add("private", "gpt2", gpus, "lm_gpt2_small",
            [f"124M, {medium:,} tokens: data.batch_tokens={medium}", f"124M private, {medium:,} tokens: data.batch_tokens={medium}, {private}",
             f"124M private, {medium:,} tokens, no overlap: data.batch_tokens={medium}, {private}, benchmark.private_overlap=false"],
            [*SHORT, f"data.micro_tokens={medium // 4}"], 20)
    for affinity in ("auto", "none"):
        add("affinity", affinity, most, "lm_gpt2_small", [f"124M, {tokens(8192):,} tokens: data.batch_tokens={tokens(8192)}"],
            [*SHORT, "benchmark.steps=20", f"device.affinity={affinity}"], 10)
    return runs


# --- Measuring ----------------------------------------------------------------------------------------------------------------


class Machine:
    def __init__(self, given):
        self.given, self.begin, self.failed = given, time.monotonic(), []
        self.weft = os.environ.get("WEFT", str(REPOSITORY / "build/cuda-release/weft"))
        listed = subprocess.run(["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True,
                                check=False).stdout.split() if shutil.which("nvidia-smi") else []
        self.gpus = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu] or listed
        self.ranks = given.ranks or [n for n in (1, 2, 4) if n <= len(self.gpus)]

    def command(self, run, slot, words):
        """The words that start `weft benchmark` on the GPUs from `slot` on, with their part of the cores; and its environment."""
        # Open MPI starts as root only with both variables set; containers often run as root.
        environment = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[slot:slot + run.gpus])
        start = ["mpiexec", "-n", str(run.gpus), "--oversubscribe", "--bind-to", "none"] if run.gpus > 1 else []
        if self.slots(run.gpus) > 1:
            cores = sorted(os.sched_getaffinity(0))
            own = cores[slot * len(cores) // len(self.gpus):(slot + run.gpus) * len(cores) // len(self.gpus)]
            start = ["taskset", "-c", ",".join(map(str, own or cores)), *start]
        return [*start, self.weft, "benchmark", str(REPOSITORY / f"inputs/{run.input}.toml"), *words], environment

    def slots(self, width):
        """Runs of `width` GPUs at a time."""
        return max(1, len(self.gpus) // width) if width == 1 or (width == 2 and self.given.pairs) else 1

    def call(self, run, folder, slot, cases, settings, *words):
        """The exit code; 124 at the time limit."""
        of_kind = self.given.language_set if run.input.startswith("lm_") else self.given.transcoder_set
        words = [*words, "--output", str(folder)]
        for setting in [f"benchmark.cases={json.dumps(cases, ensure_ascii=False)}", *settings, *of_kind]:
            words += ["--set", setting]
        command, environment = self.command(run, slot, words)
        with open(f"{folder}.log", "w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment,
                                       start_new_session=True)
            try:
                return process.wait(min(self.given.run_seconds, self.left()))
            except subprocess.TimeoutExpired:
                process.terminate()     # mpiexec ends its ranks
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                return 124

    def left(self):
        return max(0.1, self.given.seconds - (time.monotonic() - self.begin))

    def measure(self, run, slot):
        folder, begin = self.given.output / run.folder, time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)
        if self.left() < 5:
            return self.fail(run, "not started: the time is over")
        settings, code = list(run.settings), 0
        if run.tune_tokens and self.gpus:
            tuned = folder.with_name(folder.name + "-tune")
            code = self.call(run, tuned, slot, run.cases, [f"data.batch_tokens={run.tune_tokens}"], "--tune")
            settings.append(f"device.algorithms={json.dumps(str(tuned / 'algorithms.json'))}")
        code = code or self.call(run, folder, slot, run.cases, settings)
        if code:
            last = "\n".join(Path(f"{folder}.log").read_text().splitlines()[-4:]) if Path(f"{folder}.log").exists() else ""
            return self.fail(run, f"failed with {code} (124: time limit)\n{last}")
        print(f"{run.folder}: {time.monotonic() - begin:.0f} s", flush=True)
        return None

    def fail(self, run, reason):
        self.failed.append(run.folder)
        print(f"{run.folder}: {reason}", flush=True)

    def all(self, runs):
        for width in sorted({run.gpus for run in runs}):
            free = queue.SimpleQueue()
            for slot in range(self.slots(width)):
                free.put(slot * width)

            def work(run, free=free):
                slot = free.get()
                try:
                    self.measure(run, slot)
                finally:
                    free.put(slot)

            # The longest first: then the slots end at about the same time.
            chosen = sorted((run for run in runs if run.gpus == width), key=lambda run: -run.seconds if self.slots(width) > 1 else 0)
            with ThreadPoolExecutor(self.slots(width)) as pool:
                list(pool.map(work, chosen))

    def conditions(self, build):
        """One sentence: what every table was measured with."""
        def first(*command):
            if not shutil.which(command[0]):
                return ""
            return next(iter(subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()), "").strip()

        names = sorted(first("nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "-i", gpu) for gpu in self.gpus)
        parts = [f"{len(names)} {names[0]} of one host" if names else "No GPU",
                 f"driver {first('nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader')}" if names else "",
                 f"CUDA {build['cuda']}" if build["cuda"] else "", build["compiler"], re.sub(r"mpirun |[()]", "", first("mpirun", "--version"))]
        return (", ".join(part for part in parts if part) + f"; Weft {build['version']}, revision {build['revision'][:8]}"
                f"{', modified' if build['modified'] else ''}; {datetime.date.today().isoformat()}.")


# --- Tables -------------------------------------------------------------------------------------------------------------------


def number(value, digits=1):
    return "" if value is None else f"{value:,.{digits}f}"


def table(titles, lines, texts=1):
    """Markdown; "" without lines. The first `texts` columns are aligned to the left."""
    def line(cells):
        return "| " + " | ".join(map(str, cells)) + " |"

    aligned = "|" + "|".join(["---"] * texts + ["---:"] * (len(titles) - texts)) + "|"
    return "\n".join([line(titles), aligned, *map(line, lines)]) if lines else ""


class Results:
    """Results of a folder: (run, case) in the order of the runs."""

    def __init__(self, folder, runs):
        self.found, self.documents = [], []
        for run in runs:
            path = folder / run.folder / "benchmark.json"
            if path.exists():
                document = json.loads(path.read_text())
                self.documents.append((run, document))
                self.found += [(run, case) for case in document["cases"]]

    def of(self, subject, *names):
        return [(run, case) for run, case in self.found if run.subject == subject and (not names or run.name in names)]

    def case(self, subject, name, gpus=1):
        return next((case for run, case in self.of(subject) if case["name"] == name and run.gpus == gpus), None)


def label(run, case):
    return LABELS.get((run.input, case["name"]), case["name"].split(" [")[0])


def rate(case):
    """Tokens per second, with three or four digits."""
    value = case["tokens_per_second"]
    step = 100 if value >= 10000 else 10 if value >= 1000 else 1
    return f"{round(value / step) * step:,}"


def gib(case, key):
    return number(case[key] / 2**30) if case.get(key) else ""


def grid(case):
    parts = case["grid"]
    return f"{parts['data']} x {parts.get('feature', parts.get('tensor'))}"


def mfu(case):
    return f"{100 * case['mfu']['causal']:.0f} %" if case.get("mfu") and case["mfu"]["causal"] else ""


def speed_table(results):
    return table(["case", "ms/step", "tokens/s", "state, GiB", "memory (driver), GiB"],
                 [(label(run, case), number(case["ms_per_step"]), rate(case), gib(case, "state_bytes"), gib(case, "driver_bytes"))
                  for run, case in results.of("transcoder")])


def phases_table(results, subject, columns, merge=lambda name: name):
    """`columns`: title -> case. Cells: ms, and the per cent of the limit of the longest part."""
    columns = {title: case for title, case in columns.items() if case}
    names = list(dict.fromkeys(merge(phase["name"]) for case in columns.values() for phase in case["phases"]))
    lines = []
    for name in names:
        cells = []
        for case in columns.values():
            phases = [phase for phase in case["phases"] if merge(phase["name"]) == name]
            ms = sum(phase["ms"] for phase in phases)
            possible = sum(phase["ms"] * phase["percent_of_limit"] for phase in phases if phase["percent_of_limit"] is not None)
            cells.append(number(ms, 2 if ms < 100 else 0) + (f" ({possible / ms:.0f} %)" if possible and ms else "") if phases else "")
        lines.append((name, *cells))
    limits = [document["machine"] for run, document in results.documents if run.subject == subject]
    text = table(["phase, ms (of limit)", *columns], lines)
    return text and (f"{text}\n\nLimits, measured in the same runs: copy {number(max(one['copy_gb_per_second'] for one in limits), 0)} GB/s, product "
                     f"{number(1e-3 * max(one['gemm_gflops'] for one in limits), 0)} TFLOP/s.")


def transcoder_phases(results):
    titles = {"all together": "8 bit", "fp32": "fp32", "N=16384": "N = 16,384, 8 bit", "topk, layer": "`topk` by layer, 8 bit"}
    return phases_table(results, "transcoder", {titles[name]: results.case("transcoder", name) for name in PHASES})


def language_phases(results):
    return phases_table(results, "language", {label(run, case): case for run, case in results.of("language")}, lambda name: name.split(",")[0])


def first_of(results, subject):
    """Of each row that is compared: the case on the fewest GPUs."""
    first = {}
    for run, case in sorted(results.of(subject), key=lambda pair: pair[0].gpus):
        first.setdefault(label(run, case), (run.gpus, case))
    return first


def by_case(results, subject, *names):
    """Cases next to their own other grids, by number of GPUs."""
    found = results.of(subject, *names)
    order = list(dict.fromkeys(label(run, case) for run, case in found))
    return sorted(found, key=lambda pair: (order.index(label(*pair)), pair[0].gpus))


def scaling_table(results, subject, reading=False):
    first, lines = first_of(results, subject), []
    for run, case in by_case(results, subject):
        fewest, reference = first[label(run, case)]
        speed_up, exchange = case["tokens_per_second"] / reference["tokens_per_second"], case.get("communication", {})
        exposed = exchange.get("exposed_ms")
        cells = [label(run, case), run.gpus, grid(case), number(case["ms_per_step"]), rate(case),
                 number(speed_up, 2) + ("" if fewest == 1 else f" (of {fewest})"), f"{100 * speed_up * fewest / run.gpus:.0f} %",
                 number(exchange.get("ms"), 2), number(exposed, 2),
                 number(100 * exposed / case["ms_per_step"]) if exposed is not None else "", gib(case, "driver_bytes")]
        lines.append([*cells, number(1e-9 * case["tokens_per_second"] * case["row_bytes"])] if reading else cells)
    return table(["case", "GPUs", "data x " + ("feature" if reading else "tensor"), "ms/step", "tokens/s", "speed-up", "efficiency", "exchanges, ms",
                  "exposed, ms", "exposed, % of step", "memory (driver), GiB",
                  *(["required reading rate, GB/s"] if reading else [])], lines, texts=3)


def exchanges_table(results):
    """The exchanges of at least a megabyte, on the most GPUs, all of which share the features."""
    most = max((run.gpus for run, _ in results.of("scaling")), default=0)
    lines = [(label(run, case), one["name"], number(one["calls_per_step"], 0), number(1e-6 * one["bytes_per_step"]), number(one["ms"], 2),
              number(one["gb_per_second"], 0))
             for run, case in by_case(results, "scaling") if run.gpus == most and case["grid"]["data"] == 1
             for one in case.get("communication", {}).get("exchanges", []) if one["bytes_per_step"] >= 1e6]
    return table(["case", "exchange", "calls", "MB sent", "ms", "GB/s"], lines, texts=2)


def losses_table(results):
    """Phase by phase: the time on the most GPUs less the part of one GPU's time that a perfect division leaves."""
    most = max((run.gpus for run, _ in results.of("scaling")), default=0)
    cases = [case for run, case in results.of("scaling", "gpt2") if run.gpus == most and case["grid"]["data"] == 1]
    pairs = [(case, results.case("scaling", case["name"])) for case in cases]
    if most < 2 or not all(alone for _, alone in pairs):
        return ""
    losses = [{phase["name"]: phase["ms"] - sum(one["ms"] for one in alone["phases"] if one["name"] == phase["name"]) / most
               for phase in case["phases"]} for case, alone in pairs]
    names = sorted(losses[0], key=lambda name: -losses[0][name]) if losses else []
    return table(["phase", *(f"{label_of['name'].split(', ', 1)[1]}, ms" for label_of, _ in pairs)],
                 [(name, *(number(loss.get(name, 0.0), 2) for loss in losses)) for name in names])


def optimisations_table(results):
    return table(["case", "ms/step", "tokens/s", "exchanges, ms", "exposed, ms", "MB sent", "other memory, MiB"],
                 [(case["name"], number(case["ms_per_step"]), rate(case), number(case["communication"]["ms"]),
                   number(case["communication"]["exposed_ms"], 2), number(1e-6 * case["communication"]["bytes_per_step"], 0),
                   number((case["peak_bytes"] - case["state_bytes"]) / 2**20, 0)) for _, case in results.of("optimisations")])


def language_table(results):
    return table(["model", "tokens per step", "tokens/s", "MFU, 6N + 6LCT", "memory (driver), GiB"],
                 [(label(run, case), f"{case['tokens_per_step']:,}", rate(case), mfu(case), gib(case, "driver_bytes"))
                  for run, case in results.of("language")])


def sizes_table(results, subject):
    return table(["case", "ms/step", "tokens/s", "MFU, 6N + 6LCT", "state of a GPU, GiB", "memory (driver), GiB"],
                 [(label(run, case), number(case["ms_per_step"]), rate(case), mfu(case), gib(case, "state_bytes"), gib(case, "driver_bytes"))
                  for run, case in results.of(subject)])


def generation_table(results):
    return table(["case", "tokens/s"], [(case["name"], rate(case)) for _, case in results.of("generation")])


def generation_scaling(results):
    first, ranks = first_of(results, "generation_scaling"), sorted({run.gpus for run, _ in results.of("generation_scaling")})
    lines = []
    for name in dict.fromkeys(case["name"] for _, case in results.of("generation_scaling")):
        cases = [results.case("generation_scaling", name, gpus) for gpus in ranks]
        lines.append((name, *("" if not case else rate(case) + (
            f" ({case['tokens_per_second'] / first[name][1]['tokens_per_second']:.2f})" if case is not first[name][1] else "") for case in cases)))
    return table(["tokens/s (times one GPU)", *(f"{gpus} GPU{'s' if gpus > 1 else ''}" for gpus in ranks)], lines)


def affinity_table(results):
    return table(["`device.affinity`", "tokens/s"], [(f'`"{run.name}"`', rate(case)) for run, case in results.of("affinity")])


TABLES = {
    "speed": speed_table,
    "phases": transcoder_phases,
    "scaling": lambda results: scaling_table(results, "scaling", reading=True),
    "exchanges": exchanges_table,
    "losses": losses_table,
    "optimisations": optimisations_table,
    "language": language_table,
    "language phases": language_phases,
    "language scaling": lambda results: scaling_table(results, "language_scaling"),
    "sharding": lambda results: sizes_table(results, "sharding"),
    "adapters": lambda results: sizes_table(results, "adapters"),
    "memory": lambda results: sizes_table(results, "memory"),
    "generation": generation_table,
    "generation scaling": generation_scaling,
    "private": lambda results: scaling_table(results, "private"),
    "affinity": affinity_table,
}
MARK = "<!-- scripts/benchmark.py: {} -->"


def tables_of(results, conditions):
    tables = {"conditions": conditions, **{name: function(results) for name, function in TABLES.items()}}
    return {name: text for name, text in tables.items() if text}


def marked(name, text):
    return f"{MARK.format(name)}\n\n{text}\n\n<!-- end -->"


def write_pages(paths, folder, runs):
    """Replaces the text between each mark and its <!-- end -->. All tables of a page are of one program and one type of GPU, or it stays."""
    results, code = Results(folder, runs), 0
    tables = tables_of(results, (folder / "conditions.txt").read_text().strip())
    programs = {(document["machine"]["gpu"], document["build"]["revision"]) for _, document in results.documents}
    if len(programs) > 1:
        sys.exit(f"benchmark.py: {folder}: results of several programs or types of GPU ({programs}); remove the older ones")
    for path in paths:
        page = path.read_text()
        missing = [name for name in re.findall(MARK.format("(.*)"), page) if name not in tables]
        if missing:
            print(f"benchmark.py: {path} stays as it is: not measured: {', '.join(missing)}", file=sys.stderr)
            code = 1
            continue
        path.write_text(re.sub(MARK.format("(.*?)") + r"\n.*?\n<!-- end -->", lambda found: marked(found[1], tables[found[1]]), page, flags=re.S))
    return code


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmark"))
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--run-seconds", type=float, default=150)
    parser.add_argument("--transcoder-set", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--language-set", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--page", type=Path, nargs="+", default=[])
    given = parser.parse_args()

    def tokens(usual):
        return given.tokens or usual

    if given.page:
        return write_pages(given.page, given.output, runs_of(given.ranks or [1, 2, 4], tokens))
    known = list(dict.fromkeys(run.subject for run in runs_of([1, 2, 4], tokens)))
    for subject in given.subjects:
        if subject not in known:
            parser.error(f"{subject}: no such subject (known: {', '.join(known)})")
    subjects = given.subjects or [name for name in known if name not in UNUSUAL]
    machine = Machine(given)
    ranks = machine.ranks or ([1, 2, 4] if given.dry_run else [])
    if not ranks:
        print("benchmark.py: nvidia-smi finds no GPU here; run it on a machine with GPUs, or give --ranks", file=sys.stderr)
        return 2
    runs = [run for run in runs_of(ranks, tokens) if run.subject in subjects]
    if given.dry_run:
        for run in runs:
            print(f"{run.folder}: {len(run.cases)} cases, about {run.seconds:.0f} s")
        machine.gpus = machine.gpus or list(map(str, range(max(ranks))))
        seconds = {width: [run.seconds for run in runs if run.gpus == width] for width in ranks}
        total = sum(max(sum(times) / machine.slots(width), max(times, default=0)) for width, times in seconds.items())
        print(f"about {total:.0f} s on {len(machine.gpus)} GPUs")
        return 0
    if not os.access(machine.weft, os.X_OK):
        print(f"benchmark.py: {machine.weft} does not exist; build it (README.md), or set WEFT", file=sys.stderr)
        return 2
    given.output.mkdir(parents=True, exist_ok=True)
    machine.all(runs)
    results = Results(given.output, runs)
    if not results.documents:
        print(f"benchmark.py: nothing was measured on {max(ranks)} GPUs", file=sys.stderr)
        return 1
    conditions = machine.conditions(results.documents[0][1]["build"])
    (given.output / "conditions.txt").write_text(conditions + "\n")
    text = "\n\n".join(marked(name, one) for name, one in tables_of(results, conditions).items()) + "\n"
    missing = machine.failed + [f"{run.folder} \"{one['name']}\" ({one['reason']})" for run, document in results.documents
                                for one in document["not_measured"]]
    if missing:
        text += "\nNot measured: " + "; ".join(missing) + "\n"
    (given.output / "tables.md").write_text(text)
    print(text, end="")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
