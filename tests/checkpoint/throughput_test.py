# SPDX-License-Identifier: Apache-2.0
"""weft benchmark with benchmark.checkpoint = true: the report is complete and consistent, and no files remain. The speed
depends on the machine and is not tested.

throughput_test.py WEFT
"""
import json

import program

INPUT = """
[benchmark]
layers = 2
d_model = 16
cases = []
checkpoint = true
[data]
batch_tokens = 32
[transcoder]
features = 5000
k = 3
[optimizer]
state = "{state}"
"""


def check(weft):
    for ranks, state, bytes_of_state in ((1, "fp32", 12 * 400_000), (2, "8bit", 4 * 400_000)):
        source = weft.folder / f"{state}.toml"
        source.write_text(INPUT.format(state=state))
        output = weft.run("benchmark", source, "--output", weft.folder / state, ranks=ranks)
        result = json.loads((weft.folder / state / "benchmark.json").read_text())["checkpoint"]
        # 5000 features of two layers: 2 * 16 + 3 * 16 weights each; plus biases, scales and headers.
        assert bytes_of_state < result["bytes"] < 1.5 * bytes_of_state, result
        assert result["writers"] == ranks and result["cores"] >= 1, result
        assert isinstance(result["direct"], bool) and result["write_processor_seconds"] > 0, result
        busy = result["write_while_training"]
        assert busy["durable_seconds"] >= busy["seconds"] > 0 and busy["ms_per_step"] > 0 and busy["ms_per_step_during"] > 0, busy
        assert "while training: written at" in output, output
        for direction in ("write", "write_while_training", "read"):
            one = result[direction]
            assert one["seconds"] > 0 and abs(one["percent_of_plain"] - 100 * one["plain_seconds"] / one["seconds"]) < 1e-6, result
        assert 0 < result["pause_seconds"] <= result["write"]["seconds"] and result["copy_seconds"] > 0, result
        assert "of plain files with fsync" in output and f"by {ranks} rank" in output, output
        assert sorted(path.name for path in (weft.folder / state).iterdir()) == ["benchmark.csv", "benchmark.json"]


program.main(check)
