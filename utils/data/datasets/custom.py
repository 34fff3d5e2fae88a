"""A user's own dataset, `dataset: package.module:function`: checks what the function returns (docs/own_code.md)."""

import os
from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from utils.data.config import DatasetConfig
from utils.data.datasets.dataset import Dataset, ImageArrays, Split, channel_statistics, fingerprint
from utils.data.datasets.folders import build_from_files
from utils.data.datasets.image_files import ImageFiles, printable_name
from utils.errors import ConfigError, DataError
from utils.user_code import call, user_code_errors

NEEDED, OPTIONAL = ("train", "valid", "class_names"), ("mean", "std")


def load_own(config: DatasetConfig) -> Dataset:
    """Call the user's function and return its data as a `Dataset`. `ConfigError` if there is no such function,
    `DataError` if it raises or returns unusable data."""
    what = f"dataset {config.dataset}"
    returned = call("dataset", config.dataset, DataError, data_path=Path(config.data_path))
    if not isinstance(returned, Mapping) or not {*NEEDED} <= {*returned} <= {*NEEDED, *OPTIONAL}:
        raise DataError(
            f"{what}: returned {list(returned) if isinstance(returned, Mapping) else returned!r:.60}; "
            f"expected a dict with the keys {', '.join(NEEDED)} and optionally {', '.join(OPTIONAL)}"
        )
    with user_code_errors(what, DataError):
        return _build_dataset(what, config, returned)


def _build_dataset(what: str, config: DatasetConfig, returned: Mapping[str, Any]) -> Dataset:
    names, data_path = returned["class_names"], Path(config.data_path)
    if isinstance(names, str) or len(names) < 2 or not all(isinstance(name, str) for name in names):
        raise DataError(f"{what}: class_names is {names!r:.60}; expected at least two strings, one for each label")
    class_names = tuple(map(printable_name, names))
    train, valid = (
        _read_split(f"{what}, {name}", returned[name], len(class_names), data_path) for name in ("train", "valid")
    )
    if isinstance(train, ImageFiles) and isinstance(valid, ImageFiles):
        dataset = build_from_files(config.dataset, class_names, train, valid, config.image_size)
    elif isinstance(train, ImageArrays) and isinstance(valid, ImageArrays) and train.image_shape == valid.image_shape:
        if config.image_size is not None:
            raise ConfigError(f"image_size is {config.image_size}, for image files only; {what} returned arrays")
        mean, std = channel_statistics(train.images)
        dataset = Dataset(config.dataset, train, valid, class_names, mean, std)
    else:
        raise DataError(
            f"{what}: train and valid differ; expected paths of files twice, or arrays with one shape of images"
        )
    given = {name: _read_per_channel(f"{what}, {name}", returned[name]) for name in OPTIONAL if name in returned}
    return replace(dataset, fingerprint=fingerprint(train, valid), **given)  # type: ignore[arg-type]


def _read_split(what: str, pair: Any, num_classes: int, data_path: Path) -> Split:
    """Return the split of a pair: N images, as uint8 [N, 3, H, W] or as paths, and N labels."""
    if not isinstance(pair, list | tuple) or len(pair) != 2 or isinstance(pair[0], Set):
        raise DataError(f"{what}: is {pair!r:.60}; expected the pair (images, labels), both in an order")
    labels = _as_array(f"{what}, labels", pair[1])
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or not len(labels) or len(pair[0]) != len(labels):
        found = f"labels are {labels.dtype} {list(labels.shape)} for {len(pair[0])} images"
        raise DataError(f"{what}: {found}; expected one integer for each image")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= num_classes:
        raise DataError(f"{what}: labels range from {low} to {high}; class_names has {num_classes} names")
    labels = labels.astype(np.int64)
    if all(isinstance(path, str | os.PathLike) for path in pair[0]):
        return ImageFiles(labels, 0, 1.0, data_path, np.array([os.fsencode(path) for path in pair[0]]))
    images = _as_array(f"{what}, images", pair[0])  # a memory map stays a memory map
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1] != 3 or not min(images.shape):
        raise DataError(
            f"{what}: images are {images.dtype} {list(images.shape)}; expected uint8 [N, 3, H, W], or paths of files"
        )
    return ImageArrays(images if min(images.strides) >= 0 else images.copy(), labels)  # torch takes no [:, ::-1]


def _as_array(what: str, values: Any) -> np.ndarray:
    try:
        return np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:  # RuntimeError: a tensor that needs a gradient
        raise DataError(f"{what}: expected an array or numbers in lists: {' '.join(str(error).split())}") from None


def _read_per_channel(what: str, values: Any) -> tuple[float, ...]:
    """Return the three numbers of the mean or standard deviation, as the end of `what` says."""
    array = np.asarray(values)
    in_range = (array >= 0 if what.endswith("mean") else array > 0) & (array <= 1)
    if array.shape == (3,) and array.dtype.kind in "fiu" and in_range.all():
        return tuple(array.astype(float).tolist())
    raise DataError(f"{what}: is {values!r:.60}; expected three numbers from 0 to 1, above 0 for std")
