"""The loader `dali`: NVIDIA DALI in a GPU pipeline when training on a GPU, else in a CPU pipeline.

Threads read the files ahead and pass them to DALI with the parameters of their augmentation. DALI decodes JPEG (on a
GPU fused with the random crop), crops, resizes, flips, rotates and normalises. PIL decodes all other files, since DALI
applies the EXIF orientation, reads 16 bits, CMYK and alpha differently, and may be killed by an unreadable file.
"""

import io
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils.data.augment import Normalise
from utils.data.config import DataConfig
from utils.data.datasets.dataset import ImageArrays, Split
from utils.data.datasets.image_files import MOST_ELONGATED, ReadSamples, central_square, decode_image
from utils.data.loader import Loader
from utils.data.sampling import IntArray, Sampler, resized_crop_box
from utils.errors import ConfigError, DataError

AHEAD = 2  # batches that DALI prepares in advance
END_OF_JPEG = b"\xff\xd9"  # its last marker; a truncated file lacks it
BLACK_PIXEL = b"P6 1 1 255\n\0\0\0"  # replaces an empty batch, which DALI does not accept


class DaliLoader(Loader):
    """Runs one pipeline per epoch, with at least one thread, which prepares `AHEAD` batches."""

    def __init__(self, config: DataConfig, split: Split, sampler: Sampler, normalise: Normalise) -> None:
        super().__init__(sampler, normalise)
        try:
            import nvidia.dali
        except ImportError as error:
            remedy = 'pip install ".[dali]" (CUDA 11: ".[dali-cuda110]"), or --set data_loader=device'
            raise ConfigError(f"data_loader dali: NVIDIA DALI cannot be imported ({error}).\n{remedy}") from None
        self.dali: Any = nvidia.dali
        self.split, self.num_threads = split, max(1, config.num_data_workers)
        self.labels = torch.from_numpy(split.labels).to(self.device)
        self.channels_last = normalise.memory_format is torch.channels_last

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        in_pipeline, batches = deque[ReadSamples](), self.sampler.batches(self.epoch, self.first_batch)
        if not batches:
            return
        with closing(self._prepare_ahead(batches)) as prepared:  # type: ignore[type-var]
            first = next(prepared)

            def inputs() -> Iterator[list[Any]]:
                for batch in chain([first], prepared):
                    in_pipeline.append(batch)
                    yield list(batch.samples.values())

            pipeline = self._build(list(first.samples), inputs())
            for _ in batches:
                images, batch = self._receive(pipeline), in_pipeline.popleft()
                self.unreadable |= batch.unreadable
                on_device = torch.from_numpy(batch.indices).to(self.device, non_blocking=True)
                yield images[: len(on_device)], self.labels[on_device]

    def _prepare_ahead(self, batches: list[IntArray]) -> Iterator[ReadSamples]:
        """Yield each batch, prepared ahead in threads, one batch per thread."""
        pool, waiting, epoch = ThreadPoolExecutor(self.num_threads), deque[Future[ReadSamples]](), self.epoch
        try:
            for indices in batches:
                waiting.append(pool.submit(self._prepare, epoch, indices))
                if len(waiting) > self.num_threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _prepare(self, epoch: int, indices: IntArray) -> ReadSamples:
        """Return DALI's inputs by name, each [N, ...] or a list of N: images and parameters of their augmentation, in
        NumPy, since a torch array makes DALI look for a driver."""
        split, config = self.split, self.sampler.augmentation
        augmentation = self.sampler.sample_augmentation(epoch, indices)
        crops = None if augmentation is None else augmentation.crop

        def prepare(content: bytes, row: int) -> tuple[np.ndarray, ...]:
            assert not isinstance(split, ImageArrays)
            encoded, height, width = encode_for_dali(content)
            if crops is None:
                resized, corner = central_square(height, width, split.size, split.centre_fraction)
                return encoded, np.array(resized, np.float32), np.array(corner, np.int32)
            box = np.array(resized_crop_box(crops[row], height, width), np.int32)
            return encoded, np.full(2, split.size, np.float32), box[:2], box[2:]

        if isinstance(split, ImageArrays):
            read = split.read(indices, None, replace=False)
            inputs: dict[str, Any] = {"images": np.ascontiguousarray(read.samples)}
        else:
            read = split.read_each(indices, prepare, replace=self.sampler.training)
            # (rows, columns) of each image after resizing, and of the square's corner or of the window to decode
            names = ("resized", "square") if crops is None else ("resized", "window_start", "window_shape")
            encoded, *geometry = zip(*(read.samples or [prepare(BLACK_PIXEL, 0)]), strict=True)
            inputs = {"encoded": list(encoded)} | dict(zip(names, map(np.stack, geometry), strict=True))
        if config is not None and augmentation is not None:
            inputs["flip"] = augmentation.flip.astype(np.int32)
            if config.rnd_crop_padding:
                inputs["corner"] = np.stack([augmentation.shift_y, augmentation.shift_x], axis=1).astype(np.int32)
            if config.rnd_rotation_angle:
                inputs["angle"] = augmentation.angle.astype(np.float32)
        return read._replace(samples=inputs)

    def _receive(self, pipeline: Any) -> Tensor:
        """Return a copy of the next batch's images: DALI reuses its own memory."""
        from nvidia.dali.plugin.pytorch import feed_ndarray

        try:
            (output,) = pipeline.run()
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise DataError(f"DALI failed: {reason}\nuse --set data_loader=torchvision") from None
        dense = output.as_tensor()
        images = torch.empty(dense.shape(), dtype=torch.float32, device=self.device)
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        feed_ndarray(dense, images, cuda_stream=stream)
        return images.permute(0, 3, 1, 2) if self.channels_last else images

    def _build(self, names: list[str], batches: Iterator[list[Any]]) -> Any:
        """Build the pipeline for these batches of the inputs `names`."""
        fn, gpu = self.dali.fn, self.device.type == "cuda"
        pipeline = self.dali.Pipeline(
            batch_size=self.sampler.batch_size,
            num_threads=self.num_threads,
            device_id=self.device.index if gpu else None,
            seed=0,  # not used
            prefetch_queue_depth=AHEAD,
        )
        with pipeline:
            layouts = ["CHW" if name == "images" else "" for name in names]
            sources = fn.external_source(batches, len(names), layout=layouts, batch=True)
            inputs = dict(zip(names, sources, strict=True))
            if "encoded" in inputs:
                images = self._decode(inputs, gpu)
            else:
                images = fn.transpose(inputs["images"].gpu() if gpu else inputs["images"], perm=[1, 2, 0])
            if "corner" in inputs:
                shape, pad = list(self.split.image_shape[1:]), {"out_of_bounds_policy": "pad", "fill_values": 0}
                images = fn.slice(images, start=inputs["corner"], shape=shape, axes=(0, 1), **pad)
            if "flip" in inputs:
                images = fn.flip(images, horizontal=inputs["flip"])
            if "angle" in inputs:
                kept = {"keep_size": True, "fill_value": 0, "interp_type": self.dali.types.INTERP_NN}
                images = fn.rotate(images, angle=inputs["angle"], **kept)
            images = fn.crop_mirror_normalize(
                images, output_layout="HWC" if self.channels_last else "CHW",
                mean=[255 * value for value in self.normalise.mean], std=[255 * value for value in self.normalise.std],
            )  # fmt: skip
            pipeline.set_outputs(images)
        try:
            pipeline.build()
        except RuntimeError as error:  # a driver older than DALI's CUDA, or an unknown device
            reason = " ".join(str(error).split())
            remedy = "install DALI for this driver's CUDA, or use --set data_loader=device"
            raise ConfigError(f"data_loader dali: NVIDIA DALI does not start here: {reason}\n{remedy}") from None
        return pipeline

    def _decode(self, inputs: dict[str, Any], gpu: bool) -> Any:
        """Decode images to [size, size, 3]: a window or the central square of each."""
        fn, types = self.dali.fn, self.dali.types
        # as PIL does: ignore the EXIF orientation; on a GPU, interpolate chroma samples
        decoder = {"device": "mixed" if gpu else "cpu", "output_type": types.RGB}
        decoder |= {"adjust_orientation": False, "jpeg_fancy_upsampling": True}
        # in DALI 1, only the experimental decoders take both options
        decoders = fn.experimental.decoders if self.dali.__version__.startswith("1.") else fn.decoders
        if "window_start" in inputs:
            window = {"start": inputs["window_start"], "shape": inputs["window_shape"], "axes": (0, 1)}
            images = decoders.image_slice(inputs["encoded"], **window, **decoder)
        else:
            images = decoders.image(inputs["encoded"], **decoder)
        # the nearest to PIL's bilinear filter: they differ at the image's edges only
        images = fn.resize(images, size=inputs["resized"], interp_type=types.INTERP_TRIANGULAR)
        if "square" in inputs:
            images = fn.slice(images, start=inputs["square"], shape=list(self.split.image_shape[1:]), axes=(0, 1))
        return images


def encode_for_dali(content: bytes) -> tuple[np.ndarray, int, int]:
    """Return an encoded image, uint8 [bytes], its height and width. A whole JPEG in grey or RGB is unchanged; PIL
    decodes any other image to PPM. Raises PIL's exception if it is none: DALI 2.4 may die of an unknown file."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as header:
        size = header.size
        is_whole_jpeg = header.format == "JPEG" and header.mode in ("L", "RGB") and content.endswith(END_OF_JPEG)
        is_whole_jpeg &= max(size) <= MOST_ELONGATED * min(size)
    if not is_whole_jpeg:
        image = decode_image(content)
        size = image.size
        content = b"P6 %d %d 255\n" % size + image.tobytes()
    return np.frombuffer(content, np.uint8), size[1], size[0]
