# SPDX-License-Identifier: Apache-2.0
"""The learning rate of a language model follows its loss, and a resumed run has the same bits.

tuning_test.py WEFT
"""
import re

import program

INPUT = """
[run]
steps = 12
[data]
train = "text.txt"
batch_tokens = 256
sequence = 32
[language_model]
layers = 1
heads = 2
d_model = 32
[optimizer]
learning_rate = 1e-3
schedule = "constant"
warmup_steps = 2
tuning = "{tuning}"
tuning_patience = 2
[log]
every = 1
sample_tokens = 0
"""


def train(weft, tuning, name, *arguments):
    source = weft.folder / f"{tuning}.toml"
    source.write_text(INPUT.format(tuning=tuning))
    printed = weft.run("lm", "train", source, "--output", weft.folder / name, *arguments)
    return weft.folder / name, printed


def check(weft, tuning):
    """Returns the learning rates of an uninterrupted run and what it printed."""
    whole, printed = train(weft, tuning, f"{tuning}_whole")
    half, _ = train(weft, tuning, f"{tuning}_halves", "--set", "run.steps=7")
    _, second = train(weft, tuning, f"{tuning}_halves")
    assert "instead of" not in second, second     # the sweep belongs to a new run
    assert program.shard(whole, 12) == program.shard(half, 12), f"{tuning}: the resumed run has other bits"
    rates = [line["learning_rate"] for line in program.metrics(whole)]
    assert rates == [line["learning_rate"] for line in program.metrics(half)]
    return rates, printed


def test(weft):
    (weft.folder / "text.txt").write_text("One fish, two fish, red fish, blue fish.\n" * 50)
    # The loss falls in every step: each second step after the warm-up raises the rate.
    rates, _ = check(weft, "greedy")
    for step, rate in enumerate(rates, 1):
        expected = 1e-3 * (0.5 if step == 1 else (10 / 9) ** max(0, (step - 2) // 2))
        assert abs(rate - expected) <= 1e-6 * expected, (step, rate, expected)
    rates, printed = check(weft, "range")
    found = float(re.search(r"learning rate (\S+) instead of 0.001", printed).group(1))
    assert 1e-6 < found < 0.1 and abs(rates[-1] - found) < 0.01 * found, (found, rates)
    # Not the rate of the input: the key matters. A run does not change it.
    rates, _ = check(weft, "none")
    assert rates[-1] == rates[2] and abs(rates[-1] - 1e-3) < 1e-9, rates
    refused = weft.run("lm", "train", weft.folder / "none.toml", "--output", weft.folder / "none_halves",
                       "--set", 'optimizer.tuning="greedy"', "--set", "run.steps=14", code=2)
    assert "optimizer.tuning was" in refused, refused


program.main(test)
