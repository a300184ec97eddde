# SPDX-License-Identifier: Apache-2.0
"""Adapters that Weft has trained in PEFT, merged by both, and adapters of PEFT in Weft.

launch.py transformers5 peft_test.py WEFT
"""
import json

import peft
import torch

import models
import program

INPUT = """
[run]
steps = 6
[data]
train = "text.txt"
batch_tokens = 512
sequence = 256
[optimizer]
learning_rate = 2e-2
warmup_steps = 0
weight_decay = 0
[lora]
rank = 4
alpha = 12
[checkpoint]
every = 0
"""
ROTARY = {name: f"{name[0]}_proj" for name in ("query", "key", "value", "output")} | {name: f"{name}_proj" for name in ("gate", "up", "down")}
RANDOM = dict(r=4, lora_alpha=8, init_lora_weights=False)
ALL = dict(target_modules=list(ROTARY.values()), **RANDOM)
# By name: the model, what PEFT is given, the settings of Weft, what they adapt.
READ = {
    "llama": ("llama", ALL, (4, 8), list(ROTARY)),
    "qwen3": ("qwen3", ALL, (4, 8), list(ROTARY)),
    "olmo2": ("olmo2", ALL, (4, 8), list(ROTARY)),
    "gemma2": ("gemma2", ALL, (4, 8), list(ROTARY)),
    "llama_biases": ("llama_biases", ALL, (4, 8), list(ROTARY)),
    "mistral": ("mistral", ALL, (4, 8), list(ROTARY)),
    "qwen2": ("qwen2", ALL, (4, 8), list(ROTARY)),
    "phi3": ("phi3", dict(RANDOM, target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]), (4, 8), list(ROTARY)),
    "smollm3": ("smollm3", ALL, (4, 8), list(ROTARY)),
    "gemma3_text": ("gemma3_text", ALL, (4, 8), list(ROTARY)),
    "gpt_neox": ("gpt_neox", dict(RANDOM, target_modules=["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]), (4, 8),
                 ["query", "key", "value", "output", "up", "down"]),
    "gpt2": ("gpt2", dict(RANDOM, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True), (4, 8),
             ["query", "key", "value", "output", "up", "down"]),
    "default_of_gpt2": ("gpt2", dict(RANDOM, fan_in_fan_out=True), (4, 8), ["query", "key", "value"]),
    "default_of_llama": ("llama", RANDOM, (4, 8), ["query", "value"]),
    "all_linear": ("llama", dict(RANDOM, target_modules="all-linear"), (4, 8), list(ROTARY)),
    "excluded": ("llama", dict(RANDOM, target_modules="all-linear", exclude_modules=["down_proj"]), (4, 8), [*ROTARY][:-1]),
    "expression": ("llama", dict(RANDOM, target_modules=r".*self_attn\.(q|v)_proj"), (4, 8), ["query", "value"]),
    "rank_stabilised": ("llama", dict(ALL, use_rslora=True), (4, 16), list(ROTARY)),
    "patterns": ("llama", dict(ALL, rank_pattern={r".*_proj": 3}, alpha_pattern={r".*_proj": 9}), (3, 9), list(ROTARY)),
    "fraction": ("llama", dict(ALL, lora_alpha=6.5, lora_dropout=0.1), (4, 6.5), list(ROTARY)),
}
# Refused with the key that Weft cannot apply.
REFUSED = {
    "use_dora": dict(ALL, use_dora=True),
    "init_lora_weights": dict(ALL, init_lora_weights="pissa"),
    "modules_to_save": dict(ALL, modules_to_save=["lm_head"]),
    "layers_to_transform": dict(RANDOM, target_modules=["q_proj", "v_proj"], layers_to_transform=[1]),
    "bias": dict(ALL, bias="all"),
    "lora_bias": dict(ALL, lora_bias=True),
    "embed_tokens": dict(RANDOM, target_modules=["q_proj", "embed_tokens"]),
}


def close(name, found, expected):
    """Losses: some hundred operations in fp32 on both sides."""
    assert abs(found / expected - 1) < 2e-6, (name, found, expected)


def loss(weft, model, *sets):
    changes = [argument for one in sets for argument in ("--set", one)]
    return json.loads(weft.run("lm", "evaluate", model, "--text", "line.txt", "--json", "--quiet", *changes))["validation"]["loss"]


def adapter(rank, alpha, targets, directory):
    return [f"lora.rank={rank}", f"lora.alpha={alpha}", f"lora.targets={json.dumps(targets)}", f"lora.initial={directory}"]


def writes(weft, name, directory, ids):
    table = weft.run("inspect", directory).split("\n\n", 1)[1].replace('initial = ""', f'initial = "{directory}"')
    (weft.folder / "input.toml").write_text(INPUT + table)
    run, exported, merged = (f"{name}{end}" for end in ("_run", "_adapter", "_merged"))
    weft.run("lm", "train", "input.toml", "--output", run)
    weft.run("lm", "export", run, "--adapters", "--output", exported)
    weft.run("lm", "export", run, "--output", merged)
    model = peft.PeftModel.from_pretrained(models.load(directory), weft.folder / exported).eval()
    adapted = models.loss(model, ids)
    assert abs(adapted / models.loss(models.load(directory), ids) - 1) > 1e-3, "training has changed the loss"
    close(name, loss(weft, run), adapted)
    targets = ["query", "key", "value", "output", *([] if name.startswith("gpt") else ["gate"]), "up", "down"]
    close(name, loss(weft, directory, *adapter(4, 12, targets, exported)), adapted)
    # The weights of a merge: one product and one sum of fp32 on both sides, in another order.
    theirs, ours = model.merge_and_unload().state_dict(), models.load(weft.folder / merged).state_dict()
    assert theirs.keys() == ours.keys(), theirs.keys() ^ ours.keys()
    for key, values in theirs.items():
        assert torch.allclose(ours[key], values, rtol=0, atol=2e-7 * values.abs().max()), (name, key, (ours[key] - values).abs().max())


def saved(weft, name, directory, settings):
    """An adapter as PEFT saves it, with random factors; its directory."""
    torch.manual_seed(2)
    model = peft.get_peft_model(models.load(directory), peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for parameter, values in model.named_parameters():
            if "lora_" in parameter and settings["init_lora_weights"] is False:
                values.normal_(0, 0.3)
    model.save_pretrained(weft.folder / name)
    return name


def test(weft):
    text = models.TEXT.read_text()
    (weft.folder / "text.txt").write_text(text[:20000])
    (weft.folder / "line.txt").write_text(text[:500])
    for name in models.CONFIGURATIONS:
        directory = models.save(weft, name)
        writes(weft, name, directory, models.ids(directory, text[:500]))
    for name, (model, settings, (rank, alpha), targets) in READ.items():
        folder = saved(weft, f"own_{name}", weft.folder / model, settings)
        expected = models.loss(peft.PeftModel.from_pretrained(models.load(weft.folder / model), weft.folder / folder).eval(),
                               models.ids(weft.folder / model, text[:500]))
        close(name, loss(weft, model, *adapter(rank, alpha, targets, folder)), expected)
    for name, settings in REFUSED.items():
        folder = saved(weft, f"refused_{name}", weft.folder / "llama", settings)
        changes = [argument for one in adapter(4, 8, list(ROTARY), folder) for argument in ("--set", one)]
        printed = weft.run("lm", "evaluate", "llama", "--text", "line.txt", *changes, code=2)
        assert name in printed, (name, printed)


if __name__ == "__main__":
    program.main(test)
