"""What DALI is given: batch by batch images, in memory or encoded, and the parameters of their augmentation.

Only numpy: a torch array makes DALI look for a driver.
"""

import io
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from utils.data.datasets.dataset import ImageArrays, Split
from utils.data.datasets.image_files import EncodedImages, central_square, decode_image
from utils.data.sampling import EpochPlan, IntArray, resized_crop_box

END_OF_JPEG = b"\xff\xd9"  # its last marker, which tells a file that was cut
BLACK_PIXEL = b"P6 1 1 255\n\0\0\0"  # in the place of an empty batch, which DALI does not take


@dataclass(frozen=True)
class PreparedBatch:
    """DALI's inputs by name, each [N, ...] or a list of N; the samples that they show, none of a placeholder."""

    inputs: dict[str, Any]
    indices: IntArray
    unreadable: dict[str, str]  # file: reason


@dataclass(frozen=True)
class Preparation:
    """Prepares the batches of one split; what is drawn for them is the plan's."""

    split: Split
    plan: EpochPlan
    num_threads: int

    def run_ahead(self, epoch: int, batches: list[IntArray], *, pass_jpeg: bool) -> Iterator[PreparedBatch]:
        """One batch after the other: images in memory when asked for, files ahead in threads, a batch a thread.

        JPEG is passed on as it is with `pass_jpeg`; without, PIL decodes every file."""
        if isinstance(self.split, ImageArrays):
            for indices in batches:
                images = np.ascontiguousarray(self.split.images[indices])
                yield PreparedBatch({"images": images} | self._drawn(epoch, indices), indices, {})
            return
        pool = ThreadPoolExecutor(self.num_threads)
        try:
            waiting: deque[Future[PreparedBatch]] = deque()
            for indices in batches:
                waiting.append(pool.submit(self._read, self.split, epoch, indices, pass_jpeg))
                if len(waiting) > self.num_threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _read(self, split: EncodedImages, epoch: int, indices: IntArray, pass_jpeg: bool) -> PreparedBatch:
        drawn = self.plan.draw(epoch, indices)
        crops = None if drawn is None else drawn.crop

        def prepare(content: bytes, row: int) -> tuple[np.ndarray, list[np.ndarray]]:
            encoded, height, width = encode_for_dali(content, pass_jpeg=pass_jpeg)
            return encoded, self._geometry(split, height, width, None if crops is None else crops[row])

        read = split.read_each(indices, prepare, replace=self.plan.training)
        samples = read.samples or [prepare(BLACK_PIXEL, 0)]
        inputs: dict[str, Any] = {"encoded": [encoded for encoded, _ in samples]}
        names = ("window_start", "window_shape", "resized") if crops is not None else ("resized", "square")
        geometry = zip(*(values for _, values in samples), strict=True)
        inputs |= dict(zip(names, map(np.stack, geometry), strict=True))
        return PreparedBatch(inputs | self._drawn(epoch, indices), read.indices, read.unreadable)

    def _geometry(self, split: EncodedImages, height: int, width: int, crop: np.ndarray | None) -> list[np.ndarray]:
        """Of one image, each (rows, columns): corner and size of the window that is decoded, and the size that it is
        resized to; without a random crop the size that the whole image is resized to, and the corner of the square."""
        if crop is not None:
            top, left, rows, columns = resized_crop_box(crop, height, width)
            start, shape = np.array([top, left], np.int32), np.array([rows, columns], np.int32)
            return [start, shape, np.full(2, split.size, np.float32)]
        resized, corner = central_square(height, width, split.size, split.centre_share)
        return [np.array(resized, np.float32), np.array(corner, np.int32)]

    def _drawn(self, epoch: int, indices: IntArray) -> dict[str, np.ndarray]:
        """Crop, flip and rotation of the images `indices`, each [N, ...]."""
        inputs: dict[str, np.ndarray] = {}
        drawn, ranges = self.plan.draw(epoch, indices), self.plan.ranges
        if drawn is None or ranges is None:
            return inputs
        inputs["flip"] = drawn.flip.astype(np.int32)
        if ranges.crop_padding:
            corner = np.stack([drawn.shift_y, drawn.shift_x], axis=1) - ranges.crop_padding
            inputs["corner"] = corner.astype(np.int32)
        if ranges.rotation_angle:
            inputs["angle"] = drawn.angle.astype(np.float32)
        return inputs


def encode_for_dali(content: bytes, *, pass_jpeg: bool) -> tuple[np.ndarray, int, int]:
    """An encoded image, uint8 [bytes], its height and width: with `pass_jpeg` a whole JPEG, grey or RGB, as it is; any
    other as PIL decodes it, in the PPM format. Whatever PIL raises where it is no image.

    PIL reads the header of each: NVIDIA DALI 2.4 may die, with the whole process, of a file that it does not know.
    """
    from PIL import Image

    with Image.open(io.BytesIO(content)) as header:
        size = header.size
        is_whole_jpeg = header.format == "JPEG" and header.mode in ("L", "RGB") and content.endswith(END_OF_JPEG)
    if not (pass_jpeg and is_whole_jpeg):
        image = decode_image(content)
        size = image.size
        content = b"P6 %d %d 255\n" % size + image.tobytes()
    return np.frombuffer(content, np.uint8), size[1], size[0]
