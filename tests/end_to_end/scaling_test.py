# SPDX-License-Identifier: Apache-2.0
"""scripts/benchmark.py on processes without GPUs and at small sizes: its tables contain the results of the runs, a failed run is reported, and
pages receive the tables.

scaling_test.py REPOSITORY WEFT
"""
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TINY = ["--tokens", "64", "--transcoder-set", "benchmark.layers=2", "benchmark.d_model=16", "transcoder.features=64", "transcoder.k=4",
        "benchmark.warmup=1", "benchmark.steps=2", "device.threads=1",
        "--language-set", "benchmark.warmup=1", "benchmark.steps=2", "benchmark.vocabulary=300", "data.sequence=16", "data.micro_tokens=16",
        "language_model.layers=1", "language_model.d_model=64", "language_model.heads=4", "language_model.kv_heads=2", "language_model.d_mlp=64",
        "device.threads=1", "device.precision=fp32"]


def cells(text, name):
    """Rows of the table below a mark."""
    table = text.split(f"<!-- scripts/benchmark.py: {name} -->\n")[1].split("<!-- end -->")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")][2:]


def check(folder, repository, weft):
    def benchmark(*words):
        return subprocess.run([sys.executable, repository / "scripts/benchmark.py", "--output", "out", *words], cwd=folder, text=True,
                              env=dict(os.environ, WEFT=weft), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)

    done = benchmark("scaling", "language_scaling", "affinity", "--ranks", "1", "2", *TINY)
    assert done.returncode == 0, done.stdout
    written = (folder / "out/tables.md").read_text()
    assert written in done.stdout
    llama = [line for line in cells(written, "scaling") if line[0].startswith("Llama")]
    alone, together = (json.loads((folder / f"out/scaling-llama-{n}/benchmark.json").read_text())["cases"][0] for n in (1, 2))
    speed_up, communication = together["tokens_per_second"] / alone["tokens_per_second"], together["communication"]
    assert [line[1:3] for line in llama] == [["1", "1 x 1"], ["2", "1 x 2"]], written
    assert llama[1][5:8] == [f"{speed_up:.2f}", f"{50 * speed_up:.0f} %", f"{communication['ms']:,.2f}"], (llama, together)
    # Bytes per token: inputs and targets of two layers of 16 values of 2 bytes.
    assert together["row_bytes"] == 2 * 2 * 16 * 2, together
    # One row per grid, those of a data axis next to their own case.
    assert [line[1:3] for line in cells(written, "scaling") if line[0].startswith("GPT-2")] == [
        ["1", "1 x 1"], ["2", "1 x 2"], ["2", "2 x 1"]], written
    assert [line[1:3] for line in cells(written, "language scaling") if line[0].startswith("Llama")] == [
        ["1", "1 x 1"], ["2", "2 x 1"], ["2", "1 x 2"]], written
    pair = [json.loads((folder / f"out/scaling-gpt2-{n}/benchmark.json").read_text())["cases"][0]["phases"] for n in (2, 1)]
    phases, first = ({phase["name"]: phase["ms"] for phase in one} for one in pair)
    loss = {name: float(ms.replace(",", "")) for name, ms in cells(written, "losses")}
    encode = phases["encode"] - first["encode"] / 2
    assert set(loss) == set(phases) and abs(loss["encode"] - encode) < 0.006, (loss, phases, first)
    assert [line[0] for line in cells(written, "affinity")] == ['`"auto"`', '`"none"`'], written

    # A page receives the tables and keeps what is not between marks; one with a table that was not measured stays as it is.
    page = folder / "page.md"
    begin = "# A\n\n<!-- scripts/benchmark.py: affinity -->\n\nold\n\n<!-- end -->\n\nkept\n\n"
    page.write_text(f"{begin}<!-- scripts/benchmark.py: speed -->\n\n<!-- end -->\n")
    done = benchmark("--page", "page.md", "--ranks", "1", "2", *TINY)
    assert done.returncode == 1 and "not measured: speed" in done.stdout and page.read_text().startswith(begin), done.stdout
    page.write_text(f"{begin}<!-- scripts/benchmark.py: conditions -->\n\n<!-- end -->\n")
    assert benchmark("--page", "page.md", "--ranks", "1", "2", *TINY).returncode == 0
    text = page.read_text()
    assert cells(text, "affinity") == cells(written, "affinity") and "\nold" not in text and "\nkept\n" in text and "Weft " in text, text

    # A failed run is reported with its reason; the tables contain the others. One that would start too late is not started.
    failing = list(TINY)
    failing.insert(failing.index("--language-set"), "parallel.feature=1")
    done = benchmark("scaling", "--ranks", "1", "2", *failing)
    assert done.returncode == 1 and "scaling-llama-2: failed with 2" in done.stdout, done.stdout
    assert ["1", "1 x 1"] in [line[1:3] for line in cells(done.stdout, "scaling")] and "Not measured: " in done.stdout, done.stdout
    done = benchmark("affinity", "--ranks", "1", "2", "--seconds", "1", *TINY)
    assert done.returncode == 1 and "affinity-auto-2: not started" in done.stdout, done.stdout
    print("the tables contain the measurements; failed runs are reported")


with tempfile.TemporaryDirectory(prefix="weft_test_") as temporary:
    check(Path(temporary), Path(sys.argv[1]).resolve(), str(Path(sys.argv[2]).resolve()))
