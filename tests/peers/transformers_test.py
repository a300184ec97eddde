# SPDX-License-Identifier: Apache-2.0
"""Language models of transformers in Weft: loss, greedy text, and the export of the same bits, for each family; what the files beside the
weights say about the begin and the end of a text.

launch.py transformers5 transformers_test.py WEFT
"""
import json
import math
import re
import shutil

import torch
import transformers
from safetensors.torch import load_file

import models
import program

PROMPT = "And the Spirit of God moved upon the face of"
GREEDY = 40


def tensors_of(directory):
    return {name: values for file in sorted(directory.glob("*.safetensors")) for name, values in load_file(file).items()}


def evaluates(weft, name, directory):
    """The loss of the text, which Weft takes over the same predictions."""
    model, ids = models.load(directory), models.ids(directory, (weft.folder / "text.txt").read_text())
    assert len(ids) < 256, len(ids)
    found = json.loads(weft.run("lm", "evaluate", directory, "--text", "text.txt", "--json", "--quiet"))["validation"]
    assert found["tokens"] == len(ids) - 1, (name, found, len(ids))
    expected = models.loss(model, ids)
    # Some hundred operations in fp32 on both sides.
    assert abs(found["loss"] / expected - 1) < 2e-6, (name, found["loss"], expected)


def generates(weft, name, directory, ends=(models.END,)):
    """Returns the greedy ids."""
    model, prompt = models.load(directory), torch.tensor(models.ids(directory, PROMPT))
    with torch.no_grad():
        ids = model.generate(prompt[None], max_new_tokens=GREEDY, do_sample=False, pad_token_id=0)[0, len(prompt):]
        scores = torch.log_softmax(model(torch.cat([prompt, ids])[None]).logits[0].double(), -1)[len(prompt) - 1:-1]
    log_probability = scores.gather(1, ids[:, None]).sum().item()
    ended = ids[-1].item() in ends
    text = transformers.AutoTokenizer.from_pretrained(directory).decode(ids[:-1] if ended else ids)
    printed = weft.run("lm", "generate", directory, "--prompt", PROMPT, "--max-new-tokens", GREEDY, "--temperature", 0, "--jsonl", "--quiet")
    found, marks = json.loads(printed.splitlines()[-1]), re.compile("\ufffd+")
    # Bytes that are no UTF-8: a mark for each in Weft, for each sequence of them in the library.
    assert marks.sub("\ufffd", found["text"]) == marks.sub("\ufffd", text) and found["finish"] == ("end" if ended else "length"), (name, found, text)
    # A sum of 40 logarithms, from fp32 logits.
    assert math.isclose(found["log_probability"], log_probability, rel_tol=5e-6), (name, found, log_probability)
    return ids.tolist()


def exports(weft, name, dtype):
    """Weights of the library come back bit for bit, in their own type, and load into its class without a missing or unknown name."""
    directory = models.save(weft, name, dtype, f"{name}_{str(dtype)[6:]}")
    exported = weft.folder / f"{directory.name}_exported"
    weft.run("lm", "export", directory, "--output", exported, "--type", "fp32" if dtype == torch.float32 else "bf16")
    written, own = tensors_of(exported), tensors_of(directory)
    assert written.keys() == own.keys(), (name, written.keys() ^ own.keys())
    for key, values in own.items():
        assert written[key].dtype == values.dtype, (name, key, written[key].dtype)
        if name.startswith("gemma") and dtype == torch.float32 and "norm" in key:
            # Weft keeps 1 + weight, rounded to fp32 as the library rounds it in each pass.
            assert torch.equal(1 + written[key], 1 + values), (name, key)
        else:
            assert torch.equal(written[key], values), (name, key)
    model, information = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32, attn_implementation="eager",
                                                                           output_loading_info=True)
    assert not information["missing_keys"] and not information["unexpected_keys"], (name, information)
    ids = torch.randint(0, models.VOCABULARY, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, models.load(directory)(ids).logits), name
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(one) for one in (exported, directory))
    for special in ("bos_token", "eos_token", "pad_token"):
        assert getattr(ours, special) == getattr(theirs, special), (name, special, getattr(ours, special))
    assert ours(PROMPT).input_ids == theirs(PROMPT).input_ids, name


def longer(weft):
    """Sequences that are longer than those of the training, where the wavelengths follow their length."""
    yarn = dict(rope_type="yarn", rope_theta=1000.0, factor=2.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=0.4)
    dynamic = dict(rope_type="dynamic", rope_theta=1000.0, factor=3.0)
    for name, settings in (("llama_yarn", dict(rope_parameters=yarn)),
                           ("llama", dict(rope_parameters=dynamic, max_position_embeddings=64)),
                           ("phi3_longrope", dict(original_max_position_embeddings=64))):
        directory = models.save(weft, name, to=f"longer_{name}", **settings)
        model, ids = models.load(directory), models.ids(directory, (weft.folder / "text.txt").read_text())
        length = len(ids) - 1
        found = json.loads(weft.run("lm", "evaluate", directory, "--text", "text.txt", "--json", "--quiet", "--set",
                                    f"data.sequence={length}"))["validation"]
        with torch.no_grad():
            logits = model(torch.tensor(ids)[None, :-1]).logits[0].double()
        expected = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])).item()
        assert abs(found["loss"] / expected - 1) < 2e-6, (name, found, expected)
        if name != "llama_yarn":
            printed = weft.run("lm", "generate", directory, "--prompt", PROMPT, "--max-new-tokens", 3, "--set", "data.sequence=200", code=2)
            assert "grows beyond rope_length = 64" in printed, printed


def begins_and_ends(weft):
    """A post-processor that puts a token before each text, and a second end token, as models for conversation have."""
    name = "llama"
    directory = models.save(weft, name, to="begin")
    models.add_begin(directory)
    assert models.ids(directory, PROMPT)[0] == models.END
    evaluates(weft, name, directory)
    ids = generates(weft, name, directory)
    last = next(i for i, one in enumerate(ids) if i > 0 and one not in ids[:i])
    for file in ("generation_config.json", "config.json"):
        ended = shutil.copytree(directory, weft.folder / f"ended_{file}")
        values = json.loads((ended / file).read_text())
        (ended / file).write_text(json.dumps({**values, "eos_token_id": [models.END, ids[last]]}))
        if file == "config.json":       # the library reads it where the other file is missing
            (ended / "generation_config.json").unlink()
        assert generates(weft, name, ended, (models.END, ids[last])) == ids[:last + 1], file


def test(weft):
    (weft.folder / "text.txt").write_text(models.TEXT.read_text()[:500])
    for name in models.CONFIGURATIONS:
        directory = models.save(weft, name)
        evaluates(weft, name, directory)
        generates(weft, name, directory)
        exports(weft, name, torch.float32)
        exports(weft, name, torch.bfloat16)
    longer(weft)
    begins_and_ends(weft)


if __name__ == "__main__":
    program.main(test)
