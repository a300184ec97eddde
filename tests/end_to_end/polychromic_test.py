# SPDX-License-Identifier: Apache-2.0
"""Polychromic fine-tuning from the outside: diversity rises, only with a gradient; records, samples, the page; example rewards; resuming
bit for bit, also after a kill within a batch of answers; refusals.

polychromic_test.py WEFT
"""
import json
import math
import subprocess
import sys
from pathlib import Path

import program

INPUTS = Path(__file__).resolve().parents[2] / "inputs"

MODEL = """
[run]
steps = {steps}
[data]
train = "text.txt"
validation_fraction = 0.2
tokens = "character"
batch_tokens = 256
sequence = 32
[language_model]
layers = 2
heads = 2
d_model = 32
{initial}
[optimizer]
learning_rate = 3e-3
schedule = "constant"
warmup_steps = 4
[checkpoint]
every = 6
keep = 8
[log]
every = 2
evaluate_every = 6
"""
POLYCHROMIC = """
[polychromic]
every = 2
prompts = 2
samples = 6
set_size = 3
prompt_tokens = 6
max_new_tokens = 12
evaluation_prompts = 8
"""


def tune(weft, name, *sets, code=0, steps=24, ranks=None, arguments=(), extra=""):
    source = weft.folder / f"{name}.toml"
    source.write_text(MODEL.format(steps=steps, initial='initial = "base"') + POLYCHROMIC + extra)
    changes = program.sets(*sets)
    printed = weft.run("lm", "polychromic", source, "--output", weft.folder / name, *changes, *arguments, code=code, ranks=ranks)
    return weft.folder / name, printed


def diversity_rises(weft):
    """With a gradient of the objective alone (a small supervised loss remains), and not without."""
    change = {}
    for weight in (0, 20):
        run, _ = tune(weft, f"weight_{weight}", f"polychromic.weight={weight}", "optimizer.learning_rate=1e-3")
        answers = program.record(run)["result"]["answers"]
        before, after = answers["before"], answers["after"]
        assert before["step"] == 0 and after["step"] == 24, answers
        assert all(len(one["answers"]) == 6 for one in before["samples"]) and len(before["samples"]) == 4, before
        assert json.loads((run / "samples.json").read_text()) == answers
        assert before["reward"] == after["reward"] == 1, answers  # constant
        change[weight] = after["diversity"] - before["diversity"]
        lines = program.metrics(run)
        assert all(line["answers.diversity"] is not None for line in lines), lines[0]
        if weight > 0:
            assert [line["answers.log_probability_gap"] for line in lines] == [0] * 12, lines  # fp32: the same bits
        evaluated = [line["step"] for line in lines if "validation.diversity" in line]
        assert evaluated == [6, 12, 18, 24], evaluated
        assert lines[-1]["validation.diversity"] == after["diversity"], (lines[-1], after)
        for stage in ("generate", "embed", "reward", "diversity and advantage"):
            assert stage in program.record(run)["timings"], stage
    assert change[20] > change[0] + 0.02, change
    if weft.has_package():
        page = weft.folder / "page.html"
        weft.run("report", weft.folder / "weight_20", "--output", page)
        text = page.read_text()
        assert "Diversity of answers" in text and "before the training" in text


def example_rewards(weft):
    """The programs of inputs/ on lines of their protocol, and what they train on or write."""
    def ran(program_file, *arguments, lines=()):
        return subprocess.run([sys.executable, INPUTS / program_file, *arguments], input="".join(json.dumps(line) + "\n" for line in lines),
                              cwd=weft.folder, text=True, capture_output=True, check=True).stdout

    def scored(program_file, *arguments, reference, answers):
        line = {"id": "a", "prompt": "?", "reference": reference, "answers": answers}
        return json.loads(ran(program_file, "reward", *arguments, lines=[line]))["scores"]

    rows = (INPUTS / "text" / "arithmetic.jsonl").read_text()
    assert ran("arithmetic.py", "data", str(rows.count("\n"))) == rows
    assert scored("arithmetic.py", reference="12", answers=["= 12.", "it is 12 or 13", "13, not 12", "", "-12"]) == [1, 1, 0, 0, 0]
    assert ran("classifier.py", "train", INPUTS / "text" / "sentences.jsonl", "classifier.json").startswith("48 of 48")
    good, bad, unknown, empty = scored("classifier.py", "classifier.json", reference="",
                                       answers=["The people were kind and the food was good.", "A rude, dirty and noisy place.", "qqq", ""])
    assert bad < 0.2 < unknown == empty < 0.8 < good, (good, bad, unknown)


def reference_has_its_probability(weft, run):
    """The reward is exp of the difference between the losses of two texts under the initial model."""
    prompts = {one["prompt"]: one["reference"] for one in map(json.loads, (weft.folder / "prompts.jsonl").read_text().splitlines())}

    def nats(text):
        (weft.folder / "scored.txt").write_text(text)
        weft.run("lm", "evaluate", "base", "--text", "scored.txt", "--output", "scored")
        found = program.validation(weft.folder / "scored")
        assert found["tokens"] == len(text) - 1, found
        return found["loss"] * found["tokens"]

    sample = json.loads((run / "samples.json").read_text())["after"]["samples"][0]
    reference = prompts[sample["prompt"]]
    for answer, reward in zip(sample["answers"][:2], sample["rewards"]):
        text = sample["prompt"] + answer
        assert math.isclose(reward, math.exp((nats(text) - nats(text + reference)) / len(reference)), rel_tol=1e-4), (text, reference, reward)


def measures_checkpoints(weft, run):
    """Every checkpoint of a run, with more answers; groups of ranks divide the prompts."""
    def measured(*arguments, ranks=None):
        weft.run("lm", "evaluate", *arguments, "--answers", "prompts.jsonl", "--samples", 8, "--output", run, ranks=ranks)
        return json.loads((run / "answers.json").read_text())["checkpoints"]

    both = measured(run, "--all-checkpoints")
    assert [one["step"] for one in both] == [2, 4] and both[0]["answers"] != both[1]["answers"], both
    last = both[1]["answers"]
    assert last["pass_8"] >= last["pass_1"] == last["reward"] and last["pass_64"] is None, last
    assert [one["answers"] for one in measured(run, ranks=2)] == [last]
    for arguments, message in (((run / "checkpoints", "--all-checkpoints", "--answers", "prompts.jsonl"), "needs the directory of a run"),
                               ((run, "--all-checkpoints"), "is for --answers")):
        assert message in weft.run("lm", "evaluate", *arguments, code=2), message


def objectives(weft):
    """Every measure of diversity, objective and reward makes a step."""
    (weft.folder / "prompts.jsonl").write_text(
        '{"prompt": "The cat", "reference": " sat"}\n{"prompt": "The dog sat", "reference": " on"}\n')
    command = f"{sys.executable} {INPUTS / 'classifier.py'} reward classifier.json"
    weights = {}
    for name, sets in {
            "distinct": ["polychromic.diversity=distinct"], "both": ["polychromic.diversity=distinct", "polychromic.semantic_weight=2"],
            "bleu": ["polychromic.diversity=self_bleu"],
            "additive": ["polychromic.objective=additive", "polychromic.diversity_weight=2"],
            "likelihood": ["polychromic.reward=likelihood"],
            "reference": ["polychromic.reward=reference_likelihood", "polychromic.prompts_file=prompts.jsonl"],
            "top_p": ["polychromic.top_p=0.9", "language_model.dropout=0.1"],
            "grpo": ["polychromic.objective=grpo", "polychromic.reward=likelihood", 'polychromic.more_rewards=["length"]',
                     "polychromic.more_weights=[0.5]", "polychromic.reward_length=30"],
            "epochs": ["polychromic.epochs=2", "optimizer.learning_rate=0.02"], "kl": ["polychromic.kl=1"],
            "stop": ['polychromic.stop=["."]', "polychromic.max_new_tokens=20"],
            "regex": ["checkpoint.every=2", "polychromic.reward=regex", 'polychromic.reward_pattern="t[eh]"'],
            "exact": ["polychromic.reward=exact", "polychromic.prompts_file=prompts.jsonl"],
            "command": ["polychromic.reward=command", f'polychromic.reward_command="{command}"']}.items():
        run, _ = tune(weft, name, *sets, steps=4, extra="")
        weights[name] = program.shard(run, 4)
        line = program.metrics(run)[-1]
        assert 0 <= line["answers.reward"] <= 1, line
        if name == "epochs":
            assert 0 < line["answers.clipped"] < 1, line
        if name == "stop":
            texts = [text for one in program.record(run)["result"]["answers"]["after"]["samples"] for text in one["answers"]]
            assert not any("." in text for text in texts) and min(map(len, texts)) < 20, texts
        if name == "kl":
            assert line["answers.divergence"] > 0, line
        if name == "reference":
            reference_has_its_probability(weft, run)
        if name == "regex":
            measures_checkpoints(weft, run)
        if name != "exact":  # no answer of this length is the reference
            assert line["answers.advantage_spread"] > 0, (name, line)
    assert len(set(weights.values())) == len(weights)


def resumes(weft):
    """The same bits after a resume between two batches answers of its own, and refused with another frozen model."""
    # Answers of step 4 are used in steps 4 to 7; the checkpoint of step 6 lies in between.
    sets = ("polychromic.every=4", "polychromic.epochs=4", "polychromic.kl=0.1")
    whole, _ = tune(weft, "whole", *sets, steps=12)
    tune(weft, "pieces", "run.steps=6", *sets, steps=12)
    pieces, printed = tune(weft, "pieces", *sets, steps=12)
    assert "resuming after step 6" in printed, printed
    assert program.shard(whole, 12) == program.shard(pieces, 12)
    after = [program.record(run)["result"]["answers"]["after"] for run in (whole, pieces)]
    assert after[0] == after[1], after
    # The same on two ranks that share the gradients.
    sets = (*sets, "parallel.shard=gradients")
    shared, _ = tune(weft, "shared_whole", *sets, steps=12, ranks=2)
    tune(weft, "shared_pieces", "run.steps=6", *sets, steps=12, ranks=2)
    pieces_shared, _ = tune(weft, "shared_pieces", *sets, steps=12, ranks=2)
    assert program.shard(shared, 12) == program.shard(pieces_shared, 12)
    sets = sets[:-1]
    weft.run("lm", "train", "base.toml", "--output", weft.folder / "base", "--set", "run.steps=70")
    _, printed = tune(weft, "pieces", "run.steps=18", *sets, steps=12, code=2)
    assert "has other weights than when this run began" in printed, printed
    # The checkpoint that it began with, wherever it is now, on ranks that divide the model.
    (weft.folder / "base" / "checkpoints" / "step_00000060").rename(weft.folder / "moved")
    _, printed = tune(weft, "pieces", "run.steps=13", "language_model.initial=moved", "parallel.tensor=2", *sets, steps=12, ranks=2)
    assert "resuming after step 12" in printed, printed


def survives_a_kill(weft):
    """The program of the reward kills the run while it waits for the scores of its third batch; the next start has the same bits."""
    script = weft.folder / "killer.py"
    script.write_text("""import json, os, pathlib, signal, sys
for number, line in enumerate(sys.stdin):
    answers = json.loads(line)["answers"]
    marker = pathlib.Path(sys.argv[1])
    if number == 8 + 2 * 2 and not marker.exists():     # 8 evaluation prompts, two batches of 2
        marker.touch()
        os.kill(os.getppid(), signal.SIGKILL)
    print(json.dumps({"scores": [answer.count("e") / 10 for answer in answers]}), flush=True)
""")
    (weft.folder / "never").touch()
    runs = {}
    for name, marker, codes in (("undisturbed", "never", [0]), ("killed", "once", [program.KILLED, 0])):
        for code in codes:
            runs[name], printed = tune(weft, name, "polychromic.reward=command", "checkpoint.every=2",
                                       f'polychromic.reward_command="exec {sys.executable} {script} {marker}"', steps=8, code=code)
    assert "resuming after step" in printed, printed    # 2 or 4: the last checkpoint may not be written yet
    assert program.shard(runs["killed"], 8) == program.shard(runs["undisturbed"], 8)
    answers = [program.record(run)["result"]["answers"] for run in runs.values()]
    assert answers[0] == answers[1], answers


def one_rank_fails(weft):
    """A program that answers one of two ranks with what is no score ends the run on both, with the reason."""
    script = weft.folder / "wrong.py"
    script.write_text("""import json, os, sys
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", 0)))
for number, line in enumerate(sys.stdin):
    answers = json.loads(line)["answers"]
    print(json.dumps({"scores": ["high" if rank == 1 and number == 5 else 1] * len(answers)}), flush=True)
""")
    _, printed = tune(weft, "wrong", "polychromic.reward=command", f'polychromic.reward_command="{sys.executable} {script}"', steps=8,
                      ranks=2, code=3)
    assert "rank 1" in printed and "returns a score that is not a finite number" in printed, printed


def ranks_agree(weft):
    """Answers depend on the number of their prompt, not on their ranks, nor on how many are computed together."""
    alone, _ = tune(weft, "alone", steps=4)
    others = [tune(weft, f"ranks_{ranks}_{tensor}", f"parallel.tensor={tensor}", steps=4, ranks=ranks)
              for ranks, tensor in ((2, 1), (4, 1), (2, 2), (4, 2))]
    # Micro-batches of one answer, of which two of four ranks have none.
    others += [tune(weft, f"gradients_{ranks}", "parallel.shard=gradients", "data.micro_tokens=32", steps=4, ranks=ranks)
               for ranks in (2, 4)]
    others += [tune(weft, "one_by_one", "polychromic.draw_together=1", "polychromic.embed_together=1", steps=4),
               tune(weft, "in_parts", "polychromic.draw_together=5", "polychromic.embed_together=3", steps=4)]
    _, printed = tune(weft, "refused", "parallel.shard=full", steps=4, ranks=2, code=2)
    assert 'take "gradients"' in printed and not (weft.folder / "refused").exists(), printed
    for several, _ in others:
        for one, other in zip(program.metrics(alone), program.metrics(several)):
            for name in ("loss", "answers.diversity", "answers.distinct_2", "answers.objective", "gradient_norm"):
                # Rounding of sums; a token drawn at the border of two intervals would show as more.
                assert abs(one[name] - other[name]) <= 1e-4 * abs(one[name]), (several.name, name, one[name], other[name])
        samples = [json.loads((run / "samples.json").read_text())["before"]["samples"] for run in (alone, several)]
        assert [one["answers"] for one in samples[0]] == [one["answers"] for one in samples[1]]


def reward_is_held(weft):
    """From a weight of the diversity that is three times too large, the mean reward returns to that of the initial model; without the
    constraint it is lost. The weight is part of the state; ranks agree on it."""
    sets = ("polychromic.every=1", "polychromic.reward=likelihood", "polychromic.objective=additive", "polychromic.diversity=distinct",
            "polychromic.diversity_weight=3", "polychromic.weight=5", "polychromic.prompts=4", "polychromic.evaluation_prompts=32",
            "optimizer.learning_rate=1e-3")
    hold = ("polychromic.hold_reward=initial", "polychromic.hold_horizon=20")
    change = {}
    for name, more in {"free": (), "held": hold}.items():
        run, _ = tune(weft, name, *sets, *more, steps=80)
        answers = program.record(run)["result"]["answers"]
        change[name] = answers["after"]["reward"] / answers["before"]["reward"] - 1
    assert change["free"] < -0.5, change
    assert abs(change["held"]) < 0.1, change  # six seeds: at most 0.05
    tune(weft, "held_pieces", "run.steps=30", *sets, *hold, steps=80)
    pieces, printed = tune(weft, "held_pieces", *sets, *hold, steps=80)
    assert "resuming after step 30" in printed, printed
    assert program.shard(weft.folder / "held", 80) == program.shard(pieces, 80)
    # Given as a number; two ranks.
    target = ("polychromic.hold_reward=target", "polychromic.reward_target=0.4")
    lines = [program.metrics(tune(weft, f"target_{ranks}", *sets, *target, steps=6, ranks=ranks)[0]) for ranks in (1, 2)]
    for one, other in zip(*lines):
        a, b = one["answers.diversity_weight"], other["answers.diversity_weight"]
        assert abs(a - b) <= 1e-4 * a and a != 3, (a, b)  # rounding of sums


def refusals(weft):
    for sets, message in {
            ("polychromic.samples=3",): "all advantages would be 0",
            ("polychromic.max_new_tokens=40",): "together they do not fit data.sequence",
            ('language_model.initial=""',): "without language_model.initial",
            ("privacy.epsilon=8", "privacy.delta=1e-5", "privacy.clip=1"): "weft lm polychromic with privacy",
            ("language_model.d_model=64",): "another model than that of [language_model]",
            ("polychromic.reward=regex",): "needs polychromic.reward_pattern",
            ('polychromic.reward_pattern="a"',): 'is for polychromic.reward = "regex" only',
            ("polychromic.reward=exact",): "needs references",
            ("polychromic.prompts_file=none.txt",): "no such file",
            ("polychromic.diversity_weight=1",): 'is for polychromic.objective = "additive" only',
            ("polychromic.reward=regex", 'polychromic.reward_pattern="(("'): "cannot be compiled",
            ("polychromic.reward=file", "polychromic.reward_file=none.jsonl"): "none.jsonl",
            ("polychromic.epochs=3",): "is more than polychromic.every",
            ("polychromic.clip=0.1",): "has no effect",
            ("polychromic.top_p=0.9", "polychromic.kl=1"): "set top_p to 1",
            ("polychromic.standardise=false",): 'is for polychromic.objective = "grpo" only',
            ('polychromic.more_rewards=["nice"]', "polychromic.more_weights=[1]"): "there is no reward",
            ('polychromic.more_rewards=["length"]', "polychromic.reward_length=4"): "give a finite one for each",
            ("polychromic.hold_reward=initial",): 'is for polychromic.objective = "additive" only',
            ("polychromic.hold_reward=initial", "polychromic.objective=additive"): "the same for all answers",
            ("polychromic.reward_target=0.3",): 'is for polychromic.hold_reward = "target" only',
            ("polychromic.hold_gain=2",): "no effect without polychromic.hold_reward",
            ('polychromic.stop=[""]',): "has an empty text",
            ("polychromic.semantic_weight=1",): 'does not go with polychromic.diversity = "semantic"',
            ("polychromic.evry=1",): 'did you mean "every"',
    }.items():
        _, printed = tune(weft, "refused", *sets, code=2, steps=4)
        assert message in printed, (sets, printed)
        assert not (weft.folder / "refused").exists(), sets
    (weft.folder / "bad.jsonl").write_text('{"prompt": "The"}\n{"text": "The"}\n')
    _, printed = tune(weft, "refused", "polychromic.prompts_file=bad.jsonl", code=3, steps=4)
    assert "bad.jsonl:2" in printed, printed
    # Before the training begins, not when the prompt is drawn.
    (weft.folder / "unanswered.jsonl").write_text('{"prompt": "The", "reference": "cat"}\n{"prompt": "The"}\n')
    (weft.folder / "number.jsonl").write_text('{"prompt": "The", "reference": 4}\n')
    for file, message in (("unanswered.jsonl", 'unanswered.jsonl:2: has no "reference"'), ("number.jsonl", 'number.jsonl:1: "reference" is not a string')):
        _, printed = tune(weft, "refused", "polychromic.reward=exact", f"polychromic.prompts_file={file}", code=3, steps=4, ranks=2)
        assert message in printed and "MPI_ABORT" not in printed and not (weft.folder / "refused").exists(), printed
    (weft.folder / "empty.txt").write_text("")
    _, printed = tune(weft, "refused", "polychromic.prompts_file=empty.txt", code=3, steps=4)
    assert "empty.txt: is empty" in printed, printed
    # The other text has other characters, in another number.
    (weft.folder / "other.txt").write_text(program.TEXT.replace("cat", "CAT"))
    _, printed = tune(weft, "refused", "data.train=other.txt", code=2, steps=4)
    assert "tokeniser" in printed, printed
    _, printed = tune(weft, "dry", steps=4, arguments=["--dry-run"])
    assert "frozen model" in printed and "answers" in printed, printed


def test(weft):
    (weft.folder / "text.txt").write_text(program.TEXT)
    (weft.folder / "base.toml").write_text(MODEL.format(steps=60, initial=""))
    weft.run("lm", "train", "base.toml", "--output", weft.folder / "base")
    refusals(weft)
    example_rewards(weft)
    objectives(weft)
    diversity_rises(weft)
    ranks_agree(weft)
    resumes(weft)
    survives_a_kill(weft)
    one_rank_fails(weft)
    reward_is_held(weft)


program.main(test)
