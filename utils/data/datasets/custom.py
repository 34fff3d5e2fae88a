"""A user's own dataset, `dataset: package.module:function`: checks what the function returns (docs/own_code.md)."""

import hashlib
import math
import os
from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from utils.data.config import DatasetConfig
from utils.data.datasets.dataset import Dataset, ImageArrays, Split, channel_statistics
from utils.data.datasets.folders import build_from_files
from utils.data.datasets.image_files import ImageFiles, printable_name
from utils.errors import ConfigError, DataError
from utils.user_code import call

NEEDED, OPTIONAL = ("train", "valid", "class_names"), ("mean", "std")
SAMPLED_IMAGES = 512  # of each split, evenly spaced, in the fingerprint


def load_own(config: DatasetConfig) -> Dataset:
    """Call the user's function and return its data as a `Dataset`. `ConfigError` if there is no such function,
    `DataError` if it raises or returns unusable data."""
    what, data_path = f"dataset {config.dataset}", Path(config.data_path)
    returned = call("dataset", config.dataset, DataError, data_path=data_path)
    if not isinstance(returned, Mapping) or not {*NEEDED} <= {*returned} <= {*NEEDED, *OPTIONAL}:
        is_dict = isinstance(returned, Mapping)
        found = f"the keys {', '.join(map(str, returned))}" if is_dict else f"a value {_of_type(returned)}"
        raise DataError(
            f"{what}: returned {found}\n"
            f"expected a dict with the keys {', '.join(NEEDED)} and optionally {' and '.join(OPTIONAL)}"
        )
    class_names = _read_class_names(what, returned["class_names"])
    train, valid = (
        _read_split(f"{what}, {name}", returned[name], len(class_names), data_path) for name in ("train", "valid")
    )
    dataset = _build_dataset(what, config, class_names, train, valid)
    mean, std = (
        _read_per_channel(what, name, returned[name]) if name in returned else getattr(dataset, name)
        for name in OPTIONAL
    )
    return replace(dataset, mean=mean, std=std, fingerprint=_fingerprint(train, valid))


def _build_dataset(
    what: str, config: DatasetConfig, class_names: tuple[str, ...], train: Split, valid: Split
) -> Dataset:
    if isinstance(train, ImageFiles) and isinstance(valid, ImageFiles):
        return build_from_files(config.dataset, class_names, train, valid, config.image_size)
    if not isinstance(train, ImageArrays) or not isinstance(valid, ImageArrays):
        raise DataError(f"{what}: train and valid are of two kinds; they must both be arrays, or both paths of files")
    if train.image_shape != valid.image_shape:
        raise DataError(f"{what}: train has images {train.image_shape}, valid {valid.image_shape}; expected one shape")
    if config.image_size is not None:
        raise ConfigError(
            f"image_size is {config.image_size}, which applies to image files only; {what} returned arrays, so use null"
        )
    mean, std = channel_statistics(train.images)
    return Dataset(config.dataset, train, valid, class_names, mean, tuple(max(value, 1e-6) for value in std))


def _read_class_names(what: str, names: Any) -> tuple[str, ...]:
    are_strings = isinstance(names, list | tuple | np.ndarray) and all(isinstance(name, str) for name in names)
    if not are_strings or len(names) < 2:
        raise DataError(f"{what}: class_names is {_of_type(names)}; expected at least two strings, one for each label")
    return tuple(map(printable_name, names))


def _read_split(what: str, pair: Any, num_classes: int, data_path: Path) -> Split:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise DataError(f"{what}: is {_of_type(pair)}; expected the pair (images, labels)")
    images, labels = pair
    if isinstance(images, Mapping | Set) or not _has_length(images) or not _has_length(labels):
        raise DataError(f"{what}: images are {_of_type(images)}, labels {_of_type(labels)}; expected arrays [N, ...]")
    if not len(images) or len(images) != len(labels):
        raise DataError(f"{what}: {len(images)} images and {len(labels)} labels; expected equal numbers, at least one")
    checked = _read_labels(what, labels, num_classes)
    if isinstance(next(iter(images)), str | os.PathLike):
        if wrong := [path for path in images if not isinstance(path, str | os.PathLike)]:
            raise DataError(
                f"{what}: the paths of the images include a value {_of_type(wrong[0])}; expected paths only"
            )
        names = np.array([os.fsencode(path) for path in images])
        return ImageFiles(checked, 0, 1.0, data_path, names)
    return ImageArrays(_read_images(what, images), checked)


def _read_labels(what: str, labels: Any, num_classes: int) -> np.ndarray:
    """Return int64 [N]."""
    array = _as_array(f"{what}: labels", labels)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(f"{what}: labels are {array.dtype} {list(array.shape)}; expected integers [N]")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= num_classes:
        raise DataError(
            f"{what}: labels range from {low} to {high}; class_names has {num_classes} names, so expected 0 to "
            f"{num_classes - 1}"
        )
    return array.astype(np.int64)


def _read_images(what: str, images: Any) -> np.ndarray:
    """Return uint8 [N, 3, H, W]; a memory map stays a memory map."""
    array = _as_array(f"{what}: images", images)
    if array.dtype == np.uint8 and array.ndim == 4 and array.shape[1] == 3 and min(array.shape):
        return array if min(array.strides) >= 0 else array.copy()  # torch.from_numpy takes no view such as [:, ::-1]
    remedy = ""
    if array.ndim == 4 and array.shape[3] == 3:
        remedy = "; use images.transpose(0, 3, 1, 2)"
    elif array.ndim == 4 and array.shape[1] == 1:
        remedy = "; use images.repeat(3, axis=1) to make three channels of grey"
    elif array.dtype.kind == "f":
        remedy = "; for values in [0, 1], use (255 * images).round().astype(numpy.uint8)"
    raise DataError(f"{what}: images are {array.dtype} {list(array.shape)}; expected uint8 [N, 3, H, W]{remedy}")


def _as_array(what: str, values: Any) -> np.ndarray:
    try:
        return np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:  # RuntimeError: a tensor that needs a gradient
        raise DataError(f"{what}: expected an array or numbers in lists: {' '.join(str(error).split())}") from None


def _read_per_channel(what: str, name: str, values: Any) -> tuple[float, ...]:
    """`name` is "mean" or "std"."""
    array = _as_array(f"{what}, {name}", values)
    if array.shape == (3,) and array.dtype.kind in "fiu":
        numbers = tuple(float(value) for value in array)
        if all(math.isfinite(value) and 0 <= value <= 1 for value in numbers) and (min(numbers) or name == "mean"):
            return numbers
    raise DataError(f"{what}, {name}: is {values!r:.60}; expected three numbers from 0 to 1, above 0 for std")


def _has_length(values: Any) -> bool:
    return hasattr(values, "__len__") and getattr(values, "ndim", 1) > 0  # an array of no dimension has no length


def _of_type(value: Any) -> str:
    return f"of type {type(value).__name__}"


def _fingerprint(*splits: Split) -> str:
    """Return the SHA-256 of all labels, and of the files' names or evenly spaced images. It ensures that a run resumes
    with the same data, and that all ranks have the same data."""
    digest = hashlib.sha256()
    for split in splits:
        digest.update(split.labels.tobytes())
        if isinstance(split, ImageArrays):
            count = len(split.labels)
            chosen = np.linspace(0, count - 1, min(SAMPLED_IMAGES, count)).astype(np.int64)
            digest.update(np.ascontiguousarray(split.images[chosen]).tobytes())
        elif isinstance(split, ImageFiles):
            digest.update(b"\0".join(split.names.tolist()))
    return digest.hexdigest()
