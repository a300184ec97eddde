# SPDX-License-Identifier: Apache-2.0
"""Trains a shipped parity input and compares its losses with those of the same training in PyTorch.

parity_test.py WEFT REPOSITORY CASE

The PyTorch figures are of seeds 0, 1, 2 with the same text, model, initial distribution, optimizer, schedule and batches of
random windows. Random numbers differ, so only the spread of seeds can agree.
"""
import os
import sys
from pathlib import Path

import numpy as np

import program

# Validation losses of PyTorch, allowed distance from their range, training losses after 1/4, 1/2, 3/4 and all steps.
CASES = {
    "tiny": ((1.7843, 1.8111, 1.7878), 0.02, (2.190, 2.040, 1.758, 1.639)),
    "gpt": ((1.1710, 1.1686, 1.1705), 0.005, (1.140, 0.889, 0.760, 0.731)),
    "llama": ((1.2541, 1.2378, 1.2623), 0.02, (0.994, 0.812, 0.692, 0.649)),
}


def test(weft):
    repository, case = Path(sys.argv[2]), sys.argv[3]
    losses, margin, curve = CASES[case]
    if not os.environ.get("WEFT_TEST_DATA"):
        program.skip("WEFT_TEST_DATA is not set: no text")
    if case != "tiny":
        program.needs_gpu()
    os.environ["OMP_NUM_THREADS"] = "2"
    run = weft.folder / "run"
    weft.run("lm", "train", repository / "inputs" / f"lm_parity_{case}.toml", "--output", run, "--set", "log.every=1")
    record, metrics = program.record(run), program.metrics(run)
    steps = record["result"]["step"]
    means = [np.mean([line["loss"] for line in metrics if abs(line["step"] - round(quarter * steps / 4)) <= 10]) for quarter in (1, 2, 3, 4)]
    loss = record["result"]["validation"]["loss"]
    print(f"{case}: validation loss {loss:.4f}, PyTorch {losses}; training losses {np.round(means, 3)}, PyTorch {curve}")
    low, high = min(losses) * (1 - margin), max(losses) * (1 + margin)
    assert low <= loss <= high, f"validation loss {loss}, expected {low:.4f} to {high:.4f}"
    # PyTorch's are losses of one batch: of 2,048 or 16,384 tokens, with a deviation of some 0.05.
    np.testing.assert_allclose(means, curve, atol=0.15)


if __name__ == "__main__":
    program.main(test)
