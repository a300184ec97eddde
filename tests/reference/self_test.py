# SPDX-License-Identifier: Apache-2.0
"""Tests of the reference: finite differences, brute-force selection, and analytical cases."""
import unittest

import numpy as np

import transcoder as t


def small_problem(seed=1, n=13, n_layers=3, width=5, **settings):
    generator = np.random.default_rng(seed)
    settings = t.Settings(features=11, k=3, **settings)
    state = t.initial_state(settings, n_layers, width, generator)
    for name in state.weights:          # non-zero biases, so that they are tested
        state.weights[name] += generator.normal(0, 0.1, state.weights[name].shape)
    return settings, state, generator.normal(size=(n, n_layers, width)), generator.normal(size=(n, n_layers, width))


class Gradients(unittest.TestCase):
    def test_every_gradient_is_the_slope_of_the_loss(self):
        for more in (dict(activation="batch_topk"), dict(activation="topk"), dict(activation="relu"), dict(skip="linear"),
                     dict(decoder="per_layer", skip="linear")):
            settings, state, x, y = small_problem(**more)
            there = t.forward_backward(settings, state.weights, x, y)
            generator = np.random.default_rng(2)
            for name, gradient in there.gradients.items():
                for _ in range(20):
                    at = tuple(generator.integers(size) for size in gradient.shape)
                    slope = self.slope(state.weights, name, at, x, y, there.masks)
                    # Central differences with step h are off by h^2 times the third derivative (h^2 = 1e-10) and by
                    # rounding of the loss over h (1e-16 / 1e-5 = 1e-11).
                    self.assertAlmostEqual(slope, gradient[at], delta=1e-8, msg=f"{more} {name}{at}")

    @staticmethod
    def slope(weights, name, at, x, y, masks, step=1e-5):
        kept = weights[name][at]
        weights[name][at] = kept + step
        above = t.loss_of(weights, x, y, masks)
        weights[name][at] = kept - step
        below = t.loss_of(weights, x, y, masks)
        weights[name][at] = kept
        return (above - below) / (2 * step)


class Selection(unittest.TestCase):
    def test_ties_go_to_the_lowest_token_layer_and_feature(self):
        z = [np.ones((2, 3)), np.ones((2, 3))]
        masks = t.select(t.Settings(features=3, k=1.25, scope="all_layers"), z)      # budget 5 of 12 equal values
        self.assertEqual(masks[0].tolist(), [[True, True, True], [False, False, False]])
        self.assertEqual(masks[1].tolist(), [[True, True, False], [False, False, False]])
        masks = t.select(t.Settings(features=3, k=2, scope="layer"), z)              # budget 4 of 6 in each layer
        for mask in masks:
            self.assertEqual(mask.tolist(), [[True, True, True], [True, False, False]])

    def test_only_positive_values_are_kept(self):
        z = [np.array([[-1.0, 0.0, 2.0], [-3.0, -2.0, -0.0]])]
        for activation in ("batch_topk", "topk", "relu"):
            mask = t.select(t.Settings(features=3, k=2, activation=activation), z)[0]
            self.assertEqual(mask.tolist(), [[False, False, True], [False, False, False]])

    def test_equals_a_sort_of_tuples(self):
        generator = np.random.default_rng(3)
        z = [generator.integers(-4, 5, (6, 7)).astype(float) for _ in range(2)]      # many ties
        settings = t.Settings(features=7, k=1.5, scope="all_layers")
        entries = sorted((-z[s][n, f], n, s, f) for s in range(2) for n in range(6) for f in range(7) if z[s][n, f] > 0)
        expected = {(n, s, f) for _, n, s, f in entries[:18]}
        masks = t.select(settings, z)
        self.assertEqual({(n, s, f) for s in range(2) for n, f in np.argwhere(masks[s])}, expected)


class Optimizer(unittest.TestCase):
    def test_first_step_moves_by_the_rate_against_the_sign(self):
        settings, state, x, y = small_problem(learning_rate=0.01, schedule="constant")
        before = {name: tensor.copy() for name, tensor in state.weights.items()}
        gradients = t.forward_backward(settings, state.weights, x, y).gradients
        t.update(settings, state, gradients)
        for name, gradient in gradients.items():
            moved, big = state.weights[name] - before[name], np.abs(gradient) > 1e-3
            # m^ / sqrt(v^) = sign(g) up to epsilon / |g| = 1e-8 / 1e-3.
            np.testing.assert_allclose(moved[big], -0.01 * np.sign(gradient[big]), rtol=2e-5)

    def test_decay_shrinks_weights_only(self):
        settings, state, x, y = small_problem(learning_rate=0.1, weight_decay=0.5, schedule="constant")
        nothing = {name: np.zeros_like(tensor) for name, tensor in state.weights.items()}
        before = {name: tensor.copy() for name, tensor in state.weights.items()}
        t.update(settings, state, nothing)
        for name in before:
            factor = 0.95 if name.endswith("/weight") else 1.0
            np.testing.assert_allclose(state.weights[name], factor * before[name], rtol=1e-15)

    def test_clipping_bounds_the_norm(self):
        settings, state, x, y = small_problem(clip_norm=1e-3, beta1=0.0, schedule="constant")
        gradients = t.forward_backward(settings, state.weights, x, y).gradients
        self.assertGreater(t.gradient_norm(gradients), 1e-3)
        t.update(settings, state, gradients)
        self.assertAlmostEqual(t.gradient_norm(state.first), 1e-3, delta=1e-15)      # beta1 = 0: the moment is the gradient

    def test_previous_norm_clips_one_step_late(self):
        settings, state, x, y = small_problem(clip_norm=1e-3, clip_mode="previous", beta1=0.0, schedule="constant")
        gradients = t.forward_backward(settings, state.weights, x, y).gradients
        norm = t.gradient_norm(gradients)
        t.update(settings, state, gradients)
        self.assertAlmostEqual(t.gradient_norm(state.first), norm, delta=1e-15)
        t.update(settings, state, gradients)
        self.assertAlmostEqual(t.gradient_norm(state.first), 1e-3, delta=1e-15)

    def test_schedules_at_their_corners(self):
        def rates(schedule, **more):
            s = t.Settings(features=1, steps=10, learning_rate=1.0, schedule=schedule, decay_begin=0.5, final_fraction=0.2, **more)
            return [t.learning_rate(s, step) for step in range(11)]
        self.assertEqual(rates("constant", warmup_steps=4)[:5], [0.25, 0.5, 0.75, 1.0, 1.0])
        for schedule in ("linear", "cosine"):
            self.assertEqual(rates(schedule)[5], 1.0)
            self.assertAlmostEqual(rates(schedule)[10], 0.2)
        self.assertAlmostEqual(rates("linear")[7], 1 - 0.8 * 0.4)
        self.assertEqual(rates("step")[4:6], [1.0, 0.2])
        self.assertAlmostEqual(rates("wsd")[7], 1 - 0.8 * np.sqrt(0.4))
        self.assertEqual(rates("linear", warmup_steps=8)[7:9], [1.0, 1.0])


class Training(unittest.TestCase):
    def test_twenty_steps_lower_the_loss(self):
        settings, state, x, y = small_problem(learning_rate=0.01, schedule="constant")
        losses = []
        for _ in range(20):
            there = t.forward_backward(settings, state.weights, x, y)
            t.update(settings, state, there.gradients)
            losses.append(there.loss)
        self.assertLess(losses[-1], 0.9 * losses[0])

    def test_statistics_and_scales(self):
        rows = np.random.default_rng(4).normal(3, 2, (50, 2, 4))
        stats = t.statistics(rows)
        mean, scale = t.normalisation("per_dimension", stats)
        normalised = (rows - mean) * scale
        np.testing.assert_allclose(normalised.std(axis=0, ddof=1), 1, rtol=1e-6)     # 1e-6 is added to the deviation
        mean, scale = t.normalisation("scalar", stats)
        np.testing.assert_allclose(np.linalg.norm((rows - mean) * scale, axis=2).mean(axis=0), 2.0)   # sqrt(d)


if __name__ == "__main__":
    unittest.main()
