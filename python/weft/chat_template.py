# SPDX-License-Identifier: Apache-2.0
"""The chat template of a model directory: conversations as text, and which of it the assistant writes.

A template is a program in Jinja2, in a sandbox with the filters and functions that the transformers library documents for chat templates.
"""
import datetime
import json
from pathlib import Path

from weft.errors import DATA, USAGE, WeftError, read_bytes
from weft.text import parse_json

LARGEST_FILE = 64 << 20
REASONING = ("reasoning_content", "thinking", "reasoning")      # names of one thing; templates read the first or the second


class TemplateFailure(Exception):
    """The template does not take this conversation."""


def environment():
    """The sandbox in which templates run."""
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
    except ModuleNotFoundError:
        raise WeftError(USAGE, "chat templates need Jinja2, which is not installed; install python3-jinja2, or pip install jinja2") from None

    class Generation(jinja2.ext.Extension):
        """{% generation %} … {% endgeneration %} marks what the assistant writes; it is part of the text like everything else."""
        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    def raise_exception(message):
        raise TemplateFailure(message)

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    sandbox.filters["tojson"] = to_json
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return sandbox


def object_in(path):
    """The JSON object of a file; {} if there is no file."""
    if not path.exists():
        return {}
    value = parse_json(read_bytes(path, LARGEST_FILE).decode("utf-8", "replace"))
    if not isinstance(value, dict):
        raise WeftError(DATA, f"{path}: is not a JSON object; is it complete?")
    return value


def source_in(directory):
    """The text of the template, and the file that has it."""
    own = directory / "chat_template.jinja"
    if own.exists():
        return read_bytes(own, LARGEST_FILE).decode("utf-8", "replace"), own
    for name in ("tokenizer_config.json", "chat_template.json"):
        template = object_in(directory / name).get("chat_template")
        if isinstance(template, list):      # several, by name
            template = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}.get("default")
        if isinstance(template, str):
            return template, directory / name
    raise WeftError(DATA, f"{directory}: has no chat template (chat_template.jinja, or \"chat_template\" in tokenizer_config.json); name the "
                    "directory of a model for conversations")


def special_tokens_in(directory):
    """{"bos_token": TEXT, …} of the files of a tokeniser."""
    tokens = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in object_in(directory / name).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                tokens[key] = text
    return tokens


def plain(message):
    """A message as templates read it: no members without a value, the assistant's reasoning under its common names."""
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[name] for name in REASONING if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


class ChatTemplate:
    def __init__(self, directory, arguments=None):
        """`arguments`: further variables of the template."""
        directory = Path(directory)
        if not directory.is_dir():
            raise WeftError(USAGE, f"--model {directory}: no such directory; name the directory of a model")
        source, self.path = source_in(directory)
        self.variables = {**special_tokens_in(directory), **(arguments or {})}
        sandbox = environment()
        try:
            self.template = sandbox.from_string(source)
        except Exception as failure:    # whatever a template can be wrong in
            raise WeftError(DATA, f"{self.path}: the chat template cannot be read ({failure}); is it complete?") from None

    def render(self, messages, generation_prompt=False):
        """The text of a conversation, as apply_chat_template of transformers gives it. Raises TemplateFailure."""
        if not messages:
            raise TemplateFailure("the conversation is empty")
        try:
            return self.template.render(messages=[plain(message) for message in messages], tools=None, documents=None,
                                        add_generation_prompt=generation_prompt, **self.variables)
        except TemplateFailure:
            raise
        except Exception as failure:    # a template is a program: anything may fail
            raise TemplateFailure(f"{type(failure).__name__}: {failure}") from None

    def begin_of_turn(self, messages, text):
        """How much of `text` stands before the turn that follows `messages`: with its header if the template has that as generation prompt.
        None if the text does not begin with these messages."""
        for generation_prompt in (True, False):
            try:
                before = self.render(messages, generation_prompt)
            except TemplateFailure:
                continue
            if text.startswith(before):
                return len(before)
        return None

    def spans(self, messages):
        """(text, [(begin, end)] of the assistant's turns, True if these are all its turns).

        A turn is where the conversation up to it ends with it and the whole text begins with that. Where one of the turns has no such
        place (templates that leave out the reasoning of earlier turns), the last turn alone counts."""
        text = self.render(messages)
        turns = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
        if not turns:
            raise TemplateFailure("has no turn of the assistant, so that nothing counts in the loss")
        found = []
        for number in turns:
            begin = self.begin_of_turn(messages[:number], text)
            after = text if number + 1 == len(messages) else self.render(messages[:number + 1])
            found.append((begin, len(after)) if begin is not None and text.startswith(after) and begin <= len(after) else None)
        if None not in found:
            return text, found, True
        if found[-1] is None:
            raise TemplateFailure("its last turn has no place in the text of the template, so that it is not known what counts in the loss")
        return text, found[-1:], len(turns) == 1


def segments(text, spans):
    """The text cut at the spans, which count in the loss."""
    parts, end = [], 0
    for begin, stop in spans:
        parts += [{"text": text[end:begin], "loss": False}, {"text": text[begin:stop], "loss": True}]
        end = stop
    parts.append({"text": text[end:], "loss": False})
    return [part for part in parts if part["text"]]
