# SPDX-License-Identifier: Apache-2.0
"""Runs a test of this folder by the interpreter of an environment of scripts/peers.sh; skipped (77) without it.

launch.py ENVIRONMENT TEST WEFT
"""
import os
import sys
from pathlib import Path

SKIPPED = 77
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false",
           "SPARSIFY_DISABLE_TRITON": "1"}      # sparsify then computes on a CPU
ONE_CORE = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")}


def main():
    environment, test, weft = sys.argv[1:]
    prefix = Path(os.environ.get("WEFT_PEERS", ROOT / ".deps/peers")) / environment
    complete = prefix / "complete"
    if not complete.is_file() or complete.read_bytes() != (HERE / f"{environment}.txt").read_bytes():
        print(f"skipped: {prefix} is missing, incomplete or of other versions (bash scripts/peers.sh makes it)")
        sys.exit(SKIPPED)
    python = str(prefix / "bin/python")
    path = ":".join(str(ROOT / part) for part in ("python", "tests/end_to_end"))
    os.execve(python, [python, "-W", "ignore", str(HERE / test), weft], {**os.environ, **OFFLINE, **ONE_CORE, "PYTHONPATH": path})


if __name__ == "__main__":
    main()
