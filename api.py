"""Train, load and evaluate from Python, for example in a notebook; docs/evaluation.md explains it.

    from resnet50_at_scale.api import evaluate, load, train  # in a checkout: from api import ...

    run = train("quickstart", max_epochs=4)
    print(run.metrics["best_acc1"], evaluate(run.folder)["acc1"])
    model, class_names, transform = load(run.folder)

Each function does, in this process, what a command does: train.py, tools.predict, tools.evaluate. Where the command
prints an error and ends, the function raises it: `ExpectedError` and its kinds, which can be imported from here.
"""

import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

if (code := str(Path(__file__).resolve().parent)) not in sys.path:
    sys.path.insert(0, code)  # the modules import each other as in a checkout

import torch
from PIL.Image import Image
from torch import Tensor, nn

from tools.bench.common import alone
from tools.common import as_settings
from tools.evaluate import evaluate as evaluate_trained
from tools.trained import load_classifier, open_trained, prepare_image
from train import Trainer
from utils.config import load_config
from utils.errors import CheckpointError, ConfigError, CorruptionError, DataError, ExpectedError, Stopped
from utils.program import VERSION as __version__
from utils.run.logger import read_records
from utils.training.learner import Classifier

__all__ = [
    "CheckpointError", "ConfigError", "CorruptionError", "DataError", "ExpectedError", "Loaded", "Run", "Stopped",
    "Validated", "__version__", "evaluate", "load", "train",
]  # fmt: skip


class Run(NamedTuple):
    """A finished run."""

    folder: Path
    metrics: dict[str, Any]  # "best_acc1", "last_loss", "seconds", ...; accuracies are in [0, 1]
    epochs: list[dict[str, Any]]  # "epoch", "loss/train", "acc1/valid", "images_per_sec", ... of each epoch


class Validated(nn.Module):
    """A network as it is validated: weights or their moving average, precision, memory format, test-time augmentation.

    Images [N, 3, S, S] of the transform -> float32 logits [N, classes], on the network's device."""

    def __init__(self, classifier: Classifier, device: torch.device) -> None:
        super().__init__()
        self.network, self.classifier, self.device = classifier.validated, classifier, device

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier.predict(images.to(self.device, memory_format=self.classifier.plan.memory_format))


class Loaded(NamedTuple):
    """A trained network."""

    model: Validated
    class_names: list[str]  # of each logit
    transform: Callable[[Image], Tensor]  # a PIL image of any size -> float32 [3, S, S]


def train(
    config: str, *, run_dir: str | Path | None = None, resume: str | Path = "auto",
    yaml_config: str | Path = "config/cifar100.yaml", **overrides: Any,
) -> Run:  # fmt: skip
    """Train the block `config` with settings on top, in one process, and return the run. A run that was interrupted is
    resumed, and a finished one is only read; its figures are empty if its folder is new and `resume` names a finished
    run. The other arguments are train.py's options.

    Raises `Stopped` if the kernel's interrupt button stopped it; everything is saved then."""
    chosen = load_config(Path(yaml_config).expanduser(), config, as_settings(overrides))
    folder = Path(run_dir).expanduser() if run_dir else Path("expts") / config
    Trainer(chosen, alone(chosen), folder, config, os.path.expanduser(resume)).train()
    ends = read_records(folder, "end")  # none in a folder that began with a checkpoint of a finished run
    return Run(folder, ends[-1] if ends else {}, read_records(folder, "epoch"))


def load(run: str | Path, **overrides: Any) -> Loaded:
    """Return the network of a run's folder (its last checkpoint) or of a checkpoint, in evaluation mode.

    Warns of what it skipped or ignores, such as a damaged checkpoint."""
    trained = open_trained(Path(run).expanduser(), as_settings(overrides))
    world = alone(trained.config)
    classifier = load_classifier(trained, world)
    for note in [*trained.notes, *classifier.plan.notes]:
        warnings.warn(note, stacklevel=2)
    model = Validated(classifier, world.device).eval()
    return Loaded(model, trained.class_names, partial(prepare_image, trained))


def evaluate(run: str | Path, data: str | Path | None = None, **overrides: Any) -> dict[str, Any]:
    """Return the figures of tools.evaluate for the run's validation images, or for the class folders in `data`."""
    changes = {"limit_valid_batches": None} if data else {}  # evaluate every image of a folder
    trained = open_trained(Path(run).expanduser(), as_settings(changes | overrides))
    return evaluate_trained(trained, Path(data).expanduser() if data else None, alone(trained.config))
