"""Images in class folders, `imagefolder` and `imagenet`, and images that a user names.

DATA_PATH/train/CLASS/*.jpg    DATA_PATH/val/CLASS/*.jpg
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from textwrap import shorten

import numpy as np

from utils.data.datasets.dataset import Dataset, channel_statistics
from utils.data.datasets.image_files import EncodedImages, ImageFiles, describe_unreadable, image_sides, printable_name
from utils.data.sampling import IntArray
from utils.errors import DataError
from utils.files import name_file_in_error
from utils.program import command

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
STATISTICS_IMAGES = 512  # evenly spaced training images, for size, mean and standard deviation
SMALLEST_SIZE = 8  # pixels, if image_size is not set
IMAGENET_SIZE = 224
# of ImageNet's training images, as for torchvision's published weights
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LAYOUT = "expected DATA_PATH/train/CLASS/IMAGE and DATA_PATH/val/CLASS/IMAGE"
INDEX_COMMAND = f"{command('prepare_data')} --shards DATA_PATH"  # for shards without an index


def open_folders(name: str, data_path: Path, image_size: int | None) -> Dataset:
    """Return the dataset `name`, "imagefolder" or "imagenet", in `data_path`; `DataError` if its folders are wrong.

    `image_size` None: 224 for imagenet, else the median shorter side of a sample of training images.
    """
    folders = data_path / "train", data_path / "val"
    class_names, others = (_list_classes(folder) for folder in folders)
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
    entries = _scan(path)
    folders = [entry.name for entry in entries if _is_folder(entry)]
    images = [(entry.path, -1) for entry in entries if _is_image(entry) and entry.name not in folders]
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
        (image, labels[printable_name(name)]) for name in folders for image in _list_images(os.path.join(path, name))
    ]
    if not images:
        raise DataError(f"{path}: holds no images ({', '.join(EXTENSIONS)}); expected images or class folders")
    return images


def _scan(folder: str | Path, remedy: str = "name a folder that can be read") -> list[os.DirEntry[str]]:
    """Return the entries of a folder, sorted by name; `DataError` if it cannot be read."""
    with name_file_in_error(folder, "cannot be read", f"; {remedy}", DataError):
        return sorted(os.scandir(folder), key=lambda entry: entry.name)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether this is a folder, or a link to one, that is not hidden."""
    with suppress(OSError):  # a link to itself
        return entry.is_dir() and not entry.name.startswith(".")
    return False


def _is_image(entry: os.DirEntry[str]) -> bool:
    return entry.name.lower().endswith(EXTENSIONS)


def _list_classes(folder: Path) -> list[str]:
    """Return the sorted names of the class folders; `DataError` if there are none."""
    names = [entry.name for entry in _scan(folder, LAYOUT) if _is_folder(entry)]
    if not names:
        raise DataError(f"{folder}: holds no class folders; {LAYOUT}, or shards and their index: {INDEX_COMMAND}")
    return names


def _list_images(folder: str, outer: tuple[str, ...] = ()) -> list[str]:
    """Return the images in a folder and in the folders within it, in the order of ImageFolder.

    A link back to one of the folders `outer` counts as an image, so that it is reported as unreadable."""
    path, images = os.path.realpath(folder), list[str]()
    if not outer:  # the class folder may be a link
        above = Path(os.path.realpath(os.path.dirname(folder)))
        outer = tuple(map(str, (above, *above.parents, *Path(path).parents)))
    if path in outer:
        return [folder]
    for entry in _scan(folder):
        if _is_folder(entry):
            images += _list_images(entry.path, (*outer, path))
        elif _is_image(entry):
            images.append(entry.path)
    return sorted(images, key=os.path.split)


def _list_files(folder: Path, class_names: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return names relative to `folder`, bytes [N], and labels, int64 [N], in the order of the names."""
    files = {name: _list_images(os.path.join(folder, name)) for name in class_names}
    if empty := [name for name, images in files.items() if not images]:
        raise DataError(
            f"{folder / empty[0]}: class folder without images ({', '.join(EXTENSIONS)}); fill or remove it"
        )
    names = [os.fsencode(image[len(os.path.join(folder, "")) :]) for images in files.values() for image in images]
    return np.array(names), np.repeat(np.arange(len(files)), [len(images) for images in files.values()])


def _sample(images: EncodedImages) -> IntArray:
    """Return evenly spaced training images, the same on every rank."""
    return np.linspace(0, len(images.labels) - 1, min(STATISTICS_IMAGES, len(images.labels))).astype(np.int64)


def _median_side(images: EncodedImages) -> tuple[int, str]:
    """Return the median shorter side of a sample, and a note for the log."""
    chosen = _sample(images)
    read = images.read_each(chosen, lambda content, _: min(image_sides(content)), replace=False)
    if not read.samples:
        raise DataError(
            f"not one of {len(chosen)} images can be read to find image_size: {describe_unreadable(read.unreadable)}"
        )
    low, median, high = (int(np.quantile(read.samples, q, method="lower")) for q in (0, 0.5, 1))
    sides = f"the median of {len(read.samples)} training images' shorter sides, which are {low} to {high} pixels"
    if median < SMALLEST_SIZE:
        raise DataError(f"images of {median} pixels ({sides}) are suspiciously small; if intended, set image_size")
    return median, f"image_size: {median}, {sides}"


def _statistics(images: EncodedImages) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of a sample of the training images, the same on every rank."""
    chosen = _sample(images)
    pixels = images.read(chosen, None, replace=False).samples
    if not len(pixels):
        raise DataError(f"not one of {len(chosen)} images can be read, for example {images.path(0)}")
    mean, std = channel_statistics(pixels)
    return mean, tuple(max(value, 1e-6) for value in std)
