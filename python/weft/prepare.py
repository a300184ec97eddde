# SPDX-License-Identifier: Apache-2.0
"""Makes JSON Lines of conversations and of Parquet files, as weft lm train, evaluate, tokenize, harvest and generate read them.

    weft prepare FILE... --model DIRECTORY --output OUT.jsonl
    weft prepare FILE... --model DIRECTORY --generation-prompt --output PROMPTS.jsonl

Rows of FILE.jsonl and FILE.parquet (which needs the package pyarrow):

  {"messages": [{"role", "content"}]}           a conversation
  {"prompt": [messages], "completion": [messages]}   a conversation; only the completion counts in the loss
  {"text"}, {"prompt", "completion"}, {"segments"}   texts, which are copied

The chat template of the model (chat_template.jinja or tokenizer_config.json in DIRECTORY) makes a text of a conversation, as
apply_chat_template of transformers does (needs Jinja2). The row becomes {"segments": [{"text", "loss"}]}: the turns of the assistant count
in the loss. If a template writes a turn differently when others follow, only the last turn counts; the number of such rows is printed.

With --generation-prompt a conversation becomes a prompt: it ends with the header of the assistant's next turn. A last turn of the assistant is
left out of the text and becomes "reference".
"""
import json
import os
import sys
from pathlib import Path

from weft.chat_template import ChatTemplate, TemplateFailure, segments
from weft.errors import DATA, USAGE, Output, Parser, WeftError, pending, run
from weft.text import plural, printable

LONGEST_LINE = 256 << 20
COPIED = ("text", "prompt", "completion", "segments", "reference")
SHOWN = 3


class BadRow(Exception):
    """A row that cannot be used."""


def json_rows(path):
    """(place, row or BadRow) of each line that is not blank."""
    with open(path, "rb") as file:
        for number in range(1, sys.maxsize):
            line = file.readline(LONGEST_LINE + 1)
            if not line:
                return
            place = f"{path}:{number}"
            if len(line) > LONGEST_LINE:
                yield place, BadRow(f"has more than {LONGEST_LINE:,} bytes")
                while line and not line.endswith(b"\n"):
                    line = file.readline(LONGEST_LINE)
                continue
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                yield place, json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as failure:
                yield place, BadRow(f"byte {failure.start + 1}: not UTF-8")
            except json.JSONDecodeError as failure:
                yield place, BadRow(f"byte {len(failure.doc[:failure.pos].encode()) + 1}: {failure.msg}")
            except (RecursionError, ValueError) as failure:
                yield place, BadRow(str(failure))


def parquet_rows(path, kept):
    """(place, row) of each row."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as failure:  # not installed, or for another NumPy
        raise WeftError(USAGE, f"{path}: Parquet needs the package pyarrow ({printable(str(failure), 200)}); pip install pyarrow") from None
    try:
        file = pyarrow.parquet.ParquetFile(path)
        wanted = [name for name in file.schema_arrow.names if name in (*COPIED, *kept, "messages", "tools")]
        number = 0
        for batch in file.iter_batches(batch_size=256, columns=wanted):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", {key: value for key, value in row.items() if value is not None}
    except (pyarrow.ArrowException, OSError) as failure:
        raise WeftError(DATA, f"{path}: cannot be read as Parquet ({printable(str(failure), 200)}); is it complete?") from None


def rows_of(path, kept):
    with open(path, "rb") as file:
        return parquet_rows(path, kept) if file.read(4) == b"PAR1" else json_rows(path)


def messages_in(row, key):
    """The messages of a row, checked."""
    messages = row[key]
    if not isinstance(messages, list) or not messages:
        raise BadRow(f"\"{key}\" is not a list of messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRow(f"a message of \"{key}\" has no \"role\"")
        if not isinstance(message.get("content"), (str, list)) and "tool_calls" not in message:
            raise BadRow(f"a message of \"{key}\" has no \"content\"")
    return messages


class Preparer:
    """Makes rows of rows, and counts them."""

    def __init__(self, template, generation_prompt, ignore_tools, kept):
        self.template, self.generation_prompt, self.ignore_tools, self.kept = template, generation_prompt, ignore_tools, kept
        self.counts = {"rows": 0, "conversations": 0, "last_turn_alone": 0, "skipped": 0}

    def row(self, row):
        """Raises BadRow and TemplateFailure."""
        if not isinstance(row, dict):
            raise BadRow("not a JSON object")
        missing = [key for key in self.kept if key not in row]
        if missing:
            raise BadRow(f"has no \"{missing[0]}\" (--keep)")
        return {**self.made(row), **{key: row[key] for key in self.kept}}

    def made(self, row):
        is_split = isinstance(row.get("prompt"), list)
        if "messages" not in row and not is_split:
            return self.copied(row)
        if row.get("tools") and not self.ignore_tools:
            raise WeftError(DATA, "has \"tools\" (their definitions are not passed to the template); leave them out with --ignore-tools")
        if self.template is None:
            raise WeftError(USAGE, "is a conversation, which becomes a text by the chat template of a model; give --model DIRECTORY")
        self.counts["conversations"] += 1
        if self.generation_prompt:
            return self.prompt(messages_in(row, "prompt" if is_split else "messages"), row)
        if not is_split:
            text, spans, complete = self.template.spans(messages_in(row, "messages"))
            self.counts["last_turn_alone"] += not complete
            return {"segments": segments(text, spans)}
        if "completion" not in row:
            raise BadRow("has no \"completion\"")
        prompt = messages_in(row, "prompt")
        text = self.template.render(prompt + messages_in(row, "completion"))
        begin = self.template.begin_of_turn(prompt, text)
        if begin is None:
            raise BadRow("the text of its prompt is not the begin of its whole text, so that it is not known what counts in the loss")
        return {"segments": segments(text, [(begin, len(text))])}

    def copied(self, row):
        kept = {key: row[key] for key in COPIED if key in row}
        if not any(key in kept for key in ("text", "prompt", "segments")):
            raise BadRow("has no \"messages\", \"text\", \"prompt\" or \"segments\"")
        return kept

    def prompt(self, messages, row):
        last = messages_in(row, "completion")[-1] if "completion" in row else None
        if last is None and messages[-1]["role"] == "assistant":
            last, messages = messages[-1], messages[:-1]
        reference = row.get("reference", (last or {}).get("content"))
        made = {"segments": [{"text": self.template.render(messages, True), "loss": False}]}
        return {**made, "reference": reference} if isinstance(reference, str) else made


def write(preparer, files, target, skips):
    """Writes the rows; returns messages about the first that were skipped."""
    skipped = []
    for path in files:
        for place, row in rows_of(path, preparer.kept):
            try:
                if isinstance(row, BadRow):
                    raise row
                # Half a surrogate pair is no UTF-8.
                target.write(json.dumps(preparer.row(row), ensure_ascii=False).encode() + b"\n")
                preparer.counts["rows"] += 1
            except WeftError as failure:
                raise WeftError(failure.code, f"{place}: {failure}") from None
            except (BadRow, TemplateFailure, UnicodeEncodeError) as failure:
                why = "has half a surrogate pair" if isinstance(failure, UnicodeEncodeError) else printable(str(failure), 300)
                if not skips:
                    raise WeftError(DATA, f"{place}: {why}; correct the row, or leave such rows out with --bad-lines skip") from None
                preparer.counts["skipped"] += 1
                if len(skipped) < SHOWN:
                    skipped.append(f"{place}: {why}")
    return skipped


def value_of(text):
    try:
        return json.loads(text)
    except ValueError:
        return text


def command(arguments):
    parser = Parser("prepare", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="JSON Lines or Parquet")
    parser.add_argument("--model", metavar="DIRECTORY", help="model whose chat template is applied to conversations")
    parser.add_argument("--output", required=True, metavar="OUT.jsonl", help="output file, written when all rows are complete")
    parser.add_argument("--generation-prompt", action="store_true", help="write prompts for weft lm generate and weft lm polychromic")
    parser.add_argument("--argument", action="append", default=[], metavar="NAME=VALUE",
                        help="a variable of the template, as enable_thinking=false (VALUE is JSON or a text); repeatable")
    parser.add_argument("--keep", action="append", default=[], metavar="KEY",
                        help="a key that each row must have and keeps, as the one that privacy.owner_field names; repeatable")
    parser.add_argument("--ignore-tools", action="store_true", help="leave \"tools\" of conversations out")
    parser.add_argument("--bad-lines", choices=["stop", "skip"], default="stop",
                        help="a row that cannot be used is an error, or is left out and counted (default %(default)s)")
    Output.add_options(parser)
    given = parser.parse_args(arguments)
    output = Output(given.json, given.quiet)
    for path in given.files:
        if not Path(path).is_file():
            parser.error(f"{path}: no such file")
    if any("=" not in one for one in given.argument):
        parser.error("--argument: not NAME=VALUE")
    target = Path(given.output)
    if target.suffix not in (".jsonl", ".ndjson") or not target.parent.is_dir():
        parser.error(f"--output {target}: not a FILE.jsonl in a directory that exists")

    variables = {name: value_of(value) for name, _, value in (one.partition("=") for one in given.argument)}
    template = ChatTemplate(given.model, variables) if given.model else None
    preparer = Preparer(template, given.generation_prompt, given.ignore_tools, given.keep)
    with pending(target) as place, open(place, "wb") as file:
        skipped = write(preparer, given.files, file, given.bad_lines == "skip")
        file.flush()
        os.fsync(file.fileno())
        if preparer.counts["rows"] == 0:
            raise WeftError(DATA, f"no row could be used ({preparer.counts['skipped']} were left out); see --help for their forms")
    counts = preparer.counts
    if counts["skipped"]:
        output.warning(f"{plural(counts['skipped'], 'bad row')} left out (--bad-lines skip), the first of them:")
        for message in skipped:
            output.warning(message)
    if counts["last_turn_alone"]:
        output.warning(f"{plural(counts['last_turn_alone'], 'conversation')}: the last turn alone counts in the loss, since {template.path} writes "
                       "earlier turns differently when others follow")
    output.written(f"wrote {target}: {plural(counts['rows'], 'row')}, {counts['conversations']:,} of them conversations", {"output": str(target), **counts})
    return 0


def main(arguments=None):
    return run(command, arguments)


if __name__ == "__main__":
    sys.exit(main())
