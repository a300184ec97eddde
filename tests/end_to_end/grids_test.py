# SPDX-License-Identifier: Apache-2.0
"""One result on any grid of ranks: training curves of 1 to 4 ranks, on the feature axis, the data axis and both, agree within
the stated tolerance, and each grid repeats bit for bit. On real activations where they are at hand, else on planted ones.

grids_test.py WEFT
"""
import os

import files
import program

GRIDS = ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1))
STEPS = 40
# decisions: loss of the first 10 steps within 1e-5, final standardised NMSE of each layer within 1 %.
LOSS_TOLERANCE, NMSE_TOLERANCE = 1e-5, 0.01
INPUT = """
[synthetic]
output = "{folder}/data"
layers = 3
d_model = 24
features = 48
k = 4
tokens = 1500
validation_tokens = 301
rows_per_file = 400
[run]
steps = {steps}
[data]
train = "{train}"
validation = "{validation}"
batch_tokens = 250
[transcoder]
features = 131
k = 8
scope = "layer"
[optimizer]
learning_rate = 1e-3
schedule = "constant"
[device]
threads = 1
[log]
every = 1
"""


def run(weft, text, name, data, feature):
    path = weft.train(text, name, "--set", f"parallel.data={data}", "--set", f"parallel.feature={feature}",
                      ranks=data * feature)
    tensors = files.read_tensors(path / "checkpoints" / f"step_{STEPS:08d}")
    return [line["loss"] for line in program.metrics(path)], program.record(path)["result"]["validation"], tensors


def close(a, b, tolerance, what):
    assert abs(a - b) <= tolerance * abs(b), f"{what}: {a} against {b}"


def check(weft):
    folder = weft.folder
    real = os.environ.get("WEFT_TEST_DATA")
    source = f"{real}/minilm-l6" if real else f"{folder}/data"
    text = INPUT.format(folder=folder, steps=STEPS, train=f"{source}/train", validation=f"{source}/validation")
    if not real:
        path = folder / "synthetic.toml"
        path.write_text(text)
        weft.run("synth", path)
    expected = None
    for data, feature in GRIDS:
        name = f"grid_{data}x{feature}"
        losses, validation, tensors = run(weft, text, name, data, feature)
        if expected is None:
            expected = losses, validation, tensors
        for step, (mine, one) in enumerate(zip(losses[:10], expected[0])):
            close(mine, one, LOSS_TOLERANCE, f"{name}, loss of step {step + 1}")
        for layer, (mine, one) in enumerate(zip(validation["nmse_standardised"], expected[1]["nmse_standardised"])):
            close(mine, one, NMSE_TOLERANCE, f"{name}, NMSE of layer {layer}")
        worst = max(abs(a - b) / b for a, b in zip(losses[:10], expected[0]))
        # Sums over tokens stay on one rank when only the data axis has several: what may differ is the dense library's product.
        same = all(values.tobytes() == expected[2][key].tobytes() for key, values in tensors.items())
        bits = ", the same bits in the checkpoint" if same else ""
        print(f"{name}: loss of the first 10 steps within {worst:.1e} of one rank{bits}")
        if (data, feature) in ((1, 2), (2, 2), (3, 1)):
            again = run(weft, text, name + "_again", data, feature)
            assert again[0] == losses
            assert all(values.tobytes() == again[2][key].tobytes() for key, values in tensors.items())

    # A grid that does not fit the ranks is a mistake of the input: code 2 before anything is written.
    output = weft.run("train", folder / "grid_1x1.toml", "--output", folder / "none", "--set", "parallel.data=2",
                      "--set", "parallel.feature=2", code=2)
    assert "parallel.data = 2 times parallel.feature = 2 is not the 1 rank" in output, output
    assert not (folder / "none").exists()


program.main(check)
