# SPDX-License-Identifier: Apache-2.0
"""Learning quality of every variant of the transcoder on the MiniLM activations, as one table.

minilm_table.py WEFT [--features 768 3072] [--only NAME ...] [--seeds 1] [--validation whole | choose | judge] [--jobs 1]
                [--set table.key=value ...] [--output FOLDER]

Each run is inputs/minilm_best.toml (300 steps of 512 tokens, k = 16) with the settings of RECIPE and VARIANTS below. Writes
Markdown to standard output: validation NMSE (standardised), active features per token and layer, and dead features, means over layers and
seeds. Runs that are complete in FOLDER (default: runs/minilm_table) are not repeated. Needs WEFT_TEST_DATA.

A recipe must not be chosen on the data by which it is judged: "choose" is the first file of the validation set, "judge" the second.
"""
import argparse
import json
import os
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

INPUT = Path(__file__).resolve().parent.parent / "inputs" / "minilm_best.toml"
# Schedule and rates were chosen on the first half of the validation set: a rate that falls to zero from 70 % of the run on is better than
# a tenth of it from 80 % on, and bears a higher rate. Four times the features need a lower one.
COMMON = {"optimizer.beta2": 0.97, "optimizer.weight_decay": 2.3, "optimizer.warmup_steps": 40, "optimizer.schedule": "wsd",
          "optimizer.decay_begin": 0.7, "optimizer.final_fraction": 0.0}
RECIPE = {768: {**COMMON, "optimizer.learning_rate": 2e-2}, 3072: {**COMMON, "optimizer.learning_rate": 1.5e-2}}
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
DEAD = {"transcoder.auxk": 0.03125, "transcoder.auxk_features": 64, "transcoder.dead_window": 5000}
DECLINE = {"transcoder.k_initial": 48, "transcoder.k_end": 0.6}
VARIANTS.update({
    "topk, k declines": DECLINE,
    "topk, auxiliary loss": DEAD,
    "topk, k declines, auxiliary loss": {**DECLINE, **DEAD},
    "batch_topk by decoder norm, layer": {"transcoder.activation": "batch_topk", "transcoder.ranking": "decoder_norm"},
    "batch_topk by z-score, layer": {"transcoder.activation": "batch_topk", "transcoder.ranking": "z_score"},
    "topk, resampling": {"transcoder.dead_window": 5000, "transcoder.resample_every": 60, "transcoder.resample_end": 0.5},
    "topk, encoder biases from the first batch": {"transcoder.encoder_bias_initial": "data", "transcoder.initially_active": 50},
    "topk, tied per source": {"transcoder.decoder": "tied"},
    "topk, tied per target": {"transcoder.decoder": "tied_target"},
    "topk, tied per target, offsets and scales": {"transcoder.decoder": "tied_target", "transcoder.decoder_affine": "true",
                                                  "transcoder.decoder_scale_initial": 0.1},
    "relu, linear penalty": {"transcoder.activation": "relu", "transcoder.sparsity_form": "linear", "transcoder.sparsity_scale": 1,
                             "transcoder.sparsity_end": 0.5},
    "jumprelu, tanh penalty": {"transcoder.activation": "jumprelu", "transcoder.bandwidth": 1, "transcoder.sparsity_end": 0.5},
})
# Coefficients by which about 16 features are active; what a run reaches is in the column L0.
SPARSITY = {("relu, linear penalty", 768): 0.0045, ("relu, linear penalty", 3072): 0.0062,
            ("jumprelu, tanh penalty", 768): 0.0004, ("jumprelu, tanh penalty", 3072): 0.0009}
MEASURES = ("nmse_standardised_mean", "l0_mean", "dead_fraction_mean")


def part_of_validation(part, folder):
    """The directory of a file of the validation set as a dataset of its own; for "whole" that of the input."""
    whole = Path(os.environ["WEFT_TEST_DATA"]) / "minilm-l6" / "validation"
    if part == "whole":
        return whole
    number = 0 if part == "choose" else 1
    records = [struct.unpack("<iiq", (whole / "index.bin").read_bytes()[16 * i:16 * i + 16]) for i in range(2)]
    directory = folder.resolve() / f"validation_{part}"
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "chunk_0.hdf5").exists():
        (directory / "chunk_0.hdf5").symlink_to(whole / f"chunk_{number}.hdf5")
    (directory / "index.bin").write_bytes(struct.pack("<iiq", 0, records[number][1], 0))
    metadata = json.loads((whole / "metadata.json").read_text())
    (directory / "metadata.json").write_text(json.dumps({**metadata, "total_tokens": records[number][1]}))
    return directory


def settings_of(variant, features, seed, validation):
    settings = {"data.validation": validation, "transcoder.features": features, "run.seed": seed, **RECIPE.get(features, COMMON),
                **VARIANTS[variant]}
    if (variant, features) in SPARSITY:
        settings["transcoder.sparsity"] = SPARSITY[variant, features]
    return settings


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
    parser.add_argument("--validation", choices=("whole", "choose", "judge"), default="whole")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--set", action="append", default=[], metavar="table.key=value", help="for all runs")
    parser.add_argument("--output", type=Path, default=Path("runs/minilm_table"))
    options = parser.parse_args()
    validation = part_of_validation(options.validation, options.output)

    titles = [f"F = {features}: {name}" for features in options.features for name in ("NMSE", "L0", "dead, %")]
    print("| " + " | ".join(["variant", *titles]) + " |")
    print("|---|" + "---:|" * len(titles))
    given = dict(word.split("=", 1) for word in options.set)

    def run(variant, features, seed):
        name = "".join(c if c.isalnum() else "_" for c in variant)
        return measure(options.weft, {**settings_of(variant, features, seed, validation), **given},
                       options.output / f"{name}_{features}_{seed}_{options.validation}")

    with ThreadPoolExecutor(options.jobs) as pool:
        rows = {variant: [[pool.submit(run, variant, features, seed) for seed in options.seeds] for features in options.features]
                for variant in options.only}
        for variant, sizes in rows.items():
            cells = []
            for seeds in sizes:
                nmse, l0, dead = (sum(values) / len(seeds) for values in zip(*(seed.result() for seed in seeds)))
                cells += [f"{nmse:.4f}", f"{l0:.2f}", f"{100 * dead:.1f}"]
            print("| " + " | ".join([variant, *cells]) + " |", flush=True)


if __name__ == "__main__":
    main()
