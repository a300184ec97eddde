# SPDX-License-Identifier: Apache-2.0
"""Every allowed pair of levels occurs in a covering array, in few rows."""
import itertools

import covering

FACTORS = {"a": "wxyz", "b": (1, 2, 3), "c": (False, True), "d": ("p", "q", "r")}


def check(allowed, most):
    rows = list(covering.pairs(FACTORS, allowed))
    assert all(map(allowed, rows)) and len(rows) <= most, rows
    found = [set(row.items()) for row in rows]
    everything = [dict(zip(FACTORS, levels)) for levels in itertools.product(*FACTORS.values())]
    for row in filter(allowed, everything):
        for pair in itertools.combinations(row.items(), 2):
            assert any(set(pair) <= one for one in found), pair


check(lambda row: True, 15)     # of 72; a and b alone need 12
check(lambda row: row["a"] != "w" or row["c"], 15)
