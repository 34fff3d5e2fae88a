"""NVIDIA DALI behind the loader contract: a GPU pipeline where the training is on a GPU, else a CPU pipeline.

Order and augmentation are the contract's: images in memory are handed to DALI batch by batch, files are read by DALI's
own reader from a list in the epoch's order, and crop offset, flip and angle come from `EpochPlan.draw`. DALI crops,
flips, rotates and normalises, and decodes JPEG, on a GPU fused with the random crop. What it does not keep:
- the crop of rnd_resized_crop is DALI's own draw, from (seed, epoch, rank): it differs between world sizes and after
  resuming in mid-epoch;
- resizing rounds otherwise than PIL does, by a few of 255 levels, and the central square may lie a pixel elsewhere;
- a file that cannot be read ends the run: DALI fails the whole batch.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils.data.augment import Normalise
from utils.data.datasets import ImageArrays, Split
from utils.data.image_files import ImageFiles, describe_unreadable
from utils.data.keys import DataKeys
from utils.data.loader import Loader
from utils.data.sampling import CROP_AREA, CROP_ATTEMPTS, CROP_RATIO, EpochPlan, IntArray
from utils.errors import ConfigError, DataError

AHEAD = 2  # batches that DALI prepares while the last one is trained on


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


class DaliLoader(Loader):
    """One pipeline an epoch, with `num_threads` threads, which prepares `AHEAD` batches."""

    def __init__(self, split: Split, plan: EpochPlan, normalise: Normalise, num_threads: int) -> None:
        super().__init__(plan, normalise)
        self.fn, self.types, self.pipeline_class = import_dali()
        self.split, self.num_threads = split, num_threads
        self.labels = torch.from_numpy(split.labels).to(self.device)
        self.channels_last = normalise.memory_format is torch.channels_last

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = self.plan.batches(self.epoch, self.first_batch)
        pipeline = self._build(self.epoch, batches) if batches else None
        for indices in batches:
            yield self._receive(pipeline, indices)

    def _inputs(self, epoch: int, indices: IntArray) -> dict[str, np.ndarray]:
        """What one batch brings from outside, each [N, ...]. Only numpy: torch makes DALI look for a driver."""
        inputs = {}
        if isinstance(self.split, ImageArrays):
            inputs["images"] = np.ascontiguousarray(self.split.images[indices])
        else:  # the reader fills the last batch up with its first files
            indices = np.resize(indices, self.plan.batch_size)
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

    def _receive(self, pipeline: Any, indices: IntArray) -> tuple[Tensor, Tensor]:
        """The next batch, as tensors of our own: DALI will write into its memory again."""
        from nvidia.dali.plugin.pytorch import feed_ndarray

        try:
            (output,) = pipeline.run()
        except RuntimeError as error:
            raise DataError(self._explain(error, indices)) from None
        dense = output.as_tensor()
        images = torch.empty(dense.shape(), dtype=torch.float32, device=self.device)
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        feed_ndarray(dense, images, cuda_stream=stream)
        if self.channels_last:
            images = images.permute(0, 3, 1, 2)
        on_device = torch.from_numpy(indices).to(self.device, non_blocking=True)
        return images[: len(indices)], self.labels[on_device]

    def _build(self, epoch: int, batches: list[IntArray]) -> Any:
        """The pipeline for these batches."""
        fn, gpu = self.fn, self.device.type == "cuda"
        pipeline = self.pipeline_class(
            batch_size=self.plan.batch_size,
            num_threads=self.num_threads,
            device_id=self.device.index if gpu else None,
            seed=int(np.random.SeedSequence([self.plan.seed, epoch, self.plan.rank]).generate_state(1)[0] >> 1),
            prefetch_queue_depth=AHEAD,
        )
        inputs: dict[str, Any] = {}
        with pipeline:
            if first := self._inputs(epoch, batches[0]):
                arrays = (list(self._inputs(epoch, indices).values()) for indices in batches)
                layouts = ["CHW" if name == "images" else "" for name in first]
                inputs = dict(
                    zip(first, fn.external_source(arrays, len(first), layout=layouts, batch=True), strict=True)
                )
            if isinstance(self.split, ImageFiles):
                images = self._decode(self.split, np.concatenate(batches), gpu)
            else:
                images = fn.transpose(inputs["images"].gpu() if gpu else inputs["images"], perm=[1, 2, 0])
            images = fn.crop_mirror_normalize(
                self._augment(images, inputs),
                mean=[255 * value for value in self.normalise.mean],
                std=[255 * value for value in self.normalise.std],
                output_layout="HWC" if self.channels_last else "CHW",
            )
            pipeline.set_outputs(images)
        pipeline.build()
        return pipeline

    def _decode(self, files: ImageFiles, indices: IntArray, gpu: bool) -> Any:
        """Images [size, size, 3] of the files `indices`, in this order."""
        fn, size, resized = self.fn, files.size, {"interp_type": self.types.INTERP_TRIANGULAR}
        names = [files.path(index) for index in indices.tolist()]
        encoded, _ = fn.readers.file(files=names, name="files", prefetch_queue_depth=AHEAD)
        decoder = {"device": "mixed" if gpu else "cpu", "output_type": self.types.RGB}
        if self.plan.ranges is not None and self.plan.ranges.resized_crop:
            area, ratio = list(CROP_AREA), list(CROP_RATIO)
            crop = {"random_area": area, "random_aspect_ratio": ratio, "num_attempts": CROP_ATTEMPTS}
            images = fn.decoders.image_random_crop(encoded, **crop, **decoder)
            return fn.resize(images, resize_x=size, resize_y=size, **resized)
        images = fn.resize(
            fn.decoders.image(encoded, **decoder), resize_shorter=round(size / files.centre_share), **resized
        )
        return fn.crop(images, crop=(size, size))

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

    def _explain(self, error: RuntimeError, indices: IntArray) -> str:
        """DALI's message over many lines in one, or the files at fault, which not every version of it names."""
        lines = [line.strip() for line in str(error).splitlines() if "rror" in line or "ailure" in line]
        what = lines[-1] if lines else str(error)
        if isinstance(self.split, ImageFiles):
            unreadable = self.split.read(indices, None, replace=False).unreadable
            what = describe_unreadable(unreadable) if unreadable else what
        return f"DALI cannot go on: {what}\ndata_loader torchvision can go on without unreadable images"


def build(keys: DataKeys, split: Split, plan: EpochPlan, normalise: Normalise, num_workers: int) -> Loader:
    """The loader for one split."""
    return DaliLoader(split, plan, normalise, num_threads=max(1, num_workers))
