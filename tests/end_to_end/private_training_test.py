# SPDX-License-Identifier: Apache-2.0
"""Private training from the outside: the guarantee, what is not released, resuming bit for bit with the same epsilon,
several ranks, settings that contradict one another.

private_training_test.py WEFT
"""
import json
import signal

import program

INPUT = """
[run]
steps = 20
[data]
train = "text.txt"
validation = "held_out.txt"
batch_tokens = 256
micro_tokens = 64
sequence = 16
[privacy]
enabled = true
epsilon = 8
delta = 1e-4
noise_key = "{key}"
[language_model]
layers = 1
heads = 2
d_model = 16
[optimizer]
learning_rate = 3e-3
warmup_steps = 2
[checkpoint]
every = 5
keep = 4
[log]
every = 5
evaluate_every = 10
"""


def command(weft, name, *arguments, key="test"):
    source = weft.folder / f"{name}.toml"
    source.write_text(INPUT.format(key=key))
    return ["lm", "train", source, "--output", weft.folder / name, *arguments]


def reports_the_guarantee(weft):
    printed = weft.run(*command(weft, "plain"))
    run = weft.folder / "plain"
    records = (len(program.TEXT) // 17) + (1 if len(program.TEXT) % 17 >= 2 else 0)
    result = program.record(run)["result"]["privacy"]
    assert 7.9 < result["epsilon"] <= 8 and result["delta"] == 1e-4 and result["steps"] == 20, result
    assert result["records"] == records and abs(result["sample_rate"] - 16 / records) < 1e-12, result
    assert result["noise_multiplier"] > 0.3 and result["private"] is False, result
    assert printed.strip().splitlines()[-2].startswith("privacy: none"), printed   # before the command that follows
    assert "clipping: " in printed and "norms: " in printed and "16 expected" in printed, printed
    for line in program.metrics(run):
        assert "loss" not in line, "the loss on private data was released"
        assert line["tokens"] % 256 == 0, "the number of records of a step was released"
    assert "loss" not in (program.record(run)["result"].get("train") or {})
    assert program.record(run)["result"]["validation"]["loss"] > 0
    if weft.has_package():
        weft.run("report", run)
        assert "Protected:" in (run / "report.html").read_text()
    # Another step, another batch: the same run twice has the same bits, with a key of the system other ones.
    weft.run(*command(weft, "again"))
    assert program.shard(weft.folder / "again", 20) == program.shard(run, 20)
    for name in ("secret", "other_secret"):
        last = weft.run(*command(weft, name, key="system")).strip().splitlines()[-2]
        assert last.startswith(f"privacy: epsilon {result['epsilon']:.4g} at delta 0.0001 (prv) after 20 steps"), last
        assert program.record(weft.folder / name)["result"]["privacy"]["private"] is True
        folder = weft.folder / name / "checkpoints" / "step_00000020"
        assert (folder / "rank_00000.h5").stat().st_mode & 0o077 == 0, "others can read the key"
    secret, other = (program.record(weft.folder / name)["result"]["validation"]["loss"] for name in ("secret", "other_secret"))
    assert secret != other, "two runs have the same noise"
    return run


def resumes_bit_for_bit(weft, expected):
    arguments = command(weft, "killed")
    # When the checkpoint of step 10 has been published, whatever step the run has reached by then.
    weft.run(*arguments, fault="before-latest:0:10", code=-signal.SIGKILL)
    printed = weft.run(*arguments)
    assert "resuming after step 10" in printed, printed
    assert program.shard(weft.folder / "killed", 20) == program.shard(expected, 20), "the resumed run has other bits"
    assert program.record(weft.folder / "killed")["result"]["privacy"] == program.record(expected)["result"]["privacy"]


def adapts_its_bound_to_truncated_batches(weft):
    changes = program.sets("privacy.clip=0.1", "privacy.clipping=adaptive", "privacy.count_noise=2", "privacy.sampling=truncated_poisson",
                           "privacy.most_records=60", "log.every=1")
    weft.run(*command(weft, "adaptive", *changes))
    bounds = [line["clip_bound"] for line in program.metrics(weft.folder / "adaptive")]
    # Gradients of a new model are larger than 0.1: the bound grows, by a factor of at most exp(0.2 * (0.5 + noise)) per step.
    assert len(bounds) == 20 and bounds[-1] > 0.15 and all(b != a for a, b in zip(bounds, bounds[1:])), bounds
    result = program.record(weft.folder / "adaptive")["result"]["privacy"]
    assert 7.9 < result["epsilon"] <= 8 and result["clipping"] == "adaptive" and result["most_records"] == 60, result
    killed = command(weft, "adaptive_killed", *changes)
    weft.run(*killed, fault="before-latest:0:10", code=-signal.SIGKILL)
    assert "resuming after step 10" in weft.run(*killed)
    assert program.shard(weft.folder / "adaptive_killed", 20) == program.shard(weft.folder / "adaptive", 20)
    assert program.record(weft.folder / "adaptive_killed")["result"]["privacy"] == result
    assert program.metrics(weft.folder / "adaptive_killed")[-1]["clip_bound"] == bounds[-1]
    # Batches that are truncated too often for the target, and a count with too little noise.
    for change, words in (("privacy.most_records=30", "truncated too often"), ("privacy.count_noise=0.1", "raise privacy.count_noise")):
        assert words in weft.run(*command(weft, "refused_bound", *changes, "--set", change), code=2)


def correlated_noise_is_state(weft):
    bands = ("--set", "privacy.bands=3")
    printed = weft.run(*command(weft, "bands", *bands))
    assert "in 3 bands" in printed and "noise of earlier steps" in printed, printed
    run, killed = weft.folder / "bands", command(weft, "killed_bands", *bands)
    weft.run(*killed, fault="before-latest:0:10", code=-signal.SIGKILL)
    assert "resuming after step 10" in weft.run(*killed)
    assert program.shard(weft.folder / "killed_bands", 20) == program.shard(run, 20), "the resumed run has other bits"
    found = program.record(run)["result"]["privacy"]
    answer = json.loads(weft.run("privacy", "--noise-multiplier", repr(found["noise_multiplier"]), "--delta", "1e-4", "--sample-rate",
                                 repr(found["sample_rate"]), "--steps", 20, "--bands", 3, "--accountant", "prv", "--json"))
    assert answer["accountants"][0]["epsilon"] == found["epsilon"] and found["bands"] == 3, (answer, found)
    # 16 of 116 records per step: more than an eighth of them.
    printed = weft.run(*command(weft, "parts", "--set", "privacy.bands=8", "--dry-run"), code=2)
    assert "privacy.bands = 8 at a sample rate" in printed and "smaller batches" in printed, printed


def ranks_agree(weft, expected):
    for name, axis in (("data", ()), ("tensor", ("--set", "parallel.tensor=2"))):
        weft.run(*command(weft, name, *axis), ranks=2)
        one, two = (program.record(run)["result"] for run in (expected, weft.folder / name))
        assert one["privacy"] == two["privacy"]
        # The same batches and noise; sums of another order.
        assert abs(one["validation"]["loss"] - two["validation"]["loss"]) < 1e-4, (name, one, two)
    # One rank continues the run of two, with the same account. Sums round otherwise: with the noise of the run on two ranks
    # as well, the difference would show that of the gradients.
    for name in ("data", "tensor"):
        printed = weft.run(*command(weft, f"whole_{name}", "--resume", weft.folder / name / "checkpoints" / "step_00000010"))
        assert "from a new key" in printed, printed
        assert program.record(weft.folder / f"whole_{name}")["result"]["privacy"] == program.record(expected)["result"]["privacy"]


def modes_agree(weft):
    losses = {}
    for mode in ("privacy.mode=two_pass", "privacy.mode=materialise", "privacy.algorithm=naive", "privacy.mode=book_keeping"):
        printed = weft.run(*command(weft, mode, "--set", mode))
        record = program.record(weft.folder / mode)
        losses[mode] = record["result"]["validation"]["loss"]
    for mode, loss in losses.items():
        # Stored gradients are rounded to 8 bits; the noise is a thousand times larger.
        assert abs(loss - losses["privacy.mode=book_keeping"]) < (1e-2 if "materialise" in mode else 1e-4), losses
    # The last one: what the plan says, and the record of the run.
    assert "clipping: book_keeping, rows are kept\n" in printed and "on the device with two_pass" in printed, printed
    assert record["clipping"] == {"mode": "book_keeping"}, record["clipping"]
    for change, instead in (("privacy.mode=recompute", 'take "auto", or "two_pass"'),
                            ('privacy.mode_of=["block_0: two_pass"]', "privacy.mode holds for all blocks"),
                            ('privacy.algorithm_of=["mlp/up/weight: width"]', 'privacy.algorithm = "auto"')):
        printed = weft.run(*command(weft, "dropped", "--set", change, "--dry-run"), code=2)
        assert instead in printed, (change, printed)


def benchmark_shows_phases(weft):
    """Of private steps on two ranks: phases with counted work, the exchange of sums with its exposed time."""
    modes = ("book_keeping", "two_pass", "materialise")
    cases = ", ".join(f'"{mode}: privacy.mode={mode}"' for mode in modes)
    source = command(weft, "phases")[2]
    weft.run("benchmark", source, "--output", weft.folder / "phases", "--set", "benchmark.steps=1",
             "--set", "benchmark.warmup=1", "--set", "benchmark.vocabulary=64", "--set", f"benchmark.cases=[{cases}]", ranks=2)
    measured = json.loads((weft.folder / "phases" / "benchmark.json").read_text())["cases"]
    weights = 4 * 16 * 16 + 2 * 4 * 16 * 16 + 64 * 16  # of the attention, the MLP, and the tied head
    for mode, case in zip(modes, measured, strict=True):
        flops = {phase["name"]: phase["flops"] for phase in case["phases"]}
        assert {"norms of records", "clipping factors", "clipped sums", "noise", "exchange"} <= set(flops), (mode, flops)
        product = 2 * 128 * weights  # of the 128 tokens of a rank per step, each weight gradient once
        # A tile of tokens is wider than these matrices: all norms are formed by input_length.
        assert flops["norms of records"] == product and flops["clipped sums"] == (0 if mode == "materialise" else product), (mode, flops)
        sums = [one for one in case["communication"]["exchanges"] if one["name"] == "gradients"]
        assert sums and sums[0]["calls_per_step"] > 1 and case["communication"]["exposed_ms"] > 0, (mode, case["communication"])


def keeps_the_guarantee_on_resume(weft):
    """What the guarantee depends on cannot change, with or without resume.accept_changed."""
    for change in ("privacy.noise_key=system", "privacy.epsilon=4", "privacy.bands=2", "privacy.delta=1e-3", "privacy.clip=2", "privacy.clipping=adaptive", "privacy.scheme=per_layer",
                   "privacy.clip_function=automatic", "privacy.accountant=rdp", "privacy.enabled=false", "data.sequence=8",
                   "data.validation_fraction=0.5"):
        more = ("--set", "data.validation=") if "fraction" in change else ()
        for accept in ((), ("--set", "resume.accept_changed=true")):
            printed = weft.run(*command(weft, "plain", "--set", "run.steps=25", "--set", change, *more, *accept), code=2)
            assert change.split("=")[0] in printed and "it defines the run" in printed, (change, printed)
    printed = weft.run(*command(weft, "plain", "--set", "run.steps=25", "--set", "privacy.epsilon=0", "--set", "privacy.noise_multiplier=2",
                                "--set", "resume.accept_changed=true"), code=2)
    assert "privacy.noise_multiplier was 0.0, now 2" in printed, printed
    printed = weft.run(*command(weft, "plain", "--set", "run.steps=25", "--set", "data.accept_changed=true"), code=2)
    assert "accounted for the records of the data" in printed, printed
    # A run without privacy does not become private.
    weft.run(*command(weft, "public", "--set", "privacy.enabled=false", "--set", "run.steps=5"))
    printed = weft.run(*command(weft, "public", "--set", "resume.accept_changed=true"), code=2)
    assert "privacy.enabled was false, now true (it defines the run)" in printed, printed
    # Another learning rate: the steps that follow are others, and must not have the same noise.
    printed = weft.run(*command(weft, "again", "--set", "run.steps=22", "--set", "optimizer.learning_rate=1e-3",
                                "--set", "resume.accept_changed=true"))
    assert "from a new key" in printed, printed
    # So for fewer steps, which change the schedule of the learning rate without permission. The same input continues the run.
    checkpoint = weft.folder / "other_secret" / "checkpoints" / "step_00000010"
    branch = command(weft, "branch", "--resume", checkpoint, key="system")
    assert "from a new key" in weft.run(*branch, "--set", "run.steps=18")
    same = command(weft, "same", "--resume", checkpoint, "--set", "log.every=3", key="system")
    assert "from a new key" not in weft.run(*same)
    losses = [program.record(weft.folder / name)["result"]["validation"]["loss"] for name in ("same", "other_secret")]
    assert losses[0] == losses[1], losses


def begins_with_public_weights(weft):
    initial = ("--set", f"language_model.initial={weft.folder / 'public'}", "--set", "run.steps=5")
    printed = weft.run(*command(weft, "continued", *initial))
    assert "was not trained privately" in printed, printed
    protects = program.record(weft.folder / "continued")["result"]["privacy"]["protects"]
    assert "are not covered" in protects and "public" in protects, protects


def adapters_over_documents(weft):
    """Records are the lines of JSON Lines, of one or several sequences, or those of a person; the account counts them. The same on
    two ranks; resumed bit for bit."""
    rows = [(program.TEXT[at:at + 10 + 40 * (at % 3)], at % 17) for at in range(0, 1900, 20)]
    (weft.folder / "rows.jsonl").write_text("".join(json.dumps({"text": row, "user": user}) + "\n" for row, user in rows))
    changes = program.sets("data.train=rows.jsonl", f"language_model.initial={weft.folder / 'public'}", "lora.rank=2", "run.steps=10",
                           "privacy.max_per_owner=4")

    def check(result, unit, records):
        assert result["unit"] == unit and result["records"] == len(records) and result["steps"] == 10, result
        sequences = sum(min(4, sum(-(-(len(row) - 1) // 16) for row in record)) for record in records)
        assert abs(result["sample_rate"] - 16 / sequences) < 1e-12, (result, sequences)

    weft.run(*command(weft, "adapted_examples", *changes, "--set", "privacy.unit=example"))
    check(program.record(weft.folder / "adapted_examples")["result"]["privacy"], "example", [[row] for row, _ in rows])
    assert "needs privacy.owner_field" in weft.run(*command(weft, "refused", *changes, "--set", "privacy.unit=owner"), code=2)
    changes += program.sets("privacy.unit=owner", "privacy.owner_field=user")
    weft.run(*command(weft, "adapted", *changes))
    result = program.record(weft.folder / "adapted")["result"]["privacy"]
    check(result, "owner", [[row for row, user in rows if user == one] for one in range(17)])
    weft.run(*command(weft, "adapted_ranks", *changes), ranks=2)
    two = program.record(weft.folder / "adapted_ranks")["result"]
    assert two["privacy"] == result
    assert abs(two["validation"]["loss"] - program.record(weft.folder / "adapted")["result"]["validation"]["loss"]) < 1e-4, two
    assert "do not fit a micro-batch of 64 tokens" in weft.run(*command(weft, "refused", *changes, "--set", "privacy.max_per_owner=5"), code=2)
    (weft.folder / "without_owner.jsonl").write_text('{"text": "abc", "user": 1}\n{"text": "abc"}\n')
    assert 'without_owner.jsonl:2: has no "user"' in weft.run(*command(weft, "refused", *changes, "--set", "data.train=without_owner.jsonl"), code=3)
    killed = command(weft, "adapted_killed", *changes)
    weft.run(*killed, fault="before-latest:0:5", code=-signal.SIGKILL)
    assert "resuming after step 5" in weft.run(*killed)
    assert program.shard(weft.folder / "adapted_killed", 10) == program.shard(weft.folder / "adapted", 10)
    assert program.record(weft.folder / "adapted_killed")["result"]["privacy"] == result


def refusals(weft):
    for arguments, words in [
            (("--set", "data.batch_tokens=16384"), "records per step"),
            (("--set", "privacy.delta=0"), "privacy.delta"),
            (("--set", "privacy.noise_multiplier=1"), "give one of them"),
            (("--set", "run.nonfinite=skip"), "private data"),
            (("--set", "privacy.algorithm=width", "--set", "privacy.mode=materialise"), "no effect"),
            (("--set", "language_model.dropout=0.1"), "place in the batch"),
            (("--set", "privacy.unit=document"), "needs privacy.max_per_owner"),
            (("--set", "privacy.unit=document", "--set", "privacy.max_per_owner=2"), "where documents begin")]:
        printed = weft.run(*command(weft, "refused", *arguments), code=2)
        assert words in printed, (arguments, printed)
    printed = weft.run(*command(weft, "dry", "--dry-run"))
    assert "private: " in printed and not (weft.folder / "dry").exists(), printed
    little = program.sets("privacy.epsilon=0", "privacy.noise_multiplier=1", 'privacy.clipping="adaptive"')  # 0.8 = 16 / 20
    assert "raise privacy.count_noise to 1" in weft.run(*command(weft, "dry", "--dry-run", "--set", "privacy.count_noise=0.5", *little), code=2)


def test(weft):
    (weft.folder / "text.txt").write_text(program.TEXT)
    (weft.folder / "held_out.txt").write_text(program.TEXT[1000:1700])
    run = reports_the_guarantee(weft)
    resumes_bit_for_bit(weft, run)
    adapts_its_bound_to_truncated_batches(weft)
    correlated_noise_is_state(weft)
    ranks_agree(weft, run)
    modes_agree(weft)
    benchmark_shows_phases(weft)
    keeps_the_guarantee_on_resume(weft)
    begins_with_public_weights(weft)
    adapters_over_documents(weft)
    refusals(weft)


program.main(test)
