# SPDX-License-Identifier: Apache-2.0
"""weft benchmark of a language model: every case, what is written, which rows count.

language_benchmark_test.py WEFT
"""
import csv
import json

import program

INPUT = """
[benchmark]
vocabulary = 200
warmup = 1
steps = 3
batches = 2
[run]
output = "unused"
[data]
batch_tokens = 256
sequence = 32
[language_model]
layers = 3
heads = 2
d_model = 32
[optimizer]
learning_rate = 1e-3
warmup_steps = 2
"""
# On a CPU, and what this version does not have.
NOT_HERE = {"TF32", "fp8", "hand-written kernels", "bf16 + hand-written kernels", "host-resident state",
            "activation swapping", "graphs"}


def run(weft, name, *sets, code=0, options=(), ranks=None):
    source = weft.folder / "input.toml"
    source.write_text(INPUT)
    output = weft.folder / name
    words = program.sets(*sets)
    printed = weft.run("benchmark", source, *words, "--output", output, *options, code=code, ranks=ranks)
    file = output / "benchmark.json"
    return printed, json.loads(file.read_text()) if file.exists() else None


def cases_of(*names):
    return f"benchmark.cases={json.dumps(list(names))}"


def test(weft):
    printed, result = run(weft, "all")
    cases = {case["name"]: case for case in result["cases"]}
    missing = {case["name"]: case["reason"] for case in result["not_measured"]}
    # Nothing is skipped silently: each case is measured, or listed with a reason that is printed too.
    assert set(missing) <= NOT_HERE and missing.keys().isdisjoint(cases), missing
    for name, reason in missing.items():
        assert reason and f"{name}: not measured, {reason}" in printed, name
    assert len(cases) + len(missing) == 26, sorted(cases) + sorted(missing)
    assert result["steps"] == 4 and result["baseline"] == "baseline" and result["machine"]["peak_tflops"] is None
    for case in cases.values():
        assert case["valid"] and case["problem"] == "", case
        assert case["tokens_per_second"] > 0 and case["peak_bytes"] > case["state_bytes"] > 0 and case["times_faster"] > 0
        assert case["mfu"] == {"causal": None, "full": None} and case["flops_per_token"]["full"] > case["flops_per_token"]["causal"] > 0
        assert case["fastest_ms"] <= case["ms_per_step"], case
        phases = {phase["name"]: phase for phase in case["phases"]}
        assert {"loss", "weight gradients", "update"} <= phases.keys(), case
        for phase in ("products", "attention", "norms", "embedding"):
            forward, backward = phases[f"{phase}, forward"], phases[f"{phase}, backward"]
            assert phase not in phases and min(forward["ms"], backward["ms"], forward["bytes"], backward["bytes"]) > 0, case
    # The same training: recomputation, chunks and a repetition give the same bits.
    assert cases["baseline again"]["loss"] == cases["baseline"]["loss"]
    for name in ("recompute activation", "recompute norms", "recompute blocks"):
        assert cases[name]["loss"] == cases["baseline"]["loss"], name
    # Others differ by rounding: fp32 in another order, then in other types. The loss itself falls.
    for name, largest in (("flash attention", 1e-5), ("chunked head", 1e-5), ("accumulation", 1e-5), ("bf16", 1e-2), ("fp16", 1e-2),
                          ("bf16 + fp8", 1e-2)):
        assert abs(cases[name]["loss_difference"]) <= largest, (name, cases[name]["loss_difference"])
    assert cases["bf16"]["loss"] != cases["baseline"]["loss"]
    # Memory: what each optimisation is for.
    peak = {name: case["peak_bytes"] for name, case in cases.items()}
    for name in ("bf16", "fp16", "flash attention", "recompute activation", "recompute blocks", "8-bit state", "bf16 state", "accumulation"):
        assert peak[name] < peak["baseline"], name
    assert peak["recompute blocks"] < peak["recompute norms"] < peak["recompute activation"]
    assert peak["8-bit state + recompute blocks"] < min(peak["8-bit state"], peak["recompute blocks"])
    assert peak["all"] == min(peak.values())
    assert cases["8-bit state"]["state_bytes"] < cases["bf16 state"]["state_bytes"] < cases["baseline"]["state_bytes"]
    assert cases["safe"]["toggles"] == ["flash attention", "chunked head"] and "graphs" in cases["safe"]["left_out"]
    assert "loss: nats per token after 4 steps" in printed
    # The same rows as CSV, and a plot.
    with open(weft.folder / "all" / "benchmark.csv", newline="", encoding="utf-8") as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    assert rows.keys() == cases.keys() | missing.keys()
    assert abs(float(rows["bf16"]["ms_per_step"]) - cases["bf16"]["ms_per_step"]) < 1e-6 * cases["bf16"]["ms_per_step"]
    assert rows["bf16"]["valid"] == "true" and rows["TF32"]["ms_per_step"] == "" and "needs a GPU" in rows["TF32"]["remark"]

    # A stated peak gives a utilisation; a chunk smaller than the batch changes memory; own cases take overrides.
    printed, result = run(weft, "own", cases_of("input", "baseline", "small: optimizer.state=bf16, data.micro_tokens=64"),
                          "benchmark.peak_tflops=0.5", "benchmark.batch_tokens=128")
    given, baseline, small = result["cases"]
    expected = given["tokens_per_second"] * given["flops_per_token"]["causal"] / 0.5e12
    assert abs(given["mfu"]["causal"] - expected) < 1e-9 * expected and "of 0.5 TFLOP/s" in printed
    # They take data.batch_tokens per step, not benchmark.batch_tokens: another problem than the baseline's.
    assert baseline["valid"] and given["valid"] is None and small["valid"] is None and small["times_faster"] is None
    assert given["overrides"] == "" and small["overrides"].startswith("optimizer.state")

    # A row whose loss leaves the tolerance is not valid; nor is any if the baseline does not fit in memory.
    _, result = run(weft, "strict", cases_of("baseline", "recompute blocks", "bf16"), "benchmark.loss_tolerance=0")
    assert [case["valid"] for case in result["cases"]] == [True, True, False] and "apart" in result["cases"][2]["problem"], result
    printed, result = run(weft, "large", cases_of("input", "baseline"), "benchmark.batch_tokens=268435456")
    assert [case["name"] for case in result["not_measured"]] == ["baseline"] and "it needs" in result["not_measured"][0]["reason"]
    assert result["cases"][0]["valid"] is False and 'not valid: "baseline" could not be measured' in printed

    _, result = run(weft, "dropped", cases_of("baseline", "flash attention"), "language_model.attention_dropout=0.1",
                    "data.sequence_start=16", "data.sequence_growth_steps=1")
    assert "attention_dropout" in result["not_measured"][0]["reason"] and result["cases"][0]["valid"] is False, result

    # Refused, and planned only.
    printed, _ = run(weft, "typo", cases_of("bsaeline"), code=2)
    assert '"bsaeline" stands for no case (known: input, bf16, ' in printed, printed
    printed, _ = run(weft, "both", cases_of("8-bit state + bf16 state"), code=2)
    assert "two values of optimizer.state" in printed, printed
    printed, result = run(weft, "plan", options=["--dry-run"])
    assert result is None and "baseline: 45,600 parameters" in printed and "TF32: not measured, it needs a GPU" in printed, printed
    # Ids of token files.
    text = weft.folder / "text.txt"
    text.write_text("".join(chr(97 + i * i % 26) for i in range(4000)))
    weft.run("lm", "tokenize", text, "--tokens", "bytes", "--output", weft.folder / "tokens")
    data = f"benchmark.data={weft.folder / 'tokens'}"
    _, random_ids = run(weft, "random", cases_of("baseline"), "benchmark.vocabulary=300")
    _, given = run(weft, "given", cases_of("baseline"), "benchmark.vocabulary=300", data)
    assert given["cases"][0]["loss"] != random_ids["cases"][0]["loss"] and 0 < given["cases"][0]["loss"] < 6, given
    printed, _ = run(weft, "few", cases_of("baseline"), data, code=2)
    assert "(benchmark.vocabulary is 200); set benchmark.vocabulary = 25" in printed, printed
    printed, _ = run(weft, "none", cases_of("baseline"), "benchmark.data=missing.h5", code=3)
    assert "missing.h5" in printed, printed

    # A case has its own grid; private steps state the time of their exchanges, and how much of it is exposed.
    _, result = run(weft, "grids", cases_of("input", "tensor: parallel.tensor=2",
                    "private: privacy.enabled=true, privacy.epsilon=8, privacy.delta=1e-4"), ranks=2)
    for case, grid, exchange in zip(result["cases"], ({"data": 2, "tensor": 1}, {"data": 1, "tensor": 2}, {"data": 2, "tensor": 1}),
                                    ("gradients", "activations", "gradients")):
        communication = case["communication"]
        assert case["grid"] == grid, case
        assert exchange in [one["name"] for one in communication["exchanges"]], communication
        assert communication["ms"] > 0 and communication["exposed_ms"] > 0, communication
    private = [phase["name"] for phase in result["cases"][2]["phases"]]
    assert {"norms of records", "clipped sums", "noise", "exchange"} <= set(private), private

    # An earlier run of the same cases.
    reference = weft.folder / "own" / "benchmark.json"
    only = cases_of("baseline")
    run(weft, "compared", only, "benchmark.compare_ratio=1000", options=["--compare", reference])
    faster = json.loads(reference.read_text())
    faster["cases"] = [dict(case, ms_per_step=case["ms_per_step"] / 1000) for case in faster["cases"]]
    (weft.folder / "faster.json").write_text(json.dumps(faster))
    run(weft, "compared", only, code=1, options=["--compare", weft.folder / "faster.json"])
    # The state of a language model is written and read like that of any other; --profile records the first case.
    _, result = run(weft, "checkpoint", only, "benchmark.checkpoint=true", options=["--profile"])
    assert result["checkpoint"]["bytes"] > 0 and result["profile"]["steps"] > 0 and (weft.folder / "checkpoint" / "profile.json").exists()


program.main(test)
