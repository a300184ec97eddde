# SPDX-License-Identifier: Apache-2.0
"""Files that transformers and PEFT wrote (fixtures/library, by make_library_files.py), in the program: the losses of the libraries,
training that begins with them on one and two processes, and every part of them that Weft lacks, by name.

library_files_test.py WEFT
"""
import json
import pathlib
import shutil

import numpy as np

import program
from weights_files import read_safetensors, write_safetensors

FILES = pathlib.Path(__file__).parent / "fixtures" / "library"
RECORDED = json.loads((FILES / "losses.json").read_text())
BYTES = '{"format":"weft-tokenizer","version":1,"kind":"bytes","special":[]}'
ADAPTERS = {"plain": (2, 6), "rslora": (2, 6 / 2 ** 0.5 * 2), "patterns": (3, 9)}       # lora.rank, lora.alpha
INPUT = """
[run]
steps = 2
[data]
train = "text.txt"
sequence = 16
batch_tokens = 64
[optimizer]
warmup_steps = 0
learning_rate = 1e-3
[checkpoint]
every = 0
[log]
every = 1
"""


def copy(weft, name, to=None):
    """A recorded directory; its model reads bytes."""
    folder = weft.folder / (to or name)
    shutil.copytree(FILES / name, folder)
    if not name.startswith("adapter"):
        (folder / "weft_tokenizer.json").write_text(BYTES)
    return folder


def change(file, **changes):
    """None removes the key."""
    values = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def loss(weft, model, *sets, name):
    changes = program.sets(*sets)
    weft.run("lm", "evaluate", model, "--text", "line.txt", "--output", "evaluated", *changes)
    found = json.loads((weft.folder / "evaluated" / "evaluation.json").read_text())["validation"]["loss"]
    # Some 50 operations in fp32.
    assert abs(found / RECORDED["losses"][name] - 1) < 5e-6, (name, found, RECORDED["losses"][name])


def refused(weft, code, *arguments, parts):
    output = weft.run(*arguments, code=code)
    assert all(part in output for part in parts), (parts, output)


def test_models(weft):
    loss(weft, copy(weft, "gpt2"), name="gpt2")
    llama = copy(weft, "llama")
    loss(weft, llama, name="llama")
    config = llama / "config.json"
    written = config.read_text()
    linear = dict(rope_type="linear", factor=4.0)
    change(config, rope_theta=1000.0, rope_scaling=linear)
    loss(weft, llama, name="llama with rope_scaling")
    # The library would take the base 10,000 with the first, not the base of rope_parameters.
    for changes, part in ((dict(rope_scaling=linear), "rope_theta 10000 and 1000"), (dict(rope_theta=7.0), '"rope_theta" = 7'),
                          (dict(rope_theta=1000.0, rope_scaling=dict(linear, rope_type="axial")), '"axial"'),
                          (dict(rope_parameters=dict(linear, rope_theta=1000.0), rope_theta=1000.0,
                                rope_scaling=dict(linear, factor=2.0)), "scaling differs")):
        config.write_text(written)
        change(config, **changes)
        refused(weft, 2, "inspect", "llama", parts=["config.json", part])
    config.write_text(written)
    # A directory of a model, and of adapters to it: nothing is left out.
    (llama / "adapter_config.json").write_bytes((FILES / "adapter_plain/adapter_config.json").read_bytes())
    refused(weft, 2, "lm", "evaluate", "llama", "--text", "line.txt", parts=["adapter_config.json"])
    (llama / "adapter_config.json").unlink()


def test_parts(weft):
    """A set of files is complete, and every tensor of it is read."""
    index = FILES / "llama/model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    last = "model-00003-of-00003.safetensors"

    def broken(name, code, *parts, without=(), weight_map=None):
        folder = copy(weft, "llama", name)
        for file in without:
            (folder / file).unlink()
        if weight_map is not None:
            change(folder / index.name, weight_map=weight_map)
        refused(weft, code, "lm", "evaluate", name, "--text", "line.txt", parts=parts)

    broken("last_missing", 3, last, without=[last])
    broken("index_missing", 2, "model.safetensors.index.json", without=[index.name])
    broken("last_not_listed", 3, "one of 3", without=[last], weight_map={t: f for t, f in places.items() if f != last})
    some = next(tensor for tensor, file in places.items() if file == last)
    broken("tensor_not_listed", 3, some, "is not placed there", weight_map={t: f for t, f in places.items() if t != some})
    broken("tensor_nowhere", 3, '"model.layers.7.x"', weight_map={**places, "model.layers.7.x": last})
    folder = copy(weft, "llama", "both")
    shutil.copyfile(FILES / "gpt2/model.safetensors", folder / "model.safetensors")
    refused(weft, 2, "inspect", "both", parts=["model.safetensors.index.json", "remove one"])


def test_head(weft):
    """A head that is the embedding once more may be there; another one is never dropped."""
    folder = copy(weft, "gpt2", "with_head")
    tensors = read_safetensors(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].copy()
    write_safetensors(folder / "model.safetensors", tensors)
    loss(weft, folder, name="gpt2")
    tensors["lm_head.weight"][-1, -1] += 1
    write_safetensors(folder / "model.safetensors", tensors)
    refused(weft, 2, "inspect", folder, parts=["lm_head.weight", "tie_word_embeddings"])


def test_adapters(weft):
    def sets(folder, rank, alpha):
        return [f"lora.initial={folder}", f"lora.rank={rank}", f"lora.alpha={alpha}", 'lora.targets=["query", "value"]']

    for name, (rank, alpha) in ADAPTERS.items():
        copy(weft, f"adapter_{name}")
        loss(weft, "llama", *sets(f"adapter_{name}", rank, alpha), name=f"adapter_{name}")
    for name, parts in {
            "pissa": ["init_lora_weights", '"pissa"'],
            "olora": ["init_lora_weights", '"olora"'],
            "dora": ["use_dora"],
            "modules_to_save": ["modules_to_save", '["norm"]'],
            "biases": ["bias is", '"lora_only"'],
            "layers_to_transform": ["layers_to_transform = [1]"],
            "one_layer": ["model.layers.1.self_attn.q_proj", "factor 4.5", "lora.alpha = 9"],
    }.items():
        copy(weft, f"adapter_{name}")
        changes = [argument for one in sets(f"adapter_{name}", 2, 6) for argument in ("--set", one)]
        refused(weft, 2, "lm", "evaluate", "llama", "--text", "line.txt", *changes, parts=parts)
    # A key of a later version; a pattern that is none; adapters that the file should have.
    config = weft.folder / "adapter_plain" / "adapter_config.json"
    written = config.read_text()
    plain = [argument for one in sets("adapter_plain", 2, 6) for argument in ("--set", one)]
    for changes, code, part in ((dict(new_trick={"a": 1}), 2, "new_trick"), (dict(rank_pattern={"(": 2}), 2, '"("'),
                                (dict(target_modules=["q_proj", "v_proj", "o_proj"]), 3, "o_proj"),
                                (dict(lora_alpha=None), 3, "lora_alpha")):
        config.write_text(written)
        change(config, **changes)
        refused(weft, code, "lm", "evaluate", "llama", "--text", "line.txt", *plain, parts=[part])
    config.write_text(written)


def train(weft, model, output, *sets, code=0, ranks=None, arguments=()):
    """Begins with a model; the table [language_model] is that which inspect prints."""
    table = weft.run("inspect", model).split("\n\n", 1)[1].replace('initial = ""', f'initial = "{model}"')
    (weft.folder / "input.toml").write_text(INPUT + table)
    changes = program.sets(*sets)
    return weft.run("lm", "train", "input.toml", "--output", output, *changes, *arguments, code=code, ranks=ranks)


def export(weft, run):
    weft.run("lm", "export", run, "--output", f"{run}_files")
    folder = weft.folder / f"{run}_files"
    return json.loads((folder / "config.json").read_text()), read_safetensors(folder / "model.safetensors")


def test_training_keeps_the_model(weft):
    """Its context and its tokeniser; the runs have sequences of 16 tokens, the models contexts of 64."""
    before = read_safetensors(FILES / "gpt2/model.safetensors")["transformer.wpe.weight"]
    output = train(weft, "gpt2", "tuned")
    assert "tokeniser: bytes" in output, output
    config, tensors = export(weft, "tuned")
    assert config["n_positions"] == config["n_ctx"] == 64, config
    after = tensors["transformer.wpe.weight"]
    # Rows beyond the sequences decay with the others and learn nothing.
    assert after.shape == before.shape and np.max(np.abs(after[16:] - before[16:])) < 1e-3, after.shape
    assert np.max(np.abs(after[:16] - before[:16])) > 1e-4
    # Of the run itself, of one that begins with it, and of adapters that were merged.
    text = "In the beginning God created the heaven."
    printed = weft.run("lm", "generate", "tuned", "--prompt", text, "--max-new-tokens", 20, "--jsonl")
    assert json.loads(printed.splitlines()[-1])["tokens"] == 20, printed
    weft.run("lm", "generate", "tuned", "--prompt", text * 2, code=2)
    lora = ("lora.rank=2",)
    train(weft, "gpt2", "adapted", *lora)
    assert np.array_equal(export(weft, "adapted")[1]["transformer.wpe.weight"], before)
    weft.run("lm", "merge", "adapted", "--output", "merged")
    assert export(weft, "merged")[0]["n_positions"] == 64
    train(weft, "llama", "rotary")
    assert export(weft, "rotary")[0]["max_position_embeddings"] == 64
    train(weft, "llama", "rotary_adapted", *lora)
    weft.run("lm", "merge", "rotary_adapted", "--output", "rotary_merged")
    for run in ("rotary_adapted", "rotary_merged"):
        assert export(weft, run)[0]["max_position_embeddings"] == 64, run
    for model, run in (("tuned", "tuned_again"), ("rotary", "rotary_again")):
        table = weft.run("inspect", "gpt2" if model == "tuned" else "llama").split("\n\n", 1)[1]
        (weft.folder / "again.toml").write_text(INPUT + table.replace('initial = ""', f'initial = "{model}"'))
        weft.run("lm", "train", "again.toml", "--output", run, "--set", "data.sequence=8")
        assert 64 in export(weft, run)[0].values(), run
        refused(weft, 2, "lm", "train", "again.toml", "--output", "refused", "--dry-run", "--set", "optimizer.state=bf16",
                parts=["embedding/tokens is fp32"])

    # What does not fit is known before the run begins.
    dry = dict(code=2, arguments=["--dry-run"])
    output = train(weft, "gpt2", "refused", "data.sequence=128", "data.batch_tokens=128", **dry)
    assert "64 learned positions" in output, output
    output = train(weft, "gpt2", "refused", "data.tokens=character", **dry)
    assert "another tokeniser" in output and "leave data.tokens" in output, output
    train(weft, "gpt2", "same_ids", "data.tokens=bytes", arguments=["--dry-run"])
    (weft.folder / "gpt2" / "weft_tokenizer.json").unlink()
    output = train(weft, "gpt2", "refused", **dry)
    assert "has no tokeniser" in output, output
    (weft.folder / "gpt2" / "weft_tokenizer.json").write_text(BYTES)
    assert not (weft.folder / "refused").exists()


def test_tensor_parallel(weft):
    """Each rank reads its part of every tensor: whole weights, and adapters from a file."""
    copy(weft, "gpt2", "parallel")
    for name, sets in (("whole", ()), ("adapters", ("lora.rank=2",))):
        train(weft, "parallel", f"one_{name}", *sets)
        train(weft, "parallel", f"two_{name}", "parallel.tensor=2", *sets, ranks=2)
        one, two = (program.metrics(weft.folder / f"{ranks}_{name}") for ranks in ("one", "two"))
        assert len(one) == len(two) == 2
        for a, b in zip(one, two):
            # Sums in another order.
            assert abs(a["loss"] / b["loss"] - 1) < 1e-5, (name, a["loss"], b["loss"])
    output = train(weft, "llama", "refused", "parallel.tensor=2", "parallel.world=2", code=2, arguments=["--dry-run"])
    assert "language_model.kv_heads = 1" in output, output


def test_messages(weft):
    """Keys of config.json, or the --set that is at fault; never a line of a table that Weft made of them."""
    folder = copy(weft, "llama", "sizes")
    written = (folder / "config.json").read_text()
    for changes, part in ((dict(hidden_size=20, head_dim=None), 'heads of 10 ("hidden_size" / "num_attention_heads")'),
                          (dict(head_dim=12), 'heads of 12 ("head_dim")'), (dict(head_dim=512), "heads of 512"),
                          (dict(num_attention_heads=3, num_key_value_heads=2), '"num_key_value_heads" = 2 does not divide'),
                          (dict(hidden_size=17, head_dim=None), '"hidden_size" = 17 is no multiple'),
                          (dict(rms_norm_eps=2.0), '"rms_norm_eps" = 2')):
        (folder / "config.json").write_text(written)
        change(folder / "config.json", **changes)
        output = weft.run("inspect", folder, code=2)
        assert part in output and "config.json: " in output and "language_model" not in output, output
    # 4096 tokens pass together; they follow the sequences.
    weft.run("lm", "evaluate", "llama", "--text", "line.txt", "--set", "data.sequence=6")
    weft.run("lm", "harvest", "llama", "--text", "text.txt", "--output", "harvested", "--set", "data.sequence=6")
    for one in ("data.sequence=0", "data.batch_tokens=7", "language_model.sparse_local=2", "data.sequence=100000000"):
        output = weft.run("lm", "evaluate", "llama", "--text", "line.txt", "--set", one, code=2)
        assert f"--set {one}: " in output, output
    refused(weft, 2, "lm", "evaluate", "gpt2", "--text", "line.txt", "--set", "data.sequence=65", parts=["64 learned positions"])


def test(weft):
    (weft.folder / "line.txt").write_text(RECORDED["text"])
    (weft.folder / "text.txt").write_text(RECORDED["text"] * 8)
    for one in (test_models, test_parts, test_head, test_adapters, test_training_keeps_the_model, test_tensor_parallel, test_messages):
        one(weft)


if __name__ == "__main__":
    program.main(test)
