"""`ImageFiles`: images that stay encoded on disk until they are needed, as an alternative to `ImageArrays`."""

import errno
import io
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from utils.data.sampling import IntArray, resized_crop_box
from utils.errors import OUT_OF_MEMORY, DataError, ExpectedError
from utils.files import PAUSES, open_regular

if TYPE_CHECKING:
    from PIL import Image

SAMPLED_IMAGES = 512  # evenly spaced: for fingerprint, size, mean and standard deviation
THREADS = 16  # asking for the sizes of many small files is waiting, not computing
# a broken link, not a regular file, a socket, a link to itself; other errors of the system may pass
NO_IMAGE = (errno.ENOENT, errno.EINVAL, errno.ENXIO, errno.ELOOP)
MOST_ELONGATED = 16  # longer to shorter side: the shorter one is resized to a fixed size, and the longer one with it
EIGHT_BITS = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")
BITS_PER_SAMPLE, PHOTOMETRIC, SAMPLE_FORMAT = 258, 262, 339  # tags of TIFF
WHITE_IS_ZERO, UNSIGNED = 0, 1  # values of the last two


class ReadSamples(NamedTuple):
    """The results of decoding samples, the indices of the samples, and the unreadable files."""

    samples: Any  # uint8 [N, 3, S, S], or N results of another function
    indices: IntArray
    unreadable: dict[str, str]  # file: reason

    def check_any(self) -> "ReadSamples":
        """Return itself; `DataError` without a readable sample."""
        if not len(self.indices):
            number, why = len(self.unreadable), describe_unreadable(self.unreadable)
            raise DataError(f"not one of {number} images can be read: {why}")
        return self


@dataclass(frozen=True)
class ImageFiles:
    """One split: images that are decoded on demand to squares of `size` pixels; one file per image."""

    labels: np.ndarray  # int64 [N]
    size: int
    centre_fraction: float  # of the shorter side, which the central square keeps
    root: Path
    names: np.ndarray  # bytes [N], relative to root; reference counts of str objects would unshare workers' memory
    unreadable: dict[int, str] = field(init=False, default_factory=dict)  # reason by index, of the images tried so far

    def path(self, index: int) -> str:
        """Return the sample's name for messages."""
        return os.path.join(self.root, os.fsdecode(self.names[index]))

    def content(self, index: int) -> bytes:
        """Return the sample's encoded bytes. `OSError` if they cannot be read."""
        with open_regular(self.path(index)) as file:
            return file.read()

    def take(self, indices: IntArray) -> "ImageFiles":
        """Return a split of these samples."""
        return replace(self, labels=self.labels[indices], names=self.names[indices])

    def identity(self) -> Iterator[bytes]:
        """Yield all names and sizes, and the bytes of evenly spaced files."""

        def find_sizes(indices: IntArray) -> bytes:
            sizes = np.full(len(indices), -1)
            for row, index in enumerate(indices.tolist()):
                with suppress(OSError):
                    sizes[row] = os.stat(self.path(index)).st_size
            return sizes.tobytes()

        yield b"\0".join(self.names.tolist())
        with ThreadPoolExecutor(THREADS) as pool:
            yield from pool.map(find_sizes, np.array_split(np.arange(len(self.names)), THREADS))
        yield from self.read_each(spaced(len(self.names)), lambda content, _: content, replace=False).samples

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return 3, self.size, self.size

    def read(self, indices: IntArray, crops: np.ndarray | None, *, replace: bool) -> ReadSamples:
        """Decode samples: central squares, or random crops with `crops` (`Augmentation.crop`); see `read_each`."""
        from torchvision.transforms import functional

        def decode(content: bytes, row: int) -> np.ndarray:
            image = decode_image(content)
            if crops is None:
                return cut_centre(image, self.size, self.centre_fraction)
            box = resized_crop_box(crops[row], image.height, image.width)
            return np.asarray(functional.resized_crop(image, *box, [self.size, self.size])).transpose(2, 0, 1)

        read = self.read_each(indices, decode, replace=replace)
        return read._replace(samples=np.stack(read.samples) if read.samples else np.empty((0, *self.image_shape), "u1"))

    def read_each(self, indices: IntArray, decode: Callable[[bytes, int], Any], *, replace: bool) -> ReadSamples:
        """Call `decode` with the bytes of each sample and its position in `indices`. A sample that it refuses is
        unreadable and not tried again: with `replace`, another one of its class replaces it, else it is skipped.
        `DataError` for a class without a readable sample, and after an error that did not pass."""
        samples, shown, unreadable = [], [], dict[str, str]()
        for row, index in enumerate(indices.tolist()):
            for candidate in self._candidates(index, replace):
                try:
                    if candidate not in self.unreadable:
                        samples.append(self._decode(candidate, decode, row))
                        shown.append(candidate)
                        break
                except ExpectedError:
                    raise
                except Exception as error:  # decoders raise exceptions of any type for damaged files
                    self.unreadable[candidate] = _reason(error)
                unreadable[self.path(candidate)] = self.unreadable[candidate]
            else:
                if replace:
                    raise DataError(f"a class without a readable training image: {describe_unreadable(unreadable)}")
        return ReadSamples(samples, np.array(shown, np.int64), unreadable)

    def _candidates(self, index: int, replace: bool) -> Iterator[int]:
        """Yield `index`, and with `replace` all samples of its class, in a random order that depends on `index`."""
        yield index
        if replace:
            members = np.flatnonzero(self.labels == self.labels[index])
            yield from np.random.Generator(np.random.Philox(key=index)).permutation(members).tolist()

    def _decode(self, index: int, decode: Callable[[bytes, int], Any], row: int) -> Any:
        """Read and decode a sample. Tries again after an error that may pass; if it stays, raises a `DataError`."""
        for pause in (*PAUSES, None):
            try:
                return decode(self.content(index), row)
            except Exception as error:
                if isinstance(error, ExpectedError) or not may_pass(error):
                    raise
                if pause is None:
                    failed = f"cannot be read in {len(PAUSES) + 1} attempts: {_reason(error)}"
                    remedy = "resume when disk, network and memory work again"
                    raise DataError(f"{printable_name(self.path(index))}: {failed}; {remedy}") from None
                time.sleep(pause)


def spaced(number: int) -> IntArray:
    """Return up to `SAMPLED_IMAGES` evenly spaced indices of `number` images."""
    return np.linspace(0, number - 1, min(SAMPLED_IMAGES, number)).astype(np.int64)


def decode_image(content: bytes) -> "Image.Image":
    """Decode an image to RGB, for every loader. Raises PIL's exception if the bytes are no image."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as encoded:
        return as_rgb(encoded)


def as_rgb(image: "Image.Image") -> "Image.Image":
    """Convert any PIL image to RGB: as torchvision.datasets.ImageFolder and PIL do, without EXIF orientation and alpha,
    the first frame; of 16-bit grey the upper eight bits, since PIL makes nearly all white. `ValueError` for other
    depths and signed numbers, which PIL clips, and 16 bits with white as 0. Of a very elongated image, the centre."""
    from PIL import Image

    tags, mode = getattr(image, "tag_v2", {}), image.mode
    is_deep = mode.startswith("I;16") or (mode == "I" and image.format in ("PNG", "PPM"))
    bits, kinds = tags.get(BITS_PER_SAMPLE, (8,)), tags.get(SAMPLE_FORMAT, (UNSIGNED,))
    negative = is_deep and tags.get(PHOTOMETRIC) == WHITE_IS_ZERO
    known = (is_deep or mode in EIGHT_BITS) and {*bits} <= {1, 2, 4, 8, 16} and {*kinds} <= {UNSIGNED}
    if negative or not known:
        raise ValueError(f"pixels of mode {mode}; only unsigned numbers of 8 or 16 bits, with black as 0, are read")
    longest = MOST_ELONGATED * min(image.size)
    if max(image.size) > longest:
        left, top = (max(0, side - longest) // 2 for side in image.size)
        image = image.crop((left, top, image.width - left, image.height - top))
    if is_deep:
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
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


def may_pass(error: Exception) -> bool:
    """Whether an error of disk, network or memory may pass; it says nothing about the image."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno not in NO_IMAGE
    return isinstance(error, MemoryError | TimeoutError) or bool(OUT_OF_MEMORY.search(str(error)))


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
    """Escape the unprintable parts of a name, such as bytes that are not UTF-8."""
    decoded = name.encode(errors="surrogateescape").decode(errors="backslashreplace")
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in decoded)
