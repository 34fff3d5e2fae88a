"""What a dataset is to the rest of the code, and `load_dataset()`, which finds or makes one by name."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from utils.data.datasets.cifar import VERSIONS, read_cifar
from utils.data.datasets.image_files import DecodedImages, EncodedImages
from utils.data.datasets.shapes import CLASS_NAMES, draw_shapes
from utils.data.sampling import IntArray
from utils.errors import ConfigError

NUM_SHAPES_TRAIN, NUM_SHAPES_VALID = 10_000, 2_000
HOLDOUT_SEED = 0  # not the run's: runs with other seeds hold out the same images


@dataclass(frozen=True)
class ImageArrays:
    """One split. The images may be a read-only memory map with strides."""

    images: np.ndarray  # uint8 [N, 3, H, W]
    labels: np.ndarray  # int64 [N]

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        return self.images.shape[1], self.images.shape[2], self.images.shape[3]

    def take(self, indices: IntArray) -> "ImageArrays":
        """The split of these samples alone, a copy."""
        return ImageArrays(self.images[indices], self.labels[indices])

    def read(self, indices: IntArray, crops: None, *, replace: bool) -> DecodedImages:
        """The samples `indices`; the rest is for `EncodedImages`, which share this interface."""
        return DecodedImages(self.images[indices], indices, {})


Split = ImageArrays | EncodedImages


@dataclass(frozen=True)
class Dataset:
    name: str
    train: Split
    valid: Split
    class_names: tuple[str, ...]
    mean: tuple[float, ...]  # per channel of the training images in [0, 1]
    std: tuple[float, ...]
    test: Split | None = None  # only where training images are held out for validation
    fingerprint: str | None = None  # of the user's own data, which no name stands for
    notes: tuple[str, ...] = ()  # what the reader of the log should know

    def describe(self) -> dict[str, Any]:
        """As plain values, what a network learns from it; "shape" is (channels, height, width)."""
        return {
            "train_images": len(self.train.labels),
            "class_names": list(self.class_names),
            "shape": self.train.image_shape,
            "mean": self.mean,
            "std": self.std,
            **({} if self.fingerprint is None else {"fingerprint": self.fingerprint}),
        }


def load_dataset(name: str, data_path: Path, *, download: bool, seed: int = 0) -> Dataset:
    """The dataset `name`: "cifar100" or "cifar10" from `data_path`, or "shapes", which needs no file, drawn by `seed`.

    CIFAR is read from the binary version's folder or, without it, from torchvision's, which is downloaded only where
    `download` says so. Among the processes of one job let one download and the others wait; unrelated processes may
    call at the same time. Raises DataError where the files are missing or damaged.
    """
    if name == "shapes":
        return _draw_shapes_dataset(seed)
    if name not in VERSIONS:
        raise ConfigError(f"dataset={name!r} is not known; allowed: {', '.join(sorted(VERSIONS))}, shapes")
    version = VERSIONS[name]
    train, valid = (ImageArrays(*arrays) for arrays in read_cifar(version, data_path, download=download))
    return Dataset(name, train, valid, version.class_names, version.mean, version.std)


def _draw_shapes_dataset(seed: int) -> Dataset:
    train = ImageArrays(*draw_shapes(NUM_SHAPES_TRAIN, [seed, 0]))
    valid = ImageArrays(*draw_shapes(NUM_SHAPES_VALID, [seed, 1]))
    mean, std = channel_statistics(train.images)
    return Dataset("shapes", train, valid, CLASS_NAMES, mean, std)


def channel_statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel in [0, 1], from exact counts. images: uint8 [N, 3, H, W]."""
    number, levels = images[:, 0].size, np.arange(256)
    counts = [np.bincount(images[:, channel].reshape(-1), minlength=256) for channel in range(3)]
    sums = [(int(count @ levels), int(count @ levels**2)) for count in counts]  # exact below 2^63
    means = tuple(total / (number * 255) for total, _ in sums)
    return means, tuple(math.sqrt(number * squares - total**2) / (number * 255) for total, squares in sums)


def hold_out(dataset: Dataset, number: int) -> Dataset:
    """The dataset with `number` training images as its validation set, and its own validation set as test set, which
    then is read once, when training is over.

    Mean and standard deviation stay those of all training images. `ConfigError` where too few are left."""
    if not number:
        return dataset
    available = len(dataset.train.labels)
    if number >= available:
        raise ConfigError(f"holdout_images {number}: {dataset.name} has {available} training images; expected fewer")
    kept, held = divide(dataset.train.labels, number)
    return replace(dataset, train=dataset.train.take(kept), valid=dataset.train.take(held), test=dataset.valid)


def divide(labels: IntArray, number: int) -> tuple[IntArray, IntArray]:
    """(kept, held out): the indices of the samples with `labels` [N], ascending. Of each class its share of `number`,
    to the next whole image, and within a class by chance."""
    drawn = np.random.Generator(np.random.Philox(key=HOLDOUT_SEED)).permutation(len(labels))
    by_class = drawn[np.argsort(labels[drawn], kind="stable")]
    sizes = np.bincount(labels)
    sizes = sizes[sizes > 0]
    # the k-th of the n images of a class at (k + 1/2) / n: the first `number` of all take the same share of each class
    place = np.concatenate([(np.arange(size) + 0.5) / size for size in sizes])
    order = by_class[np.argsort(place, kind="stable")]
    return np.sort(order[number:]), np.sort(order[:number])
