# SPDX-License-Identifier: Apache-2.0
"""Gradients of low-rank adapters in `weft lm train` against the float64 reference of the model, for every linear layer.

lora_agreement_test.py WEFT

The reference knows no adapters: it gets the merged weights W + alpha / rank B A. Expected gradients are its central differences in
float64, along the gradient that Weft has formed, and the chain rule of its own gradients, element by element. Gradients of Weft
follow from two checkpoints: m' = beta1 m + (1 - beta1) g.
"""
import numpy as np

import files
import language_model as m
import program
from language_agreement_test import Case, Text, read_state, write_text

RANK, ALPHA, STEPS = 3, 5.0, 4
MODELS = ("gpt2", "llama, grouped queries, window")


class Adapted(Case):
    """The same model with adapters of all its linear layers; gradients are not clipped."""

    def __init__(self, name, initial):
        super().__init__(name)
        self.model["initial"] = initial
        self.optimizer["clip_norm"] = 0
        self.steps = STEPS

    def settings(self):
        return m.Settings(**{key: value for key, value in self.model.items() if key not in ("preset", "initial")})

    def text(self):
        return super().text() + f"\n[lora]\nrank = {RANK}\nalpha = {ALPHA}\n"


def split(tensors):
    """(base weights, {layer: (A, B)}); the A of layers that are cut by their inputs is stored transposed."""
    base = {name: tensor for name, tensor in tensors.items() if "/lora_" not in name}
    adapters = {}
    for name in tensors:
        if name.endswith("/lora_a"):
            layer = name.removesuffix("/lora_a")
            a = tensors[name].T if layer.endswith(("attention/output", "mlp/down")) else tensors[name]
            adapters[layer] = (a, tensors[layer + "/lora_b"])
    return base, adapters


def merged(base, adapters):
    weights = dict(base)
    for layer, (a, b) in adapters.items():
        weights[layer + "/weight"] = weights[layer + "/weight"] + ALPHA / RANK * b @ a
    return weights


def compare(weft, name, number):
    base_case = Case(name)
    base_case.steps = 2
    base_case.train(weft, f"base_{number}")
    case = Adapted(name, f"base_{number}")
    run = case.train(weft, f"adapted_{number}")
    s, text, saved = case.settings(), Text(weft.folder, case), files.checkpoints(run)
    beta1, records = case.optimizer["beta1"], {line["step"]: line for line in program.metrics(run)}
    initial = read_state(files.checkpoints(weft.folder / f"base_{number}")[2], 2).weights
    expected_layers = 7 if s.mlp in ("swiglu", "geglu") else 6
    for step in (2, STEPS):
        before, after = read_state(saved[step - 1], step - 1), read_state(saved[step], step)
        base, adapters = split(before.weights)
        for layer, weight in initial.items():
            np.testing.assert_array_equal(base[layer], weight, err_msg=f"{layer} is frozen")
        assert len(adapters) == expected_layers * s.layers, adapters.keys()
        batch = text.batch(step - 1)
        there = m.forward_backward(s, merged(base, adapters), batch)
        assert abs(records[step]["loss"] - there.loss) <= 1e-5 * there.loss, (step, records[step]["loss"], there.loss)
        first = [split(state.first)[1] for state in (before, after)]
        squares = 0
        for layer, (a, b) in adapters.items():
            found = [(late - beta1 * early) / (1 - beta1) for early, late in zip(first[0][layer], first[1][layer])]
            squares += sum((gradient ** 2).sum() for gradient in found)
            dw = there.gradients[layer + "/weight"]
            chain = ALPHA / RANK * b.T @ dw, ALPHA / RANK * dw @ a.T
            for part, gradient, expected in zip("AB", found, chain):
                # As in language_agreement_test: of the gradient, or of the moments where they are larger.
                largest = max(np.abs(expected).max(), *(np.abs(moments[layer]["AB".index(part)]).max() for moments in first))
                assert np.abs(gradient - expected).max() <= 1e-5 * largest, (layer, part, np.abs(gradient - expected).max(), largest)

            def loss(distance):
                moved = {**adapters, layer: (a + distance * found[0] / size, b + distance * found[1] / size)}
                return m.forward_backward(s, merged(base, moved), batch).loss

            size = np.sqrt(sum((gradient ** 2).sum() for gradient in found))
            slope = (loss(1e-4) - loss(-1e-4)) / 2e-4
            # The gradient of Weft is in fp32; the formula is exact to 1e-8 times the third derivative.
            assert abs(slope - size) <= 1e-4 * size, (layer, slope, size)
        assert abs(records[step]["gradient_norm"] - np.sqrt(squares)) <= 1e-5 * np.sqrt(squares)
    for layer, (a, _) in split(read_state(saved[1], 1).weights)[1].items():
        # Initial values uniform in +-1 / sqrt(inputs), and one step of Adam with a gradient of 0: B begins with 0.
        bound = 1 / np.sqrt(a.shape[1])
        assert np.abs(a).max() <= bound and np.abs(a).max() > 0.8 * bound, layer
    print(f"{name}: gradients of {len(adapters)} adapters agree")


def test(weft):
    write_text(weft.folder / "train.txt", 400, 1)
    write_text(weft.folder / "validation.txt", 80, 2)
    for number, name in enumerate(MODELS):
        compare(weft, name, number)


if __name__ == "__main__":
    program.main(test)
