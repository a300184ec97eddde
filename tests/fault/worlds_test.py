# SPDX-License-Identifier: Apache-2.0
"""A run that changes its number of ranks and its grid at every start: the same rows in the same order, and, within rounding,
the training curve of an uninterrupted run on one rank.

worlds_test.py WEFT
"""
import json

import files
import jobs
import program

# (last step, data axis, feature axis): 4 ranks -> 2 -> 3 -> 1, then back to 4 on the other axis.
STARTS = ((12, 2, 2), (24, 1, 2), (36, 3, 1), (48, 1, 1), (60, 4, 1))
# Between grids the loss of the first 10 steps agrees to 1e-5 and the final NMSE to 1 %. The effect of a changed order of
# summation on the loss grows slowly in later steps.
LOSS_TOLERANCE, LATER_TOLERANCE, NMSE_TOLERANCE = 1e-5, 1e-3, 0.01


def cursor(run, step):
    manifest = json.loads((files.checkpoints(run)[step] / "manifest.json").read_text())
    return manifest["tokens"], manifest["cursor"]


def check(weft):
    job = jobs.Jobs(weft, every=12)
    keep = ("--set", "checkpoint.keep=9")
    job.run("whole", *keep)
    for before, (last, data, feature) in zip((None, *STARTS), STARTS):
        # Stopped by a signal and not by run.steps, on which the learning rate depends; the last start completes.
        fault = f"step:0:{last - 2}:usr1" if last < job.steps else ""
        output = job.run("wandering", *keep, "--set", f"parallel.data={data}", "--set", f"parallel.feature={feature}",
                         ranks=data * feature, fault=fault, code=75 if fault else 0)
        assert before is None or f"resuming after step {before[0]} " in output, output
        assert "rejected" not in output, output
    whole, wandering = job.folder / "whole", job.folder / "wandering"
    for last, _, _ in STARTS:
        assert cursor(whole, last) == cursor(wandering, last), last
    worst_early = worst = 0.0
    expected, found = program.metrics(whole), program.metrics(wandering)
    assert [line["step"] for line in found] == [line["step"] for line in expected] == list(range(1, job.steps + 1))
    for one, other in zip(expected, found):
        difference = abs(one["loss"] - other["loss"]) / one["loss"]
        worst = max(worst, difference)
        if one["step"] <= 10:
            worst_early = max(worst_early, difference)
        assert (one["tokens"], one["epoch"], one["learning_rate"]) == (other["tokens"], other["epoch"], other["learning_rate"])
    print(f"loss against one rank: the first 10 steps within {worst_early:.1e}, all {job.steps} within {worst:.1e}")
    assert worst_early <= LOSS_TOLERANCE and worst <= LATER_TOLERANCE
    one, other = (program.record(run)["result"]["train"]["nmse_standardised"] for run in (whole, wandering))
    assert abs(one - other) <= NMSE_TOLERANCE * one, (one, other)


program.main(check)
