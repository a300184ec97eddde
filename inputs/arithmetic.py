#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Sums whose answers a program can check.

    arithmetic.py data COUNT [SEED]    writes COUNT rows {"prompt", "completion", "reference"}
    arithmetic.py reward               a reward_command: 1 for an answer whose first number is the right one, else 0
"""
import json
import random
import re
import sys


def write_rows(count, seed):
    numbers = random.Random(seed)
    for _ in range(count):
        a, b = numbers.randint(0, 9), numbers.randint(0, 9)
        # Several forms are right: the reward reads the number alone.
        answer = numbers.choice(["{}.", "= {}.", "it is {}.", "the sum is {}."]).format(a + b)
        print(json.dumps({"prompt": f"{a} + {b}: ", "completion": answer, "reference": str(a + b)}))


def score(answer, reference):
    found = re.search(r"-?\d+", answer)
    return float(found is not None and int(found.group()) == int(reference))


def main(arguments):
    if arguments[:1] == ["data"] and len(arguments) in (2, 3):
        return write_rows(int(arguments[1]), int(arguments[2]) if len(arguments) == 3 else 1)
    if arguments != ["reward"]:
        sys.exit(__doc__)
    for line in sys.stdin:
        given = json.loads(line)
        scores = [score(answer, given["reference"]) for answer in given["answers"]]
        print(json.dumps({"id": given["id"], "scores": scores}), flush=True)


main(sys.argv[1:])
