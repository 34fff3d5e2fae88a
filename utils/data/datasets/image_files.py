"""Splits whose images stay encoded on disk until they are needed, as an alternative to `ImageArrays`.

`EncodedImages` is the base class; `ImageFiles` has one file per image.
"""

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from utils.data.sampling import IntArray, resized_crop_box
from utils.errors import ExpectedError
from utils.files import open_regular

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class ReadSamples:
    """The results of decoding samples, the indices of the samples, and the unreadable files."""

    samples: Any  # uint8 [N, 3, S, S], or N results of another function
    indices: IntArray
    unreadable: dict[str, str]  # file: reason


@dataclass(frozen=True)
class EncodedImages(ABC):
    """One split: images that are decoded on demand to squares of `size` pixels."""

    labels: np.ndarray  # int64 [N]
    size: int
    centre_fraction: float  # of the shorter side, which the central square keeps

    @abstractmethod
    def path(self, index: int) -> str:
        """Return the sample's name for messages."""

    @abstractmethod
    def content(self, index: int) -> bytes:
        """Return the sample's encoded bytes. `OSError` if they cannot be read."""

    @abstractmethod
    def take(self, indices: IntArray) -> "EncodedImages":
        """Return a split of these samples."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return 3, self.size, self.size

    def read(self, indices: IntArray, crops: np.ndarray | None, *, replace: bool) -> ReadSamples:
        """Decode the samples `indices`: their central squares, or random crops with `crops` (`Augmentation.crop`); see
        `read_each`."""
        from torchvision.transforms import functional

        def decode(content: bytes, row: int) -> np.ndarray:
            image = decode_image(content)
            if crops is None:
                return cut_centre(image, self.size, self.centre_fraction)
            box = resized_crop_box(crops[row], image.height, image.width)
            return np.asarray(functional.resized_crop(image, *box, [self.size, self.size])).transpose(2, 0, 1)

        read = self.read_each(indices, decode, replace=replace)
        images = np.stack(read.samples) if read.samples else np.empty((0, *self.image_shape), np.uint8)
        return ReadSamples(images, read.indices, read.unreadable)

    def read_each(self, indices: IntArray, decode: Callable[[bytes, int], Any], *, replace: bool) -> ReadSamples:
        """Call `decode` with the bytes of each sample and its position in `indices`. A sample for which it raises an
        exception is unreadable: it is replaced by the next readable one with `replace`, else skipped. An
        `ExpectedError` is passed on: it means that the whole split is unreliable."""
        samples, shown, unreadable = [], [], dict[str, str]()
        for row, index in enumerate(indices.tolist()):
            for step in range(len(self.labels) if replace else 1):
                candidate = (index + step) % len(self.labels)
                try:
                    samples.append(decode(self.content(candidate), row))
                except ExpectedError:
                    raise
                except Exception as error:  # decoders raise exceptions of any type for damaged files
                    unreadable[self.path(candidate)] = _reason(error)
                else:
                    shown.append(candidate)
                    break
            else:
                if replace:  # no sample at all can be read
                    break
        return ReadSamples(samples, np.array(shown, np.int64), unreadable)


@dataclass(frozen=True)
class ImageFiles(EncodedImages):
    """One split with one file per image."""

    root: Path
    names: np.ndarray  # bytes [N], relative to root; reference counts of str objects would unshare workers' memory

    def path(self, index: int) -> str:
        return os.path.join(self.root, os.fsdecode(self.names[index]))

    def content(self, index: int) -> bytes:
        with open_regular(self.path(index)) as file:
            return file.read()

    def take(self, indices: IntArray) -> "ImageFiles":
        return replace(self, labels=self.labels[indices], names=self.names[indices])


def decode_image(content: bytes) -> "Image.Image":
    """Decode an image to RGB, for every loader. Raises PIL's exception if the bytes are no image."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as encoded:
        return as_rgb(encoded)


def as_rgb(image: "Image.Image") -> "Image.Image":
    """Convert any PIL image to RGB: as torchvision.datasets.ImageFolder and PIL do, without EXIF orientation and alpha,
    the first frame. But of 16-bit grey it keeps the upper eight bits: PIL's conversion makes nearly all white."""
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def cut_centre(image: "Image.Image", size: int, fraction: float) -> np.ndarray:
    """Return the central square of an RGB image, resized: uint8 [3, size, size]; see `central_square`."""
    from torchvision.transforms import functional

    resized, corner = central_square(image.height, image.width, size, fraction)
    return np.asarray(functional.crop(functional.resize(image, resized), *corner, size, size)).transpose(2, 0, 1)


def central_square(height: int, width: int, size: int, fraction: float) -> tuple[list[int], list[int]]:
    """Return the (rows, columns) of the resized image, and (top, left) of its central square of `size`, whose side is
    `fraction` of the shorter side. Rounded as in torchvision's `resize` and `center_crop`."""
    shorter = round(size / fraction)
    resized = [int(shorter * side / min(height, width)) for side in (height, width)]
    return resized, [round((side - size) / 2) for side in resized]


def _reason(error: Exception) -> str:
    """Describe the error without the file's name, and without memory addresses, which differ between runs."""
    if type(error).__name__ == "UnidentifiedImageError":
        return "not an image, or of an unknown format"
    return getattr(error, "strerror", None) or " ".join(f"{type(error).__name__}: {error}".split())


def describe_unreadable(unreadable: dict[str, str]) -> str:
    """Describe the first unreadable file, and count the others."""
    path, reason = min(unreadable.items())
    others = f" and {len(unreadable) - 1} more" if len(unreadable) > 1 else ""
    return f"cannot be read as an image: {printable_name(path)}{others} ({reason})"


def printable_name(name: str) -> str:
    """Escape the unprintable parts of a file name, such as bytes that are not UTF-8."""
    decoded = os.fsencode(name).decode(errors="backslashreplace")
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in decoded)
