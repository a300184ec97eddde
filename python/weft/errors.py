# SPDX-License-Identifier: Apache-2.0
"""Errors and output of the programs: messages are *problem (why) suggestion*, exit codes those of `weft --help`."""
import argparse
import contextlib
import errno
import fcntl
import glob
import json
import os
import secrets
import shutil
import signal
import sys
from pathlib import Path

USAGE, DATA, IO = 2, 3, 6
# Errors without the name of a file that are not those of a stream.
LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
LARGEST_JSON = 64 << 20


class WeftError(Exception):
    """Ends the program with this message and exit code."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


class Parser(argparse.ArgumentParser):
    """Arguments of `weft NAME`."""

    def __init__(self, name, **options):
        super().__init__(prog=f"weft {name}", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message):
        raise WeftError(USAGE, f"{message}; see {self.prog} --help")


class Output:
    """Where a program prints: its result on standard output, with `--json` as one document; the rest is left out with `--quiet`."""

    def __init__(self, as_json=False, quiet=False):
        self.as_json, self.quiet = as_json, quiet

    @staticmethod
    def add_options(parser):
        parser.add_argument("--json", action="store_true", help="print the result as one JSON document; all else goes to standard error")
        parser.add_argument("--quiet", action="store_true", help="print only results, warnings and errors")

    def info(self, text):
        if not self.quiet:
            print(text, file=sys.stderr if self.as_json else sys.stdout, flush=True)

    def warning(self, text):
        sys.stdout.flush()
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def result(self, text, document):
        """The result: `text`, or with `--json` the document."""
        if self.as_json:
            print(json.dumps(document, indent=2), flush=True)
        else:
            print(text, flush=True)

    def written(self, text, document):
        """The same for a result that is a file: the text is left out with `--quiet`."""
        self.info(text)
        if self.as_json:
            print(json.dumps(document, indent=2), flush=True)


def run(function, arguments):
    """Calls function(arguments) and returns its exit code; prints an error as the program does."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:      # closed by the caller
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
    try:
        code = function(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        return code or 0
    except WeftError as failure:
        print(f"error: {failure}", file=sys.stderr)
        return failure.code
    except OSError as failure:
        try:
            sys.stdout.flush()
        except OSError:     # what could not be printed is not tried again at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(failure, BrokenPipeError):    # as the signal ends the program
            return 128 + signal.SIGPIPE
        place = failure.filename or ("this process" if failure.errno in LIMITS else "standard output")
        print(f"error: {place}: {failure.strerror or failure} (reading or writing failed); check the path and the file system", file=sys.stderr)
        return IO
    except KeyboardInterrupt:
        return 130


def read_bytes(path, most):
    """The contents of a file of at most `most` bytes."""
    try:
        with open(path, "rb") as file:
            content = file.read(most + 1)
    except OSError as failure:
        raise WeftError(IO, f"{path}: cannot be read ({failure.strerror}); check the file") from None
    if len(content) > most:
        raise WeftError(DATA, f"{path}: is larger than {most:,} bytes (too large for its kind); is it damaged?")
    return content


@contextlib.contextmanager
def pending(path):
    """Where to write a file or directory that appears as `path` when the block ends, or not at all. As that of the program, the directory
    around it is locked: what killed programs have left is removed. Errors without the name of a file receive `path`."""
    path = Path(path)
    for old in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 8}.tmp"):
        with contextlib.suppress(OSError), locked(old):     # locked by another process, or of another user
            shutil.rmtree(old)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir()
    try:
        with locked(temporary, required=False):
            yield temporary / path.name
            os.replace(temporary / path.name, path)
    except OSError as failure:
        failure.filename = failure.filename or str(path)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def locked(directory, required=True):
    """Holds the lock of a directory. Not `required`: a file system may have none."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        with contextlib.suppress(*([] if required else [OSError])):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def write_atomically(path, content):
    """The file, of text or bytes, appears complete, in place of an older one, or not at all."""
    with pending(path) as place, open(place, "wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode("utf-8", "replace"))
        file.flush()
        os.fsync(file.fileno())


def require_page_path(page):
    """Raises unless a page can be written there."""
    page = Path(page)
    if not page.parent.is_dir():
        raise WeftError(USAGE, f"--output {page}: {page.parent} is no directory; create it, or name a file elsewhere")
    if page.is_dir():
        raise WeftError(USAGE, f"--output {page}: is a directory (the page is a file); name a file, as {page / 'report.html'}")
    if page.exists() and not page.is_file():     # it would be replaced
        raise WeftError(USAGE, f"--output {page}: is a device or FIFO (the page is a file); name a file")
