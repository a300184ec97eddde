# SPDX-License-Identifier: Apache-2.0
"""log.evaluate_every of a transcoder: evaluations change no bit of the training, follow the step number also after a resume, and give
what the run measures after its last step.

evaluation_test.py WEFT RANKS
"""
import sys

import files
import program

RANKS = int(sys.argv[2])
# A short last batch of rows, and thresholds of a filter that depend on the batches before.
INPUT = program.SYNTHETIC + """
[run]
steps = 24
[data]
train = "{folder}/data/train"
validation = "{folder}/data/validation"
batch_tokens = 64
[transcoder]
features = 61
k = 3.5
[optimizer]
learning_rate = 3e-3
[checkpoint]
every = 8
[log]
every = 5
"""


def tensors(run):
    return {name: (values.dtype, values.tobytes()) for name, values in files.read_tensors(run / "checkpoints" / "step_00000024").items()}


def of_training(run):
    """The records of steps 5, 10, … without evaluations."""
    return [{key: value for key, value in line.items() if not key.startswith("validation.")}
            for line in program.metrics_without_times(run) if line["step"] % 5 == 0]


def of_validation(run):
    return {line["step"]: {key: value for key, value in line.items() if key.startswith("validation.")}
            for line in program.metrics(run) if "validation.l0" in line}


def check(weft):
    text = INPUT.format(folder=weft.folder)
    (weft.folder / "synth.toml").write_text(text)
    weft.run("synth", weft.folder / "synth.toml")
    often = "--set", "log.evaluate_every=6"
    plain = weft.train(text, "plain", ranks=RANKS)
    evaluated = weft.train(text, "evaluated", *often, ranks=RANKS)
    assert tensors(plain) == tensors(evaluated), "evaluations change the training"
    assert of_training(plain) == of_training(evaluated)
    assert not of_validation(plain)

    curve = of_validation(evaluated)
    assert list(curve) == [6, 12, 18, 24], curve.keys()
    result = program.record(evaluated)["result"]["validation"]
    assert result == program.record(plain)["result"]["validation"]
    for name in ("nmse_standardised", "explained_variance", "l0", "dead_fraction"):
        assert curve[24]["validation." + name] == result[name + "_mean"], name
    assert curve[24]["validation.nmse_standardised"] < curve[6]["validation.nmse_standardised"], curve
    assert "evaluation" in program.record(evaluated)["timings"] and "evaluation" not in program.record(plain)["timings"]
    if RANKS > 1:
        sent = [program.record(run)["communication"] for run in (plain, evaluated)]
        assert sent[0]["bytes"] == sent[1]["bytes"], sent

    # Killed after step 13: the resumed run evaluates at the same steps, with the same results.
    killed = weft.folder / "killed"
    for options in (dict(fault="step:0:14", code=program.KILLED), {}):
        weft.run("train", "evaluated.toml", "--output", killed, *often, ranks=RANKS, **options)
    assert tensors(killed) == tensors(evaluated)
    assert of_validation(killed) == curve

    if weft.has_package():
        weft.run("report", evaluated)
        assert "Validation error" in (evaluated / "report.html").read_text()
    printed = weft.run("train", "plain.toml", "--output", "none", "--set", "data.validation=", *often, ranks=RANKS)
    assert "log.evaluate_every = 6 has no effect" in printed, printed


program.main(check)
