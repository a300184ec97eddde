#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Table of the MLP's activations at equal parameters: trains a small language model with each, for several seeds.

compare_mlp_activations.py WEFT [INPUT] [--steps N] [--seeds 1 2 3] [--width 128] [--output DIR] [--set table.key=value ...]

INPUT: by default inputs/lm_character.toml. The MLP of gelu and relu2 has the width 3 d_model, that of swiglu and geglu 2 d_model, and no
matrix has a bias: both have 6 d_model^2 weights per block. Validation loss in nats per token, mean over the seeds and half of the
distance between the best and the worst: at equal tokens (after the last step), and at equal time (interpolated at the time at which the
fastest run ended; on an otherwise idle machine). Runs that are complete in DIR are not repeated.
"""
import argparse
import json
import subprocess
import sys
from pathlib import Path

ACTIVATIONS = {"gelu": 3, "relu2": 3, "swiglu": 2, "geglu": 2}  # widths of the MLP per d_model
EVALUATIONS = 20


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weft")
    parser.add_argument("input", nargs="?", default="inputs/lm_character.toml")
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--width", type=int, default=128, help="language_model.d_model")
    parser.add_argument("--output", type=Path, default=Path("runs/mlp_activations"))
    parser.add_argument("--set", action="append", default=[], metavar="table.key=value")
    return parser.parse_args()


def curve(options, activation, seed):
    """[(seconds, validation loss)] of a run."""
    run = options.output / f"{activation}_{seed}"
    settings = [f"run.steps={options.steps}", f"run.seed={seed}", f"language_model.d_model={options.width}",
                f"language_model.mlp={activation}", f"language_model.d_mlp={ACTIVATIONS[activation] * options.width}",
                "language_model.bias=false", f"log.evaluate_every={max(1, options.steps // EVALUATIONS)}",
                "log.sample_tokens=0", *options.set]
    command = [options.weft, "lm", "train", options.input, "--output", str(run)]
    done = subprocess.run(command + [part for setting in settings for part in ("--set", setting)], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\n{' '.join(command)} ended with {done.returncode}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    points = [(line["seconds"], line["validation.loss"]) for line in lines if "validation.loss" in line]
    if not points:
        sys.exit(f"{run}: has no validation losses (the input needs data.validation or data.validation_fraction)")
    return points


def at_time(points, seconds):
    """The loss at a time between two evaluations."""
    for (t0, loss0), (t1, loss1) in zip(points, points[1:]):
        if seconds <= t1:
            return loss0 + (loss1 - loss0) * max(0.0, seconds - t0) / (t1 - t0)
    return points[-1][1]


def summary(losses):
    return f"{sum(losses) / len(losses):.4f} ± {(max(losses) - min(losses)) / 2:.4f}"


def main():
    options = arguments()
    curves = {activation: [curve(options, activation, seed) for seed in options.seeds] for activation in ACTIVATIONS}
    end = min(points[-1][0] for runs in curves.values() for points in runs)
    print(f"{options.input}, d_model {options.width}, {options.steps} steps, seeds {', '.join(map(str, options.seeds))}\n")
    print(f"| activation | validation loss at equal tokens | at equal time ({end:.1f} s) | seconds per run |\n|---|---:|---:|---:|")
    for activation, runs in curves.items():
        print(f"| {activation} | {summary([points[-1][1] for points in runs])} | "
              f"{summary([at_time(points, end) for points in runs])} | {sum(points[-1][0] for points in runs) / len(runs):.1f} |")


if __name__ == "__main__":
    main()
