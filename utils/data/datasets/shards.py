"""Images in tar shards: `imagefolder` and `imagenet` if DATA_PATH has an index of shards.

DATA_PATH/train/*.tar    DATA_PATH/val/*.tar    DATA_PATH/shards.index

The index, NumPy's .npz format, has each image's shard, offset, length and CRC-32. So the order is the same as in class
folders, and only the bytes of the requested images are read. Each process opens a shard when it first needs it and
keeps it open, since each opening costs a request to the metadata server of a cluster's file system.
"""

import os
import resource
import shlex
import zlib
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from utils.data.datasets.dataset import Dataset
from utils.data.datasets.folders import build_from_files
from utils.data.datasets.image_files import EncodedImages
from utils.data.sampling import IntArray
from utils.errors import DataError
from utils.files import name_file_in_error, open_regular
from utils.program import command

INDEX_FILE = "shards.index"
# Arrays of the index for each split, "train" and "valid", next to "class_names": NAME_shards and NAME_images
SHARD_FIELDS = [("name", "U300"), ("bytes", "<i8")]  # path relative to the index, size
# in the order of the images' keys; `checksum` is the CRC-32 of the image's bytes; then `member`, the name in the shard
IMAGE_FIELDS = [("shard", "<i4"), ("label", "<i8"), ("offset", "<i8"), ("length", "<i8"), ("checksum", "<u4")]


class OpenShards(dict[int, int]):
    """File descriptors of the shards that this process has opened, by number; closed with this object."""

    def __del__(self) -> None:
        for descriptor in self.values():
            os.close(descriptor)


@dataclass(frozen=True)
class ShardedImages(EncodedImages):
    """One split in shards."""

    folder: Path
    shards: np.ndarray  # [S] of SHARD_FIELDS
    images: np.ndarray  # [N] of IMAGE_FIELDS and `member`
    opened: OpenShards = field(default_factory=OpenShards, compare=False)

    def path(self, index: int) -> str:
        """Return SHARD:MEMBER."""
        shard = self.shards["name"][self.images["shard"][index]]
        return f"{self.folder / shard}:{os.fsdecode(self.images['member'][index])}"

    def content(self, index: int) -> bytes:
        """Return the image's bytes; `DataError` if they differ from the indexed bytes."""
        number, _, offset, length, checksum, _ = self.images[index].item()
        path = self.folder / self.shards["name"][number]
        with reading(path, self.folder):
            if number not in self.opened:
                with open_regular(path) as file:
                    descriptor = os.dup(file.fileno())
                if self.opened.setdefault(number, descriptor) != descriptor:  # another thread was faster
                    os.close(descriptor)
            content = os.pread(self.opened[number], length, offset)
        if zlib.crc32(content) != checksum:
            raise DataError(f"{self.path(index)}: the bytes differ from the indexed ones; {remedy(self.folder)}")
        return content

    def take(self, indices: IntArray) -> "ShardedImages":
        return replace(self, labels=self.labels[indices], images=self.images[indices])


def remedy(folder: Path) -> str:
    """Return the end of an error message: the command that rebuilds the index."""
    return f"restore the file, or index the shards again: {command('prepare_data')} --shards {shlex.quote(str(folder))}"


def reading(path: Path, folder: Path) -> AbstractContextManager[None]:
    """Turn an `OSError` of the block, which reads `path`, into a `DataError` with the remedy for the index's folder."""
    return name_file_in_error(path, "cannot be read", f"; {remedy(folder)}", DataError)


def open_shards(name: str, data_path: Path, image_size: int | None) -> Dataset:
    """Return the dataset `name`, "imagefolder" or "imagenet", in the shards of `data_path`; see `folders.open_folders`.

    `DataError` if the index is damaged, or a shard is missing or of another size; reads no shard."""
    path = data_path / INDEX_FILE
    try:
        with reading(path, data_path), open_regular(path) as file, np.load(file, allow_pickle=False) as arrays:
            class_names = tuple(arrays["class_names"].tolist())
            splits = [(arrays[f"{split}_shards"], arrays[f"{split}_images"]) for split in ("train", "valid")]
        train, valid = (
            ShardedImages(images["label"].copy(), 0, 1.0, data_path, shards, images) for shards, images in splits
        )
    except (ValueError, LookupError, EOFError, BadZipFile) as error:
        raise DataError(f"{path}: damaged, or of another version: {error}; {remedy(data_path)}") from None
    for shard_name, num_bytes in [*train.shards.tolist(), *valid.shards.tolist()]:
        shard = data_path / shard_name
        with reading(shard, data_path):
            found = shard.stat().st_size
        if found != num_bytes:
            raise DataError(f"{shard}: {found} bytes, expected {num_bytes} from the index; {remedy(data_path)}")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each process may open every shard
    return build_from_files(name, class_names, train, valid, image_size)
