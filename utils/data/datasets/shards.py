"""Images in tar shards: `imagefolder` and `imagenet` if DATA_PATH has an index of shards.

DATA_PATH/train/*.tar    DATA_PATH/val/*.tar    DATA_PATH/shards.index

The index, an .npz file, has the place of each image and of its label, and a CRC-32 of both, in the order of class
folders. Each process opens a shard when it first needs it and keeps it open, since opening loads the metadata server of
a cluster.
"""

import json
import os
import resource
import shlex
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO
from zipfile import BadZipFile

import numpy as np

from utils.data.datasets.dataset import Dataset
from utils.data.datasets.folders import build_from_files
from utils.data.datasets.image_files import ImageFiles, may_pass
from utils.data.sampling import IntArray
from utils.errors import DataError
from utils.files import open_regular
from utils.program import command

INDEX_FILE, CLASSES_FILE = "shards.index", "classes.json"
# Arrays of the index for each split, "train" and "valid", next to "class_names": NAME_shards and NAME_images
SHARD_FIELDS = [("name", "U300"), ("bytes", "<i8")]  # path relative to the index, size
# in the order of the images' keys; `checksum` is the CRC-32 of the image's bytes and then the label's: a label that is
# rewritten in place is noticed; then `member`, the image's name in the shard
IMAGE_FIELDS = [
    ("shard", "<i4"), ("label", "<i8"), ("offset", "<i8"), ("length", "<i8"), ("label_offset", "<i8"),
    ("label_length", "<i4"), ("checksum", "<u4"),
]  # fmt: skip


@dataclass(frozen=True)
class ShardedImages(ImageFiles):
    """One split in shards; `names` are the members of the tar files."""

    shards: np.ndarray  # [S] of SHARD_FIELDS
    images: np.ndarray  # [N] of IMAGE_FIELDS
    opened: dict[int, BinaryIO] = field(default_factory=dict, compare=False)  # by number, in this process

    def path(self, index: int) -> str:
        """Return SHARD:MEMBER."""
        shard = self.shards["name"][self.images["shard"][index]]
        return f"{self.root / shard}:{os.fsdecode(self.names[index])}"

    def content(self, index: int) -> bytes:
        """Return the image's bytes; `DataError` if they or the label's differ from the indexed bytes."""
        number, _, offset, length, label_offset, label_length, checksum = self.images[index].item()
        path = self.root / self.shards["name"][number]
        try:
            if number not in self.opened:
                self.opened.setdefault(number, open_regular(path))  # unless another thread was faster
            shard = self.opened[number].fileno()
            content, label = os.pread(shard, length, offset), os.pread(shard, label_length, label_offset)
        except OSError as error:
            if may_pass(error):
                raise
            raise DataError(f"{path}: cannot be read: {error.strerror}; {remedy(self.root)}") from None
        if zlib.crc32(label, zlib.crc32(content)) != checksum:
            raise DataError(f"{self.path(index)}: the bytes differ from the indexed ones; {remedy(self.root)}")
        return content

    def take(self, indices: IntArray) -> "ShardedImages":
        return replace(self, labels=self.labels[indices], names=self.names[indices], images=self.images[indices])

    def identity(self) -> Iterator[bytes]:
        """Yield the indexed checksums of all images and labels."""
        yield self.images["checksum"].tobytes()


def find_shards(folder: Path) -> list[Path]:
    """Return the shards of a dataset's folder, sorted."""
    found = [path for split in ("train", "val") for path in (folder / split).glob("*.tar")]
    return sorted(path for path in found if not path.name.startswith("."))


def remedy(folder: Path) -> str:
    """Return the end of an error message: the command that rebuilds the index."""
    return f"restore the file, or index the shards again: {command('prepare_data')} --shards {shlex.quote(str(folder))}"


def open_shards(name: str, data_path: Path, image_size: int | None) -> Dataset:
    """Return the dataset `name`, "imagefolder" or "imagenet", in the shards of `data_path`; see `folders.open_folders`.
    `DataError` if the index is damaged, or a shard is missing, new or of another size; reads no shard."""
    path = data_path / INDEX_FILE
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as arrays:
            class_names = tuple(arrays["class_names"].tolist())
            splits = [(arrays[f"{split}_shards"], arrays[f"{split}_images"]) for split in ("train", "valid")]
        fields = [name for name, _ in IMAGE_FIELDS]
        train, valid = (
            ShardedImages(images["label"].copy(), 0, 1.0, data_path, images["member"], shards, images[fields])
            for shards, images in splits
        )
        sizes = {str(shard): shard.stat().st_size for shard in find_shards(data_path)}
        names = data_path / CLASSES_FILE
        if names.exists() and tuple(json.loads(names.read_bytes())) != class_names:
            raise ValueError(f"{CLASSES_FILE} has changed since")
    except OSError as error:
        raise DataError(f"{error.filename or path}: cannot be read: {error.strerror}; {remedy(data_path)}") from None
    except (ValueError, LookupError, EOFError, BadZipFile) as error:
        raise DataError(f"{path}: damaged, or of another version: {error}; {remedy(data_path)}") from None
    indexed = {str(data_path / shard): size for shards, _ in splits for shard, size in shards.tolist()}
    for shard, _ in sorted(sizes.items() ^ indexed.items()):
        found = f"{sizes[shard]} bytes" if shard in sizes else "is missing"
        raise DataError(f"{shard}: {found}, expected {indexed.get(shard, 'no')} bytes; {remedy(data_path)}")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each process may open every shard
    return build_from_files(name, class_names, train, valid, image_size)
