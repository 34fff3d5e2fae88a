"""Input: `build_loaders()` turns a dataset on disk into batches on the device.

The loader contract, the same for every backend:
- iterating yields `(images, labels)` already on the device: float32 [N, 3, H, W], normalised, in the chosen memory
  format, and int64 [N]; N is this rank's share of a global batch (training) or at most the validation batch size;
- `len(loader)` is the number of batches that one whole epoch has on this rank;
- `set_epoch(epoch, first_batch=0)` chooses order and augmentation, pure functions of (seed, epoch, sample index),
  and where to begin;
- training drops the tail that fills no global batch; validation yields every image exactly once over all ranks.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from utils.config import Config
from utils.data.augment import Normalise
from utils.data.datasets import Dataset, ImageArrays, load_dataset
from utils.data.loaders import DeviceLoader, TorchvisionLoader, usable_cores
from utils.data.sampling import AugmentationRanges, EpochPlan
from utils.distributed import Distributed, split_batch
from utils.errors import ConfigError


class Loader(Protocol):
    """The loader contract above."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]: ...

    def __len__(self) -> int: ...

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None: ...


def open_dataset(config: Config, place: Distributed) -> Dataset:
    """Collective: the dataset `dataset`; one process fetches what is missing, where `download` allows it."""
    download = "SLURM_JOB_ID" not in os.environ if config.download == "auto" else config.download
    return place.main_first(lambda: load_dataset(config.dataset, Path(config.data_path), download=download))


def build_loaders(config: Config, dataset: Dataset, place: Distributed) -> tuple[Loader, Loader]:
    """(training, validation) loaders of this rank. `ConfigError` where dataset and configuration do not fit."""
    if len(dataset.class_names) != config.num_classes:
        raise ConfigError(
            f"num_classes is {config.num_classes}, but {dataset.name} has {len(dataset.class_names)}; "
            f"use --set num_classes={len(dataset.class_names)}"
        )
    train_images = len(dataset.train.labels)
    if config.batch_size > train_images:
        raise ConfigError(f"batch_size {config.batch_size} exceeds the {train_images} training images; use fewer")
    ranges = AugmentationRanges(config.rnd_crop_padding, config.rnd_horizontal_flip, config.rnd_rotation_angle)
    train = EpochPlan(
        num_samples=train_images,
        batch_size=split_batch(config.batch_size, place.world_size, config.micro_batch_size).rank_batch_size,
        rank=place.rank,
        world_size=place.world_size,
        training=True,
        seed=config.seed,
        ranges=ranges if ranges != AugmentationRanges(0, False, 0.0) else None,
        limit=_train_limit(config),
    )
    valid = EpochPlan(
        num_samples=len(dataset.valid.labels),
        batch_size=config.valid_batch_size_per_gpu,
        rank=place.rank,
        world_size=place.world_size,
        training=False,
        limit=config.limit_valid_batches,
    )
    return _build(config, dataset, dataset.train, train, place), _build(config, dataset, dataset.valid, valid, place)


def _train_limit(config: Config) -> int | None:
    limits = [config.limit_train_batches, config.profiling_iters_per_epoch if config.enable_profiling else None]
    return min((limit for limit in limits if limit is not None), default=None)


def _build(config: Config, dataset: Dataset, arrays: ImageArrays, plan: EpochPlan, place: Distributed) -> Loader:
    cifar100 = dataset.name == "cifar100"
    # NHWC: images come out of the loader in the memory format of the model
    normalise = Normalise(
        config.cifar100_mean if cifar100 else dataset.mean,
        config.cifar100_std if cifar100 else dataset.std,
        place.device,
        torch.channels_last if config.enable_nhwc else torch.contiguous_format,
    )
    if config.data_loader == "device":
        return DeviceLoader(arrays, plan, normalise, place.device)
    return TorchvisionLoader(arrays, plan, normalise, place.device, min(config.num_data_workers, usable_cores()))
