# SPDX-License-Identifier: Apache-2.0
"""weft.checkpoints: valid checkpoints of both formats are accepted; whatever is damaged is named, never a crash or an allocation.

checkpoints_test.py
"""
import hashlib
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

import program

sys.path.insert(0, str(program.PACKAGE))
try:
    from weft import checkpoints
except ImportError as missing:
    program.skip(f"{missing.name} is not installed (scripts/setup.sh --tests installs it)")

GOLDEN = program.PACKAGE.parent / "tests" / "checkpoint" / "golden"


def signed(values):
    """A manifest of these values with a digest that is right."""
    values = {name: value for name, value in values.items() if name not in ("format", "sha256")}
    text = checkpoints.HEAD + checkpoints.DIGEST + 64 * b"0" + b'",\n' + json.dumps(values).encode()[1:]
    start = len(checkpoints.HEAD) + len(checkpoints.DIGEST)
    return text[:start] + hashlib.sha256(text).hexdigest().encode() + text[start + 64:]


def problem(call, *arguments):
    try:
        call(*arguments)
    except checkpoints.Damaged as damage:
        return str(damage)
    return ""


def check_golden():
    found = sorted(GOLDEN.glob("*/*/checkpoints"))
    assert len(found) == 4, found
    for directory in found:
        path, manifest = checkpoints.newest_valid(directory)
        assert manifest.step == 20 and path.name == "step_00000020" and manifest.grid_text == "data 2 x feature 1"
        assert manifest.bytes == sum(one.stat().st_size for one in path.glob("*.h5"))


def check_manifests(text):
    values = json.loads(text)
    assert problem(checkpoints.parse_manifest, signed(values)) == ""
    for name in ("step", "tokens", "grid", "tensors", "shards", "format_version"):
        assert f'"{name}" is missing' in problem(checkpoints.parse_manifest, signed({key: one for key, one in values.items() if key != name}))
    assert "newer" in problem(checkpoints.parse_manifest, signed({**values, "format_version": 3}))
    for change, words in ((lambda v: v["tensors"][0].update(dtype="fp99"), "unknown dtype"),
                          (lambda v: v["tensors"][0].update(shape=[1 << 60, 1 << 60]), "larger than any memory"),
                          (lambda v: v["tensors"][0].update(shape=[True]), "no shape"), (lambda v: v["tensors"][0].update(shape=[]), "no shape"),
                          (lambda v: v["tensors"].append(v["tensors"][0]), "other row ranges"),
                          (lambda v: v["shards"][0].update(file="../x.h5"), "unusable file name"),
                          (lambda v: v["shards"][0].update(file=v["shards"][1]["file"]), "listed twice"),
                          (lambda v: v["shards"][0].update(bytes=10 ** 15), "digests for"),
                          (lambda v: v["shards"][0]["owned"].__setitem__(0, [0, 1 << 40]), "two shards"),
                          (lambda v: v["shards"][0]["owned"].__setitem__(0, [3, 1]), "other row ranges"),
                          (lambda v: [one.update(bytes=1) for one in v["shards"]], "the shards have"),
                          (lambda v: v["grid"].update(data=0), "outside")):
        changed = json.loads(text)
        change(changed)
        said = problem(checkpoints.parse_manifest, signed(changed))
        assert words in said, (words, said)
    # Anything else: accepted or named.
    generator = random.Random(5)
    for _ in range(400):
        bytes_ = bytearray(signed(values))
        for _ in range(generator.randrange(1, 4)):
            place = generator.randrange(len(bytes_))
            bytes_[place:place + generator.randrange(3)] = bytes(generator.randrange(256) for _ in range(generator.randrange(3)))
        problem(checkpoints.parse_manifest, bytes(bytes_))
        start = len(checkpoints.HEAD) + len(checkpoints.DIGEST)
        body = bytes(bytes_[:start] + 64 * b"0" + bytes_[start + 64:])
        problem(checkpoints.parse_manifest, body[:start] + hashlib.sha256(body).hexdigest().encode() + body[start + 64:])
    for other in (b"", b"{}", checkpoints.HEAD, text[:300], b"[" * 100_000):
        assert problem(checkpoints.parse_manifest, other)


def check_directories(golden, folder):
    """Steps are taken from names in the program's form; the newest valid one is found."""
    for step in (20, 40):
        shutil.copytree(golden, folder / f"step_{step:08d}")
    for name in ("step_7", "step_00000060.tmp", "step_0000008x", "latest"):
        (folder / name).mkdir()
    (folder / "step_00000090").touch()
    assert checkpoints.steps_in(folder) == [20, 40] and checkpoints.steps_in(folder / "nothing") == []
    assert checkpoints.newest_valid(folder)[0].name == "step_00000040"
    shard = next((folder / "step_00000040").glob("rank_*.h5"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 3] ^= 4
    shard.write_bytes(content)
    assert checkpoints.newest_valid(folder)[0].name == "step_00000020"
    shard.write_bytes(content[:-1])
    assert "does not have the" in problem(checkpoints.verified, folder / "step_00000040")
    next((folder / "step_00000020").glob("rank_*.h5")).unlink()
    assert "step_00000040" in problem(checkpoints.newest_valid, folder)
    assert "no checkpoint yet" in problem(checkpoints.newest_valid, folder / "nothing")


with tempfile.TemporaryDirectory(prefix="weft_test_") as name:
    sample = GOLDEN / "format_2" / "fp32" / "checkpoints" / "step_00000020"
    check_golden()
    check_manifests((sample / "manifest.json").read_bytes())
    check_directories(sample, Path(name))
print("valid checkpoints are accepted, damaged ones are named")
