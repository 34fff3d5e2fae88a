"""Write tar shards from class folders, and index existing shards."""

import errno
import io
import json
import os
import re
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import Progress

from utils.data.datasets.folders import EXTENSIONS, open_folders
from utils.data.datasets.image_files import ImageFiles, printable_name
from utils.data.datasets.shard_index import FIELDS, INDEX_FILE, ShardIndex, ShardSplit, encode_index
from utils.data.sampling import IntArray
from utils.errors import DataError
from utils.files import open_regular, partial_folder, sync_folder, write_atomically, write_new

IMAGES_PER_SHARD = 4096  # ImageNet: 313 shards of 0.45 GB
CLASSES_FILE = "classes.json"
SPLITS = ("train", "val")
THREADS = 8  # opening many small files is waiting, not computing
END_OF_TAR = bytes(1024)
# As in the webdataset package: the key ends at the first dot of the last path component.
KEY_AND_EXTENSION = re.compile(r"((?:.*/|)[^./][^.]*)\.([^/]*)", re.DOTALL)
LABEL = re.compile(rb"\d{1,6}")

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class IndexedImage:
    """One image of a shard."""

    key: str
    member: str
    label: int
    offset: int
    length: int
    checksum: int  # CRC-32


def make_shards(folder: Path, source: Path, images_per_shard: int | None, num_shards: int | None) -> str:
    """Write shards of the class folders in `source` to `folder`, which appears in one rename with its index; return a
    summary. `images_per_shard` sets their size, or `num_shards` their number, for training and validation each.

    The images' bytes are unchanged. Images are assigned to shards at random, so that each shard has many classes. The
    assignment depends only on the number of images: equal folders give equal shards, byte by byte.
    """
    if os.path.lexists(folder):
        raise DataError(f"{folder}: exists already; move it away, or omit --from to index the shards in it")
    images = open_folders("imagenet", source, image_size=1)  # with "imagenet" no image is read for statistics
    splits = [split for split in (images.train, images.valid) if isinstance(split, ImageFiles)]
    _check_files(splits)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with partial_folder(folder, folder.with_name(f".{folder.name}-shards.lock")) as partial:
            if folder.exists():
                return "another process wrote them"
            for name, split in zip(SPLITS, splits, strict=True):
                number = num_shards or -(-len(split.labels) // (images_per_shard or IMAGES_PER_SHARD))
                _write_split(partial / name, split, number)
            write_new(partial / CLASSES_FILE, (json.dumps(images.class_names) + "\n").encode())
            counts = index_shards(partial)
            partial.rename(folder)
            sync_folder(folder.parent)
    except OSError as error:  # while writing: reading raises DataError
        raise DataError(f"cannot write below {folder.parent}: {error.strerror or error}; name another DIR") from None
    return counts


def _check_files(splits: list[ImageFiles]) -> None:
    """Raise a `DataError` that lists all files that cannot be opened."""
    unreadable = list[str]()

    def check(paths: list[str]) -> None:
        for path in paths:
            try:
                open_regular(path).close()
            except OSError as error:
                unreadable.append(f"{printable_name(path)}: {error.strerror}")

    paths = [split.path(index) for split in splits for index in range(len(split.labels))]
    _run_in_threads(check, [paths[first::THREADS] for first in range(THREADS)], "check of the files")
    if unreadable:
        raise DataError("\n".join(["files that cannot be read; repair or remove them:", *sorted(unreadable)]))


def _write_split(folder: Path, images: ImageFiles, num_shards: int) -> None:
    """Write `num_shards` shards, each flushed to disk."""
    num_images = len(images.labels)
    if num_shards > num_images:
        raise DataError(f"{images.root}: {num_images} images cannot fill {num_shards} shards; make fewer")
    folder.mkdir()
    shuffled = np.random.Generator(np.random.Philox(key=[0, num_images])).permutation(num_images)
    parts = list(enumerate(np.array_split(shuffled, num_shards)))
    _run_in_threads(lambda part: _write_shard(folder / f"shard-{part[0]:06d}.tar", images, part[1]), parts, folder.name)
    sync_folder(folder)


def _write_shard(path: Path, images: ImageFiles, indices: IntArray) -> None:
    digits = len(str(len(images.labels) - 1))
    with path.open("xb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for index in indices.tolist():
                name = images.path(index)
                try:
                    content = images.content(index)
                except OSError as error:
                    raise DataError(f"{name}: cannot be read: {error.strerror}; repair or remove it") from None
                extension = os.path.splitext(name)[1].lower().replace(".jpeg", ".jpg")
                for member, data in ((extension, content), (".cls", b"%d" % images.labels[index])):
                    info = tarfile.TarInfo(f"{index:0{digits}d}{member}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        file.flush()
        os.fsync(file.fileno())


def index_shards(folder: Path) -> str:
    """Write the index of the tar files in `folder`/train and `folder`/val in one rename; return a summary.

    Every byte is read once. Class names come from classes.json, else they are the label numbers.
    """
    train, valid = (_index_split(folder, name) for name in SPLITS)
    num_classes = 1 + int(max(train.labels.max(), valid.labels.max()))
    class_names = _read_class_names(folder / CLASSES_FILE, num_classes)
    write_atomically(folder / INDEX_FILE, encode_index(ShardIndex(class_names, train, valid)))
    shards, images = (
        f"{len(a):,} and {len(b):,}" for a, b in ((train.shards, valid.shards), (train.labels, valid.labels))
    )
    return f"{shards} shards for training and validation, with {images} images, indexed in {INDEX_FILE}"


def _index_split(folder: Path, split: str) -> ShardSplit:
    try:
        paths = sorted(path for path in (folder / split).iterdir() if path.suffix == ".tar" and path.name[0] != ".")
    except OSError as error:
        raise DataError(f"{folder / split}: cannot be read: {error.strerror}; expected shards, *.tar") from None
    scanned = _run_in_threads(_scan, paths, f"index of {split}")
    samples = [(number, sample) for number, (_, found) in enumerate(scanned) for sample in found]
    if not samples:
        raise DataError(f"{folder / split}: expected shards, *.tar, with images")
    samples.sort(key=lambda numbered: numbered[1].key)  # stable: equal keys keep the order of their shards
    columns = {
        "shards": [os.path.join(split, path.name) for path in paths],
        "shard_bytes": [size for size, _ in scanned],
        "members": [os.fsencode(sample.member) for _, sample in samples],
        "labels": [sample.label for _, sample in samples],
        "shard": [number for number, _ in samples],
        "offset": [sample.offset for _, sample in samples],
        "length": [sample.length for _, sample in samples],
        "checksum": [sample.checksum for _, sample in samples],
    }
    return ShardSplit(**{field: np.array(columns[field], kind) for field, kind in FIELDS.items()})


def _scan(path: Path) -> tuple[int, list[IndexedImage]]:
    """Return a shard's size in bytes and its samples; `DataError` if it lacks the webdataset package's layout."""
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, int] = {}
    try:
        with open_regular(path) as file:
            descriptor, size = file.fileno(), os.fstat(file.fileno()).st_size
            if size < len(END_OF_TAR) or os.pread(descriptor, len(END_OF_TAR), size - len(END_OF_TAR)) != END_OF_TAR:
                raise DataError(
                    f"{path}: does not end as a tar file does: truncated, compressed or no tar file; restore it"
                )
            for key, extension, info in _members(path, file):
                is_image = f".{extension}" in EXTENSIONS
                if not is_image and extension != "cls":
                    continue
                if key in (images if is_image else labels):
                    raise DataError(
                        f"{path}: {key} has two members of the kind of {info.name}; give each image its own key"
                    )
                if is_image:
                    images[key] = info.name, info.offset_data, info.size
                    continue
                text = os.pread(descriptor, info.size, info.offset_data)
                if LABEL.fullmatch(text.strip()) is None:
                    raise DataError(f"{path}: {info.name} holds {text[:20]!r}; expected the number of a class")
                labels[key] = int(text)
            if unpaired := sorted(images.keys() ^ labels.keys()):
                missing = "cls" if unpaired[0] in images else "image"
                raise DataError(f"{path}: {unpaired[0]} has no {missing}; expected KEY.jpg and KEY.cls for each image")
            return size, [
                IndexedImage(key, name, labels[key], offset, length, _checksum(descriptor, offset, length))
                for key, (name, offset, length) in images.items()
            ]
    except (tarfile.TarError, ValueError, OSError) as error:  # ValueError: from tarfile, for a broken header
        raise DataError(f"{path}: cannot be read as a tar file: {error}; restore it") from None


def _members(path: Path, file: BinaryIO) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """Yield key, lower-case extension and header of every file of a shard whose name has both."""
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for info in tar:
            named = KEY_AND_EXTENSION.fullmatch(info.name)
            if info.isdir() or named is None:
                continue
            if not info.isreg() or info.issparse():
                raise DataError(f"{path}: {info.name} is a link, a device or a sparse file; expected files")
            yield named[1], named[2].lower(), info


def _checksum(descriptor: int, offset: int, length: int) -> int:
    content = os.pread(descriptor, length, offset)
    if len(content) < length:
        raise OSError(errno.EIO, "a read ended early; is another program writing it?")
    return zlib.crc32(content)


def _read_class_names(path: Path, num_classes: int) -> tuple[str, ...]:
    """Read the JSON list, if it exists."""
    if not os.path.lexists(path):
        return tuple(str(number) for number in range(num_classes))
    try:
        with open_regular(path) as file:
            names = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as a list of names: {error}; repair or remove it") from None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(names) < num_classes:
        raise DataError(f"{path}: expected a list of {num_classes} class names; repair or remove it")
    return tuple(names)


def _run_in_threads(work: Callable[[Task], Result], tasks: list[Task], title: str) -> list[Result]:
    """Return the results in the order of the tasks; show progress. After a failure or Ctrl-C no further task starts."""
    progress_bar = Progress(console=Console(stderr=True), disable=not sys.stderr.isatty())
    with progress_bar as progress, ThreadPoolExecutor(THREADS) as pool:
        return list(progress.track(pool.map(work, tasks), description=title, total=len(tasks)))
