# SPDX-License-Identifier: Apache-2.0
"""Tests of the reference: finite differences, brute-force selection, and analytical cases."""
import unittest

import numpy as np

import peers
import transcoder as t


def small_problem(seed=1, n=13, n_layers=3, width=5, **settings):
    generator = np.random.default_rng(seed)
    settings = t.Settings(features=11, k=3, **settings)
    state = t.initial_state(settings, n_layers, width, generator)
    for name in state.weights:          # non-zero biases, so that they are tested
        if name.endswith("/threshold"):
            state.weights[name] *= generator.uniform(0.5, 2, state.weights[name].shape)
            continue
        state.weights[name] += generator.normal(0, 0.1, state.weights[name].shape)
    return settings, state, generator.normal(size=(n, n_layers, width)), generator.normal(size=(n, n_layers, width))


class Gradients(unittest.TestCase):
    def test_every_gradient_is_the_slope_of_the_loss(self):
        for more in (dict(activation="batch_topk"), dict(activation="topk"), dict(activation="relu"), dict(activation="jumprelu"),
                     dict(skip="linear"), dict(decoder="per_layer", skip="linear"), dict(decoder="tied"),
                     dict(decoder="tied_target"), dict(decoder="tied_target", decoder_affine=True, decoder_scale_initial=0.3)):
            settings, state, x, y = small_problem(**more)
            there = t.forward_backward(settings, state.weights, x, y)
            generator = np.random.default_rng(2)
            for name, gradient in there.gradients.items():
                if name.endswith("/threshold"):      # no slope: the loss is constant between two masks
                    continue
                for _ in range(20):
                    at = tuple(generator.integers(size) for size in gradient.shape)
                    slope = self.slope(state.weights, name, at, x, y, there.masks)
                    # Central differences with step h are off by h^2 times the third derivative (h^2 = 1e-10) and by
                    # rounding of the loss over h (1e-16 / 1e-5 = 1e-11).
                    self.assertAlmostEqual(slope, gradient[at], delta=1e-8, msg=f"{more} {name}{at}")

    def test_gradients_of_the_penalties_reach_encoders_and_norms_of_decoders(self):
        for more in (dict(decoder="tied", sparsity=0.7), dict(decoder="tied_target", sparsity=0.7),
                     dict(activation="relu", sparsity=0.3, sparsity_form="linear"),
                     dict(activation="batch_topk", sparsity=0.7, sparsity_begin=0.2, sparsity_end=0.6, steps=10),
                     dict(activation="jumprelu", sparsity=0.7, preactivation_penalty=0.3),
                     dict(activation="jumprelu", preactivation_penalty=0.3, preactivation_form="negative")):
            settings, state, x, y = small_problem(**more)
            there = t.forward_backward(settings, state.weights, x, y, step=4)
            generator = np.random.default_rng(2)
            for name, gradient in there.gradients.items():
                if name.endswith("/threshold"):
                    continue
                for _ in range(20):
                    at = tuple(generator.integers(size) for size in gradient.shape)
                    slope = self.slope(state.weights, name, at, x, y, there.masks, settings=settings)
                    self.assertAlmostEqual(slope, gradient[at], delta=1e-8, msg=f"{more} {name}{at}")

    def test_gradients_of_the_auxiliary_loss(self):
        for more in (dict(activation="batch_topk"), dict(decoder="per_layer", skip="linear"),
                     dict(decoder="tied_target", decoder_affine=True, decoder_scale_initial=0.3)):
            settings, state, x, y = small_problem(auxk=0.4, auxk_features=2, dead_window=5, **more)
            generator = np.random.default_rng(4)
            silent = [generator.integers(0, 10, 11) for _ in range(3)]
            with_it = t.forward_backward(settings, state.weights, x, y, silent=silent)
            without = t.forward_backward(settings, state.weights, x, y)
            for s in range(3):
                self.assertTrue((with_it.dead_activations[s][:, silent[s] < 5] == 0).all())
                self.assertEqual((with_it.dead_activations[s] > 0).sum(axis=1).max(), 2)
            kept = [dead > 0 for dead in with_it.dead_activations]

            def loss():
                z = t.encode(state.weights, x)
                return t.auxiliary_loss(settings, state.weights, x, -with_it.error,      # the residual is a constant
                                        [np.where(mask, value, 0.0) for mask, value in zip(kept, z)])[0]

            self.assertAlmostEqual(loss(), with_it.auxiliary)
            for name, gradient in with_it.gradients.items():
                weights = state.weights[name]
                for _ in range(20):
                    at = tuple(generator.integers(size) for size in gradient.shape)
                    before = weights[at]
                    weights[at] = before + 1e-5
                    above = loss()
                    weights[at] = before - 1e-5
                    slope = (above - loss()) / 2e-5
                    weights[at] = before
                    expected = 0.0 if name.startswith("decoder_bias") or name.startswith("skip") else slope
                    self.assertAlmostEqual(gradient[at] - without.gradients[name][at], expected, delta=1e-8, msg=f"{name}{at}")

    def test_penalty_on_inactive_values_moves_thresholds_by_its_slope(self):
        # At a given mask the loss is differentiable in ln theta through this penalty alone.
        with_it, state, x, y = small_problem(activation="jumprelu", preactivation_penalty=0.3)
        without = t.Settings(**{**with_it.__dict__, "preactivation_penalty": 0.0})
        masks = t.forward_backward(with_it, state.weights, x, y).masks
        gradients = [t.forward_backward(s, state.weights, x, y).gradients for s in (with_it, without)]
        for layer in range(3):
            name = f"encoder_{layer}/threshold"
            for at in range(11):
                slope = state.weights[name][at] * (self.slope(state.weights, name, (at,), x, y, masks, settings=with_it)
                                                   - self.slope(state.weights, name, (at,), x, y, masks, settings=without))
                self.assertAlmostEqual(slope, gradients[0][name][at] - gradients[1][name][at], delta=1e-8)

    def test_the_coefficient_rises_between_its_two_fractions(self):
        settings = t.Settings(features=1, steps=10, sparsity=1.0, sparsity_begin=0.2, sparsity_end=0.6)
        rising = [t.sparsity_coefficient(settings, step) for step in range(10)]
        np.testing.assert_allclose(rising, [0, 0, 0.25, 0.5, 0.75, 1, 1, 1, 1, 1])

    @staticmethod
    def slope(weights, name, at, x, y, masks, step=1e-5, settings=None):
        kept = weights[name][at]
        weights[name][at] = kept + step
        above = t.loss_of(weights, x, y, masks, settings, step=4)
        weights[name][at] = kept - step
        below = t.loss_of(weights, x, y, masks, settings, step=4)
        weights[name][at] = kept
        return (above - below) / (2 * step)


class Peers(unittest.TestCase):
    def test_the_gradient_rows_of_every_project_are_the_slope_of_its_error(self):
        generator = np.random.default_rng(6)
        y, target = generator.normal(size=(2, 7, 3, 5))
        mean, scale = generator.normal(size=(3, 5)), generator.uniform(0.5, 2, (3, 5))
        for name, project in peers.PEERS.items():
            peer = project(peers.Run(8, 10, {}))
            _, rows = peer.error(y, target, mean, scale)
            for at in np.ndindex(y.shape):
                above, below = y.copy(), y.copy()
                above[at] += 1e-5
                below[at] -= 1e-5
                slope = (peer.error(above, target, mean, scale)[0] - peer.error(below, target, mean, scale)[0]) / 2e-5
                # Errors are quadratic: central differences are exact but for the rounding of the sum, 1e-14 / 1e-5.
                self.assertAlmostEqual(slope, rows[at], delta=1e-7, msg=f"{name}{at}")


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


class JumpReLU(unittest.TestCase):
    # Of a threshold 0.5 and a bandwidth 0.5: the factor at z = 0, the lower border of the window 0.25, between 0.375, at the
    # threshold, between 0.625, at the upper border 0.75, and at 1. Written out by hand from the definitions.
    Z = np.array([0, 0.25, 0.375, 0.5, 0.625, 0.75, 1.0])
    FACTORS = {"anthropic": [0, 0, -1, -1, -1, 0, 0],
               "crosslayer-coding": [0, -0.25, -0.375, -0.5, -0.625, -0.75, 0],
               "goreg": [0, 0, -1, -1, -1, -1, 0],
               "clt-forge": [0, 0, -0.5, -0.5, -0.5, 0, 0],
               "openmoss": [0, 0, -0.5, -0.5, -0.5, 0, 0],
               "saelens": [0, 0, -0.5, -0.5, -0.5, 0, 0]}

    def test_each_form_equals_its_definition(self):
        for form, factors in self.FACTORS.items():
            settings = t.Settings(features=7, activation="jumprelu", pseudo_derivative=form, bandwidth=0.5)
            theta = np.full(7, 0.5)
            np.testing.assert_array_equal(t.threshold_factor(settings, self.Z, theta), factors, err_msg=form)
            active = self.Z > 0.5 if form != "crosslayer-coding" else self.Z >= 0.5
            np.testing.assert_array_equal(t.select(settings, [self.Z[None]], [theta])[0][0], active, err_msg=form)
            passes = np.full(7, True) if form == "goreg" else active
            np.testing.assert_array_equal(t.passing(settings, self.Z, theta), passes, err_msg=form)
        # A window that reaches below 0: only openmoss excludes negative values.
        for form in self.FACTORS:
            settings = t.Settings(features=1, activation="jumprelu", pseudo_derivative=form, bandwidth=2)
            self.assertEqual(t.threshold_factor(settings, np.array([-0.25]), np.array([0.5]))[0] == 0, form == "openmoss", form)


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
