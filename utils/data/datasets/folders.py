"""Images in class folders, `imagefolder` and `imagenet`, and images that a user names.

DATA_PATH/train/CLASS/*.jpg    DATA_PATH/val/CLASS/*.jpg
"""

import io
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import shorten

import numpy as np

from utils.data.datasets.dataset import Dataset, channel_statistics, match_classes, unicode_remark
from utils.data.datasets.image_files import ImageFiles, printable_name, spaced
from utils.errors import DataError
from utils.files import name_file_in_error
from utils.program import command

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
IMAGENET_SIZE = 224
# of ImageNet's training images, as for torchvision's published weights
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LAYOUT = "expected DATA_PATH/train/CLASS/IMAGE and DATA_PATH/val/CLASS/IMAGE"


def open_folders(name: str, data_path: Path, image_size: int | None) -> Dataset:
    """Return the dataset `name`, "imagefolder" or "imagenet", in `data_path`; `DataError` if its folders are wrong.
    `image_size` None: 224 for imagenet, else the median shorter side of a sample of training images."""
    (class_names, train), (others, valid) = (_list_split(data_path / split) for split in ("train", "val"))
    match_classes(f"{data_path / 'val'}", others, class_names, f"train/ has others; {LAYOUT}")  # both are sorted
    return build_from_files(name, tuple(class_names), train, valid, image_size)


def build_from_files(
    name: str, class_names: tuple[str, ...], train: ImageFiles, valid: ImageFiles, image_size: int | None
) -> Dataset:
    """Return the dataset of two splits, whose size and crop are set here; see `open_folders`."""
    size, notes = image_size or (IMAGENET_SIZE if name == "imagenet" else None), list[str]()
    sample = spaced(len(train.labels))  # the same on every rank
    if size is None:
        from PIL import Image

        read = train.read_each(sample, lambda content, _: min(Image.open(io.BytesIO(content)).size), replace=False)
        low, size, high = (int(np.quantile(read.check_any().samples, q, method="lower")) for q in (0, 0.5, 1))
        sides = f"the median of {len(read.samples)} training images' shorter sides, which are {low} to {high} pixels"
        notes.append(f"image_size: {size}, {sides}")
    train, valid = (replace(split, size=size, centre_fraction=centre_fraction(name)) for split in (train, valid))
    statistics: tuple[tuple[float, ...], tuple[float, ...]] = IMAGENET_MEAN, IMAGENET_STD
    if name != "imagenet":
        statistics = channel_statistics(train.read(sample, None, replace=False).check_any().samples)
    # printing or plotting a name that is not UTF-8 would fail
    return Dataset(name, train, valid, tuple(map(printable_name, class_names)), *statistics, notes=tuple(notes))


def centre_fraction(name: str) -> float:
    """Return the side of the central square as a fraction of the shorter side; ImageNet's is the usual one."""
    return 0.875 if name == "imagenet" else 1.0


def find_images(paths: Sequence[Path], class_names: Sequence[str], size: int, centre_fraction: float) -> ImageFiles:
    """Return the images of files, folders of images, and folders of class folders as one split. A label is the index in
    `class_names`, -1 outside of class folders. `DataError` for a path without images or a folder that is no class."""
    labels, found = {name: label for label, name in enumerate(class_names)}, list[tuple[str, int]]()
    for path in paths:
        if path.is_file():
            found.append((str(path), -1))
            continue
        folders, names = _entries(path, remedy="")
        if unknown := [name for name in map(printable_name, folders) if name not in labels]:
            named = f"{shorten(', '.join(unknown), 80)}{unicode_remark(unknown, class_names)}"
            classes = shorten(", ".join(labels), 160)
            raise DataError(f"{path}: folders that are no classes of this run: {named}\nits classes are: {classes}")
        images = [(os.path.join(path, name), -1) for name in names]
        for name in folders:
            images += [(image, labels[printable_name(name)]) for image in _list_images(os.path.join(path, name))]
        if not images or (names and folders):
            kinds = f"no images ({', '.join(EXTENSIONS)}), or both images and folders"
            raise DataError(f"{path}: holds {kinds}; expected one kind")
        found += images
    files = np.array([os.fsencode(name) for name, _ in found])
    return ImageFiles(np.array([label for _, label in found], np.int64), size, centre_fraction, Path(), files)


def _entries(folder: Path, remedy: str = f"; {LAYOUT}") -> tuple[list[str], list[str]]:
    """Return the sorted names of the folders that are not hidden, and of the images; `DataError` if unreadable."""
    with name_file_in_error(folder, "cannot be read", remedy, DataError):
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    folders = [entry.name for entry in entries if os.path.isdir(entry) and not entry.name.startswith(".")]
    images = [entry for entry in entries if entry.name.lower().endswith(EXTENSIONS) and not os.path.isdir(entry)]
    return folders, [entry.name for entry in images]


def _list_images(folder: str) -> list[str]:
    """Return the images in a folder and in the folders within it, in the order of ImageFolder. Raises `DataError` for a
    link that leads back, whose images would be listed again, perhaps with another label."""

    def fail(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}; check its permissions") from None

    images = list[str]()
    for parent, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        place, *above = [os.path.realpath(one) for one in (Path(parent), *Path(parent).parents)]
        if any(Path(one).is_relative_to(place) for one in above):
            raise DataError(f"{parent}: links back to {place}; remove the link")
        folders[:] = [name for name in folders if not name.startswith(".")]
        images += [os.path.join(parent, name) for name in files if name.lower().endswith(EXTENSIONS)]
    return sorted(images, key=os.path.split)


def _list_split(folder: Path) -> tuple[list[str], ImageFiles]:
    """Return the sorted class names, and their images in the order of the names; `DataError` if there are none."""
    class_names, _ = _entries(folder)
    if not class_names:
        indexed = f"shards and their index: {command('prepare_data')} --shards DATA_PATH"
        raise DataError(f"{folder}: holds no class folders; {LAYOUT}, or {indexed}")
    names, labels = list[bytes](), list[int]()
    for label, name in enumerate(class_names):
        images = _list_images(os.path.join(folder, name))
        if not images:
            what = f"class folder without images ({', '.join(EXTENSIONS)})"
            raise DataError(f"{folder / name}: {what}; fill or remove it")
        names += [os.fsencode(image[len(os.path.join(folder, "")) :]) for image in images]
        labels += [label] * len(images)
    return class_names, ImageFiles(np.array(labels, np.int64), 0, 1.0, folder, np.array(names))
