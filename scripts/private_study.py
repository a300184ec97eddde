#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Private fine-tuning of a language model by adapters at several epsilon, as one table: loss on held-out examples.

private_study.py MODEL TEXT HELD_OUT DIR [--epsilon 1 3 8 inf] [--seeds 1 2 3] [--steps 80] [--examples 512] [--sequence 256]
                 [--rank 8] [--jobs N] [--minutes M] [--set KEY=VALUE]...

MODEL: a directory of Hugging Face, or a run; TEXT and HELD_OUT: JSON Lines with {"text"} or {"prompt", "completion"}. A record, the unit that
is protected, is a line: of a longer one, one sequence is used. HELD_OUT counts as public. delta is 1 / (10 x lines). inf: the same training
without clipping and noise, whose batches are random windows. The row "before" is the model itself.

The noise comes from a secret key, so that a loss cannot be repeated exactly. weft is taken from PATH, GPUs from CUDA_VISIBLE_DEVICES.
Finished runs in DIR are kept: the same command continues. DIR receives table.md, results.json and a log per run.
"""
import json
import sys
from pathlib import Path

from studies import Study, keep, kept, parser_of, sets, summary


def arguments():
    parser = parser_of(__doc__)
    for name in ("model", "text", "held_out", "directory"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--epsilon", nargs="+", default=["1", "3", "8", "inf"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--examples", type=int, default=512, help="records per step, on average (default 512)")
    parser.add_argument("--sequence", type=int, default=256, help="tokens (default 256)")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args()


def main():
    given = arguments()
    cases = [(epsilon, seed) for epsilon in given.epsilon for seed in given.seeds]
    with open(given.text, "rb") as file:
        lines = sum(1 for _ in file)

    def place(case):
        return given.directory / f"epsilon_{case[0]}_seed{case[1]}"

    def report():
        points = [((f"r {given.rank}", case[0]), place(case) / "result.json") for case in cases]
        columns = {"epsilon_spent": "{:.3f}", "noise_multiplier": "{:.3f}", "loss": "{:.4f}", "perplexity": "{:.3f}"}
        return summary(["adapters", "epsilon"], columns, [(("before", ""), given.directory / "before.json"), *points])

    study = Study("private_study.py", given, report)
    start = given.directory / "private.toml"
    start.write_text(f"""[run]
steps = {given.steps}
[data]
train = {json.dumps(str(given.text))}
validation = {json.dumps(str(given.held_out))}
batch_tokens = {given.examples * given.sequence}
sequence = {given.sequence}
[language_model]
initial = {json.dumps(str(given.model))}
[lora]
rank = {given.rank}
alpha = {2 * given.rank}
[optimizer]
learning_rate = 1e-3
warmup_steps = {min(10, given.steps // 4)}
weight_decay = 0
[checkpoint]
every = 0
[log]
sample_tokens = 0
""")

    def before():
        """The loss of the model itself, as a training without a change to it measures it."""
        output = given.directory / "before"
        if not (given.directory / "before.json").exists():
            study.weft(given.directory / "before.log", "lm", "train", start, "--quiet", "--output", output,
                       *sets([*given.set, "run.steps=1", "optimizer.learning_rate=1e-30", "optimizer.warmup_steps=0"]))
            keep(given.directory / "before.json", {"epsilon": "before", **measured(output)})

    def measured(output):
        result = kept(output / "run.json")["result"]
        return {"tokens": result["tokens"], **{name: result["validation"][name] for name in ("loss", "perplexity")}}

    def train(case):
        (epsilon, seed), output = case, place(case) / "run"
        if (place(case) / "result.json").exists():
            return
        privacy = [] if epsilon == "inf" else [f"privacy.epsilon={epsilon}", f"privacy.delta={1 / (10 * lines):.1e}", "privacy.unit=example",
                                               "privacy.max_per_owner=1", "optimizer.clip_norm=0"]
        study.weft(place(case) / "commands.log", "lm", "train", start, "--quiet", "--output", output,
                   *sets([*privacy, f"run.seed={seed}", *given.set]))
        account = kept(output / "run.json")["result"].get("privacy", {})
        keep(place(case) / "result.json", {"epsilon": epsilon, "seed": seed, "epsilon_spent": account.get("epsilon"),
                                           "noise_multiplier": account.get("noise_multiplier"), "delta": account.get("delta"),
                                           "records": account.get("records"), **measured(output)})

    study.run([("the model itself", before)] + [(f"epsilon {case[0]}, seed {case[1]}", lambda case=case: train(case)) for case in cases])
    return study.finish()


if __name__ == "__main__":
    sys.exit(main())
