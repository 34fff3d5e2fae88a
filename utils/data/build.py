"""Open the configured dataset and build its loaders."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from utils.data.augment import Normalise
from utils.data.config import LOADERS_WITH_WORKERS, DataConfig
from utils.data.dali import DaliLoader
from utils.data.datasets.cifar import IMAGE_SHAPE, VERSIONS
from utils.data.datasets.custom import load_own
from utils.data.datasets.dataset import STATISTICS, Dataset, ImageArrays, Split, fingerprint, hold_out, load_dataset
from utils.data.datasets.dataset import spread_over_classes as spread
from utils.data.datasets.folders import IMAGENET_MEAN, IMAGENET_SIZE, IMAGENET_STD, open_folders
from utils.data.datasets.shards import INDEX_FILE, open_shards
from utils.data.loader import DeviceLoader, Loader, SyntheticLoader, TorchvisionLoader, decode_all
from utils.data.sampling import IntArray, Sampler
from utils.distributed.launch import SCHEDULER_VARIABLES, name_ranks
from utils.distributed.world import World
from utils.errors import ConfigError, DataError
from utils.user_code import is_user_code

BUILDERS: dict[str, Callable[[DataConfig, Split, Sampler, Normalise], Loader]] = {
    "torchvision": TorchvisionLoader, "dali": DaliLoader, "device": DeviceLoader, "synthetic": SyntheticLoader,
}  # fmt: skip
SomeConfig = TypeVar("SomeConfig", bound=DataConfig)
Statistics = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation of each channel
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
    """Collective: open the dataset. With `fetch` one process downloads it, except in a batch job."""
    fetch &= not any(os.environ.get(name) for name in SCHEDULER_VARIABLES)  # whose nodes often have no network
    find = partial(find_dataset, config, download=fetch)
    dataset = world.main_only(find) or find()  # first on the main process, then on the others
    found = world.all_gather(dataset.describe())
    # versions of Pillow decode some pixels differently: all ranks take the statistics of rank 0
    statistics: dict[str, Any] = {name: found[0][name] for name in STATISTICS}
    if differing := [rank for rank, data in enumerate(found) if data | statistics != found[0]]:
        remedy = "copy the same files to each node's data_path; a function must return the same data each time"
        raise DataError(f"dataset {config.dataset}: has other data on {name_ranks(differing)} than on rank 0; {remedy}")
    return replace(dataset, **statistics)


def find_dataset(config: DataConfig, *, download: bool) -> Dataset:
    """Open the dataset, for `synthetic` with black images instead of CIFAR and ImageNet. Raises `DataError`."""
    folder = Path(config.data_path)
    if is_user_code(config.dataset):
        dataset = load_own(config)
    elif config.data_loader == "synthetic" and config.dataset in DATASET_SIZES:
        dataset = black_images(config)
    elif config.dataset in ("imagefolder", "imagenet"):
        opened = open_shards if os.path.lexists(folder / INDEX_FILE) else open_folders
        dataset = opened(config.dataset, folder, config.image_size)
    else:
        dataset = load_dataset(config.dataset, folder, download=download)
    if config.dataset == "cifar100":  # its mean and deviation are settings, as in the tutorial
        dataset = replace(dataset, mean=config.cifar100_mean, std=config.cifar100_std)
    return hold_out(replace(dataset, fingerprint=fingerprint(dataset.train, dataset.valid)), config.holdout_images)


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
        remedy = f"use --set num_classes={len(dataset.class_names)}"
        raise ConfigError(f"num_classes is {config.num_classes}, not the number of classes of {dataset.name}; {remedy}")
    decoded_once = isinstance(dataset.train, ImageArrays) or config.data_loader == "device"
    if config.rnd_resized_crop and decoded_once and config.data_loader != "synthetic":
        given = f"dataset {config.dataset} with data_loader {config.data_loader}"
        raise ConfigError(f"rnd_resized_crop needs image files, and data_loader torchvision or dali, not {given}")
    config, notes = cap_workers(config, world)
    whole, statistics = config.model_copy(update={"limit_valid_batches": None}), (dataset.mean, dataset.std)
    train = build_loader(config, statistics, world, dataset.train, training=True)
    valid = build_loader(config, statistics, world, dataset.valid, training=False)
    test = build_loader(whole, statistics, world, dataset.test, training=False) if dataset.test else None
    return Loaders(train, valid, test, [*dataset.notes, *notes])


def build_loader(config: DataConfig, statistics: Statistics, world: World, split: Split, *, training: bool) -> Loader:
    """Build the loader of this rank that trains or validates on `split`, after `cap_workers`."""
    # NHWC: the loader returns images in the model's memory format
    memory_format = torch.channels_last if config.enable_nhwc else torch.contiguous_format
    normalise = Normalise(*statistics, world.device, memory_format)
    if config.data_loader == "device":
        split = decode_all(split, replace=training)
    sampler = _build_sampler(config, split.labels, world, training)
    return BUILDERS[config.data_loader](config, split, sampler, normalise)


def _build_sampler(config: DataConfig, labels: IntArray, world: World, training: bool) -> Sampler:
    if not training:
        size, limit = config.valid_batch_size_per_gpu, config.limit_valid_batches
        number = len(labels) if limit is None else min(len(labels), limit * size * world.world_size)
        chosen = None if number == len(labels) else spread(labels, number)
        return Sampler(number, size, world.rank, world.world_size, training=False, chosen=chosen)
    if config.batch_size > len(labels):
        raise ConfigError(f"batch_size {config.batch_size} exceeds the {len(labels)} training images; use fewer")
    size = config.batch_size // world.world_size  # make_plan refuses a remainder
    limits = config.limit_train_batches, (config.profiling_iters_per_epoch if config.enable_profiling else None)
    return Sampler(
        len(labels), size, world.rank, world.world_size, training=True, seed=config.seed,
        augmentation=config if config.augments_images else None, limit=min(filter(None, limits), default=None),
    )  # fmt: skip


def cap_workers(config: SomeConfig, world: World) -> tuple[SomeConfig, list[str]]:
    """Collective: return `config` with `num_data_workers` capped to this rank's cores, and a note if so."""
    if config.data_loader not in LOADERS_WITH_WORKERS:
        return config, []
    cores = world.count_cores()
    workers = min(config.num_data_workers, max(1, int(cores)))
    note = f"num_data_workers: {workers} instead of {config.num_data_workers}, for {cores:g} cores of this rank"
    notes = [] if workers == config.num_data_workers else [note]
    return config.model_copy(update={"num_data_workers": workers}), notes
