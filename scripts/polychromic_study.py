#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning, GRPO and the polychromic objective on two tasks with many right answers, as one table.

polychromic_study.py MODEL DIR [--tasks arithmetic creative] [--objectives supervised grpo polychromic] [--seeds 1 2 3 4 5] [--steps 150]
                     [--samples 64] [--rank 16] [--new-tokens 24] [--jobs N] [--minutes M] [--set KEY=VALUE]...

MODEL: a directory of Hugging Face, or a run. Every step draws 3 answers to each of 4 prompts next to the supervised loss
("supervised": none).
arithmetic: sums of digits, right if the first number is (inputs/arithmetic.py).
creative: one sentence about a subject, right if it names the subject, ends as a sentence does and has 4 to 20 words.
DIR receives both tasks; half of the prompts of each are held out of the supervised pairs.

Measured on held-out prompts: reward and pass@1, 8 and 64 of --samples answers to each (weft lm evaluate --answers); of 16 further answers
to each, the semantic distance by hidden states of MODEL, the share of distinct bigrams (weft lm diversity), and the Vendi score: the number
of different answers, exp of the entropy of the eigenvalues of the matrix of cosines of their counts of words and pairs of words. The row
"before" is MODEL itself. Needs NumPy for the Vendi score; weft is taken from PATH, GPUs from CUDA_VISIBLE_DEVICES. The same command continues.

    polychromic_study.py reward     is the reward_command of "creative"
"""
import json
import math
import random
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

from studies import REPOSITORY, Study, keep, kept, parser_of, sets, summary

OBJECTIVES = {"supervised": ["polychromic.objective=supervised", "polychromic.every=1000000"], "grpo": ["polychromic.objective=grpo"],
              "polychromic": ["polychromic.objective=product"]}
ANSWERS = 16        # to each prompt, whose diversity is measured
HELD_OUT = 16       # prompts that are measured
SUBJECTS = ["sea", "winter", "train", "garden", "moon", "market", "river", "clock", "letter", "forest", "kitchen", "bridge", "dog", "storm",
            "violin", "lamp", "island", "school", "window", "horse", "road", "bread", "desert", "boat", "mirror", "tower", "summer", "piano",
            "village", "mountain", "coat", "candle"]
SENTENCES = ["The {} was quiet that evening.", "Nobody expected the {} to change so much.", "They wrote a long letter about the {}.",
             "Every morning the {} looked a little different.", "In my dream the {} could speak.", "We painted the {} in bright colours."]


def reward(answer, subject):
    return float(subject in answer.lower() and re.fullmatch(r"\s*\w[^.!?\n]*[.!?]\s*", answer) is not None and 4 <= len(answer.split()) <= 20)


def rewards():
    for line in sys.stdin:
        given = json.loads(line)
        print(json.dumps({"id": given["id"], "scores": [reward(answer, given["reference"]) for answer in given["answers"]]}), flush=True)


def vendi(answers):
    """Of answers to one prompt (Friedman and Dieng 2023)."""
    import numpy as np
    counts = []
    for answer in answers:
        words = re.findall(r"\w+", answer.lower())
        counts.append(Counter(words) + Counter(zip(words, words[1:])))
    cosine = np.array([[sum(a[key] * b[key] for key in a) / math.sqrt(sum(n * n for n in a.values()) * sum(n * n for n in b.values()) or 1)
                        for b in counts] for a in counts])
    np.fill_diagonal(cosine, 1)
    values = np.linalg.eigvalsh(cosine / len(counts))
    values = values[values > 1e-12]
    return float(np.exp(-(values * np.log(values)).sum()))


def arguments():
    parser = parser_of(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tasks", nargs="+", choices=["arithmetic", "creative"], default=["arithmetic", "creative"])
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=24, help="of an answer, at most (default 24)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args()


def write_task(place, task):
    """train.jsonl, and held_out.jsonl with one row per prompt. Returns the reward_command."""
    script = REPOSITORY / "inputs" / "arithmetic.py"
    if task == "arithmetic":
        rows = [json.loads(line) for line in subprocess.run([sys.executable, script, "data", "2000"], check=True, capture_output=True,
                                                             text=True).stdout.splitlines()]
    else:
        rows = [{"prompt": f"Write one sentence about: {subject}\n", "completion": sentence.format(subject), "reference": subject}
                for subject in SUBJECTS for sentence in SENTENCES]
        script = Path(__file__).resolve()
    prompts = sorted({row["prompt"]: row for row in rows}.items())
    random.Random(1).shuffle(prompts)
    held = dict(prompts[:HELD_OUT])
    random.Random(2).shuffle(rows)
    for name, chosen in (("train", [row for row in rows if row["prompt"] not in held]), ("held_out", held.values())):
        (place / f"{task}_{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    return f"{shlex.quote(sys.executable)} {shlex.quote(str(script))} reward"


def main():
    given = arguments()
    given.directory.mkdir(parents=True, exist_ok=True)
    commands = {task: write_task(given.directory, task) for task in given.tasks}
    cases = [(task, objective, seed) for seed in given.seeds for objective in given.objectives for task in given.tasks]
    before = [(task, "before", 0) for task in given.tasks]

    def place(case):
        return given.directory / "_".join(map(str, case))

    def report():
        points = [(case[:2], place(case) / "result.json") for case in sorted(before + cases, key=lambda case: given.tasks.index(case[0]))]
        columns = {"reward": "{:.3f}", "pass_1": "{:.3f}", "pass_8": "{:.3f}", "pass_64": "{:.3f}", "semantic": "{:.4f}",
                   "distinct_2": "{:.3f}", "vendi": "{:.2f}"}
        return summary(["task", "objective"], columns, points)

    study = Study("polychromic_study.py", given, report)
    start = given.directory / "polychromic.toml"
    start.write_text(f"""[run]
steps = {given.steps}
[data]
batch_tokens = 512
sequence = 64
[language_model]
initial = {json.dumps(str(given.model))}
[lora]
rank = {given.rank}
alpha = {2 * given.rank}
dropout = 0.05
[polychromic]
every = 1
prompts = 4
samples = 3
set_size = 2
weight = 1
temperature = 0.9
max_new_tokens = {given.new_tokens}
evaluation_prompts = 0
reward = "command"
[optimizer]
learning_rate = 2e-4
warmup_steps = {min(10, given.steps // 4)}
[checkpoint]
every = 0
""")

    def work(case):
        (task, objective, seed), output, log = case, place(case) / "run", place(case) / "commands.log"
        record = kept(place(case) / "result.json")
        data = [f"data.train={given.directory / task}_train.jsonl", f"polychromic.prompts_file={given.directory / task}_train.jsonl",
                f"polychromic.reward_command={json.dumps(commands[task])}"]
        # "before" is measured by the same commands: a step that changes nothing.
        changes = (["run.steps=1", "optimizer.learning_rate=1e-30", "optimizer.warmup_steps=0", *OBJECTIVES["supervised"]]
                   if objective == "before" else [*OBJECTIVES[objective], f"run.seed={seed}"])
        held_out, precision = f"{given.directory / task}_held_out.jsonl", sets([one for one in given.set if one.startswith("device.")])
        if "reward" not in record:
            study.weft(log, "lm", "polychromic", start, "--quiet", "--output", output, *sets([*data, *given.set, *changes]))
            answers = json.loads(study.weft(log, "lm", "evaluate", output, "--answers", held_out, "--samples", given.samples, "--json", "--quiet",
                                            *precision))["checkpoints"][-1]["answers"]
            record.update(task=task, objective=objective, seed=seed, **{name: answers[name] for name in ("reward", "pass_1", "pass_8", "pass_64")})
            keep(place(case) / "result.json", record)
        if "semantic" not in record:
            path = place(case) / "answers.jsonl"
            path.write_text(study.weft(log, "lm", "generate", output, "--prompts", held_out, "--samples", ANSWERS, "--max-new-tokens",
                                       given.new_tokens, "--temperature", 0.9, "--jsonl", "--quiet", *precision))
            measures = json.loads(study.weft(log, "lm", "diversity", path, "--model", given.model, "--json", "--quiet", *precision))["mean"]
            record.update({name: measures[name] for name in ("semantic", "distinct_2")})
            keep(place(case) / "result.json", record)
        if "vendi" not in record:
            answers = {}
            for line in (place(case) / "answers.jsonl").read_text().splitlines():
                answers.setdefault(json.loads(line)["prompt"], []).append(json.loads(line)["text"])
            record["vendi"] = sum(map(vendi, answers.values())) / len(answers)
            keep(place(case) / "result.json", record)

    study.run([(" ".join(map(str, case)), lambda case=case: work(case)) for case in before + cases])
    return study.finish()


if __name__ == "__main__":
    if sys.argv[1:] == ["reward"]:
        rewards()
    else:
        sys.exit(main())
