"""Images that stay on disk, encoded, until they are needed: `ImageFiles`, in the place of `ImageArrays`."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from utils.data.sampling import IntArray, resized_crop_box
from utils.files import open_regular


@dataclass(frozen=True)
class DecodedImages:
    """Decoded images, the samples that they show, and what could not be read."""

    images: np.ndarray  # uint8 [N, 3, S, S]
    indices: IntArray
    unreadable: dict[str, str]  # file: reason


@dataclass(frozen=True)
class ImageFiles:
    """One split: files that are decoded on demand, each to a square of `size` pixels."""

    root: Path
    names: np.ndarray  # bytes [N], relative to root; no str objects, whose counters would unshare workers' memory
    labels: np.ndarray  # int64 [N]
    size: int
    centre_share: float  # of the shorter side, which the central square keeps

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return 3, self.size, self.size

    def path(self, index: int) -> str:
        return os.path.join(self.root, os.fsdecode(self.names[index]))

    def read(self, indices: IntArray, crops: np.ndarray | None, *, replace: bool) -> DecodedImages:
        """Decode the samples `indices`: the central square of each, or with `crops` (`Augmentation.crop`) a
        random one. An unreadable file is replaced by the next readable one with `replace`, else left out."""
        images, shown, unreadable = [], [], dict[str, str]()
        for row, index in enumerate(indices.tolist()):
            crop = None if crops is None else crops[row]
            for candidate in self._candidates(index, replace):
                try:
                    images.append(self._decode(candidate, crop))
                except Exception as error:  # decoders raise whatever a damaged file leads them to
                    unreadable[self.path(candidate)] = f"{type(error).__name__}: {error}"
                else:
                    shown.append(candidate)
                    break
        stacked = np.stack(images) if images else np.empty((0, *self.image_shape), np.uint8)
        return DecodedImages(stacked, np.array(shown, np.int64), unreadable)

    def _candidates(self, index: int, replace: bool) -> Iterator[int]:
        yield index
        if replace:
            yield from ((index + step) % len(self.labels) for step in range(1, len(self.labels)))

    def _decode(self, index: int, crop: np.ndarray | None) -> np.ndarray:
        """uint8 [3, size, size]."""
        from PIL import Image
        from torchvision.transforms import functional

        with open_regular(self.path(index)) as file, Image.open(file) as encoded:
            image = encoded.convert("RGB")
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


def describe_unreadable(unreadable: dict[str, str]) -> str:
    """How many files could not be read, and the first of them."""
    path, reason = min(unreadable.items())
    others = f" and {len(unreadable) - 1} more" if len(unreadable) > 1 else ""
    return f"cannot be read as an image: {path}{others} ({reason})"
