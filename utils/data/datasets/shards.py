"""Images in tar shards: `imagefolder` and `imagenet` if DATA_PATH has an index of shards (`shard_index.py`).

DATA_PATH/train/*.tar    DATA_PATH/val/*.tar    DATA_PATH/shards.index

The index addresses a sample by (shard, offset, length). So the order is the same as in class folders, and only the
bytes of the requested samples are read. Each process opens a shard when it first needs it and keeps it open, since each
opening costs a request to the metadata server of a cluster's file system.
"""

import os
import resource
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path

from utils.data.config import LOADERS, DataConfig
from utils.data.datasets.dataset import Dataset, Split
from utils.data.datasets.folders import build_from_files
from utils.data.datasets.image_files import EncodedImages
from utils.data.datasets.shard_index import INDEX_FILE, ShardSplit, read_index, reading, remedy
from utils.data.sampling import IntArray, ShardGroups
from utils.errors import ConfigError, DataError
from utils.files import open_regular
from utils.program import command

OTHER_FILES = 512  # at most, that a process has open besides shards: sockets, pipes, batches in shared memory


class OpenShards:
    """The open shards of this process, by number; closed with this object."""

    def __init__(self) -> None:
        self.descriptors: dict[int, int] = {}

    def __del__(self) -> None:
        for descriptor in self.descriptors.values():
            os.close(descriptor)

    def descriptor(self, number: int, path: Path, num_bytes: int) -> int:
        """Return a shard's descriptor; open it if needed. `DataError` if it is missing or not of `num_bytes`."""
        if (descriptor := self.descriptors.get(number)) is not None:
            return descriptor
        with reading(path, path.parent.parent), open_regular(path) as file:
            _check_size(path, os.fstat(file.fileno()).st_size, num_bytes)
            descriptor = os.dup(file.fileno())
        kept = self.descriptors.setdefault(number, descriptor)  # another thread may have opened it meanwhile
        if kept != descriptor:
            os.close(descriptor)
        return kept


@dataclass(frozen=True)
class ShardedImages(EncodedImages):
    """One split in shards."""

    folder: Path
    index: ShardSplit
    opened: OpenShards = field(default_factory=OpenShards, compare=False)

    def path(self, index: int) -> str:
        """Return SHARD:MEMBER."""
        return f"{self.shard_path(self.index.shard[index])}:{os.fsdecode(self.index.members[index])}"

    def shard_path(self, number: int) -> Path:
        return self.folder / self.index.shards[number]

    def content(self, index: int) -> bytes:
        """Return the sample's bytes; `DataError` if they differ from the indexed bytes."""
        number, offset, length = (
            int(values[index]) for values in (self.index.shard, self.index.offset, self.index.length)
        )
        path = self.shard_path(number)
        descriptor = self.opened.descriptor(number, path, int(self.index.shard_bytes[number]))
        with reading(path, self.folder):
            content = os.pread(descriptor, length, offset)
            while 0 < len(content) < length and (
                more := os.pread(descriptor, length - len(content), offset + len(content))
            ):
                content += more
        if zlib.crc32(content) != self.index.checksum[index]:
            raise DataError(f"{self.path(index)}: the bytes differ from the indexed ones; {remedy(self.folder)}")
        return content

    def take(self, indices: IntArray) -> "ShardedImages":
        index = self.index.take(indices)
        return replace(self, labels=index.labels, index=index)


def open_shards(name: str, data_path: Path, image_size: int | None) -> Dataset:
    """Return the dataset `name`, "imagefolder" or "imagenet", in the shards of `data_path`; see `folders.open_folders`.

    `DataError` if the index is damaged, or a shard is missing or of another size."""
    index = read_index(data_path)
    for split in (index.train, index.valid):
        _check_shards(data_path, split)
    raise_open_file_limit(len(index.train.shards) + len(index.valid.shards))
    train, valid = (ShardedImages(split.labels, 0, 1.0, data_path, split) for split in (index.train, index.valid))
    return build_from_files(name, index.class_names, train, valid, image_size)


def check_shard_groups(config: DataConfig, train: Split, world_size: int) -> None:
    """`ConfigError` if training on this split cannot use `shard_groups`."""
    number = config.shard_groups
    if number == 1:
        return
    if not isinstance(train, ShardedImages) or LOADERS[config.data_loader].in_memory:
        raise ConfigError(
            f"shard_groups {number} needs shards that are read in each epoch: dataset imagefolder or imagenet with "
            f"{INDEX_FILE} in data_path, and data_loader torchvision or dali; else --set shard_groups=1"
        )
    if number % world_size or config.batch_size % number or number > len(train.index.shards):
        raise ConfigError(
            f"shard_groups {number}: expected a multiple of the {world_size} ranks that divides batch_size "
            f"{config.batch_size}, and at most {len(train.index.shards)}, the number of training shards"
        )


def group_shards(config: DataConfig, split: Split) -> ShardGroups | None:
    """Return the groups of a split in shards; None without `shard_groups`, or for a loader that reads no shard."""
    if config.shard_groups == 1 or not isinstance(split, ShardedImages) or not LOADERS[config.data_loader].needs_data:
        return None
    return ShardGroups(split.index.shard, config.shard_groups)


def _check_shards(folder: Path, split: ShardSplit) -> None:
    """`DataError` if a shard is missing, or its size differs from the index; reads no shard."""
    for name, num_bytes in zip(split.shards, split.shard_bytes.tolist(), strict=True):
        path = folder / name
        with reading(path, folder):
            _check_size(path, path.stat().st_size, num_bytes)


def _check_size(path: Path, actual: int, expected: int) -> None:
    if actual != expected:
        reason = f"{actual} bytes, expected {expected} from the index: truncated or replaced"
        raise DataError(f"{path}: {reason}; {remedy(path.parent.parent)}")


def raise_open_file_limit(number: int) -> None:
    """Raise this process's limit of open files, if needed, to allow `number` shards; `ConfigError` if the hard limit is
    lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = number + OTHER_FILES
    if resource.RLIM_INFINITY in (soft, hard) or needed <= hard:
        if resource.RLIM_INFINITY != soft < needed:
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        return
    raise ConfigError(
        f"{number} shards need {needed} open files, the hard limit is {hard}; raise it (ulimit -Hn), or make fewer, "
        f"larger shards: {command('prepare_data')} --shards DIR --from FOLDERS --num_shards N"
    )
