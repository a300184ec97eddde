# SPDX-License-Identifier: Apache-2.0
"""weft privacy audit from the outside: the bound stays below epsilon of an honest run, and exceeds it without clipping.

privacy_audit_test.py WEFT
"""
import json

import program

INPUT = """
[run]
steps = 150
[data]
train = "text.txt"
batch_tokens = 1024
sequence = 16
[privacy]
epsilon = 1
delta = 1e-4
clip = 0.01
canaries = 128
noise_key = "test"
accountant = "rdp"
mode = "book_keeping"
[language_model]
layers = 1
heads = 2
d_model = 64
[optimizer]
learning_rate = 1e-2
warmup_steps = 2
[checkpoint]
every = 100
keep = 2
"""


def audit(weft, run, *arguments, code=0, ranks=None):
    printed = weft.run("privacy", "audit", run, "--json", "--quiet", *arguments, code=code, ranks=ranks)
    return json.loads(printed[printed.index("{"):printed.rindex("}") + 1]), printed


def train(weft, name, *arguments, fault=""):
    source = weft.folder / "input.toml"
    source.write_text(INPUT)
    weft.run("lm", "train", source, "--output", weft.folder / name, *arguments, fault=fault)
    return weft.folder / name


def honest_runs_pass(weft):
    run = train(weft, "honest")
    privacy = program.record(run)["result"]["privacy"]
    sequences = -(-len(program.TEXT) // 17) - (1 if len(program.TEXT) % 17 == 1 else 0)
    assert privacy["records"] == sequences + 128 and abs(privacy["sample_rate"] - 64 / privacy["records"]) < 1e-12, privacy
    result, _ = audit(weft, run)
    print(result)
    assert result["canaries"] == 128 and result["guesses"] == 64 and result["score"] == "loss_change", result
    assert abs(result["epsilon"] - privacy["epsilon"]) < 1e-9 and result["epsilon_lower"] <= result["epsilon"], result
    # Two ranks divide the canaries. An earlier checkpoint has used less.
    assert audit(weft, run, ranks=2)[0]["right"] == result["right"]
    early, _ = audit(weft, run / "checkpoints" / "step_00000100", "--guesses", 32, "--confidence", 0.9)
    assert early["epsilon"] < result["epsilon"] and early["guesses"] == 32 and early["confidence"] == 0.9, early
    return run


def a_run_without_clipping_is_caught(weft):
    run = train(weft, "broken", fault="clip-factors@*:*:*:skip")
    result, printed = audit(weft, run, code=1)
    assert "the guarantee that this run states does not hold" in (run / "log.txt").read_text()
    assert result["epsilon_lower"] > result["epsilon"] and "the guarantee does not hold" in printed, printed
    return run


def wrong_uses_are_errors(weft, run):
    assert "even number" in weft.run("privacy", "audit", run, "--guesses", 130, code=2)
    assert "--confidence 1 " in weft.run("privacy", "audit", run, "--confidence", 1, code=2)
    printed = weft.run("lm", "train", weft.folder / "input.toml", "--output", run, "--set", "privacy.canaries=64",
                       "--set", "run.steps=160", code=2)
    assert "privacy.canaries" in printed, printed
    plain = train(weft, "plain", "--set", "privacy.enabled=false", "--set", "run.steps=2")
    assert "not a private run with canaries" in weft.run("privacy", "audit", plain, code=2)
    assert "weft privacy audit CHECKPOINT" in weft.run("privacy", "--help")


def documents_have_canaries_too(weft):
    lines = program.TEXT.splitlines()
    (weft.folder / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    run = train(weft, "documents", "--set", "run.steps=3", "--set", "data.train=text.jsonl", "--set", "privacy.unit=document",
                "--set", "privacy.max_per_owner=4")
    assert program.record(run)["result"]["privacy"]["records"] == len(lines) + 128
    assert audit(weft, run)[0]["canaries"] == 128


def runs_with_correlated_noise_are_audited(weft):
    run = train(weft, "bands", "--set", "run.steps=3", "--set", "privacy.bands=2")
    assert audit(weft, run)[0]["epsilon"] == program.record(run)["result"]["privacy"]["epsilon"]


def test(weft):
    (weft.folder / "text.txt").write_text(program.TEXT)
    run = honest_runs_pass(weft)
    a_run_without_clipping_is_caught(weft)
    wrong_uses_are_errors(weft, run)
    documents_have_canaries_too(weft)
    runs_with_correlated_noise_are_audited(weft)


program.main(test)
