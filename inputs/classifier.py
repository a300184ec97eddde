#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A classifier of texts as a reward: logistic regression on the words of a text.

    classifier.py train LABELLED.jsonl MODEL.json    trains on rows {"text": TEXT, "label": 0 or 1}
    classifier.py reward MODEL.json                  a reward_command: the probability of label 1 for each answer
"""
import json
import math
import re
import sys

EPOCHS, RATE, DECAY = 300, 0.5, 1e-3


def words(text):
    return set(re.findall(r"[a-z']+", text.lower()))


def probability(model, text):
    score = model["bias"] + sum(model["weights"].get(word, 0) for word in words(text))
    return 1 / (1 + math.exp(-max(-50, min(50, score))))


def train(rows):
    model = {"bias": 0.0, "weights": {}}
    for _ in range(EPOCHS):
        errors = [(row["label"] - probability(model, row["text"]), words(row["text"])) for row in rows]
        model["bias"] += RATE * sum(error for error, _ in errors) / len(rows)
        model["weights"] = {word: (1 - RATE * DECAY) * weight for word, weight in model["weights"].items()}
        for error, found in errors:
            for word in sorted(found):
                model["weights"][word] = model["weights"].get(word, 0) + RATE * error / len(rows)
    return model


def write_model(labelled, path):
    with open(labelled, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    model = train(rows)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(model, file)
    right = sum((probability(model, row["text"]) > 0.5) == (row["label"] == 1) for row in rows)
    print(f"{right} of {len(rows)} training rows are classified correctly")


def reward(path):
    with open(path, encoding="utf-8") as file:
        model = json.load(file)
    for line in sys.stdin:
        given = json.loads(line)
        scores = [probability(model, answer) for answer in given["answers"]]
        print(json.dumps({"id": given["id"], "scores": scores}), flush=True)


def main(command="", *paths):
    if command == "train" and len(paths) == 2:
        write_model(*paths)
    elif command == "reward" and len(paths) == 1:
        reward(*paths)
    else:
        sys.exit(__doc__)


main(*sys.argv[1:])
