"""Training images that are held out to choose by, so that the test images are read once, when training is over."""

from dataclasses import replace

import numpy as np

from utils.data.datasets import Dataset
from utils.data.sampling import IntArray
from utils.errors import ConfigError

SEED = 0  # not the run's: runs with other seeds hold out the same images


def hold_out(dataset: Dataset, number: int) -> Dataset:
    """The dataset with `number` training images as its validation set, and its own validation set as test set.

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
    drawn = np.random.Generator(np.random.Philox(key=SEED)).permutation(len(labels))
    by_class = drawn[np.argsort(labels[drawn], kind="stable")]
    sizes = np.bincount(labels)
    sizes = sizes[sizes > 0]
    # the k-th of the n images of a class at (k + 1/2) / n: the first `number` of all take the same share of each class
    place = np.concatenate([(np.arange(size) + 0.5) / size for size in sizes])
    order = by_class[np.argsort(place, kind="stable")]
    return np.sort(order[number:]), np.sort(order[:number])
