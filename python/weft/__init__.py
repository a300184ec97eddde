# SPDX-License-Identifier: Apache-2.0
"""Runs, checkpoints, transcoders and datasets of Weft in Python (weft.reader), and its pages and sweeps: `weft report`, `weft sweep`,
`weft serve`, `weft follow` and `weft harvest` are programs of this package."""
from weft.reader import Checkpoint, Dataset, Run, Transcoder, write_dataset

__version__ = "0.2.0"
__all__ = ["Run", "Checkpoint", "Transcoder", "Dataset", "write_dataset"]
