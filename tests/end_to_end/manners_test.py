# SPDX-License-Identifier: Apache-2.0
"""How ranks exchange ([parallel] selection, wait, together, keep_buffers) costs time and changes nothing: on 2 and 3 ranks the
same metrics and, tensor by tensor, the same bits in the checkpoint. What rank 0 cannot do is refused with code 2.

manners_test.py WEFT
"""
import files
import program

STEPS = 8
MANNERS = {
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
# The filter's threshold for the next batch is where the lists of one rank or of several suggest; it decides how often tiles
# are made, never what is selected.
ONLY_TIME = "selection/threshold"


def run(weft, text, name, sets, ranks):
    path = weft.train(text, name, *(word for each in sets for word in ("--set", each)), ranks=ranks)
    tensors = files.read_tensors(path / "checkpoints" / f"step_{STEPS:08d}")
    metrics = program.metrics_without_times(path)
    for line in metrics:
        del line["communication"]  # what is sent is what differs
    return metrics, tensors


def check(weft):
    text = INPUT.format(folder=weft.folder, steps=STEPS)
    path = weft.folder / "synthetic.toml"
    path.write_text(text)
    weft.run("synth", path)
    for ranks in (2, 3):
        for scope in ("layer", "all_layers"):
            expected = None
            for name, sets in MANNERS.items():
                here = f"{name}_{scope}_{ranks}"
                metrics, tensors = run(weft, text, here, [*sets, f'transcoder.scope="{scope}"'], ranks)
                if expected is None:
                    expected = metrics, tensors
                assert metrics == expected[0], f"{here}: other metrics than by default"
                assert tensors.keys() == expected[1].keys(), here
                for tensor, values in tensors.items():
                    if tensor == ONLY_TIME and "rank_0" in " ".join(sets):
                        continue
                    assert values.tobytes() == expected[1][tensor].tobytes(), f"{here}: {tensor} has other bits"
    print("four ways to exchange give the bits of the default on 2 and 3 ranks")

    # Tokens cut between groups as well; and goes on from what another way has written.
    sets = ["parallel.data=2"]
    expected = run(weft, text, "grid_default", sets, 4)
    found = run(weft, text, "grid_baseline", [*MANNERS["baseline"], *sets], 4)
    assert found[0] == expected[0]
    assert all(values.tobytes() == expected[1][key].tobytes() for key, values in found[1].items() if key != ONLY_TIME)
    weft.train(text, "grid_baseline", "--set", "parallel.data=2", "--set", f"run.steps={STEPS + 2}", ranks=4)

    refused = weft.run("train", path, "--dry-run", "--set", 'parallel.selection="rank_0"', "--set",
                       'transcoder.activation="topk"', code=2)
    assert 'parallel.selection = "rank_0" is for' in refused, refused
    # What rank 0 collects stands in the plan.
    plans = [weft.run("train", path, "--dry-run", "--set", "parallel.world=2", "--set", f'parallel.selection="{place}"')
             for place in ("everywhere", "rank_0")]
    forward = [next(line for line in plan.splitlines() if "forward pass" in line) for plan in plans]
    assert forward[0] != forward[1], forward


program.main(check)
