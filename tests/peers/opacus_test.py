# SPDX-License-Identifier: Apache-2.0
"""One private step of Weft against Opacus: gradients of records, clipped to the bound and summed, of the same model and texts; of whole
models, and of adapters of PEFT.

Weft raises norms by a margin before it clips (docs/privacy.md), so that rounding never exceeds the bound C. Opacus has none: its bound here is
C / (1 + margin), which gives every record the factor of Weft. All sizes are such that no norm is a Gram sum, which has a margin of its own.

A step of AdamW without beta1 leaves the gradient of the step in its first moment: clipped sum / records + noise. Two steps that differ in
the noise multiplier alone have the same random numbers, so that the clipped sum follows from both: 2 * first - second.

launch.py transformers5 opacus_test.py WEFT
"""
import json
import re

import numpy as np
import peft
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer

import models
import program
import weft as reader

RECORDS, SEQUENCE, NOISE = 8, 16, 0.01
HEADS = {"qwen3": 2}    # where queries and keys have a norm per head: its gain sums over the tokens and heads of a record
INPUT = """
[run]
steps = 1
[data]
train = "text.txt"
batch_tokens = {batch}
sequence = {sequence}
[optimizer]
learning_rate = 1e-3
warmup_steps = 0
beta1 = 0.0
weight_decay = 0
clip_norm = 0
[privacy]
noise_multiplier = {noise}
delta = 1e-5
clip = {clip}
noise_key = "test"
accountant = "rdp"
"""
ROTARY = {"self_attn.q_proj": "attention/query", "self_attn.k_proj": "attention/key", "self_attn.v_proj": "attention/value",
          "self_attn.o_proj": "attention/output", "mlp.gate_proj": "mlp/gate", "mlp.up_proj": "mlp/up", "mlp.down_proj": "mlp/down",
          "self_attn.q_norm": "attention/query_norm", "self_attn.k_norm": "attention/key_norm", "input_layernorm": "attention_norm",
          "post_attention_layernorm": "mlp_norm"}
GPT2 = {"ln_1": "attention_norm", "ln_2": "mlp_norm", "attn.c_proj": "attention/output", "mlp.c_fc": "mlp/up", "mlp.c_proj": "mlp/down"}
"""Modules of a block: names of Weft. OLMo 2 and Gemma 2 have other norms; their losses are compared in transformers_test.py."""


ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapter_by_weft_name(name, values):
    """The same of a parameter of a PEFT adapter."""
    block, module, factor = re.fullmatch(r"base_model\.model\.model\.layers\.(\d+)\.(.*)\.lora_([AB])\.default\.weight", name).groups()
    transposed = factor == "A" and module in ("self_attn.o_proj", "mlp.down_proj")
    return {f"block_{block}/{ROTARY[module]}/lora_{factor.lower()}": values.T if transposed else values}


def by_weft_name(name, values):
    """{tensor of Weft: values} of a parameter of transformers. Weft stores output and down projections [inputs, outputs]."""
    name = name.removeprefix("transformer.").removeprefix("model.")
    whole = {"wte.weight": "embedding/tokens", "wpe.weight": "embedding/positions", "embed_tokens.weight": "embedding/tokens",
             "lm_head.weight": "head/weight", "norm.weight": "final_norm/weight", "ln_f.weight": "final_norm/weight",
             "ln_f.bias": "final_norm/bias"}
    if name in whole:
        return {whole[name]: values}
    block, module, kind = re.fullmatch(r"(?:h|layers)\.(\d+)\.(.*)\.(\w+)", name).groups()
    if module == "attn.c_attn":
        parts = zip(("query", "key", "value"), np.split(values, 3, axis=-1))
        return {f"block_{block}/attention/{part}/{kind}": piece.T if kind == "weight" else piece for part, piece in parts}
    to = {**ROTARY, **GPT2}[module]
    transposed = kind == "weight" and module in ("self_attn.o_proj", "mlp.down_proj", "mlp.c_fc")
    return {f"block_{block}/{to}/{kind}": values.T if transposed else values}


def record_losses(logits, targets):
    """The loss of a record is the mean over its tokens, in Weft."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").reshape(targets.shape).mean(1)


def clipped_sums(model, records, clip):
    """({trained parameter: sum over records of the clipped gradients}, norms of the records) by the optimizer of Opacus."""
    wrapped = GradSampleModule(model, loss_reduction="sum", strict=False)
    trained = {name.removeprefix("_module."): values for name, values in wrapped.named_parameters() if values.requires_grad}
    optimizer = DPOptimizer(torch.optim.SGD(trained.values(), lr=0.0), noise_multiplier=0.0, max_grad_norm=clip,
                            expected_batch_size=RECORDS, loss_reduction="sum")
    # Positions by record: the library's own are of one row for all, of which Opacus would take the batch to have one record.
    positions = torch.arange(SEQUENCE).repeat(RECORDS, 1)
    record_losses(wrapped(records[:, :-1], position_ids=positions).logits, records[:, 1:]).sum().backward()
    norms = sum((values.flatten(1).double() ** 2).sum(1) for values in optimizer.grad_samples).sqrt()
    optimizer.clip_and_accumulate()
    return {name: values.summed_grad.double().numpy() for name, values in trained.items()}, norms


def step_gradient(weft, directory, clip, noise, run, *sets):
    table = weft.run("inspect", directory).split("\n\n", 1)[1].replace('initial = ""', f'initial = "{directory}"')
    (weft.folder / "input.toml").write_text(INPUT.format(batch=RECORDS * SEQUENCE, sequence=SEQUENCE, clip=clip, noise=noise) + table)
    output = f"{run}_{clip}_{noise}"
    weft.run("lm", "train", "input.toml", "--output", output, *(argument for one in sets for argument in ("--set", one)))
    checkpoint = reader.Run(weft.folder / output).checkpoint()
    end = ".first_moment"
    return {name.removesuffix(end): checkpoint[name].astype(np.float64) for name in checkpoint.shapes if name.endswith(end)}


def raised(norm, directory):
    """A norm as Weft takes it: larger by 2^-14, and by 2^-23 for each row that the gradient of a record is a sum over."""
    return norm * (1 + 2**-14 + SEQUENCE * HEADS.get(directory.name, 1) * 2**-23)


def compare(weft, name, directory, records, clip, *sets, adapter=None):
    once, twice = (step_gradient(weft, directory, clip, noise, name, *sets) for noise in (NOISE, 2 * NOISE))
    expected = {}
    model = models.load(directory)
    if adapter:
        model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
    sums, norms = clipped_sums(model.train(), records, clip / raised(1, directory))
    for parameter, values in sums.items():
        expected.update((adapter_by_weft_name if adapter else by_weft_name)(parameter, values / RECORDS))
    assert expected.keys() == once.keys(), (name, expected.keys() ^ once.keys())
    # Positions that no record has take no part.
    if "embedding/positions" in expected:
        for part in (expected, once, twice):
            part["embedding/positions"] = part["embedding/positions"][:SEQUENCE]
    flat = lambda values: np.concatenate([values[key].ravel() for key in sorted(values)])
    found = 2 * flat(once) - flat(twice)
    wanted = flat(expected)
    # The difference removes the noise but for its rounding in fp32.
    distance = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert distance < 2e-6, (name, clip, sets, distance, norms)
    # The noise itself has the deviation noise_multiplier * clip, divided by the records.
    noise = (flat(twice) - flat(once)) * RECORDS / (NOISE * clip)
    assert abs(noise.std() - 1) < 5 / np.sqrt(2 * noise.size), (name, noise.std())
    assert abs(noise.mean()) < 5 / np.sqrt(noise.size), (name, noise.mean())
    return norms


def saved_adapter(weft, name, directory):
    """A directory of PEFT with random factors, so that the gradients of both are not 0. Their products are as large as the weights: with
    factors three times as large, scores of the attention are such that gradients of Opacus in fp32 and in fp64 differ by 9e-6."""
    torch.manual_seed(3)
    model = peft.get_peft_model(models.load(directory), peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, init_lora_weights=False,
                                                                        target_modules=list(ADAPTED)))
    with torch.no_grad():
        for parameter, values in model.named_parameters():
            if "lora_" in parameter:
                values.normal_(0, 0.1)
    folder = weft.folder / f"adapter_of_{name}"
    model.save_pretrained(folder)
    return folder


def test(weft):
    for name in ("gpt2", "llama", "qwen3"):
        directory = models.save(weft, name)
        text = models.TEXT.read_text()
        ids = models.ids(directory, text)
        # A text of exactly these records, which follow one another: each predicts its tokens but the first.
        text = models.tokenizer().decode(ids[:RECORDS * (SEQUENCE + 1)])
        assert models.ids(directory, text) == ids[:RECORDS * (SEQUENCE + 1)]
        (weft.folder / "text.txt").write_text(text)
        records = torch.tensor(ids[:RECORDS * (SEQUENCE + 1)]).reshape(RECORDS, SEQUENCE + 1)
        for mode in ("book_keeping", "two_pass"):
            norms = compare(weft, f"{name}_{mode}", directory, records, 1.0, f"privacy.mode={mode}")
        # Some records below the bound, some above.
        compare(weft, name, directory, records, norms.median().item())
        if name == "gpt2":
            continue
        adapter = saved_adapter(weft, name, directory)
        targets = json.dumps([ROTARY[module].split("/")[1] for module in ROTARY if module.endswith("_proj")])
        sets = ("lora.rank=4", "lora.alpha=8", f"lora.targets={targets}", f"lora.initial={adapter}")
        norms = compare(weft, f"{name}_adapter", directory, records, 1.0, *sets, adapter=adapter)
        compare(weft, f"{name}_adapter", directory, records, norms.median().item(), *sets, adapter=adapter)


if __name__ == "__main__":
    program.main(test)
