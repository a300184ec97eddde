# SPDX-License-Identifier: Apache-2.0
"""The sparse step of a transcoder is at least 7 times as fast as the dense formulation with the same library, threads and Adam: a ratio within
one process, of the shortest steps, so that it says the same on any machine and under load. (docs/performance.md: 8.7 at the sizes of
inputs/benchmark_cpu.toml.)

speed_ratio_test.py WEFT
"""
import json

import program

INPUT = """
[benchmark]
layers = 12
d_model = 256
cases = ["sparse", "dense"]
warmup = 1
steps = 3
batches = 1
[data]
batch_tokens = 2048
[transcoder]
features = 512
activation = "batch_topk"
k = 1
scope = "layer"
[device]
precision = "fp32"
threads = 1
"""
LEAST, TRIES = 7, 3


def test(weft):
    source = weft.folder / "input.toml"
    source.write_text(INPUT)
    ratios = []
    # Another process may take the processor during all of the few steps: the best of some tries counts.
    while len(ratios) < TRIES and max(ratios, default=0) < LEAST:
        weft.run("benchmark", source, "--output", weft.folder / "benchmark")
        sparse, dense = json.loads((weft.folder / "benchmark" / "benchmark.json").read_text())["cases"]
        ratios.append(dense["fastest_ms"] / sparse["fastest_ms"])
    print(f"dense / sparse: {', '.join(f'{ratio:.1f}' for ratio in ratios)}")
    assert max(ratios) >= LEAST, f"the sparse step is {max(ratios):.1f} times as fast as the dense one, at least {LEAST} is expected"


program.main(test)
