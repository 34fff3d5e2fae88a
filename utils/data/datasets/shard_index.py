"""The index of tar shards: where each sample lies, as (shard, offset, length). One file beside the shards.

DATA_PATH/shards.index, and the shards below DATA_PATH/train/ and DATA_PATH/val/. The file is one line of text (what it
is, the version of this format, the SHA-256 of the rest), then arrays in NumPy's .npz form.
"""

import hashlib
import io
import os
import re
import shlex
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from utils.data.sampling import IntArray
from utils.errors import DataError
from utils.files import open_regular

INDEX_FILE = "shards.index"
VERSION = 1
HEADER = re.compile(rb"image shards, version (\d{1,9}), sha256 ([0-9a-f]{64})\n")
MAX_HEADER = 200  # bytes


@dataclass(frozen=True)
class ShardSplit:
    """The shards of one split and the samples in them, numbered in the order of their keys."""

    shards: np.ndarray  # str [S], paths relative to the index
    shard_bytes: IntArray  # int64 [S], their sizes
    members: np.ndarray  # bytes [N], name of the image in its shard
    labels: IntArray  # int64 [N]
    shard: np.ndarray  # int32 [N], its number in `shards`
    offset: IntArray  # int64 [N], of its first byte in the shard
    length: IntArray  # int64 [N], bytes
    checksum: np.ndarray  # uint32 [N], CRC-32 of these bytes

    def take(self, indices: IntArray) -> "ShardSplit":
        """These samples alone, of the same shards."""
        names = ("members", "labels", "shard", "offset", "length", "checksum")
        return replace(self, **{name: getattr(self, name)[indices] for name in names})


FIELDS = {
    "shards": "U", "shard_bytes": "<i8", "members": "S", "labels": "<i8", "shard": "<i4", "offset": "<i8",
    "length": "<i8", "checksum": "<u4",
}  # fmt: skip


@dataclass(frozen=True)
class ShardIndex:
    """What the index file holds."""

    class_names: tuple[str, ...]
    train: ShardSplit
    valid: ShardSplit


def remedy(folder: Path) -> str:
    """The command that makes the index anew, as the end of a message."""
    command = f"python -m tools.prepare_data --shards {shlex.quote(str(folder))}"
    return f"bring the right file back, or index what is there: {command}"


def encode_index(index: ShardIndex) -> bytes:
    """The content of the index file."""
    arrays = {"class_names": np.array(index.class_names)}
    for name, split in (("train", index.train), ("valid", index.valid)):
        arrays |= {f"{name}_{field}": getattr(split, field) for field in FIELDS}
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    content = buffer.getvalue()
    return b"image shards, version %d, sha256 %s\n" % (VERSION, hashlib.sha256(content).hexdigest().encode()) + content


def has_index(folder: Path) -> bool:
    """Whether `folder` is one of shards, sound or not."""
    return os.path.lexists(folder / INDEX_FILE)


def read_index(folder: Path) -> ShardIndex:
    """The index in `folder`; `DataError` where it cannot be read, is damaged, or is of another version."""
    path = folder / INDEX_FILE
    try:
        with open_regular(path) as file:
            header, content = file.readline(MAX_HEADER), file.read()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; {remedy(folder)}") from None
    found = HEADER.fullmatch(header)
    if found is None:
        raise DataError(f"{path}: is no index of shards, or a damaged one; {remedy(folder)}")
    if int(found[1]) != VERSION:
        raise DataError(f"{path}: is of version {int(found[1])}, but this program reads {VERSION}; {remedy(folder)}")
    if hashlib.sha256(content).hexdigest().encode() != found[2]:
        raise DataError(f"{path}: damaged or cut off: its SHA-256 is another; {remedy(folder)}")
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            class_names = tuple(arrays["class_names"].tolist())
            train, valid = (
                ShardSplit(**{field: arrays[f"{name}_{field}"] for field in FIELDS}) for name in ("train", "valid")
            )
    except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: {error}; {remedy(folder)}") from None
    for split in (train, valid):
        if (fault := _fault(split, len(class_names))) is not None:
            raise DataError(f"{path}: {fault}; {remedy(folder)}")
    return ShardIndex(class_names, train, valid)


def _fault(split: ShardSplit, num_classes: int) -> str | None:
    """What no sound index of this version says."""
    for field, kind in FIELDS.items():
        values = getattr(split, field)
        if values.ndim != 1 or not values.dtype.str.lstrip("<|").startswith(kind.lstrip("<")):
            return f"{field} is an array of {values.dtype} with {values.ndim} dimensions"
        per_shard = field in ("shards", "shard_bytes")
        if len(values) != len(split.shards if per_shard else split.labels) or not len(values):
            return f"{field} has {len(values)} entries"
    for what, values, end in (
        ("a label", split.labels, num_classes),
        ("the number of a shard", split.shard, len(split.shards)),
        ("an offset", split.offset, split.shard_bytes.max()),
        ("a length", split.length, split.shard_bytes.max()),
    ):
        if values.min() < 0 or values.max() >= end:
            return f"{what} lies outside of 0 to {end - 1}"
    beyond = split.offset + split.length > split.shard_bytes[split.shard]
    return "an image lies outside of its shard" if beyond.any() else None
