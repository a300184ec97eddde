# SPDX-License-Identifier: Apache-2.0
"""What must not depend on the grid of ranks or the batch, and that every combination of variants trains (docs/verification.md)."""
import itertools

import numpy as np

import files
import program

INPUT = program.SYNTHETIC + """
dtype = "fp32"
[run]
steps = {steps}
[data]
train = "{folder}/data/train"
batch_tokens = {tokens}
normalise = "per_dimension"
[transcoder]
features = 48
activation = "{activation}"
k = 3
[optimizer]
learning_rate = {rate}
[device]
precision = "fp32"
"""
# The smallest rate that is accepted: weights keep all bits, and the model is the same on every grid.
STILL = 1.2e-38


def exports_of_grids(weft):
    """The files of an export do not depend on how the checkpoint was divided."""
    expected = None
    for ranks in (1, 2):
        text = INPUT.format(folder=weft.folder, steps=2, tokens=64, activation="relu", rate=STILL)
        run = weft.train(text, f"exported_{ranks}", ranks=ranks)
        shards = list((run / "checkpoints/step_00000002").glob("rank_*.h5"))
        assert len(shards) == ranks, shards
        for kind in ("circuit-tracer", "crosslayer-coding"):
            weft.run("export", run, f"export_{ranks}_{kind}", "--to", kind, "--type", "fp32")
        found = {path.relative_to(weft.folder / f"export_{ranks}_{kind}"): path.read_bytes()
                 for kind in ("circuit-tracer", "crosslayer-coding")
                 for path in (weft.folder / f"export_{ranks}_{kind}").iterdir()}
        expected = expected or found
        assert found == expected, ranks


def clocks(weft):
    """Clocks of dead features count tokens of all ranks: at equal tokens they are equal on every grid, and for other batches up to
    one batch."""
    found = {}
    for tokens, ranks in ((64, 1), (64, 2), (128, 1)):
        text = INPUT.format(folder=weft.folder, steps=512 // tokens, tokens=tokens, activation="topk", rate=STILL)
        run = weft.train(text, f"clocks_{tokens}_{ranks}", "--set", "transcoder.k=1", ranks=ranks)
        tensors = files.read_tensors(run / f"checkpoints/step_{512 // tokens:08d}")
        found[tokens, ranks] = np.concatenate([tensors[f"encoder_{s}/tokens_since_fired"] for s in range(2)])
    one = found[64, 1]
    never = one == 512
    assert never.any() and not never.all(), one      # k = 1: some features never win
    assert np.array_equal(one, found[64, 2])
    assert np.array_equal(never, found[128, 1] == 512)
    assert np.abs(one - found[128, 1]).max() <= 64, (one, found[128, 1])


def combinations(weft):
    """Every decoder with every activation, scope and skip connection makes two steps with a finite, falling loss."""
    for decoder, activation, scope, skip in itertools.product(
            ("cross_layer", "per_layer", "tied", "tied_target", "low_rank"), ("relu", "jumprelu", "topk", "batch_topk"), ("layer", "all_layers"),
            ("none", "linear")):
        if scope == "all_layers" and activation in ("relu", "jumprelu"):
            continue        # they have no budget
        text = INPUT.format(folder=weft.folder, steps=2, tokens=64, activation=activation, rate=1e-2)
        name = f"{decoder}_{activation}_{scope}_{skip}"
        run = weft.train(text, name, "--set", f"transcoder.decoder={decoder}", "--set", f"transcoder.scope={scope}", "--set",
                         f"transcoder.skip={skip}", "--set", f"transcoder.rank={4 if decoder == 'low_rank' else 0}", "--set", "log.every=1",
                         "--set", "data.validation=")
        losses = [line["loss"] for line in program.metrics(run) if "loss" in line]
        assert len(losses) == 2 and np.isfinite(losses).all() and losses[1] < losses[0], (name, losses)


def validation(weft):
    """Measures of rows that were trained on are announced as such."""
    for name, warned in (("train", True), ("validation", False)):
        output = weft.run("train", "synth.toml", "--output", f"validated_on_{name}", "--set", f"data.validation={weft.folder}/data/{name}")
        assert ("has the activations of data.train" in output) == warned, output


def test(weft):
    (weft.folder / "synth.toml").write_text(INPUT.format(folder=weft.folder, steps=1, tokens=64, activation="relu", rate=1e-3))
    weft.run("synth", "synth.toml")
    exports_of_grids(weft)
    clocks(weft)
    validation(weft)
    combinations(weft)


program.main(test)
