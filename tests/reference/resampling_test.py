# SPDX-License-Identifier: Apache-2.0
"""Resampled dead features and encoder biases from data, against NumPy.

resampling_test.py WEFT

A step from the program's checkpoint is computed by the reference. After a step with resampling, features that have been silent
must point at a token and at its error, and all others must be what the reference gives.
"""
import numpy as np

import agreement_test as agreement
import files
import program
import transcoder as t

N, LAYERS, WIDTH, FEATURES, STEPS = 64, 3, 16, 40, 4
CASES = {
    "topk": dict(activation="topk", k=2),
    "tied": dict(activation="topk", k=2, decoder="tied"),
    "per layer, jumprelu": dict(activation="jumprelu", decoder="per_layer", threshold=0.9, bandwidth=1),
}


def settings_of(case):
    return t.Settings(features=FEATURES, steps=STEPS, learning_rate=2e-3, beta1=agreement.BETA1, dead_window=N, **CASES[case])


def train(weft, case, name, seed, **keys):
    text = agreement.input_text(settings_of(case), weft.folder, seed)
    lines = "".join(f'{key} = {value}\n' for key, value in keys.items())
    return weft.train(text.replace("[transcoder]\n", f"[transcoder]\n{lines}"), name)


def cosines(rows, directions):
    """[rows, directions]"""
    unit = lambda m: m / np.linalg.norm(m, axis=1, keepdims=True)
    return unit(rows) @ unit(directions).T


def check_resampling(weft, case, seed):
    """Problems, and the tokens that were drawn, after step 2."""
    settings, data = settings_of(case), agreement.Data(weft.folder, settings_of(case))
    run = train(weft, case, f"resampled_{case.replace(' ', '_').replace(',', '')}_{seed}", seed, resample_every=2, resample_end=0.5)
    saved, problems, drawn = files.checkpoints(run), [], []
    state = files.read_state(saved[1], 1, agreement.BETA1)
    there = agreement.step(settings, state, data)
    if there.margin <= agreement.ROUNDING:
        return ["within rounding of another mask"], []
    found = files.read_state(saved[2], 2, agreement.BETA1)
    for s in range(LAYERS):
        dead = state.silent[s] >= N
        assert 0 < dead.sum() < FEATURES, f"{dead.sum()} features are dead"
        decoder = t.decoder_name(found.weights, s)
        rows = there.error[:, s:] if decoder == f"decoder_{s}/weight" and "per" not in case else there.error[:, s:s + 1]
        if decoder.endswith("tied_weight"):
            rows = there.error[:, s:].sum(axis=1, keepdims=True)
        strip = rows.reshape(N, -1)
        encoders = found.weights[f"encoder_{s}/weight"]
        aligned = cosines(encoders[dead], data.x_normalised[:, s])
        token = aligned.argmax(axis=1)
        drawn += [(s, n) for n in token]
        # fp32 rows; the error from parameters that agree within 1e-5.
        if not np.all(aligned.max(axis=1) > 1 - 1e-6):
            problems.append(f"encoder_{s}: rows of dead features are those of no token")
        against = np.take_along_axis(cosines(found.weights[decoder][dead], strip), token[:, None], 1)
        if not np.all(against < -1 + 1e-5):
            problems.append(f"{decoder}: rows are not the errors of the tokens")
        norms = np.linalg.norm(encoders[dead], axis=1), np.linalg.norm(found.weights[decoder][dead], axis=1)
        width = found.weights[decoder].shape[1]
        first = found.weights[t.decoder_name(found.weights, 0)].shape[1]
        for norm, expected in zip(norms, (np.sqrt(WIDTH / 3 / FEATURES), np.sqrt(width / 3 / first))):
            if not np.allclose(norm, expected, rtol=1e-5):
                problems.append(f"layer {s}: norm of a row is {norm[0]}, expected {expected}")
        for name, fresh in ((f"encoder_{s}/bias", 0.0), (f"encoder_{s}/threshold", settings.threshold)):
            if name in found.weights and not np.allclose(found.weights[name][dead], fresh, rtol=1e-6):
                problems.append(f"{name} of dead features is not that of the beginning")
        if not np.all(found.silent[s][dead] == 0) or not np.all(found.silent[s][~dead] == state.silent[s][~dead]):
            problems.append(f"layer {s}: clocks")
        for name in (f"encoder_{s}/weight", f"encoder_{s}/bias", decoder):
            if found.first[name][dead].any() or found.second[name][dead].any():
                problems.append(f"{name}: moments of dead features are not 0")
            if not np.allclose(found.weights[name][~dead], state.weights[name][~dead], rtol=0, atol=1e-6):
                problems.append(f"{name}: other features have changed")
    # Step 4 is beyond resample_end.
    later = files.read_state(saved[4], 4, agreement.BETA1)
    if not any(clock.max() >= 2 * N for clock in later.silent):
        problems.append("resampled after resample_end")
    return problems, drawn


def check_biases(weft):
    """A learning rate of 1e-30 changes no parameter: the first checkpoint holds the initial biases."""
    case, active = "per layer, jumprelu", 7
    settings, data = settings_of(case), agreement.Data(weft.folder, settings_of(case))
    text = agreement.input_text(settings, weft.folder, 3).replace("learning_rate = 0.002", "learning_rate = 1e-30")
    run = weft.train(text.replace("[transcoder]\n", f'[transcoder]\nencoder_bias_initial = "data"\ninitially_active = {active}\n'),
                     "biases")
    weights = files.read_state(files.checkpoints(run)[1], 1, agreement.BETA1).weights
    for s in range(LAYERS):
        z = data.x_normalised[:, s] @ weights[f"encoder_{s}/weight"].T
        tokens, ordered = int(active / FEATURES * N), np.sort(z, axis=0)[::-1]
        expected = settings.threshold - (ordered[tokens - 1] + ordered[tokens]) / 2
        # Products of 16 terms in fp32.
        assert np.allclose(weights[f"encoder_{s}/bias"], expected, rtol=0, atol=1e-5), f"biases of layer {s}"
    l0 = program.metrics(run)[0]["l0"]
    assert l0 == 11 / 64 * FEATURES, l0    # floor(7 / 40 * 64) = 11 of 64 tokens for each of 40 features


def test(weft):
    generator = np.random.default_rng(11)
    files.write_dataset(weft.folder / "train", *files.random_rows(generator, N, LAYERS, WIDTH), rows_per_file=23)
    files.write_dataset(weft.folder / "validation", *files.random_rows(generator, N, LAYERS, WIDTH), rows_per_file=100)
    check_biases(weft)
    drawn = set()
    for case in CASES:
        for seed in range(1, 5):
            problems, tokens = check_resampling(weft, case, seed)
            print(f"{case}, seed {seed}: {problems or 'agrees'}, {len(tokens)} features")
            drawn |= set(tokens)
            if not problems:
                break
        assert not problems, case
    assert len(drawn) > N // 2, "few tokens are ever drawn"


if __name__ == "__main__":
    program.main(test)
