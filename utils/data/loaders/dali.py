"""NVIDIA DALI behind the loader contract: a GPU pipeline where the training is on a GPU, else a CPU pipeline.

Order and augmentation are the contract's: DALI decodes JPEG, on a GPU fused with the random crop, crops, resizes,
flips, rotates and normalises, by what dali_inputs.py gives it with each batch. Files that are not whole JPEG are
decoded there, by PIL, so that one rule holds for all loaders: DALI turns images by their EXIF orientation, reads
16 bits, CMYK and alpha in its own way, and may die, with the whole process, of a file that it cannot read.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from utils.data.config import DataConfig
from utils.data.datasets.dataset import Split
from utils.data.loader import Loader
from utils.data.loaders.dali_inputs import Preparation, PreparedBatch
from utils.data.sampling import EpochPlan, IntArray
from utils.data.transforms.augment import Normalise
from utils.errors import ConfigError, DataError

AHEAD = 2  # batches that DALI prepares while the last one is trained on


class DaliFailure(Exception):
    """A pipeline has ended with an error, in DALI's words."""


def import_dali() -> tuple[Any, Any, Any]:
    """DALI's modules `fn`, `types` and the class Pipeline; `ConfigError` where it is not installed."""
    try:
        from nvidia.dali import Pipeline, fn, types
    except ImportError as error:
        raise ConfigError(
            f"data_loader dali: NVIDIA DALI cannot be imported ({error}).\n"
            'pip install ".[dali]" (CUDA 11: ".[dali-cuda110]"), or --set data_loader=device'
        ) from None
    return fn, types, Pipeline


def dali_version() -> int:
    """The first number of DALI's version."""
    import nvidia.dali

    return int(nvidia.dali.__version__.partition(".")[0])


class DaliLoader(Loader):
    """One pipeline an epoch, with `num_threads` threads, which prepares `AHEAD` batches."""

    def __init__(self, split: Split, plan: EpochPlan, normalise: Normalise, num_threads: int) -> None:
        super().__init__(plan, normalise)
        self.fn, self.types, self.pipeline_class = import_dali()
        self.split, self.num_threads = split, num_threads
        self.preparation = Preparation(split, plan, num_threads)
        self.labels = torch.from_numpy(split.labels).to(self.device)
        self.channels_last = normalise.memory_format is torch.channels_last

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches, done = self.plan.batches(self.epoch, self.first_batch), 0
        while done < len(batches):
            try:
                for batch in self._run(batches[done:], pass_jpeg=True):
                    yield batch
                    done += 1
            except DaliFailure as failure:
                # Damaged data, of this batch or of one after it, which DALI has begun: PIL decodes all and names files.
                try:
                    yield from self._run(batches[done : done + 1], pass_jpeg=False)
                except DaliFailure:
                    raise DataError(f"DALI cannot go on: {failure}\n--set data_loader=torchvision does") from None
                done += 1

    def _run(self, batches: list[IntArray], *, pass_jpeg: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """These batches, from a pipeline of their own."""
        underway: deque[PreparedBatch] = deque()
        with closing(self.preparation.run_ahead(self.epoch, batches, pass_jpeg=pass_jpeg)) as prepared:  # type: ignore[type-var]
            first = next(prepared)

            def hand_over() -> Iterator[list[Any]]:
                for batch in chain([first], prepared):
                    underway.append(batch)
                    yield list(batch.inputs.values())

            pipeline = self._build(list(first.inputs), hand_over())
            for _ in batches:
                images, batch = self._receive(pipeline), underway.popleft()
                self.count_unreadable(batch.unreadable, len(batch.indices))
                on_device = torch.from_numpy(batch.indices).to(self.device, non_blocking=True)
                yield images[: len(on_device)], self.labels[on_device]

    def _receive(self, pipeline: Any) -> Tensor:
        """The next batch's images, in memory of our own: DALI will write into its own again."""
        from nvidia.dali.plugin.pytorch import feed_ndarray

        try:
            (output,) = pipeline.run()
        except RuntimeError as error:
            lines = [line.strip() for line in str(error).splitlines() if "rror" in line or "ail" in line]
            raise DaliFailure(lines[-1] if lines else str(error)) from None
        dense = output.as_tensor()
        images = torch.empty(dense.shape(), dtype=torch.float32, device=self.device)
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        feed_ndarray(dense, images, cuda_stream=stream)
        return images.permute(0, 3, 1, 2) if self.channels_last else images

    def _build(self, names: list[str], batches: Iterator[list[Any]]) -> Any:
        """The pipeline for these batches of the inputs `names`."""
        fn, gpu = self.fn, self.device.type == "cuda"
        pipeline = self.pipeline_class(
            batch_size=self.plan.batch_size,
            num_threads=self.num_threads,
            device_id=self.device.index if gpu else None,
            seed=0,  # nothing is drawn
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
            images = fn.crop_mirror_normalize(
                self._augment(images, inputs),
                mean=[255 * value for value in self.normalise.mean],
                std=[255 * value for value in self.normalise.std],
                output_layout="HWC" if self.channels_last else "CHW",
            )
            pipeline.set_outputs(images)
        try:
            pipeline.build()
        except RuntimeError as error:  # a driver that is older than DALI's CUDA, a device that it does not know
            raise ConfigError(
                f"data_loader dali: NVIDIA DALI does not start here: {' '.join(str(error).split())}\n"
                "install the DALI for this driver's CUDA, or --set data_loader=device"
            ) from None
        return pipeline

    def _decode(self, inputs: dict[str, Any], gpu: bool) -> Any:
        """Images [size, size, 3]: a window, or the central square, of each."""
        fn, decoder = self.fn, {"device": "mixed" if gpu else "cpu", "output_type": self.types.RGB}
        # as PIL does it: not turned by EXIF; on a GPU, colours interpolated between their samples
        decoder |= {"adjust_orientation": False, "jpeg_fancy_upsampling": True}
        # DALI 1 has two kinds of decoders, and only these take both
        decoders = fn.decoders if dali_version() >= 2 else fn.experimental.decoders
        if "window_start" in inputs:
            window = {"start": inputs["window_start"], "shape": inputs["window_shape"], "axes": (0, 1)}
            images = decoders.image_slice(inputs["encoded"], **window, **decoder)
        else:
            images = decoders.image(inputs["encoded"], **decoder)
        images = fn.resize(images, size=inputs["resized"], interp_type=self.types.INTERP_TRIANGULAR)
        if "square" in inputs:
            images = fn.slice(images, start=inputs["square"], shape=list(self.split.image_shape[1:]), axes=(0, 1))
        return images

    def _augment(self, images: Any, inputs: dict[str, Any]) -> Any:
        """Crop, flip, rotate by what each batch brings."""
        if "corner" in inputs:
            shape, pad = list(self.split.image_shape[1:]), {"out_of_bounds_policy": "pad", "fill_values": 0}
            images = self.fn.slice(images, start=inputs["corner"], shape=shape, axes=(0, 1), **pad)
        if "flip" in inputs:
            images = self.fn.flip(images, horizontal=inputs["flip"])
        if "angle" in inputs:
            kept = {"keep_size": True, "fill_value": 0, "interp_type": self.types.INTERP_NN}
            images = self.fn.rotate(images, angle=inputs["angle"], **kept)
        return images


def build(config: DataConfig, split: Split, plan: EpochPlan, normalise: Normalise, num_workers: int) -> Loader:
    """The loader for one split."""
    return DaliLoader(split, plan, normalise, max(1, num_workers))
