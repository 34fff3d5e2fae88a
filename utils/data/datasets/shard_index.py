"""The index of tar shards, DATA_PATH/shards.index: the (shard, offset, length) of each sample.

The shards are below DATA_PATH/train/ and DATA_PATH/val/. The file has one line of text (a title, the version of the
format, the SHA-256 of the rest), then arrays in NumPy's .npz format.
"""

import hashlib
import io
import os
import re
import shlex
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from utils.data.sampling import IntArray
from utils.errors import DataError
from utils.files import name_file_in_error, open_regular
from utils.program import command

INDEX_FILE = "shards.index"
VERSION = 1
HEADER = re.compile(rb"image shards, version (\d{1,9}), sha256 ([0-9a-f]{64})\n")
MAX_HEADER = 200  # bytes


@dataclass(frozen=True)
class ShardSplit:
    """The shards of one split and the samples in them, numbered in the order of their keys."""

    shards: np.ndarray  # str [S], paths relative to the index
    shard_bytes: IntArray  # int64 [S], sizes of the shards
    members: np.ndarray  # bytes [N], name of each image in its shard
    labels: IntArray  # int64 [N]
    shard: np.ndarray  # int32 [N], number in `shards`
    offset: IntArray  # int64 [N], of the first byte in the shard
    length: IntArray  # int64 [N], bytes
    checksum: np.ndarray  # uint32 [N], CRC-32 of these bytes

    def take(self, indices: IntArray) -> "ShardSplit":
        """Return these samples, in the same shards."""
        names = ("members", "labels", "shard", "offset", "length", "checksum")
        return replace(self, **{name: getattr(self, name)[indices] for name in names})


FIELDS = {
    "shards": "U", "shard_bytes": "<i8", "members": "S", "labels": "<i8", "shard": "<i4", "offset": "<i8",
    "length": "<i8", "checksum": "<u4",
}  # fmt: skip


@dataclass(frozen=True)
class ShardIndex:
    """The content of the index file."""

    class_names: tuple[str, ...]
    train: ShardSplit
    valid: ShardSplit


def remedy(folder: Path) -> str:
    """Return the end of an error message: the command that rebuilds the index."""
    prepare = command("prepare_data")
    return f"restore the file, or index the shards again: {prepare} --shards {shlex.quote(str(folder))}"


def reading(path: Path, folder: Path) -> AbstractContextManager[None]:
    """Turn an `OSError` of the block, which reads `path`, into a `DataError` with the remedy for the index's folder."""
    return name_file_in_error(path, "cannot be read", f"; {remedy(folder)}", DataError)


def encode_index(index: ShardIndex) -> bytes:
    """Return the bytes of the index file."""
    arrays = {"class_names": np.array(index.class_names)}
    for name, split in (("train", index.train), ("valid", index.valid)):
        arrays |= {f"{name}_{field}": getattr(split, field) for field in FIELDS}
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    content = buffer.getvalue()
    return b"image shards, version %d, sha256 %s\n" % (VERSION, hashlib.sha256(content).hexdigest().encode()) + content


def has_index(folder: Path) -> bool:
    """Return whether `folder` has an index of shards, intact or damaged."""
    return os.path.lexists(folder / INDEX_FILE)


def read_index(folder: Path) -> ShardIndex:
    """Read the index in `folder`; `DataError` if it cannot be read, is damaged, or has another version."""
    path = folder / INDEX_FILE
    with reading(path, folder), open_regular(path) as file:
        header, content = file.readline(MAX_HEADER), file.read()
    found = HEADER.fullmatch(header)
    if found is None:
        raise DataError(f"{path}: not an index of shards, or damaged; {remedy(folder)}")
    if int(found[1]) != VERSION:
        raise DataError(f"{path}: has version {int(found[1])}, but this program reads {VERSION}; {remedy(folder)}")
    if hashlib.sha256(content).hexdigest().encode() != found[2]:
        raise DataError(f"{path}: damaged or truncated: its SHA-256 differs; {remedy(folder)}")
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        class_names = tuple(arrays["class_names"].tolist())
        train, valid = (
            ShardSplit(**{field: arrays[f"{name}_{field}"] for field in FIELDS}) for name in ("train", "valid")
        )
    return ShardIndex(class_names, train, valid)
