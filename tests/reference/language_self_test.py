# SPDX-License-Identifier: Apache-2.0
"""Tests of the language-model reference: finite differences of every option, identities, published numbers."""
import unittest

import numpy as np

import language_model as m

VOCABULARY, SEQUENCE, SEQUENCES = 11, 7, 3
BASE = dict(layers=2, heads=4, d_model=8, d_mlp=12)
LLAMA = dict(norm="rms", mlp="swiglu", position="rope", tied=False, bias=False)

# Each option of table [language_model] at least once.
CASES = {
    "gpt2": {},
    "llama": LLAMA,
    "grouped queries": dict(LLAMA, kv_heads=2),
    "one key head": dict(kv_heads=1),
    "head norm": dict(LLAMA, kv_heads=2, qk_norm="head"),
    "width norm": dict(LLAMA, kv_heads=2, qk_norm="width"),
    "temperature": dict(kv_heads=2, qk_norm="scaled", position="rope"),
    "geglu": dict(mlp="geglu", norm="rms"),
    "relu2": dict(mlp="relu2", bias=False, tied=False),
    "post": dict(norm_position="post"),
    "both": dict(LLAMA, norm_position="both"),
    "softcaps": dict(logit_softcap=0.7, attention_softcap=0.4),
    "window": dict(window=3, position="rope"),
    "wide heads": dict(heads=2, head_size=6, position="rope"),
    "scales": dict(position="rope", attention_scale=0.4, embedding_scale=3.0, rope_factor=4.0, rope_length=5),
    "full attention in every second block": dict(window=2, full_every=2),
}


def problem(case, seed=1):
    """Settings, weights far from their initial values (all terms count) and a batch with ignored targets."""
    generator = np.random.default_rng(seed)
    s = m.Settings(**{**BASE, **CASES[case]})
    weights = {name: generator.normal(0.0 if len(shape) == 2 else 0.5, 0.4, shape)
               for name, shape in m.shapes(s, VOCABULARY, SEQUENCE).items()}
    ids = generator.integers(VOCABULARY, size=(SEQUENCES, SEQUENCE + 1))
    targets = np.where(generator.random((SEQUENCES, SEQUENCE)) < 0.2, m.IGNORED, ids[:, 1:])
    return s, weights, m.Batch(ids[:, :-1], targets)


def documents(batch):
    """The same batch with a document border inside each sequence but the first."""
    first = np.zeros_like(batch.ids)
    first[1, 3:] = 3
    first[2, 1:] = 1
    first[2, 5:] = 5
    return m.Batch(batch.ids, batch.targets, first)


class Gradients(unittest.TestCase):
    def check(self, s, weights, batch, what):
        there = m.forward_backward(s, weights, batch)
        self.assertEqual(there.gradients.keys(), weights.keys())
        generator = np.random.default_rng(2)
        for name, tensor in weights.items():
            for _ in range(4):
                at, step, loss = tuple(generator.integers(size) for size in tensor.shape), 1e-5, []
                for sign in (1, -1):
                    moved = dict(weights, **{name: tensor.copy()})
                    moved[name][at] += sign * step
                    loss.append(m.forward_backward(s, moved, batch).loss)
                # Off by step² / 6 times the third derivative, which norms of small rows make large (2e-8 occurs), and by
                # rounding of the loss over the step (1e-11).
                self.assertAlmostEqual((loss[0] - loss[1]) / (2 * step), there.gradients[name][at], delta=1e-7,
                                       msg=f"{what}: {name}{at}")

    def test_every_gradient_is_the_slope_of_the_loss(self):
        for case in CASES:
            self.check(*problem(case), case)

    def test_with_a_document_mask(self):
        for case in ("gpt2", "llama", "window"):
            s, weights, batch = problem(case)
            self.check(s, weights, documents(batch), case)


class Attention(unittest.TestCase):
    def test_the_future_has_no_effect(self):
        for case in CASES:
            s, weights, batch = problem(case)
            changed = batch.ids.copy()
            changed[:, 4:] = (changed[:, 4:] + 1) % VOCABULARY
            before = m.forward_backward(s, weights, batch).logits
            after = m.forward_backward(s, weights, m.Batch(changed, batch.targets)).logits
            np.testing.assert_array_equal(before[:, :4], after[:, :4])
            self.assertGreater(np.abs(before[:, 4:] - after[:, 4:]).max(), 1e-3)

    def test_a_document_is_computed_as_if_it_stood_alone(self):
        for case in ("gpt2", "llama", "window"):
            s, weights, batch = problem(case)
            packed = m.forward_backward(s, weights, documents(batch)).logits
            alone = m.forward_backward(s, weights, m.Batch(batch.ids[1:2, 3:], batch.targets[1:2, 3:])).logits
            np.testing.assert_allclose(packed[1:2, 3:], alone, rtol=1e-11, atol=1e-13)

    def test_a_window_over_the_sequence_is_dense(self):
        s, weights, batch = problem("window")
        logits = []
        for window in (0, SEQUENCE, SEQUENCE - 1):
            s.window = window
            logits.append(m.forward_backward(s, weights, batch).logits)
        np.testing.assert_array_equal(logits[0], logits[1])
        self.assertGreater(np.abs(logits[0] - logits[2]).max(), 1e-3)

    def test_rotated_products_depend_on_the_distance_alone(self):
        generator = np.random.default_rng(3)
        q, k = generator.normal(size=(2, 8))
        frequencies = 10000.0 ** (-2.0 * np.arange(4) / 8)
        products = [m.rotate(q, p * frequencies) @ m.rotate(k, (p - 5) * frequencies) for p in (5, 17, 400)]
        np.testing.assert_allclose(products, products[0], rtol=1e-12)
        # The pair (j, j + d/2) as a complex number, turned by exp(i angle).
        turned = (q[:4] + 1j * q[4:]) * np.exp(3j * frequencies)
        np.testing.assert_allclose(m.rotate(q, 3 * frequencies), np.concatenate([turned.real, turned.imag]), rtol=1e-14)

    def test_grouped_heads_equal_repeated_key_heads(self):
        s, weights, batch = problem("grouped queries")
        grouped = m.forward_backward(s, weights, batch).logits
        repeated, twice = dict(weights), lambda w: np.repeat(w.reshape(2, 2, -1), 2, axis=0).reshape(8, -1)
        for name in (f"block_{layer}/attention/{side}/weight" for layer in range(2) for side in ("key", "value")):
            repeated[name] = twice(weights[name])
        s.kv_heads = s.heads
        np.testing.assert_allclose(m.forward_backward(s, repeated, batch).logits, grouped, rtol=1e-11, atol=1e-12)


class PublishedNumbers(unittest.TestCase):
    def test_rms_norm(self):
        there = m.Pass(m.Settings(layers=1, heads=1, d_model=4, d_mlp=4, norm="rms"),
                       {"n/weight": np.array([1, 0.5, 2, -1])})
        _, backward = there.norm("n", np.array([[1.0, 2, 3, 4]]))
        np.testing.assert_allclose(backward(np.array([[0.1, 0.2, -0.3, 0.4]])),
                                   [[0.07424674, 0.11197866, -0.10589311, 0.00486844]], atol=5e-9)
        np.testing.assert_allclose(there.gradients["n/weight"], [0.03651481, 0.14605925, -0.32863332, 0.58423701], atol=5e-9)

    def test_activations(self):
        value, slope = m.silu(1.0)
        np.testing.assert_allclose([2 * value, value, 2 * slope], [1.46211716, 0.73105858, 1.85534102], atol=5e-9)
        np.testing.assert_allclose(m.gelu(1.0), [0.84119199, 1.08296406], atol=5e-9)
        np.testing.assert_allclose(m.relu2(np.array([-2.0, 3.0])), [[0, 9], [0, 6]])

    def test_scaled_query(self):
        _, backward = m.normalise(np.array([3.0, 4.0]), 0.0)      # sqrt(2) q / |q|
        np.testing.assert_allclose(backward(np.array([1.0, 0.0])), [0.18101934, -0.13576450], atol=5e-9)

    def test_cross_entropy(self):
        there = m.Pass(m.Settings(layers=1, heads=1, d_model=4, d_mlp=4), {})
        dz = there.cross_entropy(np.array([[[1.0, 2, 3], [5, 5, 5]]]), np.array([[0, m.IGNORED]]))
        self.assertAlmostEqual(there.loss, 2.40760596, delta=5e-9)
        np.testing.assert_allclose(dz, [[[-0.90996943, 0.24472847, 0.66524096], [0, 0, 0]]], atol=5e-9)

    def test_adamw(self):
        state = m.initial_state({"w": np.array([[1.0]])})
        values = []
        for g in (0.1, -0.2):
            m.update(m.Optimizer(clip_norm=0.0), state, {"w": np.array([[g]])}, 1e-3)
            values.append(state.weights["w"].item())
        np.testing.assert_allclose(values, [0.9989000001, 0.9991634840], atol=5e-11)

    def test_number_of_parameters(self):
        """Of GPT-2 and of the character models whose losses are on record."""
        def count(vocabulary, sequence, **settings):
            return sum(int(np.prod(shape)) for shape in m.shapes(m.Settings(**settings), vocabulary, sequence).values())
        for layers, width, expected in ((12, 768, 124439808), (24, 1024, 354823168), (36, 1280, 774030080), (48, 1600, 1557611200)):
            self.assertEqual(count(50257, 1024, layers=layers, heads=width // 64, d_model=width, d_mlp=4 * width), expected)
        self.assertEqual(count(63, 256, layers=6, heads=6, d_model=384, d_mlp=1536), 10770048)
        self.assertEqual(count(63, 256, layers=6, heads=6, d_model=384, d_mlp=1024, **LLAMA), 10670208)
        self.assertEqual(count(63, 128, layers=4, heads=4, d_model=128, d_mlp=512), 817792)


class Training(unittest.TestCase):
    def test_initial_loss_is_the_logarithm_of_the_vocabulary(self):
        s, _, batch = problem("gpt2")
        weights = m.initial_weights(s, VOCABULARY, SEQUENCE, np.random.default_rng(1))
        # Logits have a deviation of about 0.02 sqrt(C) = 0.06.
        self.assertAlmostEqual(m.forward_backward(s, weights, batch).loss, np.log(VOCABULARY), delta=0.1)

    def test_clipping_bounds_the_norm(self):
        s, weights, batch = problem("gpt2")
        gradients = m.forward_backward(s, weights, batch).gradients
        state = m.initial_state(weights)
        norm = m.update(m.Optimizer(beta1=0.0, clip_norm=1e-3), state, gradients, 1e-3)
        self.assertGreater(norm, 1e-3)
        self.assertAlmostEqual(m.gradient_norm(state.first), 1e-3, delta=1e-15)     # beta1 = 0: the moment is the gradient

    def test_twenty_steps_lower_the_loss(self):
        s, _, batch = problem("llama")
        state = m.initial_state(m.initial_weights(s, VOCABULARY, SEQUENCE, np.random.default_rng(1)))
        losses = []
        for _ in range(20):
            there = m.forward_backward(s, state.weights, batch)
            m.update(m.Optimizer(), state, there.gradients, 0.01)
            losses.append(there.loss)
        self.assertLess(losses[-1], 0.5 * losses[0])


if __name__ == "__main__":
    unittest.main()
