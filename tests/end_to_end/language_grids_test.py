# SPDX-License-Identifier: Apache-2.0
"""A language model divided over the tensor axis: a run that passes from grid to grid at every checkpoint has the losses of
an uninterrupted one on one rank; resumed on its own grid it has the same bits; its checkpoints are those of a whole model for
the other commands; the plan compares the grids; what is not available is refused.

language_grids_test.py WEFT
"""
import json
import re
import shutil

import program

INPUT = """
[run]
steps = 12
[data]
train = "text.txt"
validation = "held_out.txt"
batch_tokens = 96
micro_tokens = 32
sequence = 16
[language_model]
preset = "llama"
layers = 2
heads = 10
kv_heads = 5
d_model = 80
tied = true
bias = true
qk_norm = "head"
[optimizer]
learning_rate = 3e-3
schedule = "constant"
warmup_steps = 2
[log]
every = 1
[checkpoint]
every = 6
keep = 9
[device]
threads = 1
"""
# tensor x data, parallel.shard; five heads of keys: an uneven cut
GRIDS = ((2, 2, "full"), (4, 1, "state"), (1, 2, "full"), (2, 1, "full"), (1, 4, "gradients"), (1, 1, "state"))


def train(weft, output, tensor, data, *options):
    weft.run("lm", "train", "input.toml", "--output", output, "--set", f"parallel.tensor={tensor}", *options, ranks=tensor * data)


def losses(weft, output):
    return {one["step"]: one["loss"] for one in program.metrics(weft.folder / output)}


def passes_from_grid_to_grid(weft, expected):
    for leg, (tensor, data, shard) in enumerate(GRIDS):
        train(weft, "moving", tensor, data, *program.sets(f"run.steps={2 * leg + 2}", f"parallel.shard={shard}"))
        grid = json.loads((weft.folder / f"moving/checkpoints/step_{2 * leg + 2:08}/manifest.json").read_text())["grid"]
        assert grid == {"tensor": tensor, "data": data}, grid
    found = losses(weft, "moving")
    assert sorted(found) == sorted(expected), (found, expected)
    for step, loss in expected.items():
        assert abs(found[step] - loss) <= 1e-6 * loss, (step, found[step], loss)


def resumes_with_the_same_bits(weft):
    train(weft, "whole", 2, 2, "--set", "log.sample_tokens=12")
    shutil.copytree(weft.folder / "whole", weft.folder / "resumed")
    shutil.rmtree(weft.folder / "resumed" / "checkpoints" / "step_00000012")
    train(weft, "resumed", 2, 2, "--set", "log.sample_tokens=12")
    samples = [(weft.folder / run / "log.txt").read_text().split("sample after step 12:\n")[1][:12] for run in ("whole", "resumed")]
    assert samples[0] == samples[1], samples
    for rank in range(4):
        assert program.shard(weft.folder / "whole", 12, rank) == program.shard(weft.folder / "resumed", 12, rank), rank
    # The last validation of the training, and that of one process that has the whole model.
    weft.run("lm", "evaluate", "whole", "--output", "evaluated")
    again = program.validation(weft.folder / "evaluated")["loss"]
    validated = program.record(weft.folder / "whole")["result"]["validation"]["loss"]
    assert abs(again - validated) <= 1e-6 * validated, (again, validated)
    assert weft.run("lm", "generate", "whole", "--prompt", "The", "--max-new-tokens", "5")


def planned(weft, *changes):
    text = weft.run("lm", "train", "input.toml", "--dry-run", *program.sets("parallel.world=4", *changes))
    rows = re.findall(r"^ +(\d) x (\d) +(state|gradients|full) +([\d.]+ \w+) +([\d.]+) (\w+) +[\d.e-]+ s(.*)$", text, re.M)
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    return {row[:3]: (float(row[4]) * units[row[5]], row[6]) for row in rows}


def the_plan_compares_grids(weft):
    rows = planned(weft, "parallel.tensor=2")
    assert list(rows) == [(t, d, s) for t, d in (("1", "4"), ("2", "2")) for s in ("state", "gradients", "full")] + [("4", "1", "state")], rows
    assert "(this run)" in rows["2", "2", "state"][1] and sum("shortest" in text for _, text in rows.values()) == 1, rows
    alone = planned(weft, "parallel.node=1")   # no group of ranks is larger than a node
    assert {tensor for tensor, _, _ in alone} == {"1"}, alone
    small = weft.run("lm", "train", "input.toml", "--dry-run", *program.sets("parallel.world=4", "device.memory=1e-5"), code=2)
    assert "device memory" in small, small


def the_program_divides(weft):
    """parallel.plan = "auto" takes what fits, has the bits of the same division by keys, and keeps it when it resumes."""
    rows = planned(weft)
    (tensor, data, shard), (least, _) = min(rows.items(), key=lambda row: row[1][0])
    assert (tensor, shard) != ("1", "state"), rows
    memory = f"device.memory={least * 1.01e-9:.9f}"
    auto = program.sets('parallel.plan="auto"', "run.steps=2", memory)
    weft.run("lm", "train", "input.toml", "--output", "divided", *auto, ranks=4)
    used = (weft.folder / "divided" / "input.toml").read_text()
    assert re.search(f'\nshard += "{shard}"', used) and re.search(f"\ntensor += {tensor}\n", used), (rows, used)
    train(weft, "by_keys", int(tensor), int(data), *program.sets("run.steps=2", f"parallel.shard={shard}"))
    for rank in range(4):
        assert program.shard(weft.folder / "divided", 2, rank) == program.shard(weft.folder / "by_keys", 2, rank), rank
    weft.run("lm", "train", "input.toml", "--output", "divided", *program.sets('parallel.plan="auto"', "run.steps=4"), ranks=4)
    grid = json.loads((weft.folder / "divided/checkpoints/step_00000004/manifest.json").read_text())["grid"]
    assert grid == {"tensor": int(tensor), "data": int(data)}, grid
    text = weft.run("lm", "train", "input.toml", "--dry-run", *program.sets('parallel.plan="auto"', "parallel.tensor=2"), code=2)
    assert "leave them out" in text, text


def refusals(weft):
    for key, value, ranks, why in (("parallel.tensor", 2, 3, "start a multiple of 2"), ("parallel.tensor", 6, 6, "kv_heads = 5"),
                                   ("parallel.world", 4, 2, "--dry-run"),
                                   ("language_model.qk_norm", '"width"', 2, "qk_norm"), ("lora.dropout", 0.1, 2, "lora.dropout")):
        options = ("--set", "parallel.tensor=2") if key != "parallel.tensor" else ()
        options += ("--set", "lora.rank=2") if key == "lora.dropout" else ()
        text = weft.run("lm", "train", "input.toml", "--output", "refused", *options, "--set", f"{key}={value}", ranks=ranks, code=2)
        assert why in text, text


def test(weft):
    (weft.folder / "text.txt").write_text(program.TEXT)
    (weft.folder / "held_out.txt").write_text(program.TEXT[-700:])
    (weft.folder / "input.toml").write_text(INPUT)
    train(weft, "one", 1, 1)
    passes_from_grid_to_grid(weft, losses(weft, "one"))
    resumes_with_the_same_bits(weft)
    the_plan_compares_grids(weft)
    the_program_divides(weft)
    refusals(weft)


program.main(test)
