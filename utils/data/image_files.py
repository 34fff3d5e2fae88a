"""Images that stay encoded, on disk, until they are needed, in the place of `ImageArrays`.

`EncodedImages` is a split of them, wherever they lie; `ImageFiles` has one file for each.
"""

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
                    unreadable[self.path(candidate)] = f"{type(error).__name__}: {error}"
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
            image = functional.center_crop(functional.resize(image, round(self.size / self.centre_share)), self.size)
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


def decode_image(content: bytes) -> "Image.Image":
    """The image in these bytes, as RGB. Whatever PIL raises where they are none."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as encoded:
        return encoded.convert("RGB")


def describe_unreadable(unreadable: dict[str, str]) -> str:
    """How many files could not be read, and the first of them."""
    path, reason = min(unreadable.items())
    others = f" and {len(unreadable) - 1} more" if len(unreadable) > 1 else ""
    return f"cannot be read as an image: {path}{others} ({reason})"
