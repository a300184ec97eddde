# SPDX-License-Identifier: Apache-2.0
"""docs/experiments.md is what scripts/experiments.py writes from the results in docs/experiments/; and the page says what results say.

experiments_test.py REPOSITORY
"""
import json
import subprocess
import sys
import tempfile
from pathlib import Path


def page_of(repository, folder):
    done = subprocess.run([sys.executable, repository / "scripts/experiments.py", folder], capture_output=True, text=True, check=True)
    return done.stdout


def row(page, name):
    rows = [line for line in page.splitlines() if line.startswith(f"| **{name}**")]
    return rows[0] if rows else ""


def main():
    repository = Path(sys.argv[1])
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
        assert "not measured: this version" in row(page, "TF32")
        assert page.count("Not measured.") == 4                            # there is no gpu.json, and no training
        variant = {"name": "GELU", "settings": [], "ms_per_step": {"128": 5.0}, "loss_at_equal_tokens": [1.5, 1.7], "loss_at_equal_time": [1.75, 1.75]}
        growing = dict(variant, name="ReLU²", ms_per_step={"64": 4.0, "128": 5.0})
        trained = {"input": "a.toml", "steps": 1000, "seeds": [1, 2], "settings": ["a.b=1"], "seconds": 5.04, "machine": changed["machine"],
                   "build": changed["build"], "variants": [variant, growing]}
        Path(folder, "activations.json").write_text(json.dumps(trained))
        page = page_of(repository, folder)
        assert page.count("Not measured.") == 3 and "at equal time (5.0 s)" in page
        assert "| GELU | 5.00 | 1.6000 ± 0.1000 | 1.7500 ± 0.0000 |" in page
        assert "| ReLU² | 4.00 (T = 64), 5.00 (T = 128) |" in page
        # Without the baseline no row has figures.
        changed["cases"] = [case for case in changed["cases"] if case["name"] != "baseline"]
        changed["not_measured"].append({"name": "baseline", "reason": "it needs 1 TiB"})
        Path(folder, "cpu.json").write_text(json.dumps(changed))
        page = page_of(repository, folder)
        assert "The baseline could not be measured (it needs 1 TiB): no row is valid." in page
        assert row(page, "bf16").endswith("| not measured |"), row(page, "bf16")


if __name__ == "__main__":
    main()
