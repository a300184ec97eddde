# SPDX-License-Identifier: Apache-2.0
"""States of a directory after a power failure, simulated from a record of what a program did (recorder.cpp).

The power fails after any number of recorded calls. From the calls before it,
- what was written to a file before the last completed fsync of it is there; of what was written later, any subset of the
  4 KiB units may be missing, and the size may be that of the missing units;
- a directory entry (created, renamed, removed) is certain once its directory was synced; any subset of the later changes
  may be missing. A rename within a directory happens completely or not at all.
"""
import hashlib
import os
import random
import re
import struct
from pathlib import Path

UNIT = 4096
HEAD = struct.Struct("<c6q")
PUBLISHED = re.compile(rb"durable (\d+)\n|checkpoint step_0*(\d+): [0-9.e+]+ GB in")


class Node:
    """A file or directory. `pending`: changes that no fsync has made durable, as (time, change)."""

    def __init__(self, is_directory):
        self.is_directory = is_directory
        self.durable = {} if is_directory else bytearray()
        self.live = {}  # directory: its present entries
        self.pending = []
        self.syncs = []  # times at which fsyncs in progress have begun

    def change(self, time, change):
        self.pending.append((time, change))

    def apply(self, content, change, include=lambda: True, sizes=True):
        """Applies those units of a change for which include() is true."""
        if self.is_directory:
            if include():
                for name, node in change:
                    if node is None:
                        content.pop(name, None)
                    else:
                        content[name] = node
            return
        kind, offset, data = change
        if kind == "t":
            if include():
                del content[offset:]
                content.extend(bytes(offset - len(content)))
            return
        end = offset + len(data)
        begin = offset
        while begin < end:
            stop = min(end, (begin // UNIT + 1) * UNIT)
            included = include()
            if (included or sizes) and len(content) < stop:
                content.extend(bytes(stop - len(content)))
            if included:
                content[begin:stop] = data[begin - offset:stop - offset]
            begin = stop

    def sync(self):
        """An fsync has ended. The oldest one in progress, if several are: less is durable."""
        begin = self.syncs.pop(0)
        for time, change in self.pending:
            if time < begin:
                self.apply(self.durable, change)
        self.pending = [(time, change) for time, change in self.pending if time >= begin]

    def crashed(self, include, sizes):
        content = self.durable.copy()
        for _, change in self.pending:
            self.apply(content, change, include, sizes)
        return content


def records(path):
    """(kind, (device, inode), offset, a, b, data) of each call."""
    log = Path(path).read_bytes()
    at = 0
    while at < len(log):
        kind, device, inode, offset, n_data, n_a, n_b = HEAD.unpack_from(log, at)
        at += HEAD.size
        a, b = log[at:at + n_a].decode(), log[at + n_a:at + n_a + n_b].decode()
        at += n_a + n_b
        yield kind.decode(), (device, inode), offset, a, b, log[at:at + n_data]
        at += n_data


class Disk:
    """Replays a record call by call; `state` gives what a power failure could leave at this point."""

    def __init__(self, root):
        self.root = Node(True)  # empty at the beginning
        status = os.stat(root)
        self.nodes = {(status.st_dev, status.st_ino): self.root}
        self.time = 0
        self.published = set()  # steps that the program reported as durable and has not begun to delete or set aside

    def parent(self, path):
        *directories, name = path.split("/")
        node = self.root
        for directory in directories:
            node = node.live[directory]
        return node, name

    def add(self, path, node):
        parent, name = self.parent(path)
        parent.live[name] = node
        parent.change(self.time, [(name, node)])

    def remove(self, path):
        parent, name = self.parent(path)
        parent.live.pop(name)
        parent.change(self.time, [(name, None)])

    def perform(self, kind, inode, offset, a, b, data):
        self.time += 1
        for step in PUBLISHED.finditer(data):
            self.published.add(int(step[1] or step[2]))
        if kind in "cd":
            self.nodes[inode] = Node(kind == "d")
            self.add(a, self.nodes[inode])
        elif kind in "wt":
            self.nodes[inode].change(self.time, (kind, offset, data))
        elif kind == "s":
            self.nodes[inode].syncs.append(self.time)
        elif kind == "S":
            self.nodes[inode].sync()
        elif kind in "ue":
            self.remove(a)
        elif kind == "l":
            parent, name = self.parent(a)
            self.add(b, parent.live[name])
        elif kind == "r":
            self.rename(a, b)

    def rename(self, a, b):
        source, old = self.parent(a)
        target, new = self.parent(b)
        node = source.live.pop(old)
        target.live[new] = node
        if source is target:
            source.change(self.time, [(new, node), (old, None)])
        else:
            target.change(self.time, [(new, node)])
            source.change(self.time, [(old, None)])
        step = re.search(r"step_0*(\d+)$", a)
        if step and not b.endswith(".replaced"):
            self.published.discard(int(step[1]))

    def state(self, choice):
        """{path: bytes, or None for a directory}. `choice`: a random generator."""
        shares = [0, 0.05, 0.5, 0.95, 1]
        data, entries, sizes = choice.choice(shares), choice.choice(shares), choice.random() < 0.5
        found = {}

        def visit(node, path):
            for name, child in sorted(node.crashed(lambda: choice.random() < entries, True).items()):
                if child.is_directory:
                    found[path + name] = None
                    visit(child, path + name + "/")
                else:
                    found[path + name] = bytes(child.crashed(lambda: choice.random() < data, sizes))

        visit(self.root, "")
        return found


def write(state, folder):
    folder.mkdir()
    for path, content in state.items():
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)


def digest(state):
    text = hashlib.blake2b()
    for path, content in state.items():
        text.update(f"{path}\0{-1 if content is None else len(content)}\0".encode())
        text.update(content or b"")
    return text.digest()


def crash_states(log, root, wanted, seed, without_sync=None):
    """Yields (disk, state) for about `wanted` different states, spread over all points of the record. Calls of fsync for
    paths that match `without_sync` are left out."""
    calls = [call for call in records(log)
             if not (without_sync and call[0] in "sS" and re.fullmatch(without_sync, call[3]))]
    choice = random.Random(seed)
    seen = set()
    share, missing = wanted / len(calls), 0.0
    disk = Disk(root)
    for call in calls:
        disk.perform(*call)
        missing += share
        for _ in range(4 * int(missing) + 4):  # equal states are drawn again, some points have few different ones
            if missing < 1:
                break
            state = disk.state(choice)
            key = digest(state), tuple(disk.published)
            if key not in seen:
                seen.add(key)
                missing -= 1
                yield disk, state
