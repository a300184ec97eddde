# SPDX-License-Identifier: Apache-2.0
"""Compares Weft with the float64 reference: gradients at equal parameters, twenty steps, initial values, evaluation.

agreement_test.py WEFT

Independent of the data order: one batch is the whole set, so the order only permutes rows, and sums over rows differ by
rounding. Gradients are computed from two checkpoints: first moments obey m' = beta1 m + (1 - beta1) g.

A mask is a discontinuous function of the pre-activations. Where a kept and a dropped value differ only by rounding, the two
programs may legitimately select differently and diverge; such a run is counted as undecided and repeated with the next seed.
"""
import copy

import numpy as np

import files
import program
import transcoder as t

N, LAYERS, WIDTH, STEPS = 64, 3, 16, 21
BETA1 = 0.9
# Largest relative difference of two pre-activations due to rounding after twenty steps: weights agree within 1e-5, which this
# test asserts.
ROUNDING = 1e-5

CASES = {
    "batch_topk": dict(activation="batch_topk", scope="layer", k=3.5, weight_decay=0.1),
    "batch_topk over all layers": dict(activation="batch_topk", scope="all_layers", k=4, normalise="scalar",
                                       schedule="linear", warmup_steps=5, decay_begin=0.4, final_fraction=0.1,
                                       clip_norm=0.05, clip_mode="exact"),
    "topk": dict(activation="topk", scope="layer", k=4, normalise="none", schedule="cosine", decay_begin=0.2,
                 clip_norm=0.05, clip_mode="previous"),
    "topk over all layers": dict(activation="topk", scope="all_layers", k=3, beta2=0.99),
    "relu": dict(activation="relu", k=4, schedule="step", decay_begin=0.5, final_fraction=0.25),
    "skip connection": dict(skip="linear", k=4, weight_decay=0.1, clip_norm=0.05),
    "tied": dict(decoder="tied", k=3.5, sparsity=0.2, clip_norm=0.05),
    "tied, jumprelu": dict(decoder="tied", activation="jumprelu", threshold=0.2, bandwidth=1, skip="linear"),
    "tied per target": dict(decoder="tied_target", k=3.5, sparsity=0.2, clip_norm=0.05, weight_decay=0.1),
    "tied per target, offsets and scales": dict(decoder="tied_target", decoder_affine=True, decoder_scale_initial=0.2, k=3.5,
                                                activation="batch_topk", clip_norm=0.05, skip="linear"),
    "tied per target, offsets, auxiliary loss": dict(decoder="tied_target", decoder_affine=True, k=0.5, auxk=0.25, auxk_features=3,
                                                     dead_window=2 * N),
    "tied per target, jumprelu": dict(decoder="tied_target", activation="jumprelu", threshold=0.2, bandwidth=1,
                                      preactivation_penalty=0.05),
    "tied per target, by decoder norm": dict(decoder="tied_target", activation="topk", k=4, ranking="decoder_norm"),
    "per layer": dict(decoder="per_layer", activation="topk", skip="linear", k=4),
    "epsilon of the loss": dict(activation="batch_topk", k=3.5, epsilon_scale="loss", epsilon=0.5),
    "autoencoder": dict(decoder="per_layer", targets="inputs", k=3.5),
    **{f"jumprelu {form}": dict(activation="jumprelu", k=4, pseudo_derivative=form, threshold=threshold, bandwidth=bandwidth,
                                clip_norm=0.05)
       for form, threshold, bandwidth in (("anthropic", 0.1, 2), ("crosslayer-coding", 0.3, 1), ("goreg", 0.2, 0.5),
                                          ("clt-forge", 0.3, 1), ("openmoss", 0.2, 2), ("saelens", 0.4, 0.25))},
    **{f"jumprelu {form}, listed windows": dict(activation="jumprelu", threshold_gradient="listed", pseudo_derivative=form,
                                                threshold=threshold, bandwidth=bandwidth, sparsity=0.2, clip_norm=0.05)
       for form, threshold, bandwidth in (("anthropic", 0.1, 2), ("crosslayer-coding", 0.4, 0.25))},
    "batch_topk, sparsity": dict(activation="batch_topk", k=3.5, sparsity=0.2, sparsity_begin=0.1, sparsity_end=0.5),
    "auxiliary loss": dict(activation="batch_topk", k=0.5, auxk=0.25, auxk_features=3, dead_window=2 * N, clip_norm=0.05),
    "auxiliary loss per layer, skip connection": dict(decoder="per_layer", skip="linear", k=0.5, auxk=0.25, auxk_features=3, dead_window=2 * N),
    "auxiliary loss, jumprelu": dict(activation="jumprelu", threshold=1.2, bandwidth=2, auxk=0.25, auxk_features=32, dead_window=2 * N),
    "auxiliary loss, tied, sparsity, skip connection": dict(decoder="tied", k=0.5, auxk=0.25, auxk_features=3, dead_window=2 * N, sparsity=0.1,
                                                            skip="linear", clip_norm=0.05),
    "k declines": dict(activation="batch_topk", k=2.5, k_initial=9, k_end=0.6),
    "k of each token declines": dict(activation="topk", k=2, k_initial=9, k_end=0.8, k_decline="linear"),
    "bandwidth changes": dict(activation="jumprelu", threshold=0.2, bandwidth=0.3, bandwidth_initial=2, bandwidth_end=0.7),
    "by decoder norm": dict(activation="batch_topk", k=3.5, ranking="decoder_norm", learning_rate=1e-2),
    "by decoder norm, each token": dict(activation="topk", scope="all_layers", k=3, ranking="decoder_norm",
                                        learning_rate=1e-2),
    "by z-score": dict(activation="batch_topk", scope="all_layers", k=3.5, ranking="z_score", normalise="scalar"),
    "by z-score, each token": dict(activation="topk", k=3, ranking="z_score"),
    "jumprelu per layer, skip connection": dict(activation="jumprelu", decoder="per_layer", skip="linear", threshold=0.2,
                                                bandwidth=1, sparsity=0.2, preactivation_penalty=0.05, clip_norm=0.05),
    "relu, linear penalty": dict(activation="relu", sparsity=0.05, sparsity_form="linear", sparsity_scale=1),
    "jumprelu, linear penalty": dict(activation="jumprelu", threshold=0.2, bandwidth=1, sparsity=0.05, sparsity_form="linear"),
    "jumprelu, penalties": dict(activation="jumprelu", threshold=0.2, bandwidth=1, sparsity=0.2, sparsity_end=0.0,
                                preactivation_penalty=0.05),
    "jumprelu goreg, penalties": dict(activation="jumprelu", pseudo_derivative="goreg", threshold=0.2, bandwidth=0.5,
                                      sparsity=0.2, sparsity_scale=1, preactivation_penalty=0.05,
                                      preactivation_form="negative"),
}


def settings_of(case):
    return t.Settings(**{"features": 32, "steps": STEPS, "learning_rate": 2e-3, "schedule": "constant", "beta1": BETA1,
                         **CASES[case]})


def input_text(s, folder, seed):
    quoted = lambda value: f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else value
    tables = {
        "run": dict(steps=s.steps, seed=seed),
        "data": dict(train=f"{folder}/train", validation=f"{folder}/validation", batch_tokens=N, normalise=s.normalise,
                     targets=s.targets),
        "transcoder": dict(features=s.features, activation=s.activation, k=s.k, scope=s.scope, decoder=s.decoder, skip=s.skip, ranking=s.ranking,
                           pseudo_derivative=s.pseudo_derivative, threshold=s.threshold, bandwidth=s.bandwidth,
                           **{key: getattr(s, key) for key in (
                               "decoder_affine", "decoder_scale_initial", "sparsity", "sparsity_form", "sparsity_scale", "sparsity_begin", "sparsity_end", "preactivation_penalty",
                               "preactivation_form", "auxk", "auxk_features", "dead_window", "k_initial", "k_end", "k_decline",
                               "bandwidth_initial", "bandwidth_end")},
                           **({"threshold_gradient": s.threshold_gradient} if s.activation == "jumprelu" else {})),
        "optimizer": {key: getattr(s, key) for key in (
            "learning_rate", "beta1", "beta2", "epsilon_scale", "epsilon", "weight_decay", "schedule", "warmup_steps", "decay_begin",
            "final_fraction", "clip_norm", "clip_mode")},
        "device": dict(precision="fp32", backend="portable"),
        "checkpoint": dict(every=1, keep_every=1),
        "log": dict(every=1),
    }
    return "\n".join(f"[{table}]\n" + "\n".join(f"{key} = {quoted(value)}" for key, value in keys.items())
                     for table, keys in tables.items())


class Data:
    def __init__(self, folder, settings):
        self.x, self.y = files.read_dataset(folder / "train")
        self.validation = files.read_dataset(folder / "validation")
        if settings.targets == "inputs":
            self.y, self.validation = self.x, (self.validation[0], self.validation[0])
        self.deviation = t.statistics(self.y).deviation
        self.inputs = t.normalisation(settings.normalise, t.statistics(self.x))
        self.targets = t.normalisation(settings.normalise, t.statistics(self.y))
        self.x_normalised = (self.x - self.inputs[0]) * self.inputs[1]
        self.y_normalised = (self.y - self.targets[0]) * self.targets[1]


def step(settings, state, data):
    """Advances `state`; returns the pass."""
    there = t.forward_backward(settings, state.weights, data.x_normalised, data.y_normalised, state.step, state.silent)
    state.silent = t.advance(state.silent, there.masks)
    t.update(settings, state, there.gradients, 2 / (N * WIDTH))
    return there


def compare_gradients(settings, run, data):
    """At Weft's parameters of several steps. Returns problems and the smallest distance of a mask from another one."""
    saved, problems, nearest = files.checkpoints(run), [], np.inf
    clipped = False
    for number in (1, STEPS // 2, STEPS - 1):
        state = files.read_state(saved[number], number, BETA1)
        if settings.clip_mode == "previous" and number > 1:      # the checkpoint lacks only the previous norm: compute it
            earlier = files.read_state(saved[number - 1], number - 1, BETA1).weights
            state.previous_norm = t.gradient_norm(
                t.forward_backward(settings, earlier, data.x_normalised, data.y_normalised).gradients)
        before = copy.copy(state.first)
        there = step(settings, state, data)
        nearest = min(nearest, there.margin)
        clipped = clipped or t.gradient_norm(there.gradients) > settings.clip_norm > 0
        weft = files.read_state(saved[number + 1], number + 1, BETA1)
        for name in state.first:
            difference = np.abs(weft.first[name] - state.first[name]).max() / (1 - BETA1)
            largest = np.abs(state.first[name] - BETA1 * before[name]).max() / (1 - BETA1)    # clipped, like Weft's
            if not difference <= 1e-5 * largest:
                problems.append(f"gradient of {name} at step {number}: off by {difference:.2e}, largest {largest:.2e}")
    assert clipped or settings.clip_norm == 0, "clip_norm is never reached: the case has no effect"
    return problems, nearest


def compare_course(settings, run, data):
    """Twenty steps from Weft's state after its first step."""
    saved, problems, nearest = files.checkpoints(run), [], np.inf
    state = files.read_state(saved[1], 1, BETA1)
    lines = {line["step"]: line for line in program.metrics(run)}
    for number in range(2, STEPS + 1):
        there = step(settings, state, data)
        nearest = min(nearest, there.margin)
        for name, expected in (("loss", there.loss), *([("auxiliary_loss", there.auxiliary)] if settings.auxk > 0 else [])):
            if not abs(lines[number][name] - expected) <= 1e-5 * expected:
                problems.append(f"{name} of step {number}: {lines[number][name]}, expected {expected}")
    weft = files.read_state(saved[STEPS], STEPS, BETA1)
    for name, expected in state.weights.items():
        difference = np.linalg.norm(weft.weights[name] - expected) / np.linalg.norm(expected)
        if not difference <= 1e-5:
            problems.append(f"{name} after {STEPS} steps: relative L2 difference {difference:.2e}")
    return problems, nearest


def compare_evaluation(settings, run, data):
    """Validation metrics of Weft's final parameters; the last of three batches is short."""
    weights = files.read_state(files.checkpoints(run)[STEPS], STEPS, BETA1).weights
    expected = t.evaluate(settings, weights, *data.validation, data.inputs, data.targets, data.deviation, N)
    found = program.record(run)["result"]["validation"]
    # fp32 reconstructions, fp64 sums; k kept values in each of several thousand entries, one of which may legitimately differ.
    return [f"validation {name}: {found[name]}, expected {values.tolist()}" for name, values in expected.items()
            if not np.allclose(found[name], values, rtol=2e-4, atol=2e-4)]


def compare_initial(weft, folder):
    """A learning rate of 1e-30 changes no fp32 weight: the first checkpoint holds the initial ones."""
    settings = copy.copy(settings_of("batch_topk"))
    settings.learning_rate, settings.weight_decay, settings.steps = 1e-30, 0.0, 1
    run = weft.train(input_text(settings, folder, 5), "initial")
    tensors = files.read_tensors(files.checkpoints(run)[1])
    for s in range(LAYERS):
        for name, bound in ((f"encoder_{s}/weight", settings.features ** -0.5),
                            (f"decoder_{s}/weight", (LAYERS * WIDTH) ** -0.5)):
            w = tensors[name]
            assert np.abs(w).max() <= bound, name
            # Uniform in +-b: deviation b / sqrt(3). For n >= 512 values the sample deviation has an error of 0.32 / sqrt(n) (one sigma).
            assert abs(w.std() * np.sqrt(3) / bound - 1) < 0.1, name
            assert abs(w.mean()) < 5 * bound / np.sqrt(3 * w.size), name
        assert np.abs(tensors[f"encoder_{s}/bias"]).max() < 1e-25
    pairs = [tensors[f"encoder_{s}/weight"] for s in range(LAYERS)]
    assert not np.array_equal(pairs[0], pairs[1]), "two layers have the same initial values"


def test(weft):
    generator = np.random.default_rng(11)
    files.write_dataset(weft.folder / "train", *files.random_rows(generator, N, LAYERS, WIDTH), rows_per_file=23)
    files.write_dataset(weft.folder / "validation", *files.random_rows(generator, 2 * N + 13, LAYERS, WIDTH), rows_per_file=100)
    compare_initial(weft, weft.folder)
    failed = False
    for case in CASES:
        settings = settings_of(case)
        data = Data(weft.folder, settings)
        for seed in range(1, 9):
            run = weft.train(input_text(settings, weft.folder, seed), f"{case.replace(' ', '_')}_{seed}")
            gradients, near_gradients = compare_gradients(settings, run, data)
            course, near_course = compare_course(settings, run, data)
            problems = compare_evaluation(settings, run, data)
            if near_gradients > ROUNDING:
                problems += gradients
            if near_course > ROUNDING:
                problems += course
            undecided = (gradients or course) and not problems
            print(f"{case}, seed {seed}: {'undecided' if undecided else 'differs' if problems else 'agrees'}; distance to another mask "
                  f"{min(near_gradients, near_course):.1e}")
            if not undecided:
                break
        else:
            problems = ["every seed was within rounding of another mask"]
        for problem in problems:
            print(f"  {problem}")
        failed = failed or bool(problems)
    assert not failed, "Weft and the reference differ"


if __name__ == "__main__":
    program.main(test)
