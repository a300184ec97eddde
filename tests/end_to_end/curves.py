# SPDX-License-Identifier: Apache-2.0
"""Training curves of one job on several grids of ranks: comparison, and a file of them for figures."""
import json
import os
from pathlib import Path

import files
import program

FIRST = 10              # steps whose losses agree within the tolerance of the precision
NMSE_TOLERANCE = 0.01   # of the final validation error, layer by layer


class Curve:
    """Losses and validation error of a finished run that logged every step."""

    def __init__(self, run):
        self.loss = [line["loss"] for line in program.metrics(run)]
        self.nmse = program.record(run)["result"]["validation"]["nmse_standardised"]

    def agree(self, one, tolerance, what):
        """Fails unless both curves agree. Returns the largest relative difference of loss and validation error."""
        assert len(self.loss) == len(one.loss), (what, len(self.loss), len(one.loss))
        loss = close(self.loss[:FIRST], one.loss[:FIRST], tolerance, f"{what}, loss of step")
        return loss, close(self.nmse, one.nmse, NMSE_TOLERANCE, f"{what}, NMSE of layer")


def close(mine, other, tolerance, what):
    worst = 0
    for number, (a, b) in enumerate(zip(mine, other, strict=True), 1):
        assert abs(a - b) <= tolerance * abs(b), f"{what} {number}: {a} against {b}"
        worst = max(worst, abs(a - b) / abs(b))
    return worst


def different_tensors(a, b, step):
    """Names of the tensors that are not bit-identical in two checkpoints."""
    first, second = (files.read_tensors(run / "checkpoints" / f"step_{step:08d}") for run in (a, b))
    assert first.keys() == second.keys()
    return [name for name, values in first.items() if values.tobytes() != second[name].tobytes()]


def same_bits(a, b, step):
    """Compares every tensor of the checkpoints, and every record that both logged, without times."""
    different = different_tensors(a, b, step)
    assert not different, f"{', '.join(different)} differ between {a.name} and {b.name}"
    records = {line["step"]: line for line in program.metrics_without_times(a)}
    for line in program.metrics_without_times(b):
        assert records.get(line["step"], line) == line, (a.name, b.name, line)


def keep(name, described, curves):
    """Writes $WEFT_TEST_KEEP/NAME.json if that variable is set; `curves` by grid."""
    folder = os.environ.get("WEFT_TEST_KEEP")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        grids = {grid: {"loss": curve.loss, "nmse_standardised": curve.nmse} for grid, curve in curves.items()}
        (Path(folder) / f"{name}.json").write_text(json.dumps({**described, "grids": grids}))


def real_data():
    """The folder of the real activations, or None."""
    data = os.environ.get("WEFT_TEST_DATA")
    return f"{data}/minilm-l6" if data and os.path.isdir(f"{data}/minilm-l6/train") else None
