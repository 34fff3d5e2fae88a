"""A user's own dataset, `dataset: package.module:function`: checks what the function returns (docs/own_code.md)."""

import os
from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from utils.data.config import DatasetConfig
from utils.data.datasets.dataset import STATISTICS, Dataset, ImageArrays, Split, channel_statistics
from utils.data.datasets.folders import build_from_files
from utils.data.datasets.image_files import ImageFiles, printable_name
from utils.errors import ConfigError, DataError
from utils.user_code import call, user_code_errors

NEEDED = ("train", "valid", "class_names")


def load_own(config: DatasetConfig) -> Dataset:
    """Call the user's function and return its data as a `Dataset`. `ConfigError` if there is no such function,
    `DataError` if it raises or returns unusable data."""
    what = f"dataset {config.dataset}"
    returned = call("dataset", config.dataset, DataError, data_path=Path(config.data_path))
    if not isinstance(returned, Mapping) or not {*NEEDED} <= {*returned} <= {*NEEDED, *STATISTICS}:
        found = list(returned) if isinstance(returned, Mapping) else returned
        expected = f"a dict with the keys {', '.join(NEEDED)} and optionally {', '.join(STATISTICS)}"
        raise DataError(f"{what}: returned {found!r:.60}; expected {expected}")
    with user_code_errors(what, DataError):
        return _build_dataset(what, config, returned)


def _build_dataset(what: str, config: DatasetConfig, returned: Mapping[str, Any]) -> Dataset:
    names, data_path = returned["class_names"], Path(config.data_path)
    if isinstance(names, str) or len(names) < 2 or not all(isinstance(name, str) for name in names):
        raise DataError(f"{what}: class_names is {names!r:.60}; expected at least two strings, one for each label")
    class_names = tuple(map(printable_name, names))
    train, valid = (_read_split(f"{what}, {name}", returned[name], len(names), data_path) for name in NEEDED[:2])
    if missing := sorted({*valid.labels.tolist()} - {*train.labels.tolist()}):
        found = f"class {class_names[missing[0]]!r} has validation images only"
        raise DataError(f"{what}: {found}; expected training images")
    given: dict[str, Any] = {name: _read_statistic(what, name, returned) for name in STATISTICS if name in returned}
    if isinstance(train, ImageFiles) and isinstance(valid, ImageFiles):
        return replace(build_from_files(config.dataset, class_names, train, valid, config.image_size), **given)
    if isinstance(train, ImageFiles) or isinstance(valid, ImageFiles) or train.image_shape != valid.image_shape:
        raise DataError(f"{what}: train and valid differ; expected paths twice, or arrays with one shape of images")
    if config.image_size is not None:
        raise ConfigError(f"image_size is {config.image_size}, for image files only; {what} returned arrays")
    if len(given) < len(STATISTICS):
        given = dict(zip(STATISTICS, channel_statistics(train.images), strict=True)) | given
    return Dataset(config.dataset, train, valid, class_names, **given)


def _read_split(what: str, pair: Any, num_classes: int, data_path: Path) -> Split:
    """Return the split of a pair: N images, as uint8 [N, 3, H, W] or as paths, and N labels."""
    if not isinstance(pair, list | tuple) or len(pair) != 2 or isinstance(pair[0], Set):
        raise DataError(f"{what}: is {pair!r:.60}; expected the pair (images, labels), both in an order")
    labels = np.asarray(pair[1])
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or not len(labels) or len(pair[0]) != len(labels):
        found = f"labels are {labels.dtype} {list(labels.shape)} for {len(pair[0])} images"
        raise DataError(f"{what}: {found}; expected one integer for each image")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= num_classes:
        raise DataError(f"{what}: labels range from {low} to {high}; class_names has {num_classes} names")
    labels = labels.astype(np.int64)
    if all(isinstance(path, str | os.PathLike) for path in pair[0]):
        paths, start = [*map(os.fsencode, pair[0])], os.fsencode(os.path.join(data_path, ""))
        if os.path.isabs(paths[0]) or not os.path.exists(start + paths[0]):  # relative, so that the folder can move
            paths = [path.removeprefix(start) for path in paths]
        return ImageFiles(labels, 0, 1.0, data_path, np.array(paths))
    images = np.asarray(pair[0])  # a memory map stays a memory map
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1] != 3 or not min(images.shape):
        found = f"images are {images.dtype} {list(images.shape)}"
        raise DataError(f"{what}: {found}; expected uint8 [N, 3, H, W], or paths of files")
    return ImageArrays(images if min(images.strides) >= 0 else images.copy(), labels)  # torch takes no [:, ::-1]


def _read_statistic(what: str, name: str, returned: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the three numbers of the "mean" or "std" among the values that the function returned."""
    array = np.asarray(returned[name])
    in_range = (array >= 0 if name == "mean" else array > 0) & (array <= 1)
    if array.shape == (3,) and array.dtype.kind in "fiu" and in_range.all():
        return tuple(array.astype(float).tolist())
    raise DataError(f"{what}, {name}: is {returned[name]!r:.60}; expected three numbers from 0 to 1, above 0 for std")
