# SPDX-License-Identifier: Apache-2.0
"""Damages files as a disk, a copy or another program may: extreme numbers in texts, headers and HDF5 datasets, flipped bits,
truncation. Digests that would reject the change before it is read are corrected."""
import hashlib
import json
import re
import struct

import h5py
import numpy as np

NUMBERS = [0, 1, -1, 1000, 10**4, 10**5, 10**6, 10**7, 10**9, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1, 1e308, -1e308, 0.5, 1e-320]
LARGEST = 1 << 28  # bytes of a damaged file
TEXTS = {".json", ".jsonl", ".yaml", ".toml", ".txt", ".jinja"}


def number_in_text(text, draw):
    """Replaces one number of a text; None if there is none."""
    places = [match.span() for match in re.finditer(r"(?<![\w.\"-])-?\d+(\.\d+)?([eE][+-]?\d+)?(?![\w\"])", text)]
    if not places:
        return None
    begin, end = draw.choice(places)
    value = draw.choice(NUMBERS)
    return text[:begin] + str(value) + text[end:]


def of_text(data, draw):
    kind = draw.randrange(5)
    text = data.decode("utf-8", "surrogateescape")
    if kind < 3:
        changed = number_in_text(text, draw)
        if changed is not None:
            return changed.encode("utf-8", "surrogateescape"), "number"
    return of_bytes(data, draw)


def of_bytes(data, draw):
    kind = draw.randrange(3)
    data = bytearray(data)
    if kind == 0 or not data:
        return bytes(data[:draw.randrange(len(data) + 1)]), "truncated"
    at = draw.randrange(len(data)) if draw.randrange(2) else draw.randrange(min(len(data), 512))
    if kind == 1:
        data[at] ^= 1 << draw.randrange(8)
        return bytes(data), f"bit of byte {at}"
    width = draw.choice((1, 2, 4, 8))
    at -= at % width
    value = draw.choice((0, 1, 10**9, 2**31, 2**40, 2**63, 2**64 - 1)) % 2 ** (8 * width)
    data[at:at + width] = value.to_bytes(width, "little")
    return bytes(data), f"{width} bytes at {at} = {value}"


def of_safetensors(data, draw):
    """A number of the header, with the length of the header corrected; or of its first bytes."""
    if draw.randrange(4) == 0:
        return of_bytes(data, draw)
    length, = struct.unpack("<Q", data[:8])
    header = number_in_text(data[8:8 + length].decode(), draw).encode()
    return struct.pack("<Q", len(header)) + header + data[8 + length:], "number of the header"


def datasets_of(file):
    names = []
    file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    return names


def of_hdf5(path, draw):
    """A dataset of another extent, an attribute, or values. The file is written by HDF5: its checksums are correct."""
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        names = datasets_of(file)
        objects = [file, *(file[name] for name in names)]
        with_attributes = [item for item in objects if len(item.attrs)]
        kind = draw.randrange(4)
        if kind == 0 and with_attributes:
            item = draw.choice(with_attributes)
            name = draw.choice(sorted(item.attrs))
            value = item.attrs[name]
            if isinstance(value, (int, np.integer)):
                value = np.int64(draw.choice([number for number in NUMBERS if isinstance(number, int) and -2**63 <= number < 2**63]))
            else:
                text = value.decode() if isinstance(value, bytes) else str(value)
                value = np.bytes_((number_in_text(text, draw) or text[: len(text) // 2]).encode("utf-8", "replace") or b" ")
            del item.attrs[name]
            item.attrs.create(name, value)
            return f"attribute {name} of {item.name}"
        if not names:
            return None
        name = draw.choice(names)
        dataset = file[name]
        if kind == 1 and dataset.size:
            values = dataset[...]
            flat = values.reshape(-1)
            at = draw.randrange(flat.size)
            with np.errstate(all="ignore"):
                flat[at] = np.array(draw.choice([value for value in NUMBERS if values.dtype.kind == "f" or isinstance(value, int)])
                                    % (2**63 if values.dtype.kind != "f" else 1e309)).astype(values.dtype)
            dataset[...] = values
            return f"value {at} of {name}"
        shape, dtype = list(dataset.shape), dataset.dtype
        if not shape:
            return None
        fletcher = dataset.fletcher32
        attributes = dict(dataset.attrs)
        axis = draw.randrange(len(shape))
        shape[axis] = draw.choice((0, 10**4, 10**6, 10**9, 2**31, 2**40))
        layout = draw.choice(("contiguous", "chunked", "gzip"))
        del file[name]
        options = {}
        if layout != "contiguous":
            # Few chunks: this process holds their index.
            chunk = [1 if at != axis else max(1, min(extent, 64, 2**20) if extent < 2**20 else 2**20) for at, extent in enumerate(shape)]
            options = {"chunks": tuple(chunk), "fletcher32": fletcher, "compression": "gzip" if layout == "gzip" else None}
        try:
            made = file.create_dataset(name, shape=shape, dtype=dtype, **options)
        except (ValueError, OSError, OverflowError, RuntimeError):
            return None
        for key, value in attributes.items():
            made.attrs[key] = value
        if layout != "contiguous" and made.size:
            made[tuple(slice(0, 1) for _ in shape)] = np.ones([1] * len(shape), dtype)
        return f"{layout} {name} {shape}"


def correct_digests(path):
    """Of the manifest of a checkpoint: those of its shards and its own."""
    manifest = path.parent / "manifest.json"
    if not manifest.exists():
        return
    text = manifest.read_bytes().decode("utf-8", "surrogateescape")
    try:
        shards = json.loads(text)["shards"]
        for shard in shards:
            data = (manifest.parent / shard["file"]).read_bytes()
            text = text.replace(shard["sha256"], hashlib.sha256(data).hexdigest()) if path != manifest else text
            if path != manifest:
                text = re.sub(rf'"bytes": *{shard["bytes"]}\b', f'"bytes": {len(data)}', text)
    except (ValueError, KeyError, TypeError, OSError):
        pass
    zeros = re.sub(r'"sha256": *"[0-9a-f]{64}"', f'"sha256": "{"0" * 64}"', text, count=1)
    digest = hashlib.sha256(zeros.encode("utf-8", "surrogateescape")).hexdigest()
    manifest.write_bytes(zeros.replace("0" * 64, digest, 1).encode("utf-8", "surrogateescape"))


def mutate(path, draw):
    """Changes the file; returns what was changed, None if nothing."""
    data = path.read_bytes()
    if path.suffix in (".h5", ".hdf5"):
        if draw.randrange(2):
            changed, what = of_bytes(data, draw)
            path.write_bytes(changed)
        else:
            what = of_hdf5(path, draw)
            if path.stat().st_size > LARGEST:  # HDF5 has reserved the whole extent
                path.write_bytes(data)
    else:
        of = of_safetensors if path.suffix == ".safetensors" else of_text if path.suffix in TEXTS else of_bytes
        changed, what = of(data, draw)
        path.write_bytes(changed)
    if draw.randrange(4):
        correct_digests(path)
    return what
