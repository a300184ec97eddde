# SPDX-License-Identifier: Apache-2.0
"""weft prepare: texts of chat templates are those of transformers in recorded cases, the assistant's turns count, and every kind of row that
cannot be used is an error with its place, or is counted.

prepare_test.py
"""
import contextlib
import importlib.util
import io
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import chat_cases
import program

sys.path.insert(0, str(program.PACKAGE))
if not all(importlib.util.find_spec(name) for name in ("h5py", "numpy", "jinja2")):
    program.skip("a library of the Python package is not installed")

from weft.chat_template import ChatTemplate, TemplateFailure, segments  # noqa: E402
from weft.prepare import main  # noqa: E402

FOLDER = Path(tempfile.mkdtemp(prefix="weft_test_"))
TURNS = chat_cases.turns


def check_recorded():
    recorded = json.loads(chat_cases.RECORDED.read_text(encoding="utf-8"))["cases"]
    assert len(recorded) == 50 == len(chat_cases.cases())
    for one, (name, number, conversation) in zip(recorded, chat_cases.cases()):
        assert (one["template"], one["conversation"]) == (name, number)
        model = chat_cases.write_model(FOLDER / f"{name}_{number}", chat_cases.TEMPLATES[name], as_file=number % 2 == 1)
        template = ChatTemplate(model, conversation.get("variables"))
        try:
            text = template.render(conversation["messages"], conversation.get("generation_prompt", False))
        except TemplateFailure:
            text = None
        assert text == one["text"], (name, number, text, one["text"])


def check_turns():
    """Which parts count, by hand."""
    def counted(name, messages, variables=None):
        template = ChatTemplate(chat_cases.write_model(FOLDER / name, chat_cases.TEMPLATES[name]), variables)
        text, spans, complete = template.spans(messages)
        parts = segments(text, spans)
        assert "".join(part["text"] for part in parts) == text == template.render(messages)
        return [part["text"] for part in parts if part["loss"]], complete

    two = TURNS("Hi", "Hello.", "And?", "More.")
    assert counted("chatml", two) == (["Hello.<|im_end|>\n", "More.<|im_end|>\n"], True)
    assert counted("llama3", two) == (["Hello.</s>", "More.</s>"], True)
    assert counted("gemma", two) == (["Hello.<end_of_turn>\n", "More.<end_of_turn>\n"], True)
    assert counted("mistral", two) == ([" Hello.</s>", " More.</s>"], True)      # it has no generation prompt
    assert counted("chatml", two[:3]) == (["Hello.<|im_end|>\n"], True)
    # Earlier turns lose their reasoning once others follow.
    assert counted("qwen3", two) == (["<think>\n\n</think>\n\nMore.<|im_end|>\n"], False)
    assert counted("qwen3", two[:2], {"enable_thinking": False}) == (["Hello.<|im_end|>\n"], True)
    # Without a user's turn before it, the first turn has no begin.
    assert counted("chatml", two[1:]) == (["More.<|im_end|>\n"], False)
    for messages, why in ((TURNS("Hi"), "has no turn of the assistant"), (two[1:2], "has no place")):
        try:
            counted("chatml", messages)
            raise AssertionError("nothing counts")
        except TemplateFailure as failure:
            assert why in str(failure)


def prepare(*arguments, code=0):
    """What the program prints."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        ended = main(list(map(str, arguments)))
    assert ended == code, (arguments, out.getvalue(), errors.getvalue())
    return out.getvalue() if "--json" in arguments else out.getvalue() + errors.getvalue()


def rows(name):
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


def check_program():
    chat_cases.write_model(FOLDER / "model", chat_cases.CHATML)
    two = TURNS("Hi 😀", "Hello.", system="S")
    lines = [{"messages": two}, {"text": "a", "meta": 1}, {"prompt": "p", "completion": "c"}, {"prompt": two[:2], "completion": two[2:]}]
    (FOLDER / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n\n".join(map(json.dumps, lines)).encode())
    said = prepare("a.jsonl", "--model", "model", "--output", "o.jsonl", "--json")
    assert json.loads(said) == {"output": "o.jsonl", "rows": 4, "conversations": 2, "last_turn_alone": 0, "skipped": 0}, said
    prompt = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi 😀<|im_end|>\n<|im_start|>assistant\n"
    made = {"segments": [{"text": prompt, "loss": False}, {"text": "Hello.<|im_end|>\n", "loss": True}]}
    assert rows("o.jsonl") == [made, {"text": "a"}, lines[2], made], rows("o.jsonl")
    prepare("a.jsonl", "--model", "model", "--output", "p.jsonl", "--generation-prompt")
    assert rows("p.jsonl") == [{"segments": [{"text": prompt, "loss": False}], "reference": "Hello."}, {"text": "a"}, lines[2],
                               {"segments": [{"text": prompt, "loss": False}], "reference": "Hello."}]

    # A key that rows keep: also without a conversation.
    (FOLDER / "k.jsonl").write_text("\n".join(json.dumps({**line, "user": i}) for i, line in enumerate(lines)))
    prepare("k.jsonl", "--model", "model", "--output", "o.jsonl", "--keep", "user")
    assert [(row["user"], "segments" in row) for row in rows("o.jsonl")] == [(0, True), (1, False), (2, False), (3, True)], rows("o.jsonl")
    assert 'a.jsonl:1: has no "user"' in prepare("a.jsonl", "--model", "model", "--output", "q.jsonl", "--keep", "user", code=3)

    # Rows that cannot be used: an error each, or left out together.
    bad = [b'{"text": "a"', b'{"text": "\xff"}', b'{"text": "\\ud800"}', b"[1]", b'{"other": 1}', b'{"messages": []}', b'{"messages": [{"content": "a"}]}',
           b'{"messages": [{"role": "user", "content": "a"}]}', b'{"messages": [{"role": "user", "content": 1}]}', b"[" * 100000]
    places = ["b.jsonl:1: byte 13: ", "byte 11: not UTF-8", "surrogate", "not a JSON object", "has no \"messages\"", "not a list of messages",
              "has no \"role\"", "no turn of the assistant", "has no \"content\"", "b.jsonl:1: "]
    for line, place in zip(bad, places):
        (FOLDER / "b.jsonl").write_bytes(line)
        said = prepare("b.jsonl", "--model", "model", "--output", "q.jsonl", code=3)
        assert place in said and "--bad-lines skip" in said, (line[:80], said)
    assert not (FOLDER / "q.jsonl").exists() and not list(FOLDER.glob("*.tmp"))
    (FOLDER / "b.jsonl").write_bytes(b"\n".join([*bad, b'{"text": "y"}']))
    said = prepare("b.jsonl", "--model", "model", "--output", "q.jsonl", "--bad-lines", "skip")
    assert "10 bad rows left out" in said and rows("q.jsonl") == [{"text": "y"}], said

    # Tools, no model, no template, a template that is damaged, what is no output.
    (FOLDER / "t.jsonl").write_text(json.dumps({"messages": two, "tools": [{"name": "f"}]}))
    assert "--ignore-tools" in prepare("t.jsonl", "--model", "model", "--output", "r.jsonl", code=3)
    prepare("t.jsonl", "--model", "model", "--output", "r.jsonl", "--ignore-tools")
    assert rows("r.jsonl") == [made]
    assert "give --model DIRECTORY" in prepare("a.jsonl", "--output", "r.jsonl", code=2)
    (FOLDER / "empty").mkdir()
    assert "has no chat template" in prepare("a.jsonl", "--model", "empty", "--output", "r.jsonl", code=3)
    chat_cases.write_model(FOLDER / "damaged", "{% for %}")
    assert "cannot be read" in prepare("a.jsonl", "--model", "damaged", "--output", "r.jsonl", code=3)
    assert "not a FILE.jsonl" in prepare("a.jsonl", "--output", "r.txt", code=2)
    # The template runs in a sandbox.
    chat_cases.write_model(FOLDER / "hostile", "{{ ''.__class__.__mro__[1].__subclasses__() }}")
    assert "SecurityError" in prepare("a.jsonl", "--model", "hostile", "--output", "r.jsonl", code=3)
    # A template that has named forms, and an argument.
    (FOLDER / "empty/tokenizer_config.json").write_text(json.dumps({"chat_template": [
        {"name": "tool_use", "template": "t"}, {"name": "default", "template": "{{ mark }}{% for m in messages %}{{ m.content }}{% endfor %}"}]}))
    (FOLDER / "c.jsonl").write_text(json.dumps({"messages": TURNS("u", "a")}))
    prepare("c.jsonl", "--model", "empty", "--output", "r.jsonl", "--argument", "mark=<>")
    assert rows("r.jsonl") == [{"segments": [{"text": "<>u", "loss": False}, {"text": "a", "loss": True}]}]


def check_parquet():
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        (FOLDER / "a.parquet").write_bytes(b"PAR1")
        assert "pip install pyarrow" in prepare("a.parquet", "--output", "r.jsonl", code=2)
        return
    table = pyarrow.table({"messages": [TURNS("u", "a"), None], "text": [None, "t"], "other": [1, 2]})
    pyarrow.parquet.write_table(table, FOLDER / "a.parquet")
    prepare("a.parquet", "--model", "model", "--output", "r.jsonl", "--keep", "other")
    assert rows("r.jsonl")[1] == {"text": "t", "other": 2} and rows("r.jsonl")[0]["segments"][1] == {"text": "a<|im_end|>\n", "loss": True}
    (FOLDER / "a.parquet").write_bytes((FOLDER / "a.parquet").read_bytes()[:100])
    assert "cannot be read as Parquet" in prepare("a.parquet", "--output", "r.jsonl", code=3)


os.chdir(FOLDER)
try:
    check_recorded()
    check_turns()
    check_program()
    check_parquet()
finally:
    shutil.rmtree(FOLDER)
