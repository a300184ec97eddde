# SPDX-License-Identifier: Apache-2.0
"""Small random models of the libraries: language models of transformers with a tokeniser of tokenizers, modules with random parameters."""
from pathlib import Path

import h5py
import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import decoders, pre_tokenizers, processors, trainers

TEXT = Path(__file__).resolve().parents[2] / "inputs/text/genesis_to_ruth.txt"
VOCABULARY, END = 400, 1       # END: id of <|endoftext|>. circuit-tracer takes id 0 for no token
SIZES = dict(vocab_size=VOCABULARY, bos_token_id=END, eos_token_id=END, pad_token_id=None)
ROTARY = dict(hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
              max_position_embeddings=256, head_dim=8, **SIZES)
NO_HEAD_SIZE = {key: value for key, value in ROTARY.items() if key != "head_dim"}
NEOX = {key: value for key, value in NO_HEAD_SIZE.items() if key != "num_key_value_heads"}
CONFIGURATIONS = {
    "gpt2": lambda: transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=256, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                                            **SIZES),
    "llama": lambda: transformers.LlamaConfig(**ROTARY),
    "llama_biases": lambda: transformers.LlamaConfig(attention_bias=True, mlp_bias=True, **ROTARY),
    "mistral": lambda: transformers.MistralConfig(sliding_window=16, **ROTARY),
    "qwen2": lambda: transformers.Qwen2Config(**NO_HEAD_SIZE),
    "phi3": lambda: transformers.Phi3Config(sliding_window=16, **NO_HEAD_SIZE),
    # Texts are shorter than the contexts of the training, so that the short factors hold.
    "phi3_longrope": lambda: transformers.Phi3Config(original_max_position_embeddings=256, rope_parameters=dict(
        rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.5, short_factor=[1.0, 1.5], long_factor=[2.0, 8.0],
        attention_factor=1.25), **NO_HEAD_SIZE),
    "llama_yarn": lambda: transformers.LlamaConfig(rope_parameters=dict(
        rope_type="yarn", rope_theta=1000.0, factor=4.0, original_max_position_embeddings=64, beta_fast=8.0), **ROTARY),
    "smollm3": lambda: transformers.SmolLM3Config(no_rope_layer_interval=2, **NO_HEAD_SIZE),
    "gemma3_text": lambda: transformers.Gemma3TextConfig(
        query_pre_attn_scalar=24, sliding_window=16, layer_types=["sliding_attention", "full_attention"], rope_parameters=dict(
            full_attention=dict(rope_type="linear", factor=4.0, rope_theta=1e5),
            sliding_attention=dict(rope_type="default", rope_theta=1e4)), **ROTARY),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
                                                   **NEOX),
    "gpt_neox_sequential": lambda: transformers.GPTNeoXConfig(use_parallel_residual=False, tie_word_embeddings=True, **NEOX),
    "qwen3": lambda: transformers.Qwen3Config(**dict(ROTARY, head_dim=16)),
    "olmo2": lambda: transformers.Olmo2Config(**NO_HEAD_SIZE),
    # Windows that are shorter than the texts, and both caps.
    "gemma2": lambda: transformers.Gemma2Config(query_pre_attn_scalar=24, sliding_window=16, attn_logit_softcapping=50.0,
                                                final_logit_softcapping=30.0, **ROTARY),
}


def fill(module):
    """Random parameters, so that every tensor matters; thresholds and their logarithms so that about half of the features stay."""
    with torch.no_grad():
        for name, values in module.named_parameters():
            if "log_threshold" in name:
                values.copy_(torch.log(torch.rand(values.shape) * 0.4 + 0.05))
            elif "threshold" in name:
                values.copy_(torch.rand(values.shape) * 0.4 + 0.05)
            else:
                values.copy_(torch.randn(values.shape) * (0.3 if values.ndim == 1 else 0.4))
    return module


def tokenizer():
    """A byte-level BPE as GPT-2's, trained by tokenizers."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    made.train([str(TEXT)], trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<|unused|>", "<|endoftext|>"],
                                                show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>", bos_token="<|endoftext|>")


def save(weft, name, dtype=torch.float32, to=None, **settings):
    """A random model of a family with its tokeniser, as save_pretrained writes it; its directory in the folder of the test."""
    torch.manual_seed(sum(map(ord, name)))
    configuration = CONFIGURATIONS[name]()
    configuration.update(settings)
    model = transformers.AutoModelForCausalLM.from_config(configuration).to(dtype)
    with torch.no_grad():
        for values in model.parameters():
            if values.ndim == 1:
                values.add_(0.3 * torch.randn_like(values))
            else:
                values.mul_(4)
    directory = weft.folder / (to or name)
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


def add_begin(directory):
    """The tokeniser of a directory puts <|endoftext|> before each text."""
    made = transformers.AutoTokenizer.from_pretrained(directory)
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A",
                                                                          special_tokens=[("<|endoftext|>", END)])
    made.save_pretrained(directory)


def load(directory):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def ids(directory, text):
    return transformers.AutoTokenizer.from_pretrained(directory)(text).input_ids


def tokens(data):
    """Ids of a dataset that Weft harvested, of its first file."""
    with h5py.File(data / "chunk_0.hdf5") as file:
        return file["tokens"][:].astype(np.int64)


def loss(model, ids):
    """Mean negative log-likelihood in nats of ids[1:], in float64 from the logits on."""
    ids = torch.as_tensor(ids)
    with torch.no_grad():
        logits = model(ids[None]).logits[0].double()
    return torch.nn.functional.cross_entropy(logits[:-1], ids[1:]).item()
