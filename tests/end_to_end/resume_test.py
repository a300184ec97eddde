# SPDX-License-Identifier: Apache-2.0
"""Stop and resume: parameters, moments, metrics and data order are bitwise identical to those of an undisturbed run.

resume_test.py WEFT RANKS [gpu]      gpu: the storage types of the hand-written kernels
"""
import sys

import numpy as np

import files
import program

RANKS = int(sys.argv[2])
# Storage, precision, ranks on the data axis, keys of the model. Thresholds have moments, and the coefficient follows the step.
SKIP = 'skip = "linear"\nerror = "unexplained"\ndecoder_bias = "pair"'
JUMPRELU = 'activation = "jumprelu"\nsparsity = 0.05\npreactivation_penalty = 0.01'
LISTED = 'activation = "jumprelu"\nthreshold_gradient = "listed"\nthreshold = 0.3\nbandwidth = 0.4\nbandwidth_initial = 0.8'
# Dead features follow from the clocks, k from the step.
DEAD = "dead_window = 300\nauxk = 0.1\nauxk_features = 5\nk_initial = 9\nk_end = 0.7\nresample_every = 10"
TIED = 'decoder = "tied"\nranking = "decoder_norm"\nactivation = "topk"\nk_total = 12'
# Ranking by z-scores takes all tokens on each rank.
PER_LAYER = 'decoder = "per_layer"\nranking = "z_score"\nscope = "all_layers"\nerror = "raw"\nencoder_bias_initial = "data"\ninitially_active = 9'
BY_TARGET = 'decoder = "tied_target"\ndecoder_affine = true\ndecoder_scale_initial = 0.1\nactivation = "relu"'
POLICIES = (("fp32", "fp32", 1, DEAD), ("8bit", "bf16", 1, TIED), ("bf16", "bf16", 1, PER_LAYER), ("8bit", "bf16", RANKS if RANKS in (2, 3) else 1, SKIP), ("bf16", "bf16", 1, JUMPRELU),
            ("8bit", "bf16", RANKS if RANKS in (2, 3) else 1, BY_TARGET), ("8bit", "bf16", RANKS if RANKS in (2, 3) else 1, LISTED))
SIZES = dict(d_model=24, features=61)
if sys.argv[3:] == ["gpu"]:
    program.needs_gpu()
    SIZES = dict(d_model=208, features=160)  # batch_topk filters products as they are formed, on Hopper
    POLICIES = (("fp32", "bf16", 1, SKIP), ("8bit", "bf16", 1, DEAD), ("bf16", "bf16", 1, JUMPRELU), ("8bit", "bf16", 1, BY_TARGET),
                ("8bit", "bf16", 1, LISTED), ("8bit", "bf16", 1, TIED), ("fp32", "bf16", 1, PER_LAYER))
INPUT = """
[synthetic]
output = "{folder}/data"
layers = 3
d_model = {d_model}
features = 48
k = 4
tokens = 1000
validation_tokens = 200
rows_per_file = 400
dtype = "bf16"
[run]
steps = 60
[data]
train = "{folder}/data/train"
batch_tokens = 96
block_rows = 16
window_rows = 256
[transcoder]
features = {features}
k = 3.5
{model}
[optimizer]
learning_rate = 3e-3
schedule = "cosine"
warmup_steps = 5
clip_norm = 0.05
clip_mode = "previous"
state = "{state}"
[parallel]
data = {data}
[device]
precision = "{precision}"
[checkpoint]
every = 25
[log]
every = 1
"""


def outcome(run, step):
    """Every tensor of the checkpoint at `step`, and the records without their times."""
    records = program.metrics_without_times(run)
    return files.read_tensors(run / "checkpoints" / f"step_{step:08d}"), records


def same(a, b):
    tensors_a, metrics_a = a
    tensors_b, metrics_b = b
    assert tensors_a.keys() == tensors_b.keys()
    for name, values in tensors_a.items():
        assert values.dtype == tensors_b[name].dtype and values.tobytes() == tensors_b[name].tobytes(), name
    assert [line["step"] for line in metrics_b] == list(range(1, len(metrics_b) + 1)), "gaps or duplicates"
    assert metrics_a == metrics_b


def check(weft):
    for number, (state, precision, data, model) in enumerate(POLICIES):
        name = f"{state}_{number}"
        text = INPUT.format(folder=weft.folder, state=state, precision=precision, data=data, model=model, **SIZES)
        source = weft.folder / f"{name}.toml"
        source.write_text(text)
        if not (weft.folder / "data").exists():
            weft.run("synth", source)
        whole = weft.train(text, f"{name}_whole", ranks=RANKS)

        def train(run, source=source, **options):
            return weft.run("train", source, "--output", run, ranks=RANKS, timeout=120, **options)

        # Stopped on request, twice; the request reaches one rank only, and all ranks stop together two steps later.
        parts = weft.folder / f"{name}_parts"
        for step in (7, 33):
            train(parts, fault=f"step:{RANKS - 1}:{step}:usr1", code=75)
            assert program.record(parts)["exit"]["code"] == 75
            assert program.record(parts)["result"]["step"] == step + 2, program.record(parts)["result"]
        train(parts)
        same(outcome(whole, 60), outcome(parts, 60))

        # Killed nine steps after a checkpoint: resumes from that checkpoint.
        killed = weft.folder / f"{name}_killed"
        train(killed, fault="step:0:30:usr1", code=75)
        train(killed, fault=f"step:{RANKS - 1}:41:kill", code=program.KILLED)
        output = train(killed)
        assert "resuming after step 32" in output, output
        same(outcome(whole, 60), outcome(killed, 60))

    # What a run of one rank does besides; signals, the file STOP and the wall limit are in tests/fault/requests_test.py.
    if RANKS == 1:
        # A checkpoint on request changes nothing.
        run = weft.folder / "usr2"
        output = train(run, fault="step:0:20:usr2")
        assert (run / "checkpoints" / "step_00000060").is_dir() and "step_00000022:" in output, output
        same(outcome(whole, 60), outcome(run, 60))
        # A changed input that defines the run is refused, all differences named; nothing is lost.
        output = weft.run("train", source, "--output", parts, "--set", "transcoder.k=4", "--set", "run.seed=3", code=2)
        assert "transcoder.k was 3.5, now 4" in output and "run.seed was 1, now 3" in output, output
        same(outcome(whole, 60), outcome(parts, 60))
        assert np.isfinite(program.record(whole)["result"]["train"]["loss"])


program.main(check)
