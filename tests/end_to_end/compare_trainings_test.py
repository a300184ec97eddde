# SPDX-License-Identifier: Apache-2.0
"""scripts/compare_trainings.py with a model of one block: every comparison runs, and its numbers are those of its runs.

compare_trainings_test.py WEFT REPOSITORY
"""
import json
import subprocess
import sys
from pathlib import Path

import program

INPUT = """
[run]
output = "unused"
[data]
train = "text.txt"
validation_fraction = 0.2
batch_tokens = 512
[language_model]
layers = 1
heads = 2
d_model = 16
[optimizer]
learning_rate = 1e-2
warmup_steps = 4
"""
SMALL = ("data.sequence=256", "language_model.d_mlp=32", "benchmark.steps=1", "benchmark.warmup=1")


def compare(weft, script, name, seeds):
    words = program.sets(*SMALL)
    subprocess.run([sys.executable, script, weft.binary, name, "--input", "input.toml", "--steps", "40", "--seeds", *seeds, "--output", "runs",
                    "--results", "results", "--jobs", "2", *words], cwd=weft.folder, check=True)
    return json.loads((weft.folder / "results" / f"{name}.json").read_text())


def test(weft):
    script = Path(sys.argv[2]).resolve() / "scripts" / "compare_trainings.py"
    (weft.folder / "input.toml").write_text(INPUT)
    (weft.folder / "text.txt").write_text("".join(f"{i} sheep and {i * i} goats.\n" for i in range(300)))

    result = compare(weft, script, "activations", ["1", "2"])
    assert [variant["name"] for variant in result["variants"]] == ["GELU", "ReLU²", "SwiGLU", "GEGLU"]
    for variant in result["variants"]:
        assert len(variant["loss_at_equal_tokens"]) == len(variant["loss_at_equal_time"]) == 2 and list(variant["ms_per_step"]) == ["256"]
    last = program.metrics(weft.folder / "runs/activations/gelu_2")[-1]
    assert result["variants"][0]["loss_at_equal_tokens"][1] == last["validation.loss"] and last["step"] == 40
    # At the end of the fastest variant the others have trained fewer steps.
    fastest = min(result["variants"], key=lambda variant: variant["ms_per_step"]["256"])
    assert fastest["loss_at_equal_time"] == fastest["loss_at_equal_tokens"]
    assert abs(result["seconds"] - 0.04 * fastest["ms_per_step"]["256"]) < 1e-6

    # Two lengths, of which the shorter one is that of the first half of the steps.
    result = compare(weft, script, "growth", ["1"])
    whole, growing = result["variants"][:2]
    assert list(whole["ms_per_step"]) == ["256"] and list(growing["ms_per_step"]) == ["128", "256"]
    run = weft.folder / "runs/growth/growing_from_128_1"
    assert [line["sequence"] for line in program.metrics(run)] == [128] * 20 + [256] * 20

    result = compare(weft, script, "tuning", ["1"])
    rates = {variant["name"]: variant["loss_at_equal_tokens"][0] for variant in result["variants"]}
    assert len(set(rates.values())) >= 3, rates     # greedy and plateau change the rate later than in 40 steps

    result = compare(weft, script, "sparse", ["1"])
    assert [len(variant["loss_at_equal_time"]) for variant in result["variants"]] == [1, 1]


program.main(test)
