"""Images that stay encoded, on disk, until they are needed, in the place of `ImageArrays`.

`EncodedImages` is a split of them, wherever they lie; `ImageFiles` has one file for each.
"""

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from utils.data.sampling import IntArray, resized_crop_box
from utils.errors import ExpectedError
from utils.files import open_regular

if TYPE_CHECKING:
    from PIL import Image

Decoded = TypeVar("Decoded")


@dataclass(frozen=True)
class DecodedImages:
    """Decoded images, the samples that they show, and what could not be read."""

    images: np.ndarray  # uint8 [N, 3, S, S]
    indices: IntArray
    unreadable: dict[str, str]  # file: reason


@dataclass(frozen=True)
class ReadSamples(Generic[Decoded]):
    """What was made of each sample's bytes, the samples that it shows, and what could not be read."""

    samples: list[Decoded]
    indices: IntArray
    unreadable: dict[str, str]  # file: reason


@dataclass(frozen=True)
class EncodedImages(ABC):
    """One split: images that are decoded on demand, each to a square of `size` pixels."""

    labels: np.ndarray  # int64 [N]
    size: int
    centre_share: float  # of the shorter side, which the central square keeps

    @abstractmethod
    def path(self, index: int) -> str:
        """What names the sample in messages."""

    @abstractmethod
    def content(self, index: int) -> bytes:
        """The sample as it lies on disk, encoded. `OSError` where it cannot be read."""

    @abstractmethod
    def take(self, indices: IntArray) -> "EncodedImages":
        """The split of these samples alone."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return 3, self.size, self.size

    def read(self, indices: IntArray, crops: np.ndarray | None, *, replace: bool) -> DecodedImages:
        """Decode the samples `indices`: the central square of each, or with `crops` (`Augmentation.crop`) a
        random one. An unreadable file is replaced by the next readable one with `replace`, else left out."""
        read = self.read_each(
            indices, lambda content, row: self._cut(content, None if crops is None else crops[row]), replace=replace
        )
        images = np.stack(read.samples) if read.samples else np.empty((0, *self.image_shape), np.uint8)
        return DecodedImages(images, read.indices, read.unreadable)

    def read_each(
        self, indices: IntArray, decode: Callable[[bytes, int], Decoded], *, replace: bool
    ) -> ReadSamples[Decoded]:
        """`decode` of the samples' bytes, which is also given each one's place in `indices`; whatever it raises makes
        the sample unreadable. Such a sample is replaced by the next readable one with `replace`, else left out.
        `ExpectedError` where the split as a whole cannot be relied on."""
        samples, shown, unreadable = [], [], dict[str, str]()
        for row, index in enumerate(indices.tolist()):
            for candidate in self._candidates(index, replace):
                try:
                    samples.append(decode(self.content(candidate), row))
                except ExpectedError:
                    raise
                except Exception as error:  # decoders raise whatever a damaged file leads them to
                    unreadable[self.path(candidate)] = _reason(error)
                else:
                    shown.append(candidate)
                    break
        return ReadSamples(samples, np.array(shown, np.int64), unreadable)

    def _candidates(self, index: int, replace: bool) -> Iterator[int]:
        yield index
        if replace:
            yield from ((index + step) % len(self.labels) for step in range(1, len(self.labels)))

    def _cut(self, content: bytes, crop: np.ndarray | None) -> np.ndarray:
        """uint8 [3, size, size]."""
        from torchvision.transforms import functional

        image = decode_image(content)
        if crop is not None:
            box = resized_crop_box(crop, image.height, image.width)
            image = functional.resized_crop(image, *box, [self.size, self.size])
        else:
            resized, corner = central_square(image.height, image.width, self.size, self.centre_share)
            image = functional.crop(functional.resize(image, resized), *corner, self.size, self.size)
        return np.asarray(image).transpose(2, 0, 1)

    def read_all(self, *, replace: bool, num_threads: int) -> DecodedImages:
        """Every image, in memory."""
        parts = np.array_split(np.arange(len(self.labels)), max(1, len(self.labels) // 256))
        with ThreadPoolExecutor(num_threads) as pool:  # decoding leaves the interpreter free
            batches = list(pool.map(lambda part: self.read(part, None, replace=replace), parts))
        return DecodedImages(
            np.concatenate([batch.images for batch in batches]),
            np.concatenate([batch.indices for batch in batches]),
            {path: reason for batch in batches for path, reason in batch.unreadable.items()},
        )


@dataclass(frozen=True)
class ImageFiles(EncodedImages):
    """One split in class folders, an image a file."""

    root: Path
    names: np.ndarray  # bytes [N], relative to root; no str objects, whose counters would unshare workers' memory

    def path(self, index: int) -> str:
        return os.path.join(self.root, os.fsdecode(self.names[index]))

    def content(self, index: int) -> bytes:
        with open_regular(self.path(index)) as file:
            return file.read()

    def take(self, indices: IntArray) -> "ImageFiles":
        return replace(self, labels=self.labels[indices], names=self.names[indices])


def decode_image(content: bytes) -> "Image.Image":
    """The image in these bytes as RGB, for every loader. Whatever PIL raises where they are none.

    As torchvision.datasets.ImageFolder has it, which is PIL's own: not turned by its EXIF orientation, alpha dropped,
    of a moving image the first. But of 16 bits the upper eight are taken, where PIL's conversion makes nearly all of a
    grey image white.
    """
    from PIL import Image

    with Image.open(io.BytesIO(content)) as encoded:
        if encoded.mode.startswith("I;16") or (encoded.mode == "I" and encoded.format in ("PNG", "PPM")):
            return Image.fromarray((np.asarray(encoded) >> 8).astype(np.uint8)).convert("RGB")
        return encoded.convert("RGB")


def central_square(height: int, width: int, size: int, share: float) -> tuple[list[int], list[int]]:
    """(rows, columns) that an image is resized to, and (top, left) of the central square of `size`, whose side is
    `share` of the shorter side. Rounded as torchvision's `resize` and `center_crop` do."""
    shorter = round(size / share)
    resized = [int(shorter * side / min(height, width)) for side in (height, width)]
    return resized, [round((side - size) / 2) for side in resized]


def _reason(error: Exception) -> str:
    """In words that are the same wherever the file lies in memory."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # without the name, which stands beside it
    if type(error).__name__ == "UnidentifiedImageError":
        return "not an image, or of an unknown format"
    return " ".join(f"{type(error).__name__}: {error}".split())


def image_sides(content: bytes) -> tuple[int, int]:
    """(width, height) of the image in these bytes, from its header. Whatever PIL raises where they are none."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as encoded:
        return encoded.size


def describe_unreadable(unreadable: dict[str, str]) -> str:
    """How many files could not be read, and the first of them."""
    path, reason = min(unreadable.items())
    others = f" and {len(unreadable) - 1} more" if len(unreadable) > 1 else ""
    return f"cannot be read as an image: {readable_name(path)}{others} ({reason})"


def readable_name(name: str) -> str:
    """A file's name with what cannot be printed, such as bytes that are not UTF-8, escaped: \\xff."""
    known = os.fsencode(name).decode(errors="backslashreplace")
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in known)
