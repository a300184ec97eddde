# SPDX-License-Identifier: Apache-2.0
"""The reference on real activations: minilm.py DATA/minilm-l6 [SEED]. Takes several minutes; not a test.

Prints the NMSE (standardised) per layer with which inputs/minilm.toml is compared (dataset's README, mean of three seeds):
validation 0.377 0.477 0.535 0.461 0.363 0.430, mean 0.4405.
"""
import sys
from pathlib import Path

import numpy as np

import files
import transcoder as t


def main():
    directory, seed = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    x, y = files.read_dataset(directory / "train")
    settings = t.Settings(features=768, k=16, steps=300, learning_rate=1e-3, schedule="constant")
    inputs, targets = t.statistics(x), t.statistics(y)
    inputs_by, targets_by = t.normalisation("per_dimension", inputs), t.normalisation("per_dimension", targets)
    normalise = lambda rows, by: ((rows - by[0]) * by[1]).astype(np.float32)      # float64 would take twice as long
    x, y = normalise(x, inputs_by), normalise(y, targets_by)
    generator = np.random.default_rng(seed)
    state = t.initial_state(settings, x.shape[1], x.shape[2], generator, np.float32)
    order = np.concatenate([generator.permutation(len(x)) for _ in range(settings.steps * 512 // len(x) + 1)])
    for step in range(settings.steps):
        rows = order[step * 512:(step + 1) * 512]
        there = t.forward_backward(settings, state.weights, x[rows], y[rows])
        t.update(settings, state, there.gradients)
        if step % 20 == 19:
            print(f"step {step + 1}: loss {there.loss:.4f}", flush=True)
    held_out = files.read_dataset(directory / "validation")
    result = t.evaluate(settings, state.weights, *held_out, inputs_by, targets_by, targets.deviation, 512)
    for name, values in result.items():
        print(f"{name:20s}", *(f"{value:.4f}" for value in values), f"mean {np.mean(values):.4f}")


if __name__ == "__main__":
    main()
