# SPDX-License-Identifier: Apache-2.0
"""The options of exchanges ([parallel] selection, wait, together, keep_buffers) do not change results: on 2 and 3 ranks the metrics are
equal and every tensor of the checkpoint is bit-identical. Unsupported combinations are refused with code 2.

exchange_strategies_test.py WEFT
"""
import files
import program

STEPS = 8
STRATEGIES = {
    "default": [],
    "selection": ['parallel.selection="rank_0"'],
    "one_by_one": ["parallel.together=false"],
    "fresh": ["parallel.keep_buffers=false"],
    "baseline": ['parallel.selection="rank_0"', "parallel.wait=true", "parallel.together=false",
                 "parallel.keep_buffers=false"],
}
INPUT = """
[synthetic]
output = "{folder}/data"
layers = 3
d_model = 24
features = 48
k = 4
tokens = 1500
[run]
steps = {steps}
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
[log]
every = 1
"""
# The threshold of the filter for the next batch depends on the number of lists. It affects how often tiles are computed, not the
# selection.
ONLY_TIME = "selection/threshold"


def run(weft, text, name, sets, ranks):
    path = weft.train(text, name, *(word for each in sets for word in ("--set", each)), ranks=ranks)
    tensors = files.read_tensors(path / "checkpoints" / f"step_{STEPS:08d}")
    metrics = program.metrics_without_times(path)
    for line in metrics:
        del line["communication"]  # bytes sent differ
    return metrics, tensors


def check(weft):
    text = INPUT.format(folder=weft.folder, steps=STEPS)
    path = weft.folder / "synthetic.toml"
    path.write_text(text)
    weft.run("synth", path)
    for ranks in (2, 3):
        for scope in ("layer", "all_layers"):
            expected = None
            for name, sets in STRATEGIES.items():
                here = f"{name}_{scope}_{ranks}"
                metrics, tensors = run(weft, text, here, [*sets, f'transcoder.scope="{scope}"'], ranks)
                if expected is None:
                    expected = metrics, tensors
                assert metrics == expected[0], f"{here}: metrics differ from the default"
                assert tensors.keys() == expected[1].keys(), here
                for tensor, values in tensors.items():
                    if tensor == ONLY_TIME and "rank_0" in " ".join(sets):
                        continue
                    assert values.tobytes() == expected[1][tensor].tobytes(), f"{here}: {tensor} differs"
    print("four exchange strategies are bit-identical to the default on 2 and 3 ranks")

    # With tokens divided between groups as well; and resume from a checkpoint of another strategy.
    sets = ["parallel.data=2"]
    expected = run(weft, text, "grid_default", sets, 4)
    found = run(weft, text, "grid_baseline", [*STRATEGIES["baseline"], *sets], 4)
    assert found[0] == expected[0]
    assert all(values.tobytes() == expected[1][key].tobytes() for key, values in found[1].items() if key != ONLY_TIME)
    weft.train(text, "grid_baseline", "--set", "parallel.data=2", "--set", f"run.steps={STEPS + 2}", ranks=4)

    refused = weft.run("train", path, "--dry-run", "--set", 'parallel.selection="rank_0"', "--set",
                       'transcoder.activation="topk"', code=2)
    assert 'parallel.selection = "rank_0" is for' in refused, refused
    # The plan includes the memory that rank 0 needs.
    plans = [weft.run("train", path, "--dry-run", "--set", "parallel.world=2", "--set", f'parallel.selection="{place}"')
             for place in ("everywhere", "rank_0")]
    forward = [next(line for line in plan.splitlines() if "forward pass" in line) for plan in plans]
    assert forward[0] != forward[1], forward


program.main(check)
