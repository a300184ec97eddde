# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters from the outside: training, resuming bit for bit, a checkpoint by itself, merging, the files of PEFT against
NumPy, polychromic training with one copy of the weights, refusals.

lora_test.py WEFT
"""
import json

import numpy as np

import program
from weights_files import read_safetensors, write_safetensors

INPUT = """
[run]
steps = 12
[data]
train = "text.txt"
validation = "other.txt"
tokens = "tokenizer.json"
batch_tokens = 128
sequence = 32
[language_model]
preset = "{preset}"
layers = 2
heads = 2
d_model = 32
{initial}
{lora}
[optimizer]
learning_rate = 1e-2
schedule = "constant"
warmup_steps = 4
{more}
[checkpoint]
every = 6
keep = 4
[log]
every = 2
evaluate_every = 12
"""
LORA = "[lora]\nrank = 4\nalpha = 10\n"
POLYCHROMIC = """
[polychromic]
every = 2
epochs = 2
kl = 0.1
prompts = 2
samples = 6
set_size = 3
prompt_tokens = 6
max_new_tokens = 12
evaluation_prompts = 4
"""


def train(weft, name, *sets, preset="gpt2", initial="", lora="", more="", code=0, ranks=None, command="train", extra="", arguments=()):
    source = weft.folder / f"{name}.toml"
    initial = f'initial = "{initial}"' if initial else ""
    source.write_text(INPUT.format(preset=preset, initial=initial, lora=lora, more=more) + extra)
    changes = program.sets(*sets)
    printed = weft.run("lm", command, source, "--output", weft.folder / name, *changes, *arguments, code=code, ranks=ranks)
    return weft.folder / name, printed


def loss(weft, model, *arguments, name="evaluated"):
    weft.run("lm", "evaluate", model, "--text", "other.txt", "--output", name, "--set", "data.sequence=32", *arguments)
    return program.validation(weft.folder / name)["loss"]


def close(a, b, tolerance=2e-5):
    """Losses of the same weights but for their rounding to fp32."""
    assert abs(a - b) <= tolerance * abs(b), (a, b)


def scaled_products(directory):
    """By tensor of the base model: what the adapters of a PEFT directory add to it, in float64."""
    config = json.loads((directory / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["bias"] == "none" and config["task_type"] == "CAUSAL_LM", config
    tensors = read_safetensors(directory / "adapter_model.safetensors")
    added = {}
    for name, a in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        found = [target for target in config["target_modules"] if layer.endswith("." + target)]
        assert len(found) == 1, (layer, config["target_modules"])
        rank = config["rank_pattern"].get(found[0], config["r"])
        alpha = config["alpha_pattern"].get(found[0], config["lora_alpha"])
        b = tensors[name.replace("lora_A", "lora_B")]
        assert a.shape[0] == rank == b.shape[1], (layer, a.shape, b.shape, rank)
        product = alpha / rank * (b.astype(np.float64) @ a.astype(np.float64))
        added[layer + ".weight"] = product.T if config["fan_in_fan_out"] else product
    return config, added


def trains_and_resumes(weft, base):
    lora = LORA + "dropout = 0.1\n"
    run, printed = train(weft, "adapted", initial="base", lora=lora)
    assert "adapters of rank 4 for query, key, value, output, up, down" in printed, printed
    result = program.record(run)["result"]
    assert result["train"]["loss"] < program.record(base)["result"]["train"]["loss"] - 0.1, result
    train(weft, "halves", "run.steps=6", initial="base", lora=lora)
    halves, printed = train(weft, "halves", initial="base", lora=lora)
    assert "resuming after step 6" in printed, printed
    assert program.shard(run, 12) == program.shard(halves, 12)
    # Without the base model, whose weights are in the checkpoint.
    (weft.folder / "base").rename(weft.folder / "moved")
    close(loss(weft, "adapted"), result["validation"]["loss"], 1e-6)
    inspected = weft.run("inspect", "adapted")
    assert "in adapters of rank 4, all tensors present" in inspected, inspected
    weft.run("lm", "generate", "adapted", "--prompt", "The cat", "--max-new-tokens", 5)
    weft.run("lm", "harvest", "adapted", "--tokens", 64, "--output", "harvested")
    (weft.folder / "moved").rename(weft.folder / "base")
    _, printed = train(weft, "halves", "lora.rank=2", initial="base", lora=lora, code=2)
    assert "lora.rank" in printed, printed
    return run


def merges(weft, run):
    expected = loss(weft, run.name)
    weft.run("lm", "merge", run.name, "--output", "merged")
    close(loss(weft, "merged"), expected)
    inspected = weft.run("inspect", "merged")
    assert "all tensors present (weights only, without moments)" in inspected and "adapters" not in inspected, inspected
    weft.run("lm", "export", run.name, "--output", "merged_files")
    close(loss(weft, "merged_files"), expected)
    # Trained further, as a whole and with new adapters.
    train(weft, "further", initial="merged")
    _, printed = train(weft, "again", initial="merged", lora=LORA, arguments=["--dry-run"])
    assert "adapters of rank 4" in printed, printed


def writes_and_reads_peft(weft, base, run, preset, lora=LORA):
    """The files of PEFT added to those of the base model give the merged ones; read again they give the run's loss."""
    for name, model, more in (("base_files", base, ()), ("merged_files_2", run, ()), ("adapters", run, ("--adapters",))):
        weft.run("lm", "export", model, "--output", f"{preset}_{name}", *more)
    folder = weft.folder / f"{preset}_adapters"
    config, added = scaled_products(folder)
    assert config["r"] == 4 and config["lora_alpha"] == 10 and config["base_model_name_or_path"] == base.name, config
    before = read_safetensors(weft.folder / f"{preset}_base_files" / "model.safetensors")
    merged = read_safetensors(weft.folder / f"{preset}_merged_files_2" / "model.safetensors")
    assert set(added) <= set(before) and len(added) == 2 * len(config["target_modules"]), set(added)
    for name, values in merged.items():
        expected = before[name].astype(np.float64) + added.get(name, 0)
        # The product and the sum in fp32.
        assert np.max(np.abs(values - expected)) <= 2e-6 * np.max(np.abs(expected)), name
        assert (name in added) == bool(np.any(values != before[name])), name
    settings = ["--set", "lora.rank=4", "--set", "lora.alpha=10", "--set", f"lora.initial={preset}_adapters"]
    if "targets" in lora:
        settings += ["--set", "lora.targets=" + lora.split("targets = ")[1].strip()]
    close(loss(weft, f"{preset}_base_files", *settings), loss(weft, run.name), 1e-6)


def reads_one_matrix_for_query_key_and_value(weft):
    """As PEFT itself trains GPT-2: one A [r, C] and one B [3 C, r] of c_attn."""
    generator = np.random.default_rng(7)
    folder = weft.folder / "foreign"
    folder.mkdir()
    tensors = {}
    for layer in range(2):
        at = f"base_model.model.transformer.h.{layer}.attn.c_attn."
        tensors[at + "lora_A.weight"] = generator.normal(0, 0.2, (4, 32)).astype(np.float32)
        tensors[at + "lora_B.weight"] = generator.normal(0, 0.2, (96, 4)).astype(np.float32)
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    config = dict(peft_type="LORA", task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["c_attn"],
                  bias="none", fan_in_fan_out=True, rank_pattern={}, alpha_pattern={}, use_dora=False, use_rslora=False)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    _, added = scaled_products(folder)
    base = weft.folder / "gpt2_base_files"
    expected = weft.folder / "foreign_merged"
    expected.mkdir()
    for file in base.iterdir():
        (expected / file.name).write_bytes(file.read_bytes())
    weights = read_safetensors(base / "model.safetensors")
    write_safetensors(expected / "model.safetensors",
                      {name: (values + added.get(name, 0)).astype(np.float32) for name, values in weights.items()})
    settings = ["lora.rank=4", "lora.alpha=8", "lora.initial=foreign"]
    three = [argument for one in (*settings, 'lora.targets=["query", "key", "value"]') for argument in ("--set", one)]
    close(loss(weft, "gpt2_base_files", *three), loss(weft, "foreign_merged"))
    # A training begins with them.
    run, _ = train(weft, "from_foreign", "run.steps=1", "optimizer.learning_rate=1e-9", "optimizer.warmup_steps=0",
                   initial="gpt2_base_files", lora='[lora]\nrank = 4\nalpha = 8\ntargets = ["query", "key", "value"]\n'
                   'initial = "foreign"\n')
    close(program.record(run)["result"]["validation"]["loss"], loss(weft, "foreign_merged"))
    # Nothing of a file is left out in silence.
    two = [argument for one in (*settings, 'lora.targets=["query", "value"]') for argument in ("--set", one)]
    printed = weft.run("lm", "evaluate", "gpt2_base_files", "--text", "other.txt", *two, code=2)
    assert "add query, key or value there" in printed, printed


def packed_weights(weft, run, base_files):
    """The base in nf4 (table of docs/adapters.md): resuming, ranks, initial models of both kinds, merging, PEFT, commands."""
    lora = LORA + 'dropout = 0.1\nbase = "nf4"\n'
    packed, printed = train(weft, "packed", initial="base", lora=lora)
    assert "the others are frozen, in bf16 and those of the linear layers in nf4" in printed, printed
    result = program.record(packed)["result"]
    # Of weights with the rounding of 4 bits: near the loss over those of fp32, and not the same.
    expected = program.record(run)["result"]["validation"]["loss"]
    assert 1e-6 < abs(result["validation"]["loss"] - expected) / expected < 0.03, (result, expected)
    train(weft, "packed_halves", "run.steps=6", initial="base", lora=lora)
    halves, printed = train(weft, "packed_halves", initial="base", lora=lora)
    assert "resuming after step 6" in printed, printed
    assert program.shard(packed, 12) == program.shard(halves, 12)
    _, printed = train(weft, "packed_halves", 'lora.base="int8"', initial="base", lora=lora, code=2)
    assert "lora.base" in printed, printed
    several, _ = train(weft, "packed_ranks", initial="base", lora=lora, ranks=4)
    # From files of Hugging Face with the same weights; they are packed when they are read.
    files, _ = train(weft, "packed_files", initial=base_files, lora=lora)
    for one, other, same in zip(program.metrics(packed), program.metrics(several), program.metrics(files)):
        assert abs(one["loss"] - other["loss"]) <= 1e-5 * one["loss"], (one, other)
        assert one["loss"] == same["loss"], (one, same)
    # A base that is converted while it is read, of which every rank keeps its own rows.
    base = LORA + 'base = "bf16"\n'
    whole, _ = train(weft, "bf16_whole", "run.steps=5", initial="base", lora=base, ranks=2)
    divided, _ = train(weft, "bf16_divided", "run.steps=5", 'parallel.shard="full"', initial="base", lora=base, ranks=2)
    for one, other in zip(program.metrics(whole), program.metrics(divided)):
        assert one["loss"] == other["loss"], (one, other)
    inspected = weft.run("inspect", "packed")
    assert "in adapters of rank 4, all tensors present" in inspected, inspected
    close(loss(weft, "packed"), result["validation"]["loss"], 1e-6)
    weft.run("lm", "generate", "packed", "--prompt", "The cat", "--max-new-tokens", 5)
    weft.run("lm", "harvest", "packed", "--tokens", 64, "--output", "packed_harvested")
    # Merged weights are the unpacked ones with the adapters; those of PEFT need the same base.
    weft.run("lm", "merge", "packed", "--output", "packed_merged")
    close(loss(weft, "packed_merged"), result["validation"]["loss"])
    weft.run("lm", "export", "packed", "--output", "packed_merged_files")
    close(loss(weft, "packed_merged_files"), result["validation"]["loss"])
    weft.run("lm", "export", "packed", "--adapters", "--output", "packed_adapters")
    settings = program.sets("lora.rank=4", "lora.alpha=10", "lora.initial=packed_adapters", 'lora.base="nf4"')
    close(loss(weft, base_files, *settings), result["validation"]["loss"], 1e-6)


def polychromic(weft):
    """The frozen model is the base of the run: the same answers and embeddings at the start, less memory."""
    sets = ("run.steps=6",)
    dropping = LORA + "dropout = 0.1\n"  # of the supervised loss alone
    whole, _ = train(weft, "tuned", *sets, initial="base", lora=dropping, command="polychromic", extra=POLYCHROMIC)
    plain, _ = train(weft, "plainly_tuned", *sets, initial="base", command="polychromic", extra=POLYCHROMIC)
    before, other = (json.loads((run / "samples.json").read_text())["before"] for run in (whole, plain))
    assert before == other, (before, other)
    # The answers of step 4 are used in step 5: the checkpoint lies in between.
    for steps in ("run.steps=4", *sets):
        halves, _ = train(weft, "tuned_halves", steps, initial="base", lora=dropping, command="polychromic", extra=POLYCHROMIC)
    assert program.shard(whole, 6) == program.shard(halves, 6)
    lines = program.metrics(whole)
    assert lines[-1]["answers.divergence"] > 0, lines[-1]
    for name, lora, expected in (("adapted_plan", LORA, False), ("whole_plan", "", True)):
        _, printed = train(weft, name, initial="base", lora=lora, command="polychromic", extra=POLYCHROMIC, arguments=["--dry-run"])
        assert ("frozen model" in printed) == expected, printed
    _, printed = train(weft, "refused", "lora.initial=gpt2_adapters", initial="base", lora=LORA, command="polychromic", extra=POLYCHROMIC, code=2)
    assert "with lora.initial" in printed, printed


def ranks_agree(weft, run):
    for ranks in (2, 4):
        several, _ = train(weft, f"ranks_{ranks}", initial="base", lora=LORA + "dropout = 0.1\n", ranks=ranks)
        for one, other in zip(program.metrics(run), program.metrics(several)):
            # Sums in another order.
            assert abs(one["loss"] - other["loss"]) <= 1e-5 * one["loss"], (ranks, one, other)


def refusals(weft):
    for message, options in {
            "without language_model.initial": dict(lora=LORA),
            "merge them with weft lm merge": dict(initial="adapted", lora=LORA),
    }.items():
        _, printed = train(weft, "refused", code=2, **options)
        assert message in printed, (message, printed)
        assert not (weft.folder / "refused").exists()
    printed = weft.run("lm", "merge", "base", "--output", "refused", code=2)
    assert "has no adapters" in printed, printed
    printed = weft.run("lm", "export", "base", "--adapters", "--output", "refused", code=2)
    assert "has no adapters" in printed, printed
    printed = weft.run("lm", "merge", "adapted", "--output", "base", code=2)
    assert "nothing is overwritten" in printed, printed
    assert not (weft.folder / "refused").exists()
    (weft.folder / "gpt2_adapters" / "adapter_model.safetensors").write_bytes(b"\x10")
    _, printed = train(weft, "refused", initial="base", lora=LORA + 'initial = "gpt2_adapters"\n', code=3)
    assert "adapter_model.safetensors" in printed, printed


def test(weft):
    (weft.folder / "text.txt").write_text(program.TEXT)
    (weft.folder / "other.txt").write_text("".join(f"A {animal} ran to a {place}.\n" for animal in ("cat", "dog", "owl")
                                                   for place in ("hill", "river", "moon")))
    weft.run("lm", "tokenize", "text.txt", "other.txt", "--tokens", "bytes", "--output", "tokens")
    (weft.folder / "tokenizer.json").write_bytes((weft.folder / "tokens" / "tokenizer.json").read_bytes())
    base, _ = train(weft, "base", "run.steps=40")
    run = trains_and_resumes(weft, base)
    merges(weft, run)
    writes_and_reads_peft(weft, base, run, "gpt2")
    reads_one_matrix_for_query_key_and_value(weft)
    llama, _ = train(weft, "llama", preset="llama")
    lora = LORA + 'targets = ["query", "gate", "down"]\n'
    adapted, _ = train(weft, "llama_adapted", preset="llama", initial="llama", lora=lora)
    writes_and_reads_peft(weft, llama, adapted, "llama", lora)
    ranks_agree(weft, run)
    packed_weights(weft, run, "gpt2_base_files")
    polychromic(weft)
    refusals(weft)


if __name__ == "__main__":
    program.main(test)
