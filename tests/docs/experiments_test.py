# SPDX-License-Identifier: Apache-2.0
"""docs/experiments.md is what scripts/experiments.py writes from the results in docs/experiments/; and the page says what results say.
docs/reference_speeds.json names inputs and cases that exist.

experiments_test.py REPOSITORY
"""
import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path


def page_of(repository, folder):
    done = subprocess.run([sys.executable, repository / "scripts/experiments.py", folder], capture_output=True, text=True, check=True)
    return done.stdout


def row(page, name):
    rows = [line for line in page.splitlines() if line.startswith(f"| **{name}**")]
    return rows[0] if rows else ""


def check_speeds(repository):
    """docs/reference_speeds.json: every case is one of its input, with its source."""
    speeds = json.loads((repository / "docs/reference_speeds.json").read_text())
    for gpu, inputs in speeds["gpus"].items():
        for name, cases in inputs.items():
            given = tomllib.loads((repository / f"inputs/{name}.toml").read_text())["benchmark"].get("cases", ["input"])
            known = [case.split(":")[0] for case in given]
            for case in cases:
                assert case["name"] in known and case["ms_per_step"] > 0 and case["ranks"] > 0, (gpu, name, case)
                assert case["source"] and case["date"] and case["commit"], (gpu, name, case)
    script, result = repository / "scripts/reference_speeds.py", {
        "input": "benchmark_gpt2_small", "ranks": 1, "machine": {"gpu": "another GPU"}, "build": {"revision": "0123456789abcdef"},
        "cases": [{"name": "fp32", "ms_per_step": 7.0, "tokens_per_second": 100.0}]}
    with tempfile.TemporaryDirectory(prefix="weft_test_") as folder:
        benchmark, file = Path(folder, "benchmark.json"), Path(folder, "speeds.json")
        file.write_text(json.dumps(speeds))
        for ms in (7.0, 6.0):       # the second replaces the first
            result["cases"][0]["ms_per_step"] = ms
            benchmark.write_text(json.dumps(result))
            subprocess.run([sys.executable, script, benchmark, "--file", file, "--date", "2026-01-02"], check=True)
        changed = json.loads(file.read_text())
        assert changed["gpus"].pop("another GPU") == {"benchmark_gpt2_small": [
            {"name": "fp32", "ranks": 1, "ms_per_step": 6.0, "tokens_per_second": 100.0, "source": "weft benchmark", "date": "2026-01-02",
             "commit": "0123456789ab"}]}
        assert changed == speeds


def main():
    repository = Path(sys.argv[1])
    check_speeds(repository)
    results, page = repository / "docs/experiments", repository / "docs/experiments.md"
    assert page_of(repository, results) == page.read_text(), "docs/experiments.md: python3 scripts/experiments.py docs/experiments writes another"

    def case(name, **more):
        return {"name": name, "ms_per_step": 10, "tokens_per_second": 100, "peak_bytes": 2**30, "loss": 2, "loss_difference": 0.0,
                "times_faster": 1.0, "valid": True, "problem": "", "left_out": "", **more}

    with tempfile.TemporaryDirectory(prefix="weft_test_") as folder:
        changed = {"machine": {"device": "portable", "copy_gb_per_second": 10, "gemm_gflops": 100}, "build": {"revision": "0123456789abcdef"},
                   "steps": 20, "not_measured": [{"name": "TF32", "reason": "this version does not have it"}],
                   "cases": [case("baseline"), case("baseline again", times_faster=1.01),  # noise: 3 %
                             case("bf16", times_faster=2.0, peak_bytes=2**29),
                             case("8-bit state", valid=False, problem="the loss is 9"),
                             case("chunked head", times_faster=1.02),
                             case("safe", times_faster=0.5, peak_bytes=2**31, left_out="graphs (no GPU)")]}
        Path(folder, "cpu.json").write_text(json.dumps(changed))
        page = page_of(repository, folder)
        assert row(page, "bf16").endswith("| 2.00 times as fast; 50 % less memory |"), row(page, "bf16")
        assert row(page, "8-bit state").endswith("| not valid: the loss is 9 |")
        assert row(page, "chunked head").endswith("| time unchanged; memory unchanged |"), row(page, "chunked head")
        assert row(page, "safe").endswith("| 2.00 times the time; 100 % more memory; without graphs (no GPU) |"), row(page, "safe")
        assert not row(page, "TF32") and "TF32 (this version does not have it)" in page
        # There is no gpu.json, no training, no operation and no combination.
        assert page.count("Not measured.") == 7 and "`device.affinity` | not measured |" in page
        variant = {"name": "GELU", "settings": [], "ms_per_step": {"128": 5.0}, "loss_at_equal_tokens": [1.5, 1.7], "loss_at_equal_time": [1.75, 1.75]}
        growing = dict(variant, name="ReLU²", ms_per_step={"64": 4.0, "128": 5.0})
        trained = {"input": "a.toml", "steps": 1000, "seeds": [1, 2], "settings": ["a.b=1"], "seconds": 5.04, "machine": changed["machine"],
                   "build": changed["build"], "variants": [variant, growing]}
        Path(folder, "activations.json").write_text(json.dumps(trained))
        page = page_of(repository, folder)
        assert page.count("Not measured.") == 6 and "at equal time (5.0 s)" in page
        assert "| GELU | 5.00 | 1.6000 ± 0.1000 | 1.7500 ± 0.0000 |" in page
        assert "| ReLU² | 4.00 (T = 64), 5.00 (T = 128) |" in page
        Path(folder, "operations.json").write_text(json.dumps({"gpu": "a GPU", "note": "", "operations": [
            {"operation": "norm", "shape": "4 x 8", "unfused_us": 30.0, "fused_us": 12.0, "bytes": 48e6, "differs": 2e-3}]}))
        Path(folder, "combined").mkdir()
        for tokens, faster in ((512, 2.0), (64, 3.0)):
            one = dict(changed, cases=[case("baseline"), case("all", times_faster=faster), case("B", valid=False)])
            Path(folder, f"combined/124M_{tokens}.json").write_text(json.dumps(one))
        for name, rate in (("auto", 120), ("none", 100)):
            Path(folder, f"affinity_{name}.json").write_text(json.dumps(dict(changed, ranks=4, cases=[case("input", tokens_per_second=rate)])))
        page = page_of(repository, folder)
        assert "| norm | 4 x 8 | 30.0 | 12.0 | 2.50 | 4,000 | 2e-03 |" in page, page
        assert "| | 64 tokens per step | faster | MiB | 512 tokens per step | faster | MiB |" in page
        assert "| **all** | 100 | 3.00 | 1,024 | 100 | 2.00 | 1,024 |" in page and "| **B** | 100 | - | 1,024 | 100 | - | 1,024 |" in page
        assert "4 ranks, input: 100 tokens/s without, 120 with it" in page
        # Without the baseline no row has figures.
        changed["cases"] = [case for case in changed["cases"] if case["name"] != "baseline"]
        changed["not_measured"].append({"name": "baseline", "reason": "it needs 1 TiB"})
        Path(folder, "cpu.json").write_text(json.dumps(changed))
        page = page_of(repository, folder)
        assert "The baseline could not be measured (it needs 1 TiB): no row is valid." in page
        assert not row(page, "bf16") and "Not measured: bf16, fp16" in page, page


if __name__ == "__main__":
    main()
