# SPDX-License-Identifier: Apache-2.0
"""Same result on any grid of ranks: training curves of 1 to 4 ranks, on the feature axis, the data axis and both, agree within the stated
tolerance, and each kind of grid repeats bit for bit. On real activations if available, else on planted ones. More ranks and every
state: trainer_test; other grids at every start: fault_worlds.

grids_test.py WEFT
"""
import curves
import program

GRIDS = (1, 1), (1, 2), (2, 1), (1, 3), (2, 2), (3, 1), (1, 4), (4, 1)
REPEATED = (1, 2), (2, 2), (3, 1)
STEPS, TOKENS = 40, 250
# Stated tolerance between grids: loss of the first 10 steps within 1e-5 in fp32.
TOLERANCE = 1e-5
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
batch_tokens = {tokens}
[transcoder]
features = 131
k = 8
scope = "layer"
[optimizer]
learning_rate = 1e-3
schedule = "constant"
[checkpoint]
every = {half}
[device]
threads = 1
[log]
every = 1
"""


def check_communication(run, data, feature, width):
    """Compares the recorded bytes with those of the algorithm, where ranks have equal shares; a single rank records none."""
    record, lines = program.record(run), program.metrics(run)
    if data * feature == 1:
        assert "communication" not in record and not any("communication" in line for line in lines)
        return
    sent = record["communication"]["bytes"]
    assert all(line["communication"]["bytes_sent"] > 0 for line in lines)
    assert all(line["communication"]["exposed_seconds"] >= 0 for line in lines)
    mean = sum(line["communication"]["bytes_sent"] for line in lines) / len(lines)
    # With several groups, reading the result of a step completes the exchange of its weights, which would be part of the next step.
    assert mean <= sent + 1 and (data > 1 or mean >= sent - 1), (mean, sent)
    exchanges = record["communication"]["exchanges"]
    assert abs(sum(one["bytes"] for one in exchanges.values()) - sent) <= 1e-6 * sent
    if data == 1:
        # Partial sums of a token are sent by all ranks except its owner, its gradient row to all others: fp32.
        for name in ("partial sums", "gradient rows"):
            expected = TOKENS * width * 4 * (feature - 1) / feature
            assert abs(exchanges[name]["bytes"] - expected) <= 1e-6 * expected, (name, exchanges[name], expected)
            assert exchanges[name]["ms"] > 0 and exchanges[name]["gb_per_second"] > 0, exchanges[name]


def check(weft):
    folder = weft.folder
    real = curves.real_data()
    source = real or f"{folder}/data"
    text = INPUT.format(folder=folder, steps=STEPS, half=STEPS // 2, tokens=TOKENS, train=f"{source}/train", validation=f"{source}/validation")
    if not real:
        path = folder / "synthetic.toml"
        path.write_text(text)
        weft.run("synth", path)

    def train(name, data, feature):
        return weft.train(text, name, "--set", f"parallel.data={data}", "--set", f"parallel.feature={feature}",
                          ranks=data * feature)

    found = {}
    for data, feature in GRIDS:
        name = f"{data}x{feature}"
        run = train(f"grid_{name}", data, feature)
        found[name] = curves.Curve(run)
        loss, nmse = found[name].agree(found["1x1"], TOLERANCE, name)
        check_communication(run, data, feature, 6 * 384 if real else 3 * 24)
        # With several ranks on the data axis only, sums over tokens stay on one rank; only the product of the dense library may differ.
        bits = not curves.different_tensors(run, folder / "grid_1x1", STEPS)
        print(f"{name}: loss of the first steps within {loss:.1e} of one rank, validation error of each layer within {nmse:.1e}"
              f"{', checkpoint bit-identical' if bits else ''}", flush=True)
        if (data, feature) in REPEATED:
            curves.same_bits(run, train(f"grid_{name}_again", data, feature), STEPS)

    # Advice about the grid is given once, not by each rank.
    output = weft.run("train", folder / "grid_1x1.toml", "--dry-run", "--set", "parallel.data=2", "--set", "data.batch_tokens=4",
                      "--set", "transcoder.features=4000", ranks=2)
    assert output.count("consider parallel.data = 1") == 1, output

    # A grid that does not match the ranks is an input error: code 2 before anything is written.
    output = weft.run("train", folder / "grid_1x1.toml", "--output", folder / "none", "--set", "parallel.data=2",
                      "--set", "parallel.feature=2", code=2)
    assert "parallel.data = 2 times parallel.feature = 2 is not the 1 rank" in output, output
    assert not (folder / "none").exists()


program.main(check)
