# SPDX-License-Identifier: Apache-2.0
"""The complete program on one GPU: hand-written and portable kernels agree, a recorded step is identical to an eager one, and two runs
are bit-identical. The sizes are such that batch_topk filters products as they are formed on Hopper.

program_test.py WEFT 8bit|bf16|fp32   every variant with this state: the portable kernels agree
program_test.py WEFT repeat           repeated, eager and diverging runs; real activations ($WEFT_TEST_DATA/minilm-l6; without it that
                                      part is skipped, with a message)
"""
import os
import sys

import files
import program

INPUT = """
[synthetic]
output = "{folder}/data"
layers = 4
d_model = 208
features = 384
k = 8
tokens = 8192
validation_tokens = 2048
dtype = "bf16"
[run]
steps = {steps}
[data]
train = "{folder}/data/train"
validation = "{folder}/data/validation"
batch_tokens = 512
[transcoder]
features = 700
k = 8
activation = "{activation}"
scope = "{scope}"
decoder = "{decoder}"
skip = "{skip}"
{more}
[optimizer]
learning_rate = 2e-3
state = "{state}"
[device]
precision = "{precision}"
backend = "{backend}"
graphs = {graphs}
[log]
every = 1
"""
MINILM = """
[run]
steps = 300
[data]
train = "{data}/train"
validation = "{data}/validation"
batch_tokens = 512
[transcoder]
features = 768
k = 16
{more}
[optimizer]
learning_rate = 1e-3
state = "{state}"
[device]
precision = "{precision}"
"""


STATES = ("8bit", "bf16", "fp32")
# Entries between 0.1 and 0.3 are listed and not active.
LISTED = 'threshold_gradient = "listed"\nthreshold = 0.3\nbandwidth = 0.4\ncapacity = 700'
JUMPRELU = dict(activation="jumprelu", scope="layer")
# What runs train otherwise than with batch_topk over all layers and a decoder for each pair of layers.
VARIANTS = {
    "one budget per layer": dict(scope="layer"),
    "topk": dict(activation="topk", scope="layer"),
    "topk over all layers": dict(activation="topk"),
    "relu": dict(activation="relu", scope="layer"),
    "relu, linear penalty": dict(activation="relu", scope="layer", more='sparsity = 0.01\nsparsity_form = "linear"'),
    "jumprelu": JUMPRELU,
    "jumprelu, listed windows": dict(JUMPRELU, more=LISTED),
    "jumprelu, short lists": dict(JUMPRELU, more="threshold = 1.3\nbandwidth = 0.2\ncapacity = 20"),
    "jumprelu, gradient below thresholds": dict(JUMPRELU, more='pseudo_derivative = "goreg"\nbandwidth = 0.5'),
    "jumprelu, penalties": dict(JUMPRELU, more="sparsity = 0.05\npreactivation_penalty = 0.01\nbandwidth = 1"),
    "linear skip": dict(skip="linear"),
    "per layer": dict(decoder="per_layer"),
    "tied": dict(decoder="tied"),
    "tied per target": dict(decoder="tied_target", more="decoder_affine = true\ndecoder_scale_initial = 0.1"),
    "sparsity penalty": dict(more="sparsity = 0.05"),
    "auxiliary loss": dict(more="dead_window = 2000\nauxk = 0.1\nauxk_features = 32"),
    "by decoder norm": dict(more='ranking = "decoder_norm"'),
    "by z-score": dict(more='ranking = "z_score"'),
    # More than one step of each k, so that graphs are recorded in between.
    "k declines": dict(more="k_initial = 20\nk_end = 0.5"),
    "raw errors, biases of pairs": dict(more='error = "raw"\ndecoder_bias = "pair"'),
    "unexplained variance": dict(more='error = "unexplained"'),
    "biases from data": dict(more='encoder_bias_initial = "data"\ninitially_active = 50'),
}


def losses(run):
    return [line["loss"] for line in program.metrics(run)]


def validation(run):
    return program.record(run)["result"]["validation"]["nmse_standardised"]


def train(weft, name, steps=40, state="8bit", precision="bf16", backend="auto", graphs="true", activation="batch_topk",
          scope="all_layers", decoder="cross_layer", skip="none", more=""):
    text = INPUT.format(folder=weft.folder, steps=steps, state=state, precision=precision, backend=backend, graphs=graphs,
                        activation=activation, scope=scope, decoder=decoder, skip=skip, more=more)
    source = weft.folder / f"{name}.toml"
    source.write_text(text)
    if not (weft.folder / "data").exists():
        weft.run("synth", source)
    return weft.train(text, name)


def same_bits(a, b, step):
    first, second = (files.read_tensors(run / "checkpoints" / f"step_{step:08d}") for run in (a, b))
    assert first.keys() == second.keys()
    for name, values in first.items():
        assert values.tobytes() == second[name].tobytes(), f"{name} differs between {a.name} and {b.name}"
    assert losses(a) == losses(b)


def agree(graph, portable, what):
    """Tolerances for different rounding: 1e-3 over the first ten losses in bf16; 1 % of the validation error of every layer."""
    for a, b in zip(losses(graph)[:10], losses(portable)[:10]):
        assert abs(a - b) <= 1e-3 * abs(b), (what, losses(graph)[:10], losses(portable)[:10])
    for a, b in zip(validation(graph), validation(portable)):
        assert abs(a - b) <= 0.01 * b, (what, validation(graph), validation(portable))


def check_variants(weft, state):
    for title, kind in VARIANTS.items():
        name = "".join(c if c.isalnum() else "_" for c in title)
        agree(train(weft, f"{name}_{state}", state=state, **kind),
              train(weft, f"{name}_{state}_portable", state=state, backend="portable", **kind), (title, state))
        print(f"{title}: portable kernels agree", flush=True)


def check_repeated(weft):
    for state in STATES:
        graph, again = train(weft, f"graph_{state}", state=state), train(weft, f"again_{state}", state=state)
        eager = train(weft, f"eager_{state}", state=state, graphs="false")
        same_bits(graph, again, 40)
        same_bits(graph, eager, 40)
        portable = train(weft, f"portable_{state}", state=state, backend="portable")
        agree(graph, portable, state)
        print(f"{state}: bitwise repeatable, graphs change nothing, portable kernels agree", flush=True)

    # A diverging run ends with 4 although the host is ahead, and names the step; no checkpoint is written afterwards.
    source = weft.folder / "graph_8bit.toml"
    output = weft.run("train", source, "--output", weft.folder / "wild", "--set", "optimizer.learning_rate=1e38", code=4)
    assert "is not finite at step" in output and not list((weft.folder / "wild" / "checkpoints").glob("step_*")), output


def check_real(weft):
    folder = os.environ.get("WEFT_TEST_DATA")
    data = folder and os.path.join(folder, "minilm-l6")
    if not data or not os.path.isdir(os.path.join(data, "train")):
        print("MiniLM: skipped (data not available)")
        return
    found = {}
    for name, state, precision in (("fp32", "fp32", "fp32"), ("two_planes", "fp32", "bf16"), ("8bit", "8bit", "bf16")):
        run = weft.train(MINILM.format(data=data, state=state, precision=precision), f"minilm_{name}")
        found[name] = validation(run)
        print(f"MiniLM {name}: {' '.join(f'{value:.4f}' for value in found[name])}, mean {sum(found[name]) / 6:.4f}")
    for name in ("two_planes", "8bit"):
        for a, b in zip(found[name], found["fp32"]):
            assert a <= 1.01 * b, (name, found)


def check(weft):
    program.needs_gpu()
    if sys.argv[2] == "repeat":
        check_repeated(weft)
        check_real(weft)
    else:
        check_variants(weft, sys.argv[2])


program.main(check)
