# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a run: which there are, what their manifests say, and whether their shards are what the manifests describe.
Nothing in these files is trusted."""
import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from weft.errors import WeftError, read_bytes
from weft.text import parse_json

FORMAT_VERSION = 2
LARGEST_MANIFEST = 64 << 20
SEGMENT = 64 << 20      # bytes of a shard that one digest covers
LARGEST = 1 << 61
HEAD, DIGEST = b'{\n  "format": "weft-checkpoint",\n', b'  "sha256": "'
BYTES_OF = {"fp32": 4, "fp16": 2, "bf16": 2, "fp64": 8, "u8": 1, "u16": 2, "i16": 2, "i32": 4, "i64": 8, "u32": 4, "u64": 8}


class Damaged(Exception):
    """Why a checkpoint cannot be used."""


@dataclass
class Shard:
    file: str
    bytes: int
    sha256: list
    owned: list     # [first row, end] of each tensor


@dataclass
class Manifest:
    step: int
    tokens: int
    grid: dict
    tensors: list = field(default_factory=list)     # (name, dtype, shape)
    shards: list = field(default_factory=list)

    @property
    def bytes(self):
        return sum(shard.bytes for shard in self.shards)

    @property
    def grid_text(self):
        return " x ".join(f"{axis} {ranks}" for axis, ranks in sorted(self.grid.items()))


def directory_name(step):
    return f"step_{step:08d}"


def steps_in(directory):
    """Steps of the checkpoints, ascending; empty if the directory cannot be listed."""
    try:
        entries = [entry for entry in os.scandir(directory) if entry.is_dir()]
    except OSError:
        return []
    found = [re.fullmatch(r"step_(\d{8,18})", entry.name) for entry in entries]
    return sorted(int(match[1]) for match in found if match and match[0] == directory_name(int(match[1])))


def _require(condition, problem):
    if not condition:
        raise Damaged(problem)


def _member(values, key, kind):
    _require(isinstance(values, dict) and key in values, f'"{key}" is missing')
    _require(isinstance(values[key], kind) and not isinstance(values[key], bool), f'"{key}" is not what it should be')
    return values[key]


def _integer(values, key, least=0, most=LARGEST):
    value = _member(values, key, int)
    _require(least <= value <= most, f'"{key}" is {value}, outside {least} to {most}')
    return value


def _names(text):
    return isinstance(text, str) and 0 < len(text) <= 1024 and text.isprintable() and ".." not in text and text[0] != "/"


def _tensor(values):
    name, dtype, shape = _member(values, "name", str), _member(values, "dtype", str), _member(values, "shape", list)
    _require(_names(name), "a tensor has an unusable name")
    _require(dtype in BYTES_OF, f"tensor {name} has an unknown dtype")
    _require(1 <= len(shape) <= 8 and all(type(extent) is int and 1 <= extent <= LARGEST for extent in shape),
             f"tensor {name} has no shape")
    _require(BYTES_OF[dtype] * prod(shape) <= LARGEST, f"tensor {name} is larger than any memory")
    return name, dtype, tuple(shape)


def _shard(values, n_tensors):
    shard = Shard(_member(values, "file", str), _integer(values, "bytes", 1), _member(values, "sha256", list), _member(values, "owned", list))
    _require(_names(shard.file) and "/" not in shard.file and shard.file != "manifest.json", "a shard has an unusable file name")
    _require(all(isinstance(digest, str) and len(digest) == 64 for digest in shard.sha256) and len(shard.sha256) == -(-shard.bytes // SEGMENT),
             f"shard {shard.file} has {len(shard.sha256)} digests for {shard.bytes} bytes")
    _require(len(shard.owned) == n_tensors and all(
        isinstance(rows, list) and len(rows) == 2 and all(type(row) is int for row in rows) and 0 <= rows[0] <= rows[1] <= LARGEST
        for rows in shard.owned), f"shard {shard.file} has other row ranges than its tensors")
    return shard


def parse_manifest(text):
    """The manifest of these bytes. Raises Damaged."""
    start = len(HEAD) + len(DIGEST)
    _require(text.startswith(HEAD), "it is not the manifest of a Weft checkpoint")
    _require(text[len(HEAD):start] == DIGEST and len(text) > start + 64, "it has no sha256 of its own (torn write)")
    digest = text[start:start + 64].decode("ascii", "replace")
    actual = hashlib.sha256(text[:start] + 64 * b"0" + text[start + 64:]).hexdigest()
    _require(actual == digest, f"its text has sha256 {actual[:8]}..., not the recorded {digest[:8]}... (damaged)")
    values = parse_json(text.decode("utf-8", "replace"))
    _require(isinstance(values, dict), "it is not JSON")
    _require(_integer(values, "format_version", 1) <= FORMAT_VERSION, "its format is newer than this program")
    grid = _member(values, "grid", dict)
    manifest = Manifest(_integer(values, "step"), _integer(values, "tokens"), {axis: _integer(grid, axis, 1, 1 << 30) for axis in grid})
    manifest.tensors = [_tensor(one) for one in _member(values, "tensors", list)]
    manifest.shards = [_shard(one, len(manifest.tensors)) for one in _member(values, "shards", list)]
    for what, names in (("tensor", [one[0] for one in manifest.tensors]), ("shard", [one.file for one in manifest.shards])):
        _require(len(set(names)) == len(names), f"a {what} is listed twice")
    # Each row of each tensor is in exactly one shard, and the shards are large enough to contain them.
    claimed = 0
    for index, (name, dtype, shape) in enumerate(manifest.tensors):
        covered = 0
        for begin, end in sorted(shard.owned[index] for shard in manifest.shards if shard.owned[index][0] < shard.owned[index][1]):
            _require(begin == covered, f"rows {covered} of tensor {name} are in {'two' if begin < covered else 'no'} shards")
            covered = end
        _require(covered == shape[0], f"tensor {name} has {shape[0]} rows, its shards hold {covered}")
        claimed += BYTES_OF[dtype] * prod(shape)
    _require(claimed <= manifest.bytes, f"the tensors take {claimed} bytes, the shards have {manifest.bytes}")
    return manifest


def read_manifest(directory):
    """Raises Damaged."""
    try:
        return parse_manifest(read_bytes(Path(directory) / "manifest.json", LARGEST_MANIFEST))
    except WeftError as failure:
        raise Damaged(str(failure)) from None


def _require_segment(path, shard, index):
    digest, left = hashlib.sha256(), min(SEGMENT, shard.bytes - index * SEGMENT)
    with open(path, "rb") as file:
        file.seek(index * SEGMENT)
        while left > 0:
            piece = file.read(min(left, 1 << 20))
            _require(piece, f"{path} is truncated")
            digest.update(piece)
            left -= len(piece)
    _require(digest.hexdigest() == shard.sha256[index], f"{path}: bytes {index * SEGMENT} and following are not those that were written")


def verified(directory):
    """The manifest, after every byte of the shards has been compared with it. Raises Damaged."""
    manifest, directory = read_manifest(directory), Path(directory)
    try:
        for shard in manifest.shards:
            path = directory / shard.file
            _require(path.is_file() and path.stat().st_size == shard.bytes, f"{path} does not have the {shard.bytes} bytes of the manifest")
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:     # hashing leaves the interpreter to the other threads
            for done in [threads.submit(_require_segment, directory / shard.file, shard, index)
                         for shard in manifest.shards for index in range(len(shard.sha256))]:
                done.result()
    except OSError as failure:
        raise Damaged(f"{failure.filename}: {failure.strerror}") from None
    return manifest


def newest_valid(directory):
    """(path, manifest) of the newest checkpoint whose bytes are valid. Raises Damaged with what is wrong with the newest one."""
    problem = "the run has no checkpoint yet"
    for count, step in enumerate(reversed(steps_in(directory))):
        path = Path(directory) / directory_name(step)
        try:
            return path, verified(path)
        except Damaged as damage:
            if count == 0:
                problem = f"{path}: {damage}"
    raise Damaged(problem)
