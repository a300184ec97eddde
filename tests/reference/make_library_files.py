# SPDX-License-Identifier: Apache-2.0
"""Writes fixtures/library: tiny models of transformers and adapters of PEFT, each as the library's save_pretrained writes it, with
the losses that the libraries compute.

make_library_files.py

Needs torch, transformers 5 and peft (pip install torch transformers peft). library_files_test.py needs none of them.
"""
import json
import pathlib
import shutil

import peft
import torch
import transformers

FOLDER = pathlib.Path(__file__).parent / "fixtures" / "library"
TEXT = "In the beginning God created the heaven and the earth."
SIZES = dict(vocab_size=256, bos_token_id=None, eos_token_id=None, pad_token_id=None)
LLAMA = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
             max_position_embeddings=64, tie_word_embeddings=True, **SIZES)
RANDOM = dict(r=2, lora_alpha=6, init_lora_weights=False)
QUERY_VALUE = dict(target_modules=["q_proj", "v_proj"])
# By name: what get_peft_model is given.
ADAPTERS = {
    "plain": dict(RANDOM, **QUERY_VALUE),
    "rslora": dict(RANDOM, use_rslora=True, **QUERY_VALUE),
    "patterns": dict(RANDOM, **QUERY_VALUE, rank_pattern={r"model\.layers\.\d+\.self_attn\.(q|v)_proj": 3, "q_proj": 5},
                     alpha_pattern={r"layers\.[01]\.self_attn\.[qv]_proj": 9}),
    "one_layer": dict(RANDOM, **QUERY_VALUE, alpha_pattern={r"layers\.1\.self_attn\.q_proj": 9}),
    "layers_to_transform": dict(RANDOM, **QUERY_VALUE, layers_to_transform=[1]),
    "pissa": dict(r=2, lora_alpha=6, init_lora_weights="pissa", **QUERY_VALUE),
    "olora": dict(r=2, lora_alpha=6, init_lora_weights="olora", **QUERY_VALUE),
    "dora": dict(RANDOM, use_dora=True, **QUERY_VALUE),
    "modules_to_save": dict(RANDOM, modules_to_save=["norm"], **QUERY_VALUE),
    "biases": dict(RANDOM, bias="lora_only", **QUERY_VALUE),
}
APPLIED = ("plain", "rslora", "patterns")


def loss(model):
    ids = torch.tensor(list(TEXT.encode()))
    with torch.no_grad():
        logits = model(ids[None]).logits[0].double()
    return torch.nn.functional.cross_entropy(logits[:-1], ids[1:]).item()


def random_model(config):
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for values in model.parameters():
            if values.ndim == 1:
                values.add_(0.3 * torch.randn_like(values))
            else:
                values.mul_(8)
    return model


def load(name):
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER / name, dtype=torch.float32, attn_implementation="eager").eval()


def main():
    shutil.rmtree(FOLDER, ignore_errors=True)
    losses = {}
    configs = {
        "gpt2": transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=64, **SIZES),
        "llama": transformers.LlamaConfig(**LLAMA, rope_parameters=dict(rope_type="default", rope_theta=1000.0)),
    }
    for name, config in configs.items():
        # Llama in parts.
        random_model(config).save_pretrained(FOLDER / name, max_shard_size="8KB" if name == "llama" else "1GB")
        (FOLDER / name / "generation_config.json").unlink(missing_ok=True)
        losses[name] = loss(load(name))
    # As model cards tell users to extend the context: rope_scaling beside the rope_parameters of the library.
    config_file = FOLDER / "llama" / "config.json"
    written = config_file.read_text()
    config_file.write_text(json.dumps(dict(json.loads(written), rope_theta=1000.0, rope_scaling=dict(rope_type="linear", factor=4.0))))
    losses["llama with rope_scaling"] = loss(load("llama"))
    config_file.write_text(written)

    for name, settings in ADAPTERS.items():
        torch.manual_seed(2)
        model = peft.get_peft_model(load("llama"), peft.LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
        with torch.no_grad():
            for parameter, values in model.named_parameters():
                if "lora_" in parameter and settings["init_lora_weights"] is False:
                    values.normal_(0, 0.3)
        folder = FOLDER / f"adapter_{name}"
        model.save_pretrained(folder)
        config = json.loads((folder / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = "llama"
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        (folder / "README.md").unlink(missing_ok=True)
        if name in APPLIED:
            losses[f"adapter_{name}"] = loss(peft.PeftModel.from_pretrained(load("llama"), folder).eval())
    (FOLDER / "losses.json").write_text(json.dumps(dict(
        written_by=dict(transformers=transformers.__version__, peft=peft.__version__, torch=torch.__version__), text=TEXT,
        losses=losses), indent=2) + "\n")


if __name__ == "__main__":
    main()
