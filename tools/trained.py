"""Load a trained network as it was validated, for tools.evaluate, tools.predict, tools.export and api.py."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from pydantic import ValidationError
from torch import Tensor

from models import build_model
from tools.common import as_settings, path_argument
from utils.base_config import KeyFlag
from utils.config import Config, override
from utils.config.command_line import report_error
from utils.data.augment import Normalise
from utils.data.build import build_loader, cap_workers, open_dataset
from utils.data.datasets.dataset import Split, match_classes
from utils.data.datasets.folders import centre_fraction, find_images
from utils.data.datasets.image_files import as_rgb, cut_centre
from utils.data.loader import Loader
from utils.distributed.ranks import run_ranks
from utils.distributed.world import World
from utils.errors import CheckpointError, ConfigError, DataError, ExpectedError
from utils.run.checkpoint import check_tensors_fit, newest_good
from utils.run.run import merge_buffers
from utils.training.learner import Classifier
from utils.training.plan import make_plan

RUNS_DATA = "--set data_path=PATH names the run's data"


@dataclass(frozen=True)
class Trained:
    """A checkpoint, the configuration to compute with, and notes for the user."""

    path: Path
    state: dict[str, Any]
    config: Config
    notes: list[str]

    @property
    def class_names(self) -> list[str]:
        return self.state["data"]["class_names"]

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)"""
        return tuple(self.state["data"]["shape"])

    def describe(self, classifier: Classifier, world: World) -> str:
        state = self.state
        of_batch = f", batch {state['batch']}" if state["batch"] else ""
        whose = ", moving average of the weights" if state["average"] else ""
        ranks = f", {world.world_size} ranks" if world.world_size > 1 else ""
        when = f"after epoch {state['epoch']}{of_batch}, step {state['step']}{whose}"
        return f"{self.path}: {self.config.model} {when}; on {world.device.type}{ranks}, {classifier.plan.precision}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name the network and change its configuration."""
    what = "a run's folder (its last checkpoint is used) or a checkpoint, such as RUN/checkpoints/best.pt"
    parser.add_argument("run", type=path_argument, metavar="RUN", help=what)
    setting = "override a setting of the run, such as data_path=/data or device=cpu; repeatable"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=setting)


def run_trained(options: argparse.Namespace, action: Callable[[Trained, World], None], changes: dict[str, Any]) -> int:
    """Run `action` on every rank with the network that `options` name; return the exit status."""
    try:
        trained = open_trained(options.run, [*as_settings(changes), *options.set])
    except ExpectedError as error:
        return report_error(error)
    return run_ranks(lambda world: action(trained, world), trained.config.device, trained.config.rank_timeout_seconds)


def open_trained(path: Path, settings: list[str]) -> Trained:
    """Open the newest good checkpoint of a run, or a checkpoint file, with KEY=VALUE `settings` on top."""
    found, state, complaints = newest_good(path)
    if found is None or state is None:
        remedy = "give the folder of a run that saved one, such as expts/NAME"
        raise CheckpointError("; ".join(complaints) or f"{path}: holds no checkpoint of a step; {remedy}")
    try:
        config = Config(**state["config"])
    except ValidationError as error:
        (first, *_) = error.errors()
        wrong = ": ".join([*map(str, first["loc"][:1]), first["msg"]])  # with the key, if it is about one
        why = f"its configuration is of another version: {wrong!r}"
        raise CheckpointError(f"{found}: {why}; use that version") from None
    changed = override(config, settings)
    for key in (*Config.keys_with(KeyFlag.FIXED_ON_RESUME), "ema_decay"):  # without which the average is not loaded
        if getattr(changed, key) != getattr(config, key):
            raise ConfigError(f"--set {key}: cannot be changed after training; it was {getattr(config, key)!r}")
    return Trained(found, state, changed, [f"skipped: {complaint}" for complaint in complaints])


def load_classifier(trained: Trained, world: World) -> Classifier:
    """Return the network as it was validated: weights or their average, precision, memory format."""
    plan = make_plan(trained.config, world, training=False)
    build = partial(build_model, image_side=trained.image_shape[-1])
    classifier = Classifier(trained.config, plan, build, world)
    check_tensors_fit(trained.path, trained.state, classifier.model.state_dict())
    classifier.load_network(trained.state)
    merge_buffers(classifier, trained.state["ranks"])
    return classifier


def find_split(trained: Trained, paths: list[Path], world: World, *, test: bool = False, read: bool = False) -> Split:
    """Collective: return the images of `paths`, or without paths the run's validation set, or with `test` its test set.
    Labels are the run's, by the names of the classes. Raises `DataError` for other classes, and with paths or
    `read` `ConfigError` for a loader that reads no images."""
    config = trained.config
    if (paths or read) and config.data_loader == "synthetic":
        raise ConfigError("data_loader synthetic reads no images; use --set data_loader=torchvision")
    if paths:
        return find_images(paths, trained.class_names, _image_side(trained), centre_fraction(config.dataset))
    dataset = open_dataset(config, world)
    split = dataset.test if test else dataset.valid
    if split is None:
        raise ConfigError("--test: the run held out no images (holdout_images 0); omit --test")
    if dataset.valid.image_shape != trained.image_shape:
        shapes = f"its images are {dataset.valid.image_shape}, the run's {trained.image_shape}"
        raise DataError(f"{config.data_path}: {shapes}; {RUNS_DATA}")
    order = match_classes(f"{config.data_path}", dataset.class_names, trained.class_names, RUNS_DATA)
    return split if (order == sorted(order)).all() else replace(split, labels=order[split.labels])


def prepare_image(trained: Trained, image: Image) -> Tensor:
    """Return the network's input from a PIL image of any size and mode, as in validation: resized, cropped and
    normalised, float32 [3, S, S] on the CPU."""
    pixels = cut_centre(as_rgb(image), _image_side(trained), centre_fraction(trained.config.dataset))
    return normalisation(trained)(torch.from_numpy(pixels.copy())[None])[0]  # PIL's memory is read-only


def normalisation(trained: Trained) -> Normalise:
    """Return the run's normalisation of uint8 pixels [N, 3, H, W], on the CPU."""
    data = trained.state["data"]
    return Normalise(data["mean"], data["std"], torch.device("cpu"), torch.contiguous_format)


def _image_side(trained: Trained) -> int:
    _, height, width = trained.image_shape
    if height != width:
        raise ConfigError(f"the run's images are {height} x {width} pixels; files are cut to squares only")
    return height


def open_split(trained: Trained, split: Split, world: World) -> tuple[Classifier, Loader, list[str]]:
    """Collective: return the network, this rank's batches of `split`, normalised as in training, and all notes."""
    data, (config, notes) = trained.state["data"], cap_workers(trained.config, world)
    loader = build_loader(config, (data["mean"], data["std"]), world, split, training=False)
    classifier = load_classifier(trained, world)
    return classifier, loader, [*trained.notes, *notes, *classifier.plan.notes]
