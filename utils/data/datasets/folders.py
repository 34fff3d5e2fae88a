"""Images in class folders, `imagefolder` and `imagenet`, and images that a user names.

DATA_PATH/train/CLASS/*.jpg    DATA_PATH/val/CLASS/*.jpg
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from textwrap import shorten

import numpy as np

from utils.data.datasets.dataset import Dataset, channel_statistics
from utils.data.datasets.image_files import EncodedImages, ImageFiles, describe_unreadable, image_sides, printable_name
from utils.data.sampling import IntArray
from utils.errors import DataError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
STATISTICS_IMAGES = 512  # evenly spaced training images, for size, mean and standard deviation
SMALLEST_SIZE = 8  # pixels, if image_size is not set
IMAGENET_SIZE = 224
# of ImageNet's training images, as for torchvision's published weights
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LAYOUT = "expected DATA_PATH/train/CLASS/IMAGE and DATA_PATH/val/CLASS/IMAGE"
INDEX_COMMAND = "python -m tools.prepare_data --shards DATA_PATH"  # for shards without an index


def open_folders(name: str, data_path: Path, image_size: int | None) -> Dataset:
    """Return the dataset `name`, "imagefolder" or "imagenet", in `data_path`; `DataError` if its folders are wrong.

    `image_size` None: 224 for imagenet, else the median shorter side of a sample of training images.
    """
    folders = data_path / "train", data_path / "val"
    lacking = f"holds no class folders; {LAYOUT}, or shards and their index: {INDEX_COMMAND}"
    class_names, others = (_list_entries(folder, _is_class, lacking) for folder in folders)
    if differing := sorted({*class_names} ^ {*others}):
        raise DataError(f"{data_path}: train/ and val/ hold different classes, for example {differing[0]!r}; {LAYOUT}")
    lists = ((folder, *_list_files(folder, class_names)) for folder in folders)
    train, valid = (ImageFiles(labels, 0, 1.0, folder, names) for folder, names, labels in lists)
    return build_from_files(name, tuple(class_names), train, valid, image_size)


def build_from_files(
    name: str, class_names: tuple[str, ...], train: EncodedImages, valid: EncodedImages, image_size: int | None
) -> Dataset:
    """Return the dataset of two splits, whose size and crop are set here; see `open_folders`."""
    notes = list[str]()
    size = image_size or (IMAGENET_SIZE if name == "imagenet" else None)
    if size is None:
        size, note = _median_side(train)
        notes.append(note)
    train, valid = (replace(split, size=size, centre_fraction=centre_fraction(name)) for split in (train, valid))
    mean, std = (IMAGENET_MEAN, IMAGENET_STD) if name == "imagenet" else _statistics(train)
    # printing or plotting a name that is not UTF-8 would fail
    printable = tuple(map(printable_name, class_names))
    return Dataset(name, train, valid, printable, mean, std, notes=tuple(notes))


def centre_fraction(name: str) -> float:
    """Return the side of the central square as a fraction of the shorter side; ImageNet's is the usual one."""
    return 0.875 if name == "imagenet" else 1.0


def find_images(paths: Sequence[Path], class_names: Sequence[str], size: int, centre_fraction: float) -> ImageFiles:
    """Return the images of files, folders of images, and folders of class folders as one split.

    A label is the index in `class_names`, -1 for an image outside of class folders. `DataError` if a path does not
    exist or holds no images, or a folder is no class.
    """
    found = [pair for path in paths for pair in _find_images(path, {name: i for i, name in enumerate(class_names)})]
    names = np.array([os.fsencode(name) for name, _ in found])
    return ImageFiles(np.array([label for _, label in found], np.int64), size, centre_fraction, Path(), names)


def _find_images(path: Path, labels: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return (name, label) of each image of one path."""
    if path.is_file():
        return [(str(path), -1)]
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        images = [(entry.path, -1) for entry in entries if _is_image(entry)]
        folders = [entry.name for entry in entries if _is_class(entry)]
        if images and folders:
            raise DataError(
                f"{path}: holds both images and folders, such as {folders[0]}; name one kind, for example {path}/*/"
            )
        if unknown := [printable_name(name) for name in folders if printable_name(name) not in labels]:
            raise DataError(
                f"{path}: {len(unknown)} of its {len(folders)} folders are no classes of this run: "
                f"{shorten(', '.join(unknown), 80)}\nits {len(labels)} classes are: {shorten(', '.join(labels), 160)}"
            )
        images += [
            (entry.path, labels[printable_name(name)])
            for name in folders
            for entry in sorted(os.scandir(path / name), key=lambda entry: entry.name)
            if _is_image(entry)
        ]
    except OSError as error:
        raise DataError(f"{error.filename or path}: cannot be read: {error.strerror}") from None
    if not images:
        raise DataError(f"{path}: holds no images ({', '.join(EXTENSIONS)}), nor folders of classes with images")
    return images


def _is_class(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):  # a link to itself
        return entry.is_dir() and not entry.name.startswith(".")
    return False


def _is_image(entry: os.DirEntry[str]) -> bool:
    return entry.name.lower().endswith(EXTENSIONS)


def _list_entries(folder: Path, wanted: Callable[[os.DirEntry[str]], bool], lacking: str) -> list[str]:
    """Return the sorted names of the wanted entries in `folder`; `DataError` with text `lacking` if there are none."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if wanted(entry))
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error.strerror}; {LAYOUT}") from None
    if not names:
        raise DataError(f"{folder}: {lacking}")
    return names


def _list_files(folder: Path, class_names: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return names relative to `folder`, bytes [N], and labels, int64 [N], in the order of the names."""
    lacking = f"class folder without images ({', '.join(EXTENSIONS)}); fill or remove it"
    files = [_list_entries(folder / class_name, _is_image, lacking) for class_name in class_names]
    pairs = zip(class_names, files, strict=True)
    names = [os.fsencode(os.path.join(class_name, name)) for class_name, listed in pairs for name in listed]
    return np.array(names), np.repeat(np.arange(len(class_names)), [len(listed) for listed in files])


def _sample(images: EncodedImages) -> IntArray:
    """Return evenly spaced training images, the same on every rank."""
    return np.linspace(0, len(images.labels) - 1, min(STATISTICS_IMAGES, len(images.labels))).astype(np.int64)


def _median_side(images: EncodedImages) -> tuple[int, str]:
    """Return the median shorter side of a sample, and a note for the log."""
    chosen = _sample(images)
    read = images.read_each(chosen, lambda content, _: min(image_sides(content)), replace=False)
    if not read.samples:
        raise DataError(
            f"image_size cannot be computed: of {len(chosen)} training images {describe_unreadable(read.unreadable)}"
        )
    low, median, high = (int(np.quantile(read.samples, q, method="lower")) for q in (0, 0.5, 1))
    sides = f"the median of {len(read.samples)} training images' shorter sides, which are {low} to {high} pixels"
    if median < SMALLEST_SIZE:
        raise DataError(f"images of {median} pixels ({sides}) are suspiciously small; if intended, set image_size")
    return median, f"image_size: {median}, {sides}"


def _statistics(images: EncodedImages) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of a sample of the training images, the same on every rank."""
    chosen = _sample(images)
    pixels = images.read(chosen, None, replace=False).images
    if not len(pixels):
        raise DataError(f"not one of {len(chosen)} images can be read, for example {images.path(0)}")
    mean, std = channel_statistics(pixels)
    return mean, tuple(max(value, 1e-6) for value in std)
