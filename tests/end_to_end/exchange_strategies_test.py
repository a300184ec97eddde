# SPDX-License-Identifier: Apache-2.0
"""The baselines of weft benchmark ([benchmark] selection, wait, together, keep_buffers, direct, prefetch) do not change results: each case
has the loss of the default, with batches from memory and from files. baselines_test compares every tensor on 1 to 8 ranks. Unsupported
combinations are errors.

exchange_strategies_test.py WEFT
"""
import json

import program

BASELINE = "benchmark.selection=rank_0, benchmark.wait=true, benchmark.together=false, benchmark.keep_buffers=false, benchmark.direct=false"
CASES = ["default", "selection: benchmark.selection=rank_0", "wait: benchmark.wait=true", "one by one: benchmark.together=false",
         "fresh: benchmark.keep_buffers=false", "through NCCL: benchmark.direct=false", f"baseline: {BASELINE}"]
FROM_FILES = ["default", "on demand: benchmark.prefetch=false", f"baseline: benchmark.prefetch=false, {BASELINE}"]
INPUT = """
[synthetic]
output = "{folder}/data"
layers = 3
d_model = 24
features = 48
k = 4
tokens = 1500
[run]
output = "{folder}/benchmark"
steps = 8
[data]
train = "{folder}/data/train"
batch_tokens = 250
micro_tokens = 100
[transcoder]
features = 131
k = 8
scope = "layer"
[optimizer]
learning_rate = 1e-3
[device]
threads = 1
[benchmark]
layers = 3
d_model = 24
warmup = 2
steps = 4
"""

def losses(weft, path, cases, *sets, ranks):
    given = ["--set", f"benchmark.cases={json.dumps(cases)}", *program.sets(*sets)]
    weft.run("benchmark", path, *given, ranks=ranks)
    found = {case["name"]: case["loss"] for case in json.loads((weft.folder / "benchmark" / "benchmark.json").read_text())["cases"]}
    assert len(found) == len(cases), found
    return found


def check(weft):
    path = weft.folder / "input.toml"
    path.write_text(INPUT.format(folder=weft.folder))
    weft.run("synth", path)
    for ranks, sets in ((1, []), (3, ['transcoder.scope="all_layers"'])):
        for cases, source in ((CASES, "resident"), (FROM_FILES, "data")):
            found = losses(weft, path, cases, f'benchmark.from="{source}"', *sets, ranks=ranks)
            assert len(set(found.values())) == 1 and found["default"] > 0, (ranks, source, found)

    refused = weft.run("benchmark", path, "--dry-run", "--set", 'benchmark.selection="rank_0"', "--set",
                       'transcoder.activation="topk"', code=2)
    assert 'benchmark.selection = "rank_0" is for' in refused, refused
    without = weft.run("benchmark", path, "--dry-run", "--set", 'benchmark.cases=["a: benchmark.prefetch=false"]')
    assert 'set benchmark.from = "data"' in without, without


program.main(check)
