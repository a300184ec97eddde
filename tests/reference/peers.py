# SPDX-License-Identifier: Apache-2.0
"""One training step of each project whose conventions are presets, in float64, by the formulas of that project.

Independent of transcoder.py and of the program: every constant stands here. Common to all projects is only the linear algebra,
on dense arrays: encoder E [L, F, d], b [L, F]; decoder D [L, L, F, d], source and target, 0 where the target is below the
source; decoder bias B, [L, L, d] if the project has one for each pair of layers, else [L, d].

A class gives: `normalise(statistics)`, the activation with its rules of differentiation, the loss, and the optimizer.
`Peer.step` is one step. Parameters are those that the project trains: ln theta where it trains the logarithm.
"""
from dataclasses import dataclass

import numpy as np


@dataclass
class Run:
    """What a user gives: sizes, the number of steps, and values in the place of the defaults of the project."""
    features: int
    steps: int
    given: dict


class Peer:
    learning_rate, beta1, beta2, epsilon, decay, clip = 4e-4, 0.9, 0.999, 1e-8, 0.0, 0.0
    logarithm, pairs, skip = True, False, False    # trains ln theta; a bias for each pair of layers; a skip connection

    def __init__(self, run):
        self.run = run
        for key, value in run.given.items():
            assert hasattr(self, key), key
            setattr(self, key, value)

    # --- of a project ---

    def normalise(self, mean, deviation, norm, width):
        """(mean, scale) [L, d] of one side."""
        raise NotImplementedError

    def activate(self, p, z, nu):
        """Activations, and a function (d loss / d a) -> (d loss / d z, d loss / d trained threshold or None)."""
        raise NotImplementedError

    def error(self, y, target, mean, scale):
        """(loss of the reconstruction, gradient by y), both y and target normalised."""
        raise NotImplementedError

    def penalties(self, p, z, a, nu, step):
        """(d a, d z, d trained threshold, d nu) of the penalties."""
        return 0.0, 0.0, 0.0, 0.0

    def rate(self, step):
        """Of the step after `step` completed ones."""
        return self.learning_rate

    # --- common algebra ---

    def gradients(self, p, x, y, mean, scale, step):
        n_layers = x.shape[1]
        z = np.einsum("nsd,sfd->nsf", x, p["E"]) + p["b"]
        decoder = p["D"]
        nu = np.sqrt((decoder ** 2).sum(axis=(1, 3)))
        a, backward = self.activate(p, z, nu)
        bias = p["B"].sum(axis=0) if self.pairs else p["B"]
        out = np.einsum("nsf,stfd->ntd", a, decoder) + bias
        if self.skip:
            out = out + np.einsum("ntd,ted->nte", x, p["S"])
        loss, rows = self.error(out, y, mean, scale)
        into = np.einsum("ntd,stfd->nsf", rows, decoder)
        of_a, of_z, of_threshold, of_nu = self.penalties(p, z, a, nu, step)
        to_z, to_threshold = backward(into + of_a)
        to_z = to_z + of_z
        g = {"E": np.einsum("nsf,nsd->sfd", to_z, x), "b": to_z.sum(axis=0),
             "D": np.einsum("nsf,ntd->stfd", a, rows)}
        g["D"] = g["D"] + (of_nu / np.where(nu > 0, nu, 1))[:, None, :, None] * decoder if np.ndim(of_nu) else g["D"]
        g["D"] = g["D"] * self.allowed(n_layers)[:, :, None, None]
        of_bias = rows.sum(axis=0)
        g["B"] = of_bias[None] * self.allowed(n_layers)[:, :, None] if self.pairs else of_bias
        if to_threshold is not None:
            g["T"] = to_threshold + of_threshold
        if self.skip:
            g["S"] = np.einsum("nte,ntd->ted", rows, x)
        return loss, g

    def allowed(self, n_layers):
        return np.triu(np.ones((n_layers, n_layers)))

    def step(self, p, m, v, x, y, mean, scale, step):
        """Changes parameters p and moments m, v; returns the loss of the reconstruction."""
        loss, gradients = self.gradients(p, x, y, mean, scale, step)
        norm = np.sqrt(sum((g ** 2).sum() for g in gradients.values()))
        factor = self.clip / norm if 0 < self.clip < norm else 1.0
        for name, g in gradients.items():
            g = factor * g
            m[name] = self.beta1 * m[name] + (1 - self.beta1) * g
            v[name] = self.beta2 * v[name] + (1 - self.beta2) * g * g
            root = np.sqrt(v[name] / (1 - self.beta2 ** (step + 1))) + self.epsilon
            move = m[name] / (1 - self.beta1 ** (step + 1)) / root
            if name in ("E", "D", "S"):    # Weft decays matrices only; AdamW of torch also biases and ln theta
                move = move + self.decay * p[name]
            p[name] = p[name] - self.rate(step) * move
        return loss


def linear_warmup(step, warmup):
    return min(1.0, (step + 1) / warmup)


def unit_variance(mean, deviation):
    return mean, 1.0 / (deviation + 1e-6)


def unit_norm(norm, width):
    """Rows of mean Euclidean norm sqrt(d)."""
    return np.zeros((len(norm), width)), np.repeat((np.sqrt(width) / norm)[:, None], width, axis=1)


class CrosslayerCoding(Peer):
    decay, pairs = 0.01, True
    sparsity, c, preactivation = 1e-3, 1.0, 3e-6
    bandwidth = 1.0

    def normalise(self, mean, deviation, norm, width):
        return unit_variance(mean, deviation)

    def activate(self, p, z, nu):
        theta = np.exp(p["T"])
        active = z >= theta
        near = np.abs(z - theta) <= self.bandwidth / 2
        return np.where(active, z, 0.0), lambda g: (np.where(active, g, 0.0),
                                                    (-(z / self.bandwidth) * near * g).sum(axis=0) * theta)

    def error(self, y, target, mean, scale):
        raw = (y - target) / scale
        return (raw ** 2).mean(axis=(0, 2)).sum(), 2 * raw / (len(raw) * raw.shape[2]) / scale

    def penalties(self, p, z, a, nu, step):
        now = self.sparsity * (step + 1) / self.run.steps
        slope = now * self.c * (1 - np.tanh(self.c * a * nu) ** 2)
        return slope * nu, -self.preactivation / z.size * (z < 0), 0.0, (slope * a).sum(axis=0)

    def rate(self, step):
        return self.learning_rate * (1 - 0.9 * step / self.run.steps)


class Eleuther(Peer):
    """Per layer transcoders of TopK with a skip connection, of its sweeps."""
    skip, k, warmup = True, 16, 1000

    def __init__(self, run):
        self.learning_rate = 2e-4 / np.sqrt(run.features / 2 ** 14)
        super().__init__(run)

    def normalise(self, mean, deviation, norm, width):
        return unit_norm(norm, width)

    def allowed(self, n_layers):
        return np.eye(n_layers)

    def activate(self, p, z, nu):
        positive = np.maximum(z, 0)
        kept = np.zeros(z.shape, dtype=bool)
        np.put_along_axis(kept, np.argsort(-positive, axis=2, kind="stable")[:, :, :int(self.k)], True, axis=2)
        kept &= z > 0
        return np.where(kept, z, 0.0), lambda g: (np.where(kept, g, 0.0), None)

    def error(self, y, target, mean, scale):
        total = ((target - target.mean(axis=0)) ** 2).sum(axis=(0, 2))
        return (((y - target) ** 2).sum(axis=(0, 2)) / total).sum(), 2 * (y - target) / total[None, :, None]

    def rate(self, step):
        left = 1.0 if step < self.warmup else (self.run.steps - step) / (self.run.steps - self.warmup)
        return self.learning_rate * linear_warmup(step, self.warmup) * left


class Goreg(Peer):
    learning_rate = 1e-4
    logarithm, bandwidth = False, 0.01
    sparsity, c, preactivation = 7e-4, 1.0, 1e-6

    def normalise(self, mean, deviation, norm, width):
        return unit_variance(mean, deviation)

    def activate(self, p, z, nu):
        theta = p["T"]
        active = (z > theta) & (z > 0)
        offset = (z - theta) / self.bandwidth
        near = (offset > -0.5) & (offset <= 0.5)
        return np.where(active, z, 0.0), lambda g: (np.where(z >= 0, g, 0.0),
                                                    (-(theta / self.bandwidth) * near * g).sum(axis=0))

    def error(self, y, target, mean, scale):
        return ((y - target) ** 2).mean(), 2 * (y - target) / y.size

    def penalties(self, p, z, a, nu, step):
        now = self.sparsity * (step + 1) / self.run.steps / len(z)
        slope = now * self.c * (1 - np.tanh(self.c * a * nu) ** 2)
        return slope * nu, -self.preactivation / (len(z) * z.shape[1]) * (z < 0), 0.0, (slope * a).sum(axis=0)

    def rate(self, step):
        return self.learning_rate * (1.0 if step < 0.8 * self.run.steps else 0.1)


class Dictionary(Peer):
    """What CLT-Forge and the formulas of January 2025 have in common: losses are sums, divided by the tokens."""
    clip = 1.0
    c, end = 4.0, 1.0

    def normalise(self, mean, deviation, norm, width):
        return unit_norm(norm, width)

    def error(self, y, target, mean, scale):
        return ((y - target) ** 2).sum(axis=(1, 2)).mean(), 2 * (y - target) / len(y)

    def penalties(self, p, z, a, nu, step):
        theta = np.exp(p["T"])
        now = self.sparsity * min(1.0, (step + 1) / (self.end * self.run.steps)) / len(z)
        slope = now * self.c * (1 - np.tanh(self.c * a * nu) ** 2)
        below, weight = z < theta, self.preactivation / len(z)
        return (slope * nu, -weight * nu * below, weight * (nu * below).sum(axis=0) * theta,
                (slope * a + weight * np.where(below, theta - z, 0.0)).sum(axis=0))


class CltForge(Dictionary):
    pairs, warmup, end, bandwidth = True, 1000, 0.7, 1.0
    sparsity, preactivation = 2.0, 1e-5

    def activate(self, p, z, nu):
        theta = np.exp(p["T"])
        active, near = z > theta, np.abs(z - theta) < self.bandwidth / 2
        return np.where(active, z, 0.0), lambda g: (np.where(active, g, 0.0),
                                                    (-(theta / self.bandwidth) * near * g).sum(axis=0) * theta)

    def rate(self, step):
        begin = max(0.95 * self.run.steps, self.warmup)
        left = 1.0 if step < begin else (self.run.steps - step) / (self.run.steps - begin)
        return self.learning_rate * linear_warmup(step, self.warmup) * left


class Anthropic(Dictionary):
    sparsity, preactivation, bandwidth = 10.0, 3e-6, 2.0

    def activate(self, p, z, nu):
        theta = np.exp(p["T"])
        active, near = z > theta, np.abs(z - theta) < self.bandwidth / 2
        return np.where(active, z, 0.0), lambda g: (np.where(active, g, 0.0),
                                                    (-(theta / self.bandwidth) * near * g).sum(axis=0))

    def rate(self, step):
        begin = 0.8 * self.run.steps
        return self.learning_rate * (1.0 if step < begin else (self.run.steps - step) / (self.run.steps - begin))


class OpenMoss(Peer):
    learning_rate, k, warmup = 5e-5, 256, 1000

    def normalise(self, mean, deviation, norm, width):
        return unit_norm(norm, width)

    def activate(self, p, z, nu):
        """k of the row over all layers, by relu(z nu); the activation is divided by nu again, so nu cancels."""
        ranked = np.maximum(z * nu, 0).reshape(len(z), -1)
        kept = np.zeros(ranked.shape, dtype=bool)
        np.put_along_axis(kept, np.argsort(-ranked, axis=1, kind="stable")[:, :int(self.k)], True, axis=1)
        kept = kept.reshape(z.shape) & (z > 0)
        return np.where(kept, z, 0.0), lambda g: (np.where(kept, g, 0.0), None)

    def error(self, y, target, mean, scale):
        n, n_layers, _ = y.shape
        return ((y - target) ** 2).sum() / (n * n_layers), 2 * (y - target) / (n * n_layers)

    def rate(self, step):
        return self.learning_rate * linear_warmup(step, self.warmup)


PEERS = {"crosslayer-coding": CrosslayerCoding, "eleuther": Eleuther, "goreg": Goreg, "clt-forge": CltForge,
         "openmoss": OpenMoss, "anthropic": Anthropic}
