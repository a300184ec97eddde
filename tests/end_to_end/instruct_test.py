# SPDX-License-Identifier: Apache-2.0
"""The story of a user who has a model, its chat template and conversations (docs/own_data.md): weft prepare, adapters trained on the
answers alone, the checkpoint with the lowest validation loss, answers by the chat template, a merged model in files of Hugging Face.

instruct_test.py WEFT
"""
import json

import program

TEMPLATE = ("{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{{ eos_token }}{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}")
ANSWERS = {"sky": "blue", "grass": "green", "blood": "red", "snow": "white", "coal": "black", "sun": "gold", "rose": "pink", "sea": "teal"}
END = "<|endoftext|>"
PLACES = ("here", "there", "away", "above")
BASE = """
[run]
steps = 80
[data]
train = "tokens"
order = "shuffled"
batch_tokens = 512
sequence = 64
[language_model]
preset = "llama"
layers = 1
heads = 2
d_model = 48
[optimizer]
learning_rate = 1e-2
warmup_steps = 5
"""
TUNED = """
[run]
epochs = 60
stop_after = 3
[data]
train = "train.jsonl"
validation = "validation.jsonl"
order = "shuffled"
pack = "documents"
document_mask = true
batch_tokens = 256
sequence = 64
[lora]
rank = 16
alpha = 32
targets = ["query", "key", "value", "output", "gate", "up", "down"]
[optimizer]
learning_rate = 1e-2
warmup_fraction = 0.05
[checkpoint]
every = 40
keep = 2
keep_best = true
[log]
evaluate_every = 20
"""


def conversation(thing, answer=None):
    turns = [{"role": "system", "content": "Be short."}, {"role": "user", "content": f"The colour of the {thing}?"}]
    return {"messages": turns + ([{"role": "assistant", "content": answer}] if answer else [])}


def write(weft, name, rows):
    (weft.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def answers(weft, model):
    printed = weft.run("lm", "generate", model, "--prompts", "prompts.jsonl", "--temperature", "0", "--max-new-tokens", "12", "--jsonl", "--quiet")
    return [json.loads(line)["text"] for line in printed.splitlines() if line.startswith("{")]


def test(weft):
    if not weft.has_package():
        return
    # The model that the user has.
    text = [f"[system]Be kind.{END}[user]Where is the {thing}?{END}[assistant]{place}{END}\n" for thing in ANSWERS for place in PLACES]
    (weft.folder / "text.txt").write_text(program.TEXT + "".join(text))
    weft.run("lm", "tokenize", "text.txt", "--train-bpe", "320", "--output", "tokens")
    (weft.folder / "base.toml").write_text(BASE)
    weft.run("lm", "train", "base.toml", "--output", "base_run")
    weft.run("lm", "export", "base_run", "--output", "base")
    config = weft.folder / "base/tokenizer_config.json"
    settings = json.loads(config.read_text())
    assert settings["eos_token"] == END, settings
    config.write_text(json.dumps({**settings, "chat_template": TEMPLATE}))

    # Conversations: as they are, an error that states the command; prepared, rows whose answers count.
    everything = [conversation(thing, answer) for thing, answer in ANSWERS.items()]
    write(weft, "chats.jsonl", everything)
    write(weft, "questions.jsonl", [conversation(thing) for thing in ANSWERS])
    (weft.folder / "tuned.toml").write_text(TUNED + '[language_model]\ninitial = "base"\n')       # its directory gives the sizes
    printed = weft.run("lm", "train", "tuned.toml", "--output", "no", "--set", "language_model.layers=2", code=2)
    assert "layers = 1" in printed, printed
    printed = weft.run("lm", "train", "tuned.toml", "--output", "no", "--set", 'data.train="chats.jsonl"', code=3)
    assert "chats.jsonl:1" in printed and "weft prepare" in printed, printed
    weft.run("prepare", "chats.jsonl", "--model", "base", "--output", "train.jsonl")
    weft.run("prepare", "chats.jsonl", "--model", "base", "--output", "validation.jsonl")
    weft.run("prepare", "questions.jsonl", "--model", "base", "--generation-prompt", "--output", "prompts.jsonl")
    first = json.loads((weft.folder / "train.jsonl").read_text().splitlines()[0])["segments"]
    prompt = f"[system]Be short.{END}[user]The colour of the sky?{END}[assistant]"
    assert first == [{"text": prompt, "loss": False}, {"text": f"blue{END}", "loss": True}], first

    # Training. The best checkpoint has learned the answers; the model that it began with does not know them.
    printed = weft.run("lm", "train", "tuned.toml", "--output", "tuned")
    result = program.record(weft.folder / "tuned")["result"]
    assert (weft.folder / f"tuned/checkpoints/step_{result['best']['step']:08}").is_dir(), result

    expected = list(ANSWERS.values())
    assert answers(weft, "tuned/best") == expected, (answers(weft, "tuned/best"), printed[-2000:])
    assert not set(answers(weft, "base")) & set(expected)

    # Merged and exported: the same answers, also of the directory that other programs read; its chat template is still there.
    weft.run("lm", "merge", "tuned/best", "--output", "merged")
    weft.run("lm", "export", "merged", "--output", "exported")
    assert answers(weft, "merged") == answers(weft, "exported") == expected
    assert json.loads((weft.folder / "exported/tokenizer_config.json").read_text())["chat_template"] == TEMPLATE
    weft.run("prepare", "questions.jsonl", "--model", "exported", "--generation-prompt", "--output", "again.jsonl")
    assert (weft.folder / "again.jsonl").read_text() == (weft.folder / "prompts.jsonl").read_text()


program.main(test)
