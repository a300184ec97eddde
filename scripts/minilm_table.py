# SPDX-License-Identifier: Apache-2.0
"""Learning quality of every variant of the transcoder on the MiniLM activations, as one table.

minilm_table.py WEFT [--features 768 3072] [--only NAME ...] [--seeds 1] [--output FOLDER]

Each run is inputs/minilm_best.toml (300 steps of 512 tokens, k = 16) with the settings of VARIANTS below. Writes Markdown to
standard output: validation NMSE (standardised), active features per token and layer, and dead features, means over layers and
seeds. Runs that are complete in FOLDER (default: runs/minilm_table) are not repeated. Needs WEFT_TEST_DATA.
"""
import argparse
import json
import subprocess
import sys
from pathlib import Path

INPUT = Path(__file__).resolve().parent.parent / "inputs" / "minilm_best.toml"
# Recipe for features at which it differs from that of minilm_best.toml.
RECIPE = {}
VARIANTS = {
    "topk, layer": {},
    "topk, all layers": {"transcoder.scope": "all_layers"},
    "batch_topk, layer": {"transcoder.activation": "batch_topk"},
    "batch_topk, all layers": {"transcoder.activation": "batch_topk", "transcoder.scope": "all_layers"},
    "topk, linear skip": {"transcoder.skip": "linear"},
    "batch_topk, linear skip": {"transcoder.activation": "batch_topk", "transcoder.skip": "linear"},
    "topk, per layer": {"transcoder.decoder": "per_layer"},
    "topk, per layer, linear skip": {"transcoder.decoder": "per_layer", "transcoder.skip": "linear"},
    "topk, autoencoder (targets are the inputs)": {"transcoder.decoder": "per_layer", "data.targets": "inputs"},
}
MEASURES = ("nmse_standardised_mean", "l0_mean", "dead_fraction_mean")


def settings_of(variant, features, seed):
    return {"transcoder.features": features, "run.seed": seed, **RECIPE.get(features, {}), **VARIANTS[variant]}


def measure(weft, settings, run):
    """The three measures of a run, trained first unless it is complete."""
    record = run / "run.json"
    if not record.exists() or json.loads(record.read_text())["exit"]["code"] != 0:
        sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        done = subprocess.run([weft, "train", INPUT, "--output", run, *sets], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{run}: exit code {done.returncode}\n{done.stdout[-2000:]}")
    validation = json.loads(record.read_text())["result"]["validation"]
    return [validation[name] for name in MEASURES]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weft", type=Path)
    parser.add_argument("--features", type=int, nargs="+", default=[768, 3072])
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--output", type=Path, default=Path("runs/minilm_table"))
    options = parser.parse_args()

    titles = [f"F = {features}: {name}" for features in options.features for name in ("NMSE", "L0", "dead, %")]
    print("| " + " | ".join(["variant", *titles]) + " |")
    print("|---|" + "---:|" * len(titles))
    for variant in options.only:
        cells = []
        for features in options.features:
            runs = []
            for seed in options.seeds:
                name = "".join(c if c.isalnum() else "_" for c in variant)
                runs.append(measure(options.weft, settings_of(variant, features, seed),
                                    options.output / f"{name}_{features}_{seed}"))
            nmse, l0, dead = (sum(values) / len(runs) for values in zip(*runs))
            cells += [f"{nmse:.4f}", f"{l0:.2f}", f"{100 * dead:.1f}"]
        print("| " + " | ".join([variant, *cells]) + " |", flush=True)


if __name__ == "__main__":
    main()
