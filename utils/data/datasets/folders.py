"""Images in class folders: `imagefolder` for a dataset of one's own, and `imagenet`; and any images that a user names.

DATA_PATH/train/CLASS/*.jpg    DATA_PATH/val/CLASS/*.jpg
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import shorten

import numpy as np

from utils.data.datasets.dataset import Dataset, channel_statistics
from utils.data.datasets.image_files import EncodedImages, ImageFiles, describe_unreadable, image_sides, readable_name
from utils.data.sampling import IntArray
from utils.errors import DataError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
STATISTICS_IMAGES = 512  # training images, evenly spread, whose size, mean and deviation stand for all
SMALLEST_SIZE = 8  # pixels, of images that nobody chose the size of
IMAGENET_SIZE = 224
# of ImageNet's training images, the values that torchvision's published weights were trained with
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LAYOUT = "expected DATA_PATH/train/CLASS/IMAGE and DATA_PATH/val/CLASS/IMAGE"
INDEX_COMMAND = "python -m tools.prepare_data --shards DATA_PATH"  # where shards are, their index is missing


def open_folders(name: str, data_path: Path, image_size: int | None) -> Dataset:
    """The dataset `name`, "imagefolder" or "imagenet", in `data_path`; DataError where the folders are not as expected.

    `image_size` None: 224 for imagenet, else the median of the training images' shorter sides, of a sample of them.
    """
    folders = data_path / "train", data_path / "val"
    lacking = f"holds no class folders; {LAYOUT}, or shards and their index: {INDEX_COMMAND}"
    class_names, others = (_entries(folder, _is_class, lacking) for folder in folders)
    if differing := sorted({*class_names} ^ {*others}):
        raise DataError(f"{data_path}: train/ and val/ hold different classes, for example {differing[0]!r}; {LAYOUT}")
    lists = ((folder, *_list_files(folder, class_names)) for folder in folders)
    train, valid = (ImageFiles(labels, 0, 1.0, folder, names) for folder, names, labels in lists)
    return complete(name, tuple(class_names), train, valid, image_size)


def complete(
    name: str, class_names: tuple[str, ...], train: EncodedImages, valid: EncodedImages, image_size: int | None
) -> Dataset:
    """The dataset of two splits whose size and crop are not set yet, wherever their images lie; see `open_folders`."""
    notes = list[str]()
    size = image_size or (IMAGENET_SIZE if name == "imagenet" else None)
    if size is None:
        size, note = _median_side(train)
        notes.append(note)
    train, valid = (replace(split, size=size, centre_share=centre_share(name)) for split in (train, valid))
    mean, std = (IMAGENET_MEAN, IMAGENET_STD) if name == "imagenet" else _statistics(train)
    # names that are not UTF-8 would end whatever prints or draws them
    printable = tuple(map(readable_name, class_names))
    return Dataset(name, train, valid, printable, mean, std, notes=tuple(notes))


def centre_share(name: str) -> float:
    """The central square's share of the shorter side of the images of the dataset `name`: ImageNet's is the usual."""
    return 0.875 if name == "imagenet" else 1.0


def find_images(paths: Sequence[Path], class_names: Sequence[str], size: int, share: float) -> ImageFiles:
    """The images that a user names, as one split: files, folders of images, and folders of class folders. `share`: of
    the shorter side, for the central square.

    Labels are those of `class_names`, -1 for an image that is not in a class folder. `DataError` where a path is not
    there or holds no images, or a folder is not one of the classes.
    """
    found = [pair for path in paths for pair in _find_images(path, {name: i for i, name in enumerate(class_names)})]
    names = np.array([os.fsencode(name) for name, _ in found])
    return ImageFiles(np.array([label for _, label in found], np.int64), size, share, Path(), names)


def _find_images(path: Path, labels: Mapping[str, int]) -> list[tuple[str, int]]:
    """(name, label) of each image of one path."""
    if path.is_file():
        return [(str(path), -1)]
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        images = [(entry.path, -1) for entry in entries if _is_image(entry)]
        folders = [entry.name for entry in entries if _is_class(entry)]
        if images and folders:
            raise DataError(f"{path}: holds both images and folders, such as {folders[0]}; name one kind, as {path}/*/")
        if unknown := [readable_name(name) for name in folders if readable_name(name) not in labels]:
            raise DataError(
                f"{path}: {len(unknown)} of its {len(folders)} folders are no classes of this run: "
                f"{shorten(', '.join(unknown), 80)}\nits {len(labels)} classes are: {shorten(', '.join(labels), 160)}"
            )
        images += [
            (entry.path, labels[readable_name(name)])
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
    return entry.is_dir() and not entry.name.startswith(".")


def _is_image(entry: os.DirEntry[str]) -> bool:
    return entry.name.lower().endswith(EXTENSIONS)


def _entries(folder: Path, wanted: Callable[[os.DirEntry[str]], bool], lacking: str) -> list[str]:
    """The names in `folder` that are wanted, in order; an error that says what is `lacking` where there are none."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if wanted(entry))
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error.strerror}; {LAYOUT}") from None
    if not names:
        raise DataError(f"{folder}: {lacking}")
    return names


def _list_files(folder: Path, class_names: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Names relative to `folder`, bytes [N], and labels, int64 [N], in the order of the names."""
    lacking = f"class folder without images ({', '.join(EXTENSIONS)}); fill or remove it"
    files = [_entries(folder / class_name, _is_image, lacking) for class_name in class_names]
    pairs = zip(class_names, files, strict=True)
    names = [os.fsencode(os.path.join(class_name, name)) for class_name, listed in pairs for name in listed]
    return np.array(names), np.repeat(np.arange(len(class_names)), [len(listed) for listed in files])


def _sample(images: EncodedImages) -> IntArray:
    """Training images, evenly spread, the same on every rank."""
    return np.linspace(0, len(images.labels) - 1, min(STATISTICS_IMAGES, len(images.labels))).astype(np.int64)


def _median_side(images: EncodedImages) -> tuple[int, str]:
    """The median of the shorter sides of a sample, and a note for the log."""
    chosen = _sample(images)
    read = images.read_each(chosen, lambda content, _: min(image_sides(content)), replace=False)
    if not read.samples:
        raise DataError(
            f"no size can be taken: of {len(chosen)} training images {describe_unreadable(read.unreadable)}"
        )
    low, median, high = (int(np.quantile(read.samples, share, method="lower")) for share in (0, 0.5, 1))
    sides = f"the median of {len(read.samples)} training images' shorter sides, which are {low} to {high} pixels"
    if median < SMALLEST_SIZE:
        raise DataError(f"images of {median} pixels ({sides}) are too small to be meant; else set image_size")
    return median, f"image_size: {median}, {sides}"


def _statistics(images: EncodedImages) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of the training images, from a sample of them that is the same on every rank."""
    chosen = _sample(images)
    pixels = images.read(chosen, None, replace=False).images
    if not len(pixels):
        raise DataError(f"not one of {len(chosen)} images can be read, {images.path(0)} among them")
    mean, std = channel_statistics(pixels)
    return mean, tuple(max(value, 1e-6) for value in std)
