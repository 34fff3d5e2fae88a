"""`Dataset`, and `load_dataset()`, which reads CIFAR or generates shapes."""

import hashlib
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np

from utils.data.datasets.cifar import VERSIONS, read_cifar
from utils.data.datasets.image_files import ImageFiles, ReadSamples, spaced
from utils.data.datasets.shapes import CLASS_NAMES, generate_shapes
from utils.data.sampling import IntArray
from utils.errors import ConfigError, DataError

NUM_SHAPES = 10_000, 2_000  # training and validation images
STATISTICS = ("mean", "std")  # of the pixels: they may differ between versions of Pillow
LARGEST_PART = 2**24  # bytes of images that are counted at once
SMALLEST_DEVIATION = 1 / 255  # a channel that varies by less than one level is constant
HOLDOUT_SEED = 0  # not the run's: runs with other seeds hold out the same images


@dataclass(frozen=True)
class ImageArrays:
    """One split in memory. The images may be a read-only memory map with strides."""

    images: np.ndarray  # uint8 [N, 3, H, W]
    labels: np.ndarray  # int64 [N]
    unreadable: dict[str, str] = field(default_factory=dict)  # file: reason, if the images were decoded from files

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)"""
        return self.images.shape[1], self.images.shape[2], self.images.shape[3]

    def take(self, indices: IntArray) -> "ImageArrays":
        """Return a copy of these samples."""
        return ImageArrays(self.images[indices], self.labels[indices])

    def read(self, indices: IntArray, crops: np.ndarray | None, *, replace: bool) -> ReadSamples:
        """Return the samples `indices`; the other arguments are for `ImageFiles`, which has the same interface."""
        self.check_file()
        return ReadSamples(self.images[indices], indices, {})

    def check_file(self) -> None:
        """`DataError` if the file of a memory map has been cut: reading beyond its end would kill the process."""
        owner = self.images
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        if isinstance(owner, np.memmap) and owner.filename and os.path.exists(owner.filename):
            found, needed = os.path.getsize(owner.filename), owner.offset + owner.nbytes
            if found < needed:
                raise DataError(f"{owner.filename}: has become shorter: {found} bytes, expected {needed}; restore it")

    def identity(self) -> Iterator[bytes]:
        """Yield evenly spaced images."""
        yield np.ascontiguousarray(self.images[spaced(len(self.labels))]).tobytes()


Split = ImageArrays | ImageFiles


@dataclass(frozen=True)
class Dataset:
    name: str
    train: Split
    valid: Split
    class_names: tuple[str, ...]
    mean: tuple[float, ...]  # per channel of the training images in [0, 1]
    std: tuple[float, ...]
    test: Split | None = None  # only if training images are held out for validation
    fingerprint: str = ""  # of all images and labels
    notes: tuple[str, ...] = ()  # lines for the log

    def __post_init__(self) -> None:
        match_classes(f"dataset {self.name}", self.class_names, self.class_names, remedy="")

    def describe(self) -> dict[str, Any]:
        """Return the properties that a checkpoint records, as plain values; "shape" is (channels, height, width)."""
        return {
            "train_images": len(self.train.labels), "class_names": list(self.class_names),
            "shape": self.train.image_shape, "mean": self.mean, "std": self.std, "fingerprint": self.fingerprint,
        }  # fmt: skip


def match_classes(where: str, found: Sequence[str], known: Sequence[str], remedy: str) -> IntArray:
    """Return the index in `known` of each of the class names `found`, int64 [classes]: their order may differ.
    Raises `DataError` if the names differ, or one of them occurs twice, perhaps in two Unicode forms."""
    for names in (found, known):
        composed = [normalize("NFC", name) for name in names]
        if twice := [name for name, count in Counter(composed).items() if count > 1]:
            forms = "" if names.count(twice[0]) > 1 else ", in two Unicode forms"
            raise DataError(f"{where}: class {twice[0]!r} occurs twice{forms}; give each class another name")
    if differing := sorted({*known} ^ {*found}):  # in ASCII: an accent may be a character of its own
        sizes = f"its {len(found)} classes are not the {len(known)} expected ones, for example {differing[0]!a}"
        raise DataError(f"{where}: {sizes}{unicode_remark(found, known)}; {remedy}")
    labels = {name: label for label, name in enumerate(known)}
    return np.array([labels[name] for name in found], np.int64)


def unicode_remark(names: Sequence[str], others: Sequence[str]) -> str:
    """Return a remark if one of these names differs from one of the others in its Unicode form only, else ""."""
    new, old = ({normalize("NFC", name) for name in some} for some in ({*names} - {*others}, {*others} - {*names}))
    return "; some differ in their Unicode form only" if new & old else ""


def load_dataset(name: str, data_path: Path, *, download: bool) -> Dataset:
    """Return the dataset `name`: "cifar100" or "cifar10" from `data_path`, downloaded only with `download`, or
    "shapes", which needs no file. `DataError` if files are missing or damaged."""
    if name == "shapes":
        return _generate_shapes_dataset()
    version = VERSIONS[name]
    train, valid = (ImageArrays(*arrays) for arrays in read_cifar(version, data_path, download=download))
    return Dataset(name, train, valid, version.class_names, version.mean, version.std)


@cache
def _generate_shapes_dataset() -> Dataset:
    train, valid = (ImageArrays(*generate_shapes(count, [0, part])) for part, count in enumerate(NUM_SHAPES))
    return Dataset("shapes", train, valid, CLASS_NAMES, *channel_statistics(train.images))


def channel_statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation (1 if constant) of each channel of uint8 [N, 3, H, W] in [0, 1], exactly."""
    number, levels, counts = images[:, 0].size, np.arange(256), np.zeros((3, 256), np.int64)
    for part in np.array_split(images, 1 + images.size // LARGEST_PART):
        counts += [np.bincount(part[:, channel].reshape(-1), minlength=256) for channel in range(3)]
    sums = [(int(count @ levels), int(count @ levels**2)) for count in counts]  # exact below 2^63
    means = tuple(total / (number * 255) for total, _ in sums)
    deviations = (math.sqrt(number * squares - total**2) / (number * 255) for total, squares in sums)
    return means, tuple(deviation if deviation >= SMALLEST_DEVIATION else 1.0 for deviation in deviations)


def fingerprint(*splits: Split) -> str:
    """Return the SHA-256 of labels and images; it must be the same on all ranks and when a run resumes."""
    digest = hashlib.sha256()
    for split in splits:
        for part in (split.labels.tobytes(), *split.identity()):
            digest.update(part)
    return digest.hexdigest()


def hold_out(dataset: Dataset, number: int) -> Dataset:
    """Hold out `number` training images: they become the validation set, and the validation set becomes the test set.
    Mean and standard deviation still cover all training images. `ConfigError` if no image remains."""
    if not number:
        return dataset
    available = len(dataset.train.labels)
    if number >= available:
        raise ConfigError(f"holdout_images {number}: {dataset.name} has {available} training images; expected fewer")
    kept, held = stratified_split(dataset.train.labels, number)
    return replace(dataset, train=dataset.train.take(kept), valid=dataset.train.take(held), test=dataset.valid)


def stratified_split(labels: IntArray, number: int) -> tuple[IntArray, IntArray]:
    """Return (kept, held out), ascending indices of the samples with `labels` [N]. `number` are held out: the same
    fraction of each class, rounded, and random images within a class."""
    by_class = _sort_by_class(labels)
    # Place the k-th of a class's n images at (k + 1/2) / n: the first places have equal fractions of all classes.
    place = np.concatenate([(np.arange(size) + 0.5) / size for size in np.bincount(labels)])
    order = by_class[np.argsort(place, kind="stable")]
    return np.sort(order[number:]), np.sort(order[:number])


def spread_over_classes(labels: IntArray, number: int) -> IntArray:
    """Return ascending indices of `number` of the samples with `labels` [N]: every class has its fraction, rounded up
    or down, also if there are more classes than `number`."""
    return np.sort(_sort_by_class(labels)[(2 * np.arange(number) + 1) * len(labels) // (2 * number)])


def _sort_by_class(labels: IntArray) -> IntArray:
    """Return the indices of the samples, sorted by label, in random order within a class."""
    shuffled = np.random.Generator(np.random.Philox(key=HOLDOUT_SEED)).permutation(len(labels))
    return shuffled[np.argsort(labels[shuffled], kind="stable")]
