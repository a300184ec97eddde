# SPDX-License-Identifier: Apache-2.0
"""Private training of a transcoder from the outside: the guarantee, what is not released, normalisation from public data, resuming
bit for bit with the same epsilon, several ranks, settings that would break the guarantee.

private_transcoder_test.py WEFT
"""
import signal

import files
import numpy as np
import program

INPUT = """
[run]
steps = 20
[data]
train = "{folder}/data/train"
validation = "{folder}/data/validation"
batch_tokens = 240
micro_tokens = 64
[transcoder]
features = 32
{model}
[privacy]
epsilon = 6
delta = 1e-4
noise_key = "{key}"
{unit}
[optimizer]
learning_rate = 3e-3
[checkpoint]
every = 5
keep = 4
[log]
every = 5
evaluate_every = 10
"""
TOPK = 'activation = "topk"\nk = 3'
JUMP = 'activation = "jumprelu"\nthreshold_gradient = "listed"'
TOKEN, SEQUENCE = 'unit = "token"', "record_rows = 8"


def command(weft, name, *arguments, model=TOPK, unit=TOKEN, key="test"):
    source = weft.folder / f"{name}.toml"
    source.write_text(INPUT.format(folder=weft.folder, model=model, unit=unit, key=key))
    return ["train", source, "--output", weft.folder / name, *arguments]


def result_of(run):
    return program.record(run)["result"]


def reports_the_guarantee(weft):
    printed = weft.run(*command(weft, "plain"))
    run = weft.folder / "plain"
    privacy = result_of(run)["privacy"]
    assert 5.9 < privacy["epsilon"] <= 6 and privacy["steps"] == 20 and privacy["unit"] == "token", privacy
    assert privacy["records"] == 2000 and abs(privacy["sample_rate"] - 240 / 2000) < 1e-12 and privacy["private"] is False, privacy
    assert "2,000 records of at most 1 row" in printed and "240 expected" in printed and "privacy: none" in printed, printed
    for line in program.metrics(run):
        assert not {"loss", "nmse_standardised", "l0", "dead_fraction"} & set(line), f"released without noise: {line}"
        assert line["tokens"] % 240 == 0, "the number of records of a step was released"
    assert 0 < np.mean(result_of(run)["validation"]["nmse_standardised"]) < 2
    if weft.has_package():
        page = weft.folder / "page.html"
        weft.run("report", run, "--output", page)
        assert "Privacy" in page.read_text(), "the report has no section on privacy"
    # Normalised by the validation data, which are public; features that fired are not counted.
    tensors = files.read_tensors(run / "checkpoints/step_00000020")
    inputs, _ = files.read_dataset(weft.folder / "data/validation")
    mean = inputs.astype(np.float64).mean(axis=0).ravel()
    assert np.allclose(tensors["statistics/inputs_mean"], mean, atol=1e-6), "normalised by other data"
    assert not tensors["encoder_0/tokens_since_fired"].any(), "which features fired was released"
    secret, other = (weft.run(*command(weft, name, key="system")) and result_of(weft.folder / name) for name in ("secret", "other"))
    assert secret["privacy"]["private"] is True and secret["validation"] != other["validation"], "two runs have the same noise"
    shard_mode = (weft.folder / "secret/checkpoints/step_00000020/rank_00000.h5").stat().st_mode
    assert shard_mode & 0o077 == 0, "others can read the key"
    # Other commands read the result.
    weft.run("evaluate", run, "--data", weft.folder / "data/validation")
    weft.run("convert", run, "--output", weft.folder / "thresholds")
    weft.run("evaluate", weft.folder / "thresholds")
    weft.run("export", weft.folder / "thresholds", weft.folder / "exported", "--to", "circuit-tracer")
    return run


def resumes_bit_for_bit(weft):
    for name, model, unit in (("topk", TOPK, TOKEN), ("jump", JUMP, SEQUENCE)):
        weft.run(*command(weft, f"whole_{name}", model=model, unit=unit))
        arguments = command(weft, f"killed_{name}", model=model, unit=unit)
        weft.run(*arguments, fault="before-latest:0:10", code=-signal.SIGKILL)
        printed = weft.run(*arguments)
        assert "resuming after step 10" in printed, printed
        whole, killed = weft.folder / f"whole_{name}", weft.folder / f"killed_{name}"
        assert program.shard(killed, 20) == program.shard(whole, 20), "the resumed run has other bits"
        assert result_of(killed)["privacy"] == result_of(whole)["privacy"]


def ranks_agree(weft, expected):
    one = result_of(expected)
    for data in (1, 2):
        weft.run(*command(weft, f"ranks_{data}", "--set", f"parallel.data={data}"), ranks=2)
        two = result_of(weft.folder / f"ranks_{data}")
        assert one["privacy"] == two["privacy"]
        # The same records and noise; sums of another order.
        assert np.allclose(one["validation"]["nmse_standardised"], two["validation"]["nmse_standardised"], rtol=1e-4), (one, two)


def refusals(weft):
    for arguments, words in [
            (("--set", "transcoder.activation=batch_topk"), "which features of the others are active"),
            (("--set", "transcoder.ranking=z_score"), "couple its records"),
            (("--set", "transcoder.auxk=0.1"), "which features are dead follows from private data"),
            (("--set", "transcoder.resample_every=5"), "which features are dead follows from private data"),
            (("--set", "transcoder.encoder_bias_initial=data"), "from the first batch"),
            (("--set", "transcoder.error=unexplained"), "the variance of the batch"),
            (("--set", "transcoder.sparsity=0.1"), "not a product of the rows"),
            (("--set", "transcoder.skip=linear"), "do not form the gradients of records"),
            (("--set", "transcoder.activation=jumprelu", "--set", "transcoder.threshold_gradient=dense"), "take \"listed\""),
            (("--set", "privacy.mode=two_pass"), "in one way"),
            (("--set", "data.validation="), "normalisation and measures are taken from the validation data"),
            (("--set", "data.accept_changed=true"), "records of the data"),
            (("--set", "data.batch_tokens=4000"), "records per step"),
            (("--set", "run.nonfinite=skip"), "private data"),
            (("--set", "privacy.unit=sequence"), "without privacy.record_rows"),
            (("--set", "privacy.record_rows=8"), "a record is one row"),
            (("--set", "privacy.unit=sequence", "--set", "privacy.record_rows=7"), "take 245")]:
        printed = weft.run(*command(weft, "refused", *arguments), code=2)
        assert words in printed, (arguments, printed)
    assert not (weft.folder / "refused").exists()
    assert "private: " in weft.run(*command(weft, "dry", "--dry-run"))
    little = program.sets("privacy.epsilon=0", "privacy.noise_multiplier=2", 'privacy.clipping="adaptive"', "privacy.count_noise=1")
    assert "raise privacy.count_noise to 2" in weft.run(*command(weft, "dry", "--dry-run", *little), code=2)
    for change in ("privacy.noise_key=system", "privacy.epsilon=4", "privacy.clip=2", "privacy.enabled=false", "data.normalise=none"):
        printed = weft.run(*command(weft, "plain", "--set", "run.steps=25", "--set", change, "--set", "resume.accept_changed=true"), code=2)
        assert "it defines the run" in printed, (change, printed)
    printed = weft.run(*command(weft, "plain", "--set", "run.steps=25", "--set", "privacy.unit=sequence", "--set", "privacy.record_rows=8"),
                       code=2)
    assert "privacy.unit" in printed and "it defines the run" in printed, printed
    weft.run(*command(weft, "public", "--set", "privacy.enabled=false", "--set", "run.steps=5"))
    assert "privacy.enabled was false" in weft.run(*command(weft, "public"), code=2)


def test(weft):
    (weft.folder / "synth.toml").write_text(program.SYNTHETIC.format(folder=weft.folder) + 'dtype = "fp32"\n')
    weft.run("synth", weft.folder / "synth.toml")
    run = reports_the_guarantee(weft)
    resumes_bit_for_bit(weft)
    ranks_agree(weft, run)
    refusals(weft)


program.main(test)
