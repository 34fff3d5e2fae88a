"""CIFAR-10 and CIFAR-100: read from the official binary version or from torchvision's folder; download and unpack.

A record of the binary version is one label byte (CIFAR-10) or a coarse and a fine label byte (CIFAR-100; the fine label
is used), then 3072 bytes: 32 x 32 red, green and blue, row by row (https://www.cs.toronto.edu/~kriz/cifar.html).
Torchvision downloads, verifies and unpacks its version; no pickle is opened before its published MD5 is verified.
"""

import hashlib
import http.client
import math
import os
import shlex
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from utils.errors import DataError
from utils.files import partial_folder
from utils.program import command

IMAGE_SHAPE = (3, 32, 32)
Files = tuple[tuple[str, ...], str]  # of a split, in the order of their records' numbers, and the records' fingerprint
Arrays = tuple[np.ndarray, np.ndarray]  # images, uint8 [N, 3, 32, 32], and labels, int64 [N]


@dataclass(frozen=True)
class CifarVersion:
    """Everything that differs between CIFAR-10 and CIFAR-100."""

    name: str  # as in the configuration
    title: str
    folder: str
    label_bytes: int  # the last one is used
    train: Files
    valid: Files
    class_names: tuple[str, ...]
    mean: tuple[float, float, float]  # of the training pixels in [0, 1]
    std: tuple[float, float, float]

    @property
    def dataset_class(self) -> Any:
        """Torchvision's class, which knows the pickled version: its archive, folder, files and their MD5."""
        import torchvision

        return getattr(torchvision.datasets, self.name.upper())

    @property
    def record_bytes(self) -> int:
        return self.label_bytes + math.prod(IMAGE_SHAPE)


_CIFAR100_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
"""

VERSIONS = {
    "cifar10": CifarVersion(
        "cifar10", title="CIFAR-10", folder="cifar-10-batches-bin", label_bytes=1,
        train=(
            tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
            "d17523651dcffdf1be45e6671e5077f61b15cbf5376a64e556c870e6fb6066d3",
        ),
        valid=(("test_batch.bin",), "ab21d127e2bbf4b95f1588dcadf3c8502b8fedb328dd5315bc7fa51b5ab965c0"),
        class_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        # Computed from the 50,000 training images by `channel_statistics`, as a test does again.
        mean=(0.49139967861519607, 0.48215840839460783, 0.44653091444546567),
        std=(0.24703223246328201, 0.24348512800005553, 0.2615878417279645),
    ),
    "cifar100": CifarVersion(
        "cifar100", title="CIFAR-100", folder="cifar-100-binary", label_bytes=2,
        train=(("train.bin",), "38687b68dab48bb273094c1b366473fcb718ca3d9136c8d50f53cdd7bbe0964f"),
        valid=(("test.bin",), "4bdb8df876901fd525a2b0f3b17dfa05b56653fbc064870eae5c11955f179c3c"),
        class_names=tuple(_CIFAR100_CLASSES.split()),
        # As in published recipes; the same computation agrees to 15 digits.
        mean=(0.5070751592371323, 0.48654887331495095, 0.4409178433670343),
        std=(0.2673342858792401, 0.2564384629170883, 0.27615047132568404),
    ),
}  # fmt: skip


def read_cifar(version: CifarVersion, data_path: Path, *, download: bool, archive: Path | None = None) -> list[Arrays]:
    """Return the verified training and validation images of the folder that exists. Without a folder, unpack `archive`,
    or let torchvision download with `download`. `DataError` if the data are missing or damaged."""
    problem, folder = f"{version.title} is not in {data_path}", None
    try:
        folder = find_folder(version, data_path)
        if folder is None and (download or archive):
            folder = _fetch(version, data_path, archive)
        if folder is not None and folder.name == version.folder:
            return [_read_binary(folder, version, *split) for split in (version.train, version.valid)]
        if folder is not None:  # torchvision verifies every file's published MD5 before it unpickles any
            splits = [version.dataset_class(folder.parent, train=train) for train in (True, False)]
            # of [N, 32, 32, 3], a view of planes; transposing back gives a contiguous array
            return [(split.data.transpose(0, 3, 1, 2), np.asarray(split.targets, np.int64)) for split in splits]
    except (DataError, RuntimeError) as error:  # the latter of torchvision
        problem = str(error) if isinstance(error, DataError) else f"{folder}: incomplete or altered: {error}"
    except OSError as error:
        problem = f"{error.filename or data_path}: {error.strerror}"
    away = "" if folder is None else f". Move {folder} away"
    fetch = f"{command('prepare_data')} --dataset {version.name} --data_path {shlex.quote(str(data_path))}"
    raise DataError(f"{problem}{away}; to get good data:\n{fetch} (without a network: --from ARCHIVE)")


def find_folder(version: CifarVersion, data_path: Path) -> Path | None:
    """Return the folder of the binary version, else torchvision's, else None."""
    if os.path.isdir(data_path / version.folder):  # then torchvision need not be imported
        return data_path / version.folder
    pickled = data_path / version.dataset_class.base_folder
    return pickled if os.path.isdir(pickled) else None


def _fetch(version: CifarVersion, data_path: Path, archive: Path | None) -> Path:
    """Let torchvision unpack a local archive or, without one, download it; return the data's folder. It appears in one
    rename, so no process sees partial data. If several processes call, one does the work."""
    from torchvision.datasets.utils import check_integrity

    dataset = version.dataset_class
    if archive is not None and not check_integrity(archive, dataset.tgz_md5):
        raise DataError(f"{archive}: missing, truncated, altered, or not the official {dataset.filename}")
    target = data_path / dataset.base_folder
    try:
        data_path.mkdir(parents=True, exist_ok=True)
        with partial_folder(target, data_path / f".{version.name}.lock") as partial:
            if os.path.isdir(target):  # another process created it while this one waited
                return target
            if archive is not None:  # torchvision does not download what is there
                (partial / dataset.filename).symlink_to(archive.resolve())
            dataset(partial, download=True)
            (partial / target.name).rename(target)
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        if not os.path.isdir(target):  # else, without locks, another process was faster
            what = "downloaded" if archive is None else f"unpacked from {archive}"
            raise DataError(f"{version.title} cannot be {what} to {data_path}: {error}") from error
    return target


def _read_binary(folder: Path, version: CifarVersion, files: tuple[str, ...], expected: str) -> Arrays:
    """Return the verified images and labels of one split. A single file is memory-mapped, so all processes of a machine
    share its pages; the five files of CIFAR-10's training split are copied (154 MB)."""
    paths, found = [folder / name for name in files], "none"
    with suppress(ValueError):  # an empty file, or no whole number of records
        # plain arrays: memmap's own indexing is slower
        records = [np.asarray(np.memmap(path, np.uint8, "r")).reshape(-1, version.record_bytes) for path in paths]
        found = fingerprint(records)
    if found != expected:
        names, known = " + ".join(map(str, paths)), expected[:16]
        raise DataError(f"{names}: altered: the records' fingerprint is {found[:16]}, not {version.title}'s {known}")
    joined = records[0] if len(records) == 1 else np.concatenate(records)  # [N, record_bytes]
    images = joined[:, version.label_bytes :].reshape(-1, *IMAGE_SHAPE)
    return images, joined[:, version.label_bytes - 1].astype(np.int64)


def fingerprint(records: Iterable[np.ndarray]) -> str:
    """Return the sum of the SHA-256 of every record, modulo 2^256, in hexadecimal. Each array: uint8 [N, record_bytes].
    It ignores the order: copies of CIFAR with the same records in another order exist, and are equally good."""
    digests = (hashlib.sha256(record).digest() for array in records for record in np.ascontiguousarray(array))
    return f"{sum(int.from_bytes(digest, 'big') for digest in digests) % 2**256:064x}"
