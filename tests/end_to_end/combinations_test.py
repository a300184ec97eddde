# SPDX-License-Identifier: Apache-2.0
"""Keys that no other test combines: inputs that were drawn at random and whose rows together have the most pairs of values. An input
that --dry-run accepts trains within the planned memory, to the same bits when it is stopped and resumed, and on two ranks to the losses
of one.

combinations_test.py WEFT
"""
import json
import sys

import files
import numpy as np
import program

TRANSCODER = program.SYNTHETIC + """
[run]
steps = 12
[data]
train = "{folder}/data/train"
validation = "{folder}/data/validation"
batch_tokens = 64
[transcoder]
features = 61
k = 3
[optimizer]
learning_rate = 1e-2
[log]
every = 1
"""
LANGUAGE_MODEL = """
[run]
steps = 12
[data]
train = "text.txt"
batch_tokens = 128
sequence = 16
[language_model]
heads = 4
d_model = 32
layers = 2
[optimizer]
learning_rate = 3e-3
warmup_steps = 2
[log]
every = 1
"""
TC, LM, PRIVATE = "transcoder", "language_model", 'privacy.noise_multiplier=1 privacy.delta=1e-4 privacy.noise_key="test" '
# Ranks, tolerance of the losses of the first ten steps on one rank (None: the loss is private), keys.
ROWS = (
    (TC, 2, None, PRIVATE + 'device.precision="bf16" transcoder.activation="topk" transcoder.decoder="tied_target" optimizer.state="8bit" '
     'privacy.unit="token" privacy.clipping="adaptive" privacy.count_noise=5 optimizer.schedule="cosine" optimizer.decay_begin=0.5'),
    (TC, 1, None, PRIVATE + 'log.evaluate_every=5 data.micro_tokens=16 optimizer.schedule_steps=30 optimizer.clip_norm=1e-3 '
     'transcoder.decoder="per_layer" optimizer.state="8bit" transcoder.activation="relu" privacy.record_rows=4 privacy.bands=3'),
    (TC, 2, None, PRIVATE + 'parallel.data=2 data.normalise="none" optimizer.state="bf16" transcoder.activation="jumprelu" '
     'transcoder.threshold_gradient="listed" privacy.record_rows=8 privacy.scheme="per_layer" optimizer.beta1=0.8'),
    (TC, 1, None, 'data.targets="inputs" optimizer.warmup_fraction=0.2 transcoder.decoder="per_layer" transcoder.sparsity=0.1 '
     'transcoder.decoder_initial="zero" transcoder.sparsity_reduction="all" transcoder.activation="relu" optimizer.state="bf16" '
     'transcoder.pseudo_derivative="goreg" optimizer.epsilon_scale="none" log.evaluate_every=4'),
    (TC, 2, 1e-2, 'parallel.data=2 device.precision="bf16" transcoder.activation="jumprelu" transcoder.pseudo_derivative="saelens" '
     'transcoder.threshold_gradient="dense" transcoder.bandwidth_initial=2 transcoder.encoder_bias_initial="data" '
     'transcoder.initially_active=9 transcoder.sparsity=0.01 data.normalise="scalar" optimizer.schedule="step" log.evaluate_every=7'),
    (TC, 2, 1e-5, 'data.batch_tokens=37 transcoder.auxk=0.5 transcoder.auxk_features=4 transcoder.dead_window=100 transcoder.scope="all_layers" '
     'transcoder.skip="linear" transcoder.k_initial=8 transcoder.ranking="z_score" optimizer.weight_decay=0.1 data.block_rows=16'),
    (LM, 1, None, PRIVATE + 'optimizer.state="bf16" language_model.norm="rms" language_model.tied=false language_model.kv_heads=1 '
     'memory.recompute="activation" memory.head_chunk=5 privacy.canaries=20 privacy.sampling="truncated_poisson" privacy.most_records=60'),
    (LM, 2, None, PRIVATE + 'parallel.tensor=2 parallel.shard="full" optimizer.state="8bit" language_model.residual="parallel" '
     'language_model.window=5 language_model.bias=false data.special=["PAD","BOS","EOS"] privacy.products="library" privacy.clip=10'),
    (LM, 1, None, 'language_model.preset="llama" device.precision="fp16" optimizer.state="8bit" memory.recompute="block" '
     'language_model.logit_softcap=5 language_model.window=5 language_model.attention_dropout=0.2 language_model.unrotated_every=2'),
    (LM, 2, 1e-2, 'language_model.preset="llama" device.precision="fp16" language_model.qk_norm="width" language_model.attention_softcap=4 '
     'memory.recompute="norm" data.sequence_start=8 data.sequence_growth_steps=8 parallel.shard="gradients" data.micro_tokens=32'),
    (LM, 2, 1e-5, 'parallel.tensor=2 language_model.mlp="geglu" language_model.norm_position="post" language_model.qk_norm="head" '
     'language_model.embedding_scale=4 language_model.kv_heads=2 data.document_mask=true optimizer.schedule="wsd" optimizer.decay_begin=0.5'),
    (LM, 1, None, 'data.pack="documents" data.order="shuffled" language_model.norm_position="both" language_model.dropout=0.5 '
     'data.micro_tokens=16 optimizer.clip_norm=0.1 language_model.mlp="relu2" optimizer.state="bf16" device.precision="bf16"'),
)


def losses(run):
    return [line["loss"] for line in program.metrics(run) if "loss" in line]


def check(weft, number, model, ranks, tolerance, keys):
    command = [*(["lm"] if model == LM else []), "train", f"{model}.toml", *program.sets(*keys.split())]
    printed = weft.run(*command, "--set", f"parallel.world={ranks if ranks > 1 else 0}", "--dry-run", "--json", "--quiet")
    planned = json.loads(printed[printed.index("{\n"):])  # warnings come first
    whole, parts, alone = (weft.folder / f"{name}_{number}" for name in ("whole", "parts", "alone"))
    weft.run(*command, "--output", whole, ranks=ranks)
    # Initial weights of a language model are drawn with its other buffers in memory, through one more of at most 16 MiB.
    memory = program.record(whole)["device"]["peak_bytes"] if model == TC else program.metrics(whole)[-1]["memory"]["device_bytes"]
    assert memory <= planned["device_bytes"], (number, memory, planned)
    weft.run(*command, "--output", parts, ranks=ranks, fault=f"step:{ranks - 1}:4:usr1", code=75)
    weft.run(*command, "--output", parts, ranks=ranks)
    once, resumed = (files.read_tensors(run / "checkpoints/step_00000012") for run in (whole, parts))
    assert once.keys() == resumed.keys() and all(once[name].tobytes() == resumed[name].tobytes() for name in once), number
    assert program.metrics_without_times(whole) == program.metrics_without_times(parts), number
    if "privacy" in keys:
        assert not losses(whole), number
        return
    found = losses(whole)
    assert len(found) == 12 and np.isfinite(found).all() and np.mean(found[-3:]) < np.mean(found[:3]), (number, found)
    if tolerance:
        weft.run(*command, "--output", alone, *program.sets(f"parallel.{'data' if model == TC else 'tensor'}=1"))
        assert np.allclose(found[:10], losses(alone)[:10], rtol=tolerance, atol=0), (number, found, losses(alone))


def test(weft):
    (weft.folder / "text.txt").write_text(20 * program.TEXT)
    (weft.folder / f"{LM}.toml").write_text(LANGUAGE_MODEL)
    (weft.folder / f"{TC}.toml").write_text(TRANSCODER.format(folder=weft.folder))
    weft.run("synth", f"{TC}.toml")
    for number in map(int, sys.argv[2:] or range(len(ROWS))):
        check(weft, number, *ROWS[number])


program.main(test)
