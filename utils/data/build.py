"""`build_loaders()` turns a dataset on disk into batches on the device."""

import math
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from utils.config import Config
from utils.data.augment import Normalise
from utils.data.cifar import IMAGE_SHAPE, VERSIONS
from utils.data.datasets import Dataset, ImageArrays, Split, load_dataset
from utils.data.device_loader import DeviceLoader, decode_all
from utils.data.folders import IMAGENET_MEAN, IMAGENET_SIZE, IMAGENET_STD, open_folders
from utils.data.image_files import describe_unreadable
from utils.data.sampling import AugmentationRanges, EpochPlan
from utils.data.synthetic_loader import SyntheticLoader
from utils.data.torchvision_loader import TorchvisionLoader
from utils.data.workers import check_shared_memory, usable_cores, workers_of_a_rank
from utils.distributed.batch_split import split_batch
from utils.distributed.launch import in_batch_job
from utils.distributed.world import World
from utils.errors import ConfigError, DataError


class Loader(Protocol):
    """The loader contract above."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]: ...

    def __len__(self) -> int: ...

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None: ...


@dataclass(frozen=True)
class Loaders:
    """Both loaders of this rank, the plan of the training one, and what the reader of the log should know."""

    train: Loader
    valid: Loader
    plan: EpochPlan
    notes: list[str]


def open_dataset(config: Config, world: World) -> Dataset:
    """Collective: the dataset `dataset`; one process fetches what is missing, where `download` allows it."""
    download = not in_batch_job(os.environ) if config.download == "auto" else config.download
    return world.main_first(lambda: find_dataset(config, download=download))


def find_dataset(config: Config, *, download: bool) -> Dataset:
    """The dataset `dataset`, for one process. `DataError` where it is missing or damaged.

    With data_loader synthetic, CIFAR and ImageNet are stood in for by their sizes, and no file is needed.
    """
    data_path = Path(config.data_path)
    if config.data_loader == "synthetic" and config.dataset in IMAGES:
        return _stand_in(config)
    if config.dataset in ("imagefolder", "imagenet"):
        return open_folders(config.dataset, data_path, config.image_size, config.centre_crop_share)
    return _with_own_normalisation(config, load_dataset(config.dataset, data_path, download=download))


def _with_own_normalisation(config: Config, dataset: Dataset) -> Dataset:
    """CIFAR-100's mean and deviation are keys, as in the tutorial; other datasets bring their own."""
    if config.dataset != "cifar100":
        return dataset
    return replace(dataset, mean=config.cifar100_mean, std=config.cifar100_std)


# training and validation images of the datasets that can be stood in for
IMAGES = {"cifar100": (50_000, 10_000), "cifar10": (50_000, 10_000), "imagenet": (1_281_167, 50_000)}


def image_side(config: Config) -> int:
    """Pixels of an image's side without a look at the data; for imagefolder without `image_size`, what is usual."""
    return config.image_size or IMAGENET_SIZE if config.dataset in ("imagefolder", "imagenet") else IMAGE_SHAPE[-1]


def _stand_in(config: Config) -> Dataset:
    """Black images of the right number and size, which take no memory."""
    size = image_side(config)
    if config.dataset == "imagenet":
        mean, std = IMAGENET_MEAN, IMAGENET_STD
    else:
        mean, std = VERSIONS[config.dataset].mean, VERSIONS[config.dataset].std
    train, valid = (
        ImageArrays(np.broadcast_to(np.uint8(0), (count, 3, size, size)), np.zeros(count, np.int64))
        for count in IMAGES[config.dataset]
    )
    class_names = tuple(f"class {number}" for number in range(config.num_classes))
    return _with_own_normalisation(config, Dataset(config.dataset, train, valid, class_names, mean, std))


def build_loaders(config: Config, dataset: Dataset, world: World) -> Loaders:
    """Collective: the loaders of this rank. `ConfigError` where dataset and configuration do not fit."""
    if len(dataset.class_names) != config.num_classes:
        raise ConfigError(
            f"num_classes is {config.num_classes}, but {dataset.name} has {len(dataset.class_names)}; "
            f"use --set num_classes={len(dataset.class_names)}"
        )
    notes: list[str] = []
    stays_encoded = not isinstance(dataset.train, ImageArrays) and config.data_loader != "device"
    if config.rnd_resized_crop and not stays_encoded and config.data_loader != "synthetic":
        raise ConfigError(
            f"rnd_resized_crop needs images that are decoded anew in each epoch: dataset imagefolder or imagenet with "
            f"data_loader torchvision or dali, not {config.dataset} with {config.data_loader}"
        )
    if config.data_loader == "device":
        dataset = _decode(config, dataset, notes)
    train_images = len(dataset.train.labels)
    if config.batch_size > train_images:
        raise ConfigError(f"batch_size {config.batch_size} exceeds the {train_images} training images; use fewer")
    ranges = AugmentationRanges(
        config.rnd_crop_padding,
        config.rnd_horizontal_flip,
        config.rnd_rotation_angle,
        config.enable_alternating_flip,
        config.rnd_resized_crop,
    )
    train = EpochPlan(
        num_samples=train_images,
        batch_size=split_batch(config.batch_size, world.world_size, config.micro_batch_size).rank_batch_size,
        rank=world.rank,
        world_size=world.world_size,
        training=True,
        seed=config.seed,
        ranges=ranges if ranges != AugmentationRanges(0, False, 0.0) else None,
        limit=_train_limit(config),
    )
    valid = EpochPlan(
        num_samples=len(dataset.valid.labels),
        batch_size=config.valid_batch_size_per_gpu,
        rank=world.rank,
        world_size=world.world_size,
        training=False,
        limit=config.limit_valid_batches,
    )
    num_workers = 0
    if config.data_loader in ("torchvision", "dali"):
        num_workers = _count_workers(config, world, notes)
    if config.data_loader == "torchvision":
        # The validation loader's workers stay, asleep and with nothing prepared, while training runs, and vice versa.
        ranks_here = world.gather(platform.node()).count(platform.node())
        check_shared_memory(batch_bytes(config, train.batch_size, dataset.train.image_shape), num_workers * ranks_here)
    return Loaders(
        _build(config, dataset, dataset.train, train, world, num_workers),
        _build(config, dataset, dataset.valid, valid, world, num_workers),
        train,
        notes,
    )


def batch_bytes(config: Config, rank_batch_size: int, image_shape: tuple[int, int, int]) -> int:
    """Of the larger batch of a rank, training's or validation's, as a worker hands it over: uint8."""
    return max(rank_batch_size, config.valid_batch_size_per_gpu) * math.prod(image_shape)


def report_unreadable(world: World, loaders: Loaders) -> list[str]:
    """Collective: a line where files could not be read so far on any rank, else nothing."""
    mine = {
        path: reason
        for loader in (loaders.train, loaders.valid)
        if isinstance(loader, TorchvisionLoader)
        for path, reason in loader.unreadable.items()
    }
    merged = {path: reason for unreadable in world.gather(mine) for path, reason in unreadable.items()}
    return [f"{describe_unreadable(merged)}; replaced in training, left out in validation"] if merged else []


def _train_limit(config: Config) -> int | None:
    limits = [config.limit_train_batches, config.profiling_iters_per_epoch if config.enable_profiling else None]
    return min((limit for limit in limits if limit is not None), default=None)


def _decode(config: Config, dataset: Dataset, notes: list[str]) -> Dataset:
    """The dataset with every image in memory."""
    train, unreadable = decode_all(dataset.train, replace=True)
    valid, others = decode_all(dataset.valid, replace=False)
    if unreadable | others:
        message = describe_unreadable(unreadable | others)
        if config.fail_on_unreadable:
            raise DataError(f"{message}; mend them, or --set fail_on_unreadable=false")
        notes.append(f"{message}; replaced in training, left out in validation")
    return replace(dataset, train=train, valid=valid)


def _count_workers(config: Config, world: World, notes: list[str]) -> int:
    """Collective: `num_data_workers`, but no more than this rank's share of the cores that it may run on."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    sharing = world.gather((platform.node(), cores)).count((platform.node(), cores))
    workers = workers_of_a_rank(config.num_data_workers, sharing)
    if workers < config.num_data_workers:
        who = f" for {sharing} ranks" if sharing > 1 else ""
        notes.append(
            f"num_data_workers: {workers} instead of {config.num_data_workers}, there are {usable_cores()} cores{who}"
        )
    return workers


def _build(config: Config, dataset: Dataset, split: Split, plan: EpochPlan, world: World, num_workers: int) -> Loader:
    # NHWC: images come out of the loader in the memory format of the model
    memory_format = torch.channels_last if config.enable_nhwc else torch.contiguous_format
    normalise = Normalise(dataset.mean, dataset.std, world.device, memory_format)
    if config.data_loader == "synthetic":
        return SyntheticLoader(split, plan, config.num_classes, normalise)
    if config.data_loader == "device" and isinstance(split, ImageArrays):
        return DeviceLoader(split, plan, normalise, world.device)
    if config.data_loader == "dali":
        from utils.data.dali_loader import DaliLoader

        return DaliLoader(split, plan, normalise, world.device, num_threads=max(1, num_workers))
    return TorchvisionLoader(
        split,
        plan,
        normalise,
        world.device,
        num_workers=num_workers,
        fail_on_unreadable=config.fail_on_unreadable,
    )
