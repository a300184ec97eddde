# SPDX-License-Identifier: Apache-2.0
"""run.steps raised on a finished run: what happens to the learning rate is in the log, and is what docs/trust.md states.

extend_test.py WEFT
"""
import program

INPUT = """\
[run]
steps = 10
[data]
train = "{folder}/text.txt"
tokens = "character"
sequence = 16
batch_tokens = 64
[language_model]
layers = 1
d_model = 16
heads = 2
d_mlp = 32
[optimizer]
learning_rate = 1e-3
schedule = "{schedule}"
final_fraction = 0.1
warmup_steps = 0
[log]
every = 1
sample_tokens = 0
"""


def check(weft):
    def rates(run):
        return [line["learning_rate"] for line in program.metrics(run)]

    def train(run, schedule, *options):
        source = weft.folder / f"{run}.toml"
        source.write_text(INPUT.format(folder=weft.folder, schedule=schedule))
        words = program.sets(*options)
        return weft.run("lm", "train", source, "--output", weft.folder / run, *words)

    (weft.folder / "text.txt").write_text("In the beginning was the word, and the word was long enough.\n" * 60)

    # Stretched: the rate is that of a schedule over 20 steps, and the log has both rates.
    train("stretched", "linear")
    old = rates(weft.folder / "stretched")
    output = train("stretched", "linear", "run.steps=20")
    assert "warning: the learning rate was 0.00019 at step 10 and is 0.00055 at step 11 (its schedule extended over 10 steps, now over 20)" in output, output
    assert "run.steps is 20" not in output, output      # said once
    new = rates(weft.folder / "stretched")
    assert new[:10] == old and abs(new[10] - 0.00055) < 1e-9 and new[10] > old[9] and new[19] < new[10], new

    # The old schedule kept: its last rate from there on.
    train("kept", "linear")
    output = train("kept", "linear", "run.steps=20", "optimizer.schedule_steps=10")
    assert "warning: the learning rate" not in output, output
    assert "run.steps is 20, was 10: the learning rate of the next step is as planned (the schedule extends over 10 steps), and 0.0001 at step 20" in output, output
    kept = rates(weft.folder / "kept")
    assert kept[:10] == old and all(abs(rate - 1e-4) < 1e-10 for rate in kept[10:]), kept

    # A constant rate.
    train("constant", "constant")
    output = train("constant", "constant", "run.steps=20")
    assert "warning" not in output and "run.steps is 20, was 10: the learning rate of the next step is as planned" in output, output

    # Nothing more to do: nothing is said of a schedule, and the run is left as it is.
    record = (weft.folder / "constant" / "run.json").read_bytes()
    output = train("constant", "constant", "run.steps=20")
    assert "the run is finished, all 20 steps are done" in output and "learning rate" not in output, output
    assert (weft.folder / "constant" / "run.json").read_bytes() == record

    # A start that is refused leaves the record of the finished run too.
    output = weft.run("lm", "train", weft.folder / "constant.toml", "--output", weft.folder / "constant", "--set", "run.steps=30",
                      "--set", "language_model.d_mlp=64", code=2)
    assert "belongs to a run with another input" in output, output
    assert (weft.folder / "constant" / "run.json").read_bytes() == record
    train("constant", "constant", "run.steps=30")
    assert program.record(weft.folder / "constant")["result"]["step"] == 30


program.main(check)
