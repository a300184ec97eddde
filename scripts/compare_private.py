#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares private trainings of a small language model at one epsilon with one another and with training without privacy.

compare_private.py WEFT [--input FILE] [--seeds 1 2 3] [--output DIR] [--set table.key=value ...]

private   the input (inputs/lm_private.toml)
naive     the same epsilon with the usual settings of training without privacy: an expected batch of 64 records, clip 1, the learning rate of
          inputs/lm_character.toml, and as many records in all steps together as `private` has
open      the naive setting without privacy

Prints the validation loss of each seed, in nats per token, the means and epsilon. Runs that are complete in DIR are not repeated.
The noise of a run comes from a secret key, so that its loss cannot be repeated exactly.
"""
import argparse
import json
import subprocess
import sys
import tomllib
from pathlib import Path

NAIVE_RECORDS = 64
NAIVE_RATE_OF = Path("inputs/lm_character.toml")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weft")
    parser.add_argument("--input", type=Path, default=Path("inputs/lm_private.toml"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--output", type=Path, default=Path("runs/compared_private"))
    parser.add_argument("--set", action="append", default=[], metavar="table.key=value")
    return parser.parse_args()


def variants(source):
    data, run = source["data"], source["run"]
    batch = NAIVE_RECORDS * data["sequence"]
    rate = tomllib.loads(NAIVE_RATE_OF.read_text())["optimizer"]["learning_rate"]
    naive = [f"data.batch_tokens={batch}", f"data.micro_tokens={min(batch, data['micro_tokens'])}", "privacy.clip=1",
             f"optimizer.learning_rate={rate}", f"run.steps={run['steps'] * data['batch_tokens'] // batch}"]
    return {"private": [], "naive": naive, "open": [*naive, "privacy.enabled=false"]}


def result(weft, source, output, settings):
    """Of the run, which is continued or made first."""
    command = [weft, "lm", "train", source, "--quiet", "--output", output]
    for setting in settings:
        command += ["--set", setting]
    if subprocess.run(list(map(str, command)), check=False).returncode != 0:
        sys.exit(f"compare_private.py: {' '.join(map(str, command))} failed; see {output}/log.txt")
    return json.loads((output / "run.json").read_text())["result"]


def main():
    given = arguments()
    print(f"{'setting':<10}{'epsilon':>9}  validation loss by seed", flush=True)
    for name, settings in variants(tomllib.loads(given.input.read_text())).items():
        results = [result(given.weft, given.input, given.output / f"{name}_{seed}",
                          [*settings, *given.set, f"run.seed={seed}", "log.evaluate_every=0", "log.sample_tokens=0"]) for seed in given.seeds]
        losses = [one["validation"]["loss"] for one in results]
        epsilon = f"{max(one['privacy']['epsilon'] for one in results):.3f}" if "privacy" in results[0] else "none"
        print(f"{name:<10}{epsilon:>9}  {'  '.join(f'{loss:.3f}' for loss in losses)}  mean {sum(losses) / len(losses):.3f}", flush=True)


if __name__ == "__main__":
    main()
