# SPDX-License-Identifier: Apache-2.0
"""The script that measures scaling, on processes without GPUs and at small sizes: its tables contain the results of the benchmarks.

scaling_test.py REPOSITORY WEFT
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TINY = ("benchmark.layers=2 benchmark.d_model=16 transcoder.features=64 transcoder.k=4 benchmark.warmup=1 benchmark.steps=2 "
        "device.threads=1")
TINY_LANGUAGE = ("benchmark.warmup=1 benchmark.steps=2 benchmark.vocabulary=300 data.sequence=16 data.micro_tokens=16 language_model.layers=1 "
                 "language_model.d_model=64 language_model.heads=4 language_model.kv_heads=2 language_model.d_mlp=64 device.threads=1 "
                 "device.precision=fp32")


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def check(folder, weft):
    # A copy: the script writes into its repository.
    for part in ("scripts", "inputs"):
        shutil.copytree(Path(sys.argv[1]) / part, folder / part)
    environment = dict(os.environ, WEFT=weft, WEFT_RANKS="1 2", WEFT_DATA="1 2", WEFT_SET=TINY)
    done = subprocess.run(["bash", "scripts/benchmark_ranks.sh", "llama_3_2_1b"], cwd=folder, env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    assert done.returncode == 0, done.stdout
    written = (folder / "runs/benchmark_ranks/tables.md").read_text()
    assert written in done.stdout
    scaling, exchanges = ([cells(line) for line in table.splitlines() if line.startswith("|")][2:]
                          for table in written.split("Each kind"))
    assert [line[1:3] for line in scaling] == [["1", "1 x 1"], ["2", "1 x 2"], ["2", "2 x 1"]], written
    alone, together = (json.loads((folder / f"runs/benchmark_ranks/llama_3_2_1b_{grid}/benchmark.json").read_text())["cases"][0]
                       for grid in ("1x1", "1x2"))
    speed_up = together["tokens_per_second"] / alone["tokens_per_second"]
    communication = together["communication"]
    assert scaling[1][5:8] == [f"{speed_up:.2f}", f"{50 * speed_up:.0f} %", f"{communication['ms']:,.2f}"], (scaling[1], together)
    # Bytes per token: inputs and targets of two layers of 16 values of 2 bytes.
    assert together["row_bytes"] == 2 * 2 * 16 * 2, together
    names = [line[2] for line in exchanges if line[1] == "1 x 2"]
    assert names == [one["name"] for one in communication["exchanges"]] and "partial sums" in names, exchanges

    # A failed run is reported with its reason; the tables contain the others.
    environment["WEFT_SET"] += " parallel.feature=1"
    done = subprocess.run(["bash", "scripts/benchmark_ranks.sh", "llama_3_2_1b"], cwd=folder, env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    assert done.returncode == 1 and "failed with 2" in done.stdout and "| 2 x 1 |" in done.stdout, done.stdout
    # Everything that is measured on several GPUs: language models with both axes, private training, affinity.
    environment.update(WEFT_TOKENS="64", WEFT_SET=TINY, WEFT_LANGUAGE_SET=TINY_LANGUAGE)
    done = subprocess.run(["bash", "scripts/benchmark_several.sh", "tensor", "private", "affinity"], cwd=folder, env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    assert done.returncode == 0, done.stdout
    written = (folder / "runs/benchmark_several/tables.md").read_text()
    rows = [cells(line) for line in written.split("Each kind")[0].splitlines() if line.startswith("|")][2:]
    assert [line[:3] for line in rows if line[0].startswith("Llama")] == [
        ["Llama 1B, 64 tokens", "1", "1 x 1"], ["Llama 1B, 64 tokens [tensor 2]", "2", "1 x 2"], ["Llama 1B, 64 tokens", "2", "2 x 1"]], written
    assert [line[1] for line in rows if line[0].startswith("124M private")] == ["1", "2", "1", "2"], written
    assert 'device.affinity: ' in written and (folder / "runs/benchmark_several/affinity_none.json").exists()
    print("the tables contain the measurements; a failed run is reported")


with tempfile.TemporaryDirectory(prefix="weft_test_") as temporary:
    check(Path(temporary), str(Path(sys.argv[2]).resolve()))
