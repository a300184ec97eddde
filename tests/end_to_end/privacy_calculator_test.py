# SPDX-License-Identifier: Apache-2.0
"""weft privacy from the outside: both directions, all accountants, an input, and refusals.

privacy_calculator_test.py WEFT
"""
import json
import math

import program

PUBLISHED = ["--delta", "1e-5", "--sample-rate", "0.04", "--steps", "2250"]


def document(weft, *arguments):
    return json.loads(weft.run("privacy", *arguments, "--json"))


def by_accountant(result):
    return {row["accountant"]: row for row in result["accountants"]}


def test_directions(weft):
    noise = by_accountant(document(weft, "--epsilon", "8", *PUBLISHED))
    # Values of the tests of Opacus; the last digit is rounded. prv: another point within the tolerance of epsilon.
    for name, expected, error in (("prv", 1.3476563, 1.2e-3), ("rdp", 1.4160156, 1e-7), ("gdp", 1.3232422, 1e-7)):
        assert abs(noise[name]["noise_multiplier"] - expected) < error, noise
        assert 7.98 < noise[name]["epsilon"] <= 8, noise
        # The other direction, from the printed noise, gives the same epsilon.
        back = document(weft, "--noise-multiplier", repr(noise[name]["noise_multiplier"]), *PUBLISHED, "--accountant", name)
        assert [row["accountant"] for row in back["accountants"]] == [name]
        assert back["accountants"][0]["epsilon"] == noise[name]["epsilon"]
        assert (back["delta"], back["sample_rate"], back["steps"]) == (1e-5, 0.04, 2250)
    text = weft.run("privacy", "--noise-multiplier", "1.5", *PUBLISHED)
    for part in ("prv         1.5               6.7791", "rdp         1.5               7.3291", "no bound"):
        assert part in text, text
    assert document(weft, "--noise-multiplier", "1", "--delta", "1e-5", "--sample-rate", "0.1", "--steps", "0")["accountants"][0]["epsilon"] == 0
    # Of several accountants one may have no result: its row says why. Asked for alone, that is an error.
    little = ["--noise-multiplier", "1", "--delta", "1e-5", "--sample-rate", "0.001", "--steps", 10**12]
    rows = by_accountant(document(weft, *little))
    assert "accountant rdp" in rows["prv"]["problem"] and rows["rdp"]["epsilon"] > 1000, rows
    assert "accountant rdp" in weft.run("privacy", *little, "--accountant", "prv", code=2)
    # The columns of a large epsilon stay apart.
    assert "e+05  an upper bound" in weft.run("privacy", *little, "--accountant", "rdp")
    # Truncated Poisson sampling: hardly more, unless batches are truncated too often.
    batches = ["--noise-multiplier", "1", "--delta", "1e-6", "--sample-rate", repr(256 / 60000), "--steps", "1000", "--records", "60000"]
    rows = by_accountant(document(weft, *batches, "--most-records", "400"))
    assert abs(rows["pld"]["epsilon"] - 0.87052) < 1e-3 and rows["rdp"]["epsilon"] > rows["pld"]["epsilon"], rows
    assert rows["pld"]["dp_event"]["event"]["class_name"] == "TruncatedSubsampledGaussianDpEvent", rows
    assert "take privacy.most_records = " in weft.run("privacy", *batches, "--most-records", "300", code=2)
    assert "needs --records with --most-records" in weft.run("privacy", *batches, code=2)
    # If none has a result, that is an error as well; and nothing can be computed where no record is used.
    assert "cannot be reached" in weft.run("privacy", "--epsilon", "1", "--delta", "1e-5", "--sample-rate", "1", "--steps", 2**50, code=2)
    assert "--steps above 0" in weft.run("privacy", "--epsilon", "1", "--delta", "1e-5", "--sample-rate", "0.01", "--steps", 0, code=2)


def test_full_batches_and_little_epsilon(weft):
    # Three Gaussian mechanisms: the exact epsilon is 43.383.
    full = by_accountant(document(weft, "--noise-multiplier", "0.3", "--delta", "1e-6", "--sample-rate", "1", "--steps", "3"))
    assert abs(full["prv"]["epsilon"] - 43.383) < 1e-3 and abs(full["gdp"]["epsilon"] - 43.383) < 1e-3 and full["rdp"]["epsilon"] > 43.4, full
    noise = by_accountant(document(weft, "--epsilon", "40", "--delta", "1e-6", "--sample-rate", "1", "--steps", "1"))
    assert abs(noise["prv"]["noise_multiplier"] - 0.1836) < 1e-4, noise
    # The tightest accountant needs the least noise, also of little epsilon.
    little = by_accountant(document(weft, "--epsilon", "0.005", "--delta", "1e-5", "--sample-rate", "0.01", "--steps", "1000"))
    assert little["prv"]["noise_multiplier"] < 0.9 * little["rdp"]["noise_multiplier"], little


def test_bands(weft):
    """Noise of b bands: that of ceil(steps / b) steps at b times the rate."""
    given = ["--noise-multiplier", "1.5", "--delta", "1e-5", "--accountant", "prv"]
    banded = document(weft, *given, "--sample-rate", "0.01", "--steps", "2250", "--bands", "4")
    plain = document(weft, *given, "--sample-rate", "0.04", "--steps", "563")
    assert banded["accountants"] == plain["accountants"] and banded["bands"] == 4, (banded, plain)
    event = banded["accountants"][0]["dp_event"]
    assert (event["count"], event["event"]["sampling_probability"]) == (563, 0.04), event
    noise = document(weft, "--epsilon", "8", "--delta", "1e-5", "--sample-rate", "0.01", "--steps", "2250", "--bands", "4", "--accountant", "rdp")
    assert by_accountant(noise)["rdp"]["dp_event"]["event"]["event"]["noise_multiplier"] == by_accountant(noise)["rdp"]["noise_multiplier"]
    assert "has at most 3" in weft.run("privacy", *given, "--sample-rate", "0.3", "--steps", "10", "--bands", "4", code=2)


def test_input(weft):
    (weft.folder / "text.txt").write_text("private " * 1250)     # 10,000 characters
    source = weft.folder / "private.toml"
    source.write_text("""
[run]
steps = 300
[data]
train = "text.txt"
batch_tokens = 256
sequence = 32
[privacy]
epsilon = 8
delta = 1e-3
accountant = "rdp"
""")
    # 10,000 ids in windows of 33 that share none: 303 whole ones, and a rest of one id, which predicts nothing.
    result = document(weft, "--input", source)
    assert math.isclose(result["sample_rate"], 8 / 303), result
    assert (result["steps"], result["delta"], result["target_epsilon"]) == (300, 1e-3, 8)
    assert [row["accountant"] for row in result["accountants"]] == ["rdp"]
    # Options replace what the input says.
    other = document(weft, "--input", source, "--noise-multiplier", "2", "--steps", "10", "--sample-rate", "0.5", "--accountant", "gdp")
    assert (other["sample_rate"], other["steps"], other["delta"]) == (0.5, 10, 1e-3)
    assert other["accountants"][0]["noise_multiplier"] == 2 and "target_epsilon" not in other
    plain = weft.folder / "plain.toml"
    plain.write_text('[data]\ntrain = "text.txt"\nbatch_tokens = 256\nsequence = 32\n')
    assert "its training is not private" in weft.run("privacy", "--input", plain, "--delta", "1e-3", code=2)
    assert weft.run("privacy", "--input", plain, "--delta", "1e-3", "--epsilon", "8", "--accountant", "rdp").startswith(f"{plain}: 8 of 303 sequences")
    assert "missing.toml" in weft.run("privacy", "--input", "missing.toml", code=2)


def test_refusals(weft):
    given = {"--epsilon": "8", "--delta": "1e-5", "--sample-rate": "0.04", "--steps": "100"}
    for option, values in {"--epsilon": ("-1", "0", "nan", "1e9", "many"), "--delta": ("0", "1", "-1e-5", "nan"),
                           "--sample-rate": ("-0.1", "1.5", "nan"), "--steps": ("-5", "1.5", "1e40")}.items():
        for value in values:
            arguments = [part for pair in (given | {option: value}).items() for part in pair]
            message = weft.run("privacy", *arguments, code=2)
            assert option.strip("-") in message, (option, value, message)
        left_out = [part for name, text in given.items() if name != option for part in (name, text)]
        assert option.strip("-") in weft.run("privacy", *left_out, code=2)
    everything = [part for pair in given.items() for part in pair]
    assert "one of --epsilon and --noise-multiplier" in weft.run("privacy", *everything, "--noise-multiplier", "1", code=2)
    assert "out of range" in weft.run("privacy", *everything[2:], "--noise-multiplier", "1e-5", code=2)
    assert "one of prv, pld, rdp, gdp, all" in weft.run("privacy", *everything, "--accountant", "best", code=2)
    assert "unexpected argument" in weft.run("privacy", "input.toml", *everything, code=2)


def test(weft):
    test_directions(weft)
    test_full_batches_and_little_epsilon(weft)
    test_bands(weft)
    test_input(weft)
    test_refusals(weft)


if __name__ == "__main__":
    program.main(test)
