# SPDX-License-Identifier: Apache-2.0
"""What must not depend on the grid of ranks or the batch, and that every combination of variants trains (docs/trust.md)."""
import numpy as np

import covering
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
    """Every decoder with every activation, scope and skip connection makes two steps with a finite, falling loss: all pairs occur."""
    factors = {"decoder": ("cross_layer", "per_layer", "tied", "tied_target"),
               "selection": ("relu layer", "jumprelu layer", "topk layer", "topk all_layers", "batch_topk layer", "batch_topk all_layers"),
               "skip": ("none", "linear")}
    for row in covering.pairs(factors):
        decoder, skip, (activation, scope) = row["decoder"], row["skip"], row["selection"].split()
        text = INPUT.format(folder=weft.folder, steps=2, tokens=64, activation=activation, rate=1e-2)
        name = f"{decoder}_{activation}_{scope}_{skip}"
        run = weft.train(text, name, *program.sets(f"transcoder.decoder={decoder}", f"transcoder.scope={scope}", f"transcoder.skip={skip}",
                                                   "log.every=1"))
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
    clocks(weft)
    validation(weft)
    combinations(weft)


program.main(test)
