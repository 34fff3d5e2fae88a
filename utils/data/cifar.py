"""The official binary version of CIFAR-10 and CIFAR-100: what its files hold, reading them, and telling damage.

A record is one label byte (CIFAR-10) or a coarse and a fine one (CIFAR-100, of which the fine one is used), then
3072 bytes: 32 x 32 red, green and blue, row by row (https://www.cs.toronto.edu/~kriz/cifar.html).
Nothing here is unpickled and nothing is downloaded.
"""

import hashlib
import math
import shlex
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from utils.errors import DataError
from utils.files import open_regular
from utils.program import command

IMAGE_SHAPE = (3, 32, 32)


@dataclass(frozen=True)
class CifarSplit:
    """The files of one split, in the order in which their records are numbered."""

    files: tuple[str, ...]
    records_per_file: int
    fingerprint: str  # of all records together, see `fingerprint`


@dataclass(frozen=True)
class CifarVersion:
    """Everything that differs between CIFAR-10 and CIFAR-100."""

    name: str  # as in the configuration
    title: str
    folder: str
    label_bytes: int  # the last one is the label that is used
    train: CifarSplit
    valid: CifarSplit
    names_file: str
    class_names: tuple[str, ...]
    mean: tuple[float, float, float]  # of the training pixels in [0, 1]
    std: tuple[float, float, float]
    archive: str  # of the binary version, on the home page above
    archive_md5: str

    @property
    def dataset_class(self) -> Any:
        """Torchvision's, which knows the pickled version: its folder, its files and their MD5."""
        import torchvision

        return getattr(torchvision.datasets, self.name.upper())

    @property
    def record_bytes(self) -> int:
        return self.label_bytes + math.prod(IMAGE_SHAPE)

    @property
    def splits(self) -> tuple[CifarSplit, CifarSplit]:
        return (self.train, self.valid)

    def file_bytes(self, split: CifarSplit) -> int:
        return split.records_per_file * self.record_bytes


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
        name="cifar10",
        title="CIFAR-10",
        folder="cifar-10-batches-bin",
        label_bytes=1,
        train=CifarSplit(
            tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
            records_per_file=10_000,
            fingerprint="d17523651dcffdf1be45e6671e5077f61b15cbf5376a64e556c870e6fb6066d3",
        ),
        valid=CifarSplit(
            ("test_batch.bin",), 10_000, "ab21d127e2bbf4b95f1588dcadf3c8502b8fedb328dd5315bc7fa51b5ab965c0"
        ),
        names_file="batches.meta.txt",
        class_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        # Computed from the 50,000 training images by `datasets.channel_statistics` (a test repeats it).
        mean=(0.49139967861519607, 0.48215840839460783, 0.44653091444546567),
        std=(0.24703223246328201, 0.24348512800005553, 0.2615878417279645),
        archive="cifar-10-binary.tar.gz",
        archive_md5="c32a1d4ab5d03f1284b67883e8d87530",
    ),
    "cifar100": CifarVersion(
        name="cifar100",
        title="CIFAR-100",
        folder="cifar-100-binary",
        label_bytes=2,
        train=CifarSplit(("train.bin",), 50_000, "38687b68dab48bb273094c1b366473fcb718ca3d9136c8d50f53cdd7bbe0964f"),
        valid=CifarSplit(("test.bin",), 10_000, "4bdb8df876901fd525a2b0f3b17dfa05b56653fbc064870eae5c11955f179c3c"),
        names_file="fine_label_names.txt",
        class_names=tuple(_CIFAR100_CLASSES.split()),
        # As the published recipes have them; the same computation agrees to 15 digits.
        mean=(0.5070751592371323, 0.48654887331495095, 0.4409178433670343),
        std=(0.2673342858792401, 0.2564384629170883, 0.27615047132568404),
        archive="cifar-100-binary.tar.gz",
        archive_md5="03b5dce01913d631647c71ecec9e9cb8",
    ),
}


def remedy(version: CifarVersion, data_path: Path) -> str:
    """The two commands that bring sound files, with and without a network."""
    prepare = " ".join(command("prepare_data"))
    fetch = f"{prepare} --dataset {version.name} --data_path {shlex.quote(str(data_path))}"
    return f"With a network: {fetch}\nWithout one:    {fetch} --from ARCHIVE_OR_FOLDER"


def read_split(folder: Path, version: CifarVersion, split: CifarSplit) -> tuple[np.ndarray, np.ndarray]:
    """Verified images, uint8 [N, 3, 32, 32], and labels, int64 [N].

    One file is memory-mapped, so that its pages are shared by all processes of a machine; the five of CIFAR-10's
    training split cannot be mapped as one array and are copied together (154 MB).
    """
    verify_split(folder, version, split)
    records = [map_records(folder / name, version) for name in split.files]
    joined = records[0] if len(records) == 1 else np.concatenate(records)  # [N, record_bytes]
    images = joined[:, version.label_bytes :].reshape(-1, *IMAGE_SHAPE)
    return images, joined[:, version.label_bytes - 1].astype(np.int64)


def read_class_names(folder: Path, version: CifarVersion) -> tuple[str, ...]:
    """One name for each label: from the file of the official archive, or, without it, the same names built in."""
    path = folder / version.names_file
    try:
        with open_regular(path) as file:
            names = tuple(line.strip() for line in file.read().decode().split("\n") if line.strip())
        if len(names) != len(version.class_names):
            raise ValueError(f"{len(names)} class names, expected {len(version.class_names)}")
    except (FileNotFoundError, NotADirectoryError):
        return version.class_names
    except (OSError, ValueError) as error:  # not UTF-8 is a ValueError too
        raise DataError(f"{path}: {error}. Remove it: the official names are built in.") from error
    return names


def map_records(path: Path, version: CifarVersion) -> np.ndarray:
    """The file as a read-only map, uint8 [records, record_bytes]."""
    mapped = np.memmap(path, np.uint8, mode="r")
    return np.asarray(mapped).reshape(-1, version.record_bytes)  # a plain array: memmap's own indexing is slower


def fingerprint(records: Iterable[np.ndarray]) -> str:
    """The sum of the SHA-256 of every record, modulo 2^256, in hexadecimal.

    It tells one altered byte anywhere, and does not depend on the order of the records or on their division into
    files: copies of CIFAR are in circulation with the same records in another order, and they are as good.
    0.1 s for 50,000 records. Each array: uint8 [N, record_bytes].
    """
    total = 0
    for array in records:
        content, size = np.ascontiguousarray(array).data.cast("B"), array.shape[1]
        for start in range(0, len(content), size):
            total += int.from_bytes(hashlib.sha256(content[start : start + size]).digest(), "big")
    return f"{total % 2**256:064x}"


def verify_split(folder: Path, version: CifarVersion, split: CifarSplit) -> None:
    """Raise DataError or OSError where a file is missing, of another size, or the records are not the published ones.

    It writes nothing: a start of a run leaves the folder of the data as it is.
    """
    paths, expected_bytes = [folder / name for name in split.files], version.file_bytes(split)
    for path in paths:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size != expected_bytes:
            raise DataError(
                f"{path}: {status.st_size} bytes, expected exactly {expected_bytes}: truncated, or not the binary "
                f"version of {version.title}."
            )
    actual = fingerprint(map_records(path, version) for path in paths)
    if actual != split.fingerprint:
        raise DataError(
            f"{' + '.join(map(str, paths))}: altered. The records have fingerprint {actual[:16]}..., "
            f"those of {version.title} have {split.fingerprint[:16]}...."
        )
