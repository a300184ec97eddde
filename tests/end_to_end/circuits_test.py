# SPDX-License-Identifier: Apache-2.0
"""scripts/circuits.sh --small: from a model to the pages of its features and of three prompts; a second start keeps what is finished.

circuits_test.py SOURCE WEFT
"""
import json
import re
import subprocess
import sys
from pathlib import Path

import page_script
import program

SOURCE = Path(sys.argv.pop(1))
FEATURE = """
await application.all('select')[0].oninput();
await application.all('tbody')[0].children[0].onclick();
for (const text of ['Strongest examples', 'Examples at random', 'Tokens promoted', 'Features that fire most often at its tokens'])
  need(application.textContent.includes(text), text);
"""


def circuits(weft, *arguments, code=0):
    path = f"{weft.binary.parent}:{weft.environment['PATH']}"
    done = subprocess.run(["bash", SOURCE / "scripts/circuits.sh", *arguments], cwd=weft.folder, text=True, check=False, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, env=dict(weft.environment, PATH=path))
    assert done.returncode == code, done.stdout
    return done.stdout


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.S)[1])


def test(weft):
    program.needs_package(weft)
    assert "takes MODEL TEXT" in circuits(weft, "model", code=2)
    circuits(weft, "--small", "small")
    place = weft.folder / "small"
    assert (place / "model/config.json").is_file() and (place / "evaluation/evaluation.json").is_file()
    page_script.run(weft.folder, (place / "features.html").read_text(), 1, FEATURE)
    assert sorted(page.name for page in place.glob("graph_*")) == [f"graph_{i}.{kind}" for i in (1, 2, 3) for kind in ("html", "svg")]
    graphs = [data_of(place / f"graph_{i}.html") for i in (1, 2, 3)]
    assert all("logit" in graph["kinds"] for graph in graphs) and any(graph["details"] for graph in graphs)
    again = circuits(weft, "--small", "small")
    assert again.count("the run is finished") == 2 and "0 of 1 files written" in again, again
    print("scripts/circuits.sh writes its pages, and keeps what is finished")


program.main(test)
