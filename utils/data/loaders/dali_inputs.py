"""The inputs of DALI: for each batch, images in memory or encoded, and the parameters of their augmentation.

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
from utils.data.datasets.image_files import EncodedImages, ReadSamples, central_square, decode_image
from utils.data.sampling import EpochPlan, IntArray, resized_crop_box

END_OF_JPEG = b"\xff\xd9"  # its last marker; a truncated file lacks it
BLACK_PIXEL = b"P6 1 1 255\n\0\0\0"  # replaces an empty batch, which DALI does not accept


# DALI's inputs by name, each [N, ...] or a list of N, and the indices of their samples; a placeholder has none.
PreparedBatch = ReadSamples[dict[str, Any]]


@dataclass(frozen=True)
class Preparation:
    """Prepares the batches of one split; the plan gives their augmentation."""

    split: Split
    plan: EpochPlan
    num_threads: int

    def run_ahead(self, epoch: int, batches: list[IntArray], *, pass_jpeg: bool) -> Iterator[PreparedBatch]:
        """Yield each batch: images in memory on demand, files ahead in threads, one batch per thread.

        With `pass_jpeg`, JPEG is passed on unchanged; without it, PIL decodes every file."""
        if isinstance(self.split, ImageArrays):
            for indices in batches:
                images = np.ascontiguousarray(self.split.images[indices])
                yield PreparedBatch({"images": images} | self._augmentation(epoch, indices), indices, {})
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
        augmentation = self.plan.sample_augmentation(epoch, indices)
        crops = None if augmentation is None else augmentation.crop

        def prepare(content: bytes, row: int) -> tuple[np.ndarray, list[np.ndarray]]:
            encoded, height, width = encode_for_dali(content, pass_jpeg=pass_jpeg)
            return encoded, self._geometry(split, height, width, None if crops is None else crops[row])

        read = split.read_each(indices, prepare, replace=self.plan.training)
        samples = read.samples or [prepare(BLACK_PIXEL, 0)]
        inputs: dict[str, Any] = {"encoded": [encoded for encoded, _ in samples]}
        names = ("window_start", "window_shape", "resized") if crops is not None else ("resized", "square")
        geometry = zip(*(values for _, values in samples), strict=True)
        inputs |= dict(zip(names, map(np.stack, geometry), strict=True))
        return PreparedBatch(inputs | self._augmentation(epoch, indices), read.indices, read.unreadable)

    def _geometry(self, split: EncodedImages, height: int, width: int, crop: np.ndarray | None) -> list[np.ndarray]:
        """Return one image's geometry, each value as (rows, columns). With a random crop: corner and size of the window
        to decode, and its size after resizing. Without: the image's size after resizing, and the square's corner."""
        if crop is not None:
            top, left, rows, columns = resized_crop_box(crop, height, width)
            start, shape = np.array([top, left], np.int32), np.array([rows, columns], np.int32)
            return [start, shape, np.full(2, split.size, np.float32)]
        resized, corner = central_square(height, width, split.size, split.centre_fraction)
        return [np.array(resized, np.float32), np.array(corner, np.int32)]

    def _augmentation(self, epoch: int, indices: IntArray) -> dict[str, np.ndarray]:
        """Return crop, flip and rotation of the images `indices`, each [N, ...]."""
        config, augmentation = self.plan.augmentation, self.plan.sample_augmentation(epoch, indices)
        if config is None or augmentation is None:
            return {}
        inputs = {"flip": augmentation.flip.astype(np.int32)}
        if config.rnd_crop_padding:
            inputs["corner"] = np.stack([augmentation.shift_y, augmentation.shift_x], axis=1).astype(np.int32)
        if config.rnd_rotation_angle:
            inputs["angle"] = augmentation.angle.astype(np.float32)
        return inputs


def encode_for_dali(content: bytes, *, pass_jpeg: bool) -> tuple[np.ndarray, int, int]:
    """Return an encoded image, uint8 [bytes], its height and width. With `pass_jpeg`, a whole JPEG in grey or RGB is
    unchanged; PIL decodes any other image to PPM. Raises PIL's exception if it is not an image.

    PIL reads the header of each image: NVIDIA DALI 2.4 may kill the process when it parses an unknown file.
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
