# SPDX-License-Identifier: Apache-2.0
"""Conversations and completions as transformers has them: texts of chat templates, ids of rows, and which of them count.

launch.py transformers5 chat_test.py WEFT
"""
import json
import sys
from pathlib import Path

import h5py
import transformers

import models
import program
from weft.chat_template import ChatTemplate, TemplateFailure
from weft.prepare import main as prepare

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))
import chat_cases  # noqa: E402

MARKERS = ["<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<|start_header_id|>", "<|end_header_id|>", "[INST]", "[/INST]"]


def directory_of(weft, name):
    """A tokeniser with the markers of the templates as special tokens."""
    tokenizer = models.tokenizer()
    tokenizer.add_special_tokens({**chat_cases.TOKENS, "additional_special_tokens": MARKERS})
    tokenizer.chat_template = chat_cases.TEMPLATES[name]
    tokenizer.save_pretrained(weft.folder / name)
    return weft.folder / name, transformers.AutoTokenizer.from_pretrained(weft.folder / name)


def texts(template, tokenizer, conversation):
    """The text of both; None where the template raises."""
    messages, prompt, variables = conversation["messages"], conversation.get("generation_prompt", False), conversation.get("variables", {})
    try:
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **variables)
    except Exception:
        expected = None
    template.variables.update(variables)
    try:
        return template.render(messages, prompt), expected
    except TemplateFailure:
        return None, expected
    finally:
        for name in variables:
            del template.variables[name]


def documents(directory):
    """[(ids, which count)] of the rows in token files."""
    with h5py.File(directory / "tokens_00000.h5") as file:
        ids, counted, starts = file["tokens"][:].tolist(), file["counted"][:].tolist(), file["documents"][:].tolist()
    return [(ids[begin:end], counted[begin:end]) for begin, end in zip(starts, [*starts[1:], len(ids)])]


def tokenized(weft, rows, directory, name):
    (weft.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    weft.run("lm", "tokenize", f"{name}.jsonl", "--tokens", directory, "--output", name)
    return documents(weft.folder / name)


def check_conversations(weft):
    for name in chat_cases.TEMPLATES:
        directory, tokenizer = directory_of(weft, name)
        template, used = ChatTemplate(directory), []
        for number, conversation in enumerate(chat_cases.CONVERSATIONS):
            found, expected = texts(template, tokenizer, conversation)
            assert found == expected, (name, number, found, expected)
            if found is not None and not conversation.get("generation_prompt") and conversation["messages"][-1]["content"]:
                used.append(conversation["messages"])
        (weft.folder / "chats.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in used))
        assert prepare([str(weft.folder / "chats.jsonl"), "--model", str(directory), "--output", str(weft.folder / "rows.jsonl")]) == 0
        rows = [json.loads(line) for line in (weft.folder / "rows.jsonl").read_text().splitlines()]
        assert len(rows) == len(used) > 2, (name, len(rows))
        for messages, (ids, counted) in zip(used, tokenized(weft, rows, directory, f"{name}_set")):
            whole = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=name == "qwen3")
            assert ids == whole["input_ids"], (name, messages)
            # Its {% generation %} is what Weft finds, where the last turn is the only one.
            if name == "qwen3" and sum(message["role"] == "assistant" for message in messages) == 1:
                assert counted == whole["assistant_masks"], (messages, counted, whole["assistant_masks"])


def check_completions(weft):
    """The ids of both texts as one, and the end; those behind the ids of the prompt count."""
    directory, tokenizer = directory_of(weft, "chatml")
    pairs = [("And God said", ", Let there be light"), ("In the beg", "inning God"), ("", "created"), ("Q: who?\n", "</s>"), ("a ", " b"), ("é", "\u0301 😀")]
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    for (prompt, completion), (ids, counted) in zip(pairs, tokenized(weft, rows, directory, "pairs")):
        expected, before = tokenizer(prompt + completion)["input_ids"], tokenizer(prompt)["input_ids"]
        if expected[-1] != tokenizer.eos_token_id:
            expected.append(tokenizer.eos_token_id)
        same = next((place for place, (one, other) in enumerate(zip(before, expected)) if one != other), len(before))
        assert ids == expected and counted == [0] * same + [1] * (len(ids) - same), (prompt, completion, ids, expected, counted)


def test(weft):
    check_conversations(weft)
    check_completions(weft)


program.main(test)
