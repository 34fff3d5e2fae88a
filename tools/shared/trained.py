"""Loads a trained network of a run or a checkpoint, as it was validated: for tools.evaluate, tools.predict, api.py."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from tools.shared.command_line import as_settings
from utils.base_config import KeyFlag
from utils.config import Config, override
from utils.config.command_line import not_empty, report_error
from utils.errors import CheckpointError, ConfigError, DataError, ExpectedError

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from utils.data.datasets.dataset import Dataset, Split
    from utils.data.loader import Loader
    from utils.distributed.world import World
    from utils.training.classifier import Classifier

WHAT_TO_GIVE = "give a run's folder, such as expts/NAME, or a checkpoint of it"
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
        """The class name of each label."""
        return self.state["data"]["class_names"]

    def describe(self, classifier: "Classifier", world: "World") -> str:
        """Describe weights, device and precision in a line."""
        state, of_batch = self.state, f", batch {self.state['batch']}" if self.state["batch"] else ""
        whose = ", moving average of the weights" if state["average"] else ""
        ranks = f", {world.world_size} ranks" if world.world_size > 1 else ""
        return (
            f"{self.path}: {self.config.model} after epoch {state['epoch']}{of_batch}, step {state['step']}{whose}; "
            f"on {world.device.type}{ranks}, {classifier.precision}"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name the network and change its configuration."""
    parser.add_argument(
        "run", type=not_empty, metavar="RUN",
        help="a run's folder (its last checkpoint is used) or a checkpoint, such as RUN/checkpoints/best.pt",
    )  # fmt: skip
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help="default: the run's device")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="override a setting of the run, such as data_path=/data or num_data_workers=2; repeatable",
    )  # fmt: skip


def run_trained(
    options: argparse.Namespace, action: Callable[[Trained, "World"], None], changes: Mapping[str, Any] | None = None
) -> int:
    """Open the network that `options` name, with `changes` to its configuration, and run `action` on every rank.

    Returns the exit status."""
    device = [] if options.device is None else [f"device={options.device}"]
    try:
        trained = open_trained(Path(options.run), [*as_settings(changes or {}), *options.set, *device])
    except ExpectedError as error:
        return report_error(error)
    from utils.distributed.ranks import run_ranks

    config = trained.config
    return run_ranks(lambda world: action(trained, world), config.device, config.rank_timeout_seconds)


def open_trained(path: Path, settings: list[str]) -> Trained:
    """Open the checkpoint that `path` names, with KEY=VALUE `settings` on top of its configuration."""
    found, state, notes = find_checkpoint(path)
    config = read_config(found, state)
    changed = override(config, settings)
    for key in (*Config.keys_with(KeyFlag.FIXED_ON_RESUME), "ema_decay"):  # without which the average is not loaded
        if getattr(changed, key) != getattr(config, key):
            raise ConfigError(f"--set {key}: cannot be changed after training; it was {getattr(config, key)!r}")
    return Trained(found, state, changed, notes)


def find_checkpoint(path: Path) -> tuple[Path, dict[str, Any], list[str]]:
    """Return (file, content, notes) of the newest good checkpoint in a run's folder, or of a checkpoint file."""
    from utils.run.checkpoint.io import newest_good, read_checkpoint

    if path.is_file():
        return path, read_checkpoint(path), []
    found, state, complaints = newest_good(path / "checkpoints")
    if found is None or state is None:
        raise CheckpointError("; ".join(complaints) or f"{path}: holds no checkpoint of a step; {WHAT_TO_GIVE}")
    return found, state, [f"skipped: {complaint}" for complaint in complaints]


def read_config(path: Path, state: dict[str, Any]) -> Config:
    """Return the configuration in a checkpoint. Raises `CheckpointError` if this version does not know it."""
    try:
        return Config(**state["config"])
    except ValidationError as error:
        (first, *_) = error.errors()
        wrong = ": ".join([*map(str, first["loc"][:1]), first["msg"].removeprefix("Value error, ")])
        raise CheckpointError(f"{path}: its configuration is of another version: {wrong!r}; use that version") from None


def load_classifier(trained: Trained, world: "World") -> "Classifier":
    """Return the network as it was validated: weights or their average, precision, memory format."""
    from models import build_model
    from utils.run.checkpoint.fit import check_tensors_fit
    from utils.run.checkpoint.state import merge_buffers
    from utils.training.classifier import build_classifier

    build = partial(build_model, image_side=trained.state["data"]["shape"][-1])
    classifier = build_classifier(trained.config, build, world)
    check_tensors_fit(trained.path, trained.state, classifier.model.state_dict())
    classifier.load_network(trained.state)
    merge_buffers(classifier, trained.state["ranks"])
    return classifier


def check_reads_images(config: Config) -> None:
    """Raise `ConfigError` if the loader reads no images, so that its outputs are of none."""
    from utils.data.config import LOADERS

    if not LOADERS[config.data_loader].needs_data:
        raise ConfigError(f"data_loader {config.data_loader} reads no images; use --set data_loader=torchvision")


def find_split(trained: Trained, paths: list[Path], world: "World", *, test: bool = False) -> "Split":
    """Collective: return the images of `paths`, or without paths the run's validation set, or with `test` its test set.

    Raises `DataError` if they have other classes."""
    from utils.data.build import open_dataset
    from utils.data.datasets.folders import centre_fraction, find_images

    config = trained.config
    if not paths:
        dataset = open_dataset(config, world)
        _check_dataset(trained, dataset)
        if not test:
            return dataset.valid
        if dataset.test is None:
            validated = "it validated on its test images; omit --test"
            raise ConfigError(f"--test: the run held out no images (holdout_images 0); {validated}")
        return dataset.test
    check_reads_images(config)
    return find_images(paths, trained.class_names, _image_side(trained), centre_fraction(config.dataset))


def validation_transform(trained: Trained) -> "Callable[[Image], Tensor]":
    """Return a function that turns a PIL image of any size and mode into the network's input as in validation: resized,
    cropped and normalised, float32 [3, S, S] on the CPU."""
    import torch

    from utils.data.datasets.folders import centre_fraction
    from utils.data.datasets.image_files import as_rgb, cut_centre
    from utils.data.transforms.augment import Normalise

    data, fraction = trained.state["data"], centre_fraction(trained.config.dataset)
    normalise = Normalise(data["mean"], data["std"], torch.device("cpu"), torch.contiguous_format)

    def transform(image: "Image") -> "Tensor":
        pixels = cut_centre(as_rgb(image), _image_side(trained), fraction)
        return normalise(torch.from_numpy(pixels.copy())[None])[0]  # PIL's memory is read-only

    return transform


def _image_side(trained: Trained) -> int:
    _, height, width = trained.state["data"]["shape"]
    if height != width:
        raise ConfigError(f"the run's images are {height} x {width} pixels; files are cut to squares only")
    return height


def _check_dataset(trained: Trained, dataset: "Dataset") -> None:
    path, known, found = trained.config.data_path, trained.class_names, list(dataset.class_names)
    if differing := sorted({*known} ^ {*found}):
        raise DataError(
            f"{path}: its {len(found)} classes are not the {len(known)} of the run, for example "
            f"{differing[0]!r}; {RUNS_DATA}"
        )
    shape = tuple(trained.state["data"]["shape"])
    if dataset.valid.image_shape != shape:
        raise DataError(f"{path}: its images are {dataset.valid.image_shape}, the run's {shape}; {RUNS_DATA}")


def build_loader(trained: Trained, split: "Split", world: "World") -> tuple["Loader", list[str]]:
    """Collective: return this rank's batches of `split`, normalised as in training, and notes."""
    from utils.data.build import build_valid_loader

    data = trained.state["data"]
    return build_valid_loader(trained.config, split, data["mean"], data["std"], world)
