# SPDX-License-Identifier: Apache-2.0
"""Ten steps of every preset against the formulas of its project (peers.py), in float64.

presets_test.py WEFT

The input names the preset, the data and the sizes, and what a project leaves to its user. Each preset runs as it is and with
large coefficients of its penalties, so that their reductions count. One batch is the whole set, so the order of rows does not
matter. The ten steps start from the program's first checkpoint.

A mask is a discontinuous function: where a value lies within rounding of a threshold, a border of a band or another value, the
programs may differ; such a run is repeated with the next seed.
"""
import tomllib

import numpy as np

import files
import peers
import program

N, LAYERS, WIDTH, FEATURES, STEPS = 64, 3, 16, 32, 11
# Of the distance that a tensor moves. Gradients are sums in fp32 over N tokens, relative to their terms exact to about 1e-6;
# Adam divides by their size, so that elements whose terms cancel differ most. A penalty that is off by a percent gives 1e-3.
TOLERANCE = 2e-4

SHORT = dict(warmup=3)    # of a run of 11 steps; the projects have 1000
CASES = {
    "crosslayer-coding": (dict(learning_rate=2e-3), dict(learning_rate=2e-3, sparsity=0.05, preactivation=5.0)),
    "eleuther": (SHORT, dict(SHORT, k=3)),
    "goreg": ({}, dict(bandwidth=0.5, sparsity=0.5, preactivation=1.0)),
    "clt-forge": (SHORT, dict(SHORT, sparsity=40.0, preactivation=0.5)),
    "openmoss": (dict(SHORT, k=24), dict(SHORT, k=7, learning_rate=2e-3)),
    "anthropic": ({}, dict(sparsity=100.0, preactivation=0.5)),
}
# The keys of these values.
KEYS = dict(learning_rate="optimizer.learning_rate", warmup="optimizer.warmup_steps", sparsity="transcoder.sparsity",
            preactivation="transcoder.preactivation_penalty", bandwidth="transcoder.bandwidth", k="transcoder.k")


def input_text(preset, given, folder, seed):
    tables = {"run": dict(steps=STEPS, seed=seed), "data": dict(train=f"{folder}/train", batch_tokens=N),
              "transcoder": dict(features=FEATURES, preset=preset), "optimizer": {}, "checkpoint": dict(every=1, keep_every=1),
              "log": dict(every=1), "device": dict(precision="fp32", backend="portable")}
    for name, value in given.items():
        table, key = KEYS[name].split(".")
        tables[table]["k_total" if key == "k" and preset == "openmoss" else key] = value
    quoted = lambda value: f'"{value}"' if isinstance(value, str) else value
    return "\n".join(f"[{table}]\n" + "\n".join(f"{key} = {quoted(value)}" for key, value in keys.items())
                     for table, keys in tables.items())


def tensors_of(peer, stored, suffix):
    """The program's tensors as arrays of peers.py. suffix: "" weights, else moments."""
    at = lambda name: stored[name + suffix].astype(np.float64)
    p = {"E": np.stack([at(f"encoder_{s}/weight") for s in range(LAYERS)]),
         "b": np.stack([at(f"encoder_{s}/bias") for s in range(LAYERS)]),
         "D": np.zeros((LAYERS, LAYERS, FEATURES, WIDTH)), "B": at("decoder_bias").reshape(LAYERS, WIDTH)}
    for s in range(LAYERS):
        strips = at(f"decoder_{s}/weight").reshape(FEATURES, -1, WIDTH)
        for i in range(strips.shape[1]):
            p["D"][s, s + i] = strips[:, i]
    if peer.pairs:
        allowed, one = peer.allowed(LAYERS)[:, :, None], 1 if suffix else np.arange(1, LAYERS + 1)[:, None]
        p["B"] = allowed * (p["B"] / one)[None]
    if "encoder_0/threshold" in stored:
        p["T"] = np.stack([at(f"encoder_{s}/threshold") for s in range(LAYERS)])
        if peer.logarithm and not suffix:
            p["T"] = np.log(p["T"])
    if peer.skip:
        p["S"] = np.stack([at(f"skip_{t}/weight") for t in range(LAYERS)])
    return p


def compare(preset, given, run, x, y):
    peer = peers.PEERS[preset](peers.Run(FEATURES, STEPS, given))
    sides = []
    for rows in (x, y):
        mean, scale = peer.normalise(rows.mean(axis=0), rows.std(axis=0, ddof=1),
                                     np.sqrt((rows ** 2).sum(axis=2)).mean(axis=0), WIDTH)
        sides.append(((rows - mean) * scale, mean, scale))
    (x, _, _), (y, mean, scale) = sides
    saved = files.checkpoints(run)
    first = files.read_tensors(saved[1])
    p = tensors_of(peer, first, "")
    begin = {name: value.copy() for name, value in p.items()}
    m, v = tensors_of(peer, first, ".first_moment"), tensors_of(peer, first, ".second_moment")
    losses = {line["step"]: line["loss"] for line in program.metrics(run)}
    problems = []
    for step in range(1, STEPS):
        loss = peer.step(p, m, v, x, y, mean, scale, step)
        if not abs(losses[step + 1] - loss) <= 1e-5 * loss:
            problems.append(f"loss of step {step + 1}: {losses[step + 1]}, expected {loss}")
    found = tensors_of(peer, files.read_tensors(saved[STEPS]), "")
    for name, expected in p.items():
        moved = np.linalg.norm(expected - begin[name])
        off = np.linalg.norm(found[name] - expected)
        assert moved > 0, f"{name} does not move"
        if not off <= TOLERANCE * moved:
            problems.append(f"{name}: off by {off / moved:.1e} of the distance it moved")
    return problems


def resolved(run):
    return tomllib.loads((run / "input.toml").read_text())


def test(weft):
    generator = np.random.default_rng(5)
    x, y = files.random_rows(generator, N, LAYERS, WIDTH)
    files.write_dataset(weft.folder / "train", x, y, rows_per_file=23)
    failed = False
    for preset, cases in CASES.items():
        for number, given in enumerate(cases):
            for seed in range(1, 5):
                run = weft.train(input_text(preset, given, weft.folder, seed), f"{preset}_{number}_{seed}")
                assert resolved(run)["transcoder"]["preset"] == preset
                problems = compare(preset, given, run, x, y)
                print(f"{preset} {given}, seed {seed}: {'differs' if problems else 'agrees'}")
                for problem in problems:
                    print(f"  {problem}")
                if not problems:
                    break
            failed = failed or bool(problems)
    assert not failed, "Weft and the formulas of a project differ"


if __name__ == "__main__":
    program.main(test)
