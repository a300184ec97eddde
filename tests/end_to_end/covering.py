# SPDX-License-Identifier: Apache-2.0
"""Covering arrays: few combinations of the levels of some factors, in which every pair of levels of two factors occurs."""
import itertools


def pairs(factors, allowed=lambda row: True):
    """Rows {factor: level} of `factors`, {factor: levels}; every pair of levels that an allowed combination has is in one of them.
    The same rows every time; few, but not the fewest."""
    def pairs_of(row):
        return set(itertools.combinations(row.items(), 2))

    candidates = [row for row in (dict(zip(factors, levels)) for levels in itertools.product(*factors.values())) if allowed(row)]
    missing = set().union(*map(pairs_of, candidates))
    while missing:
        best = max(candidates, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(best)
        yield best
