"""Open the configured dataset and build its loaders."""

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from utils.data.config import LOADERS, DataConfig
from utils.data.datasets.cifar import IMAGE_SHAPE, VERSIONS
from utils.data.datasets.custom import load_own
from utils.data.datasets.dataset import Dataset, ImageArrays, Split, hold_out, load_dataset
from utils.data.datasets.folders import IMAGENET_MEAN, IMAGENET_SIZE, IMAGENET_STD, open_folders
from utils.data.datasets.shards import INDEX_FILE, open_shards
from utils.data.loader import Loader
from utils.data.loaders.dali import DaliLoader
from utils.data.loaders.device import DeviceLoader, SyntheticLoader, decode_all
from utils.data.loaders.torchvision import TorchvisionLoader
from utils.data.sampling import EpochPlan
from utils.data.transforms.augment import Normalise
from utils.data.workers import usable_cores
from utils.distributed.global_batch import divide_batch
from utils.distributed.launch import in_batch_job, name_ranks
from utils.distributed.world import World
from utils.errors import ConfigError, DataError
from utils.user_code import is_user_code

BUILDERS: dict[str, Callable[[DataConfig, Split, EpochPlan, Normalise, int], Loader]] = {  # int: workers of this rank
    "torchvision": TorchvisionLoader, "dali": DaliLoader, "device": DeviceLoader, "synthetic": SyntheticLoader,
}  # fmt: skip
# training and validation images of the datasets that `black_images` can replace
DATASET_SIZES = {"cifar100": (50_000, 10_000), "cifar10": (50_000, 10_000), "imagenet": (1_281_167, 50_000)}


@dataclass(frozen=True)
class Loaders:
    """The loaders of this rank."""

    train: Loader
    valid: Loader
    test: Loader | None  # with holdout_images
    notes: list[str]  # lines for the log

    def every(self) -> list[Loader]:
        return [loader for loader in (self.train, self.valid, self.test) if loader is not None]


def open_dataset(config: DataConfig, world: World, *, fetch: bool = True) -> Dataset:
    """Collective: return the dataset `dataset`. With `fetch` one process downloads missing data, except in a batch job,
    whose nodes often have no network."""
    dataset = world.main_first(lambda: find_dataset(config, download=fetch and not in_batch_job(os.environ)))
    others = [len(split.labels) for split in (dataset.valid, dataset.test) if split is not None]
    found = world.all_gather((dataset.describe(), others))
    if differing := [rank for rank, data in enumerate(found) if data != found[0]]:
        remedy = "copy the same files to each node's data_path"
        if is_user_code(config.dataset):
            remedy = "it must return the same each time: seed its random numbers, and sort directory listings"
        raise DataError(f"dataset {config.dataset}: has other data on {name_ranks(differing)} than on rank 0; {remedy}")
    return dataset


def find_dataset(config: DataConfig, *, download: bool) -> Dataset:
    """Return the dataset `dataset`, in one process. `DataError` if it is missing or damaged.

    For a loader that needs no data, black images replace CIFAR and ImageNet, and no file is read.
    """
    if is_user_code(config.dataset):
        dataset = load_own(config)
    elif not LOADERS[config.data_loader].needs_data and config.dataset in DATASET_SIZES:
        dataset = black_images(config)
    elif config.dataset in ("imagefolder", "imagenet"):
        folder = Path(config.data_path)
        opened = open_shards if os.path.lexists(folder / INDEX_FILE) else open_folders
        dataset = opened(config.dataset, folder, config.image_size)
    else:
        dataset = load_dataset(config.dataset, Path(config.data_path), download=download)
    if config.dataset == "cifar100":  # its mean and deviation are settings, as in the tutorial
        dataset = replace(dataset, mean=config.cifar100_mean, std=config.cifar100_std)
    return hold_out(dataset, config.holdout_images)


def black_images(config: DataConfig) -> Dataset:
    """Return a dataset with black images of the right number and size, which take no memory."""
    version = VERSIONS.get(config.dataset)
    size = IMAGE_SHAPE[-1] if version else config.image_size or IMAGENET_SIZE
    train, valid = (
        ImageArrays(np.broadcast_to(np.uint8(0), (count, 3, size, size)), np.zeros(count, np.int64))
        for count in DATASET_SIZES[config.dataset]
    )
    class_names = tuple(f"class {number}" for number in range(config.num_classes))
    mean, std = (version.mean, version.std) if version else (IMAGENET_MEAN, IMAGENET_STD)
    return Dataset(config.dataset, train, valid, class_names, mean, std)


def build_loaders(config: DataConfig, dataset: Dataset, world: World) -> Loaders:
    """Collective: build the loaders of this rank. `ConfigError` if dataset and configuration do not fit."""
    if len(dataset.class_names) != config.num_classes:
        raise ConfigError(
            f"num_classes is {config.num_classes}, but {dataset.name} has {len(dataset.class_names)}; "
            f"use --set num_classes={len(dataset.class_names)}"
        )
    kind = LOADERS[config.data_loader]
    decodes_each_epoch = not isinstance(dataset.train, ImageArrays) and not kind.in_memory
    if config.rnd_resized_crop and not decodes_each_epoch and kind.needs_data:
        raise ConfigError(
            f"rnd_resized_crop needs images that are decoded in each epoch, not {config.dataset} with "
            f"{config.data_loader}; use dataset imagefolder or imagenet with data_loader torchvision or dali"
        )
    build, notes = _choose_builder(config, dataset.mean, dataset.std, world)
    train = build(dataset.train, True)
    valid, *test = (build(split, False) for split in (dataset.valid, dataset.test) if split is not None)
    return Loaders(train, valid, test[0] if test else None, [*dataset.notes, *notes])


def build_valid_loader(
    config: DataConfig, split: Split, mean: tuple[float, ...], std: tuple[float, ...], world: World
) -> tuple[Loader, list[str]]:
    """Collective: build the loader of this rank that validates on `split`; return it and notes for the log."""
    build, notes = _choose_builder(config, mean, std, world)
    return build(split, False), notes


def _choose_builder(
    config: DataConfig, mean: tuple[float, ...], std: tuple[float, ...], world: World
) -> tuple[Callable[[Split, bool], Loader], list[str]]:
    """Collective: return a function that builds a loader of this rank from a split, for training or not, and notes."""
    kind = LOADERS[config.data_loader]
    num_workers, notes = _count_workers(config, world) if kind.has_workers else (0, [])
    # NHWC: the loader returns images in the model's memory format
    memory_format = torch.channels_last if config.enable_nhwc else torch.contiguous_format
    normalise = Normalise(mean, std, world.device, memory_format)

    def build(split: Split, training: bool) -> Loader:
        if kind.in_memory:
            split = decode_all(split, replace=training)
        plan = _plan_epochs(config, len(split.labels), world, training)
        return BUILDERS[config.data_loader](config, split, plan, normalise, num_workers)

    return build, notes


def _plan_epochs(config: DataConfig, num_samples: int, world: World, training: bool) -> EpochPlan:
    rank_batch_size, limit = config.valid_batch_size_per_gpu, config.limit_valid_batches
    if training:
        if config.batch_size > num_samples:
            raise ConfigError(f"batch_size {config.batch_size} exceeds the {num_samples} training images; use fewer")
        rank_batch_size = divide_batch(config.batch_size, world.world_size, config.micro_batch_size).rank_batch_size
        limit = config.train_limit
    return EpochPlan(
        num_samples, rank_batch_size, world.rank, world.world_size, training, seed=config.seed if training else 0,
        augmentation=config if training and config.augments_images else None, limit=limit,
    )  # fmt: skip


def _count_workers(config: DataConfig, world: World) -> tuple[int, list[str]]:
    """Collective: return `num_data_workers`, capped to this rank's part of its cores, and a note if it is capped."""
    here = (platform.node(), sorted(os.sched_getaffinity(0)))
    sharing = world.all_gather(here).count(here)
    wanted, cores = config.num_data_workers, usable_cores()
    workers = min(wanted, max(1, cores // sharing))
    note = f"num_data_workers: {workers} instead of {wanted}, for {sharing} rank(s) on {cores} cores"
    return workers, [] if workers == wanted else [note]
