"""The part of the learner that classifies: what training validates, and what a checkpoint is evaluated with later."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from utils import seeds
from utils.distributed.ddp import synchronise_batch_norm
from utils.distributed.world import World
from utils.training.backends import check_deterministic_kernels, prepare_backends
from utils.training.conv_products import use_products
from utils.training.conv_winograd import use_winograd
from utils.training.keys import TrainingKeys
from utils.training.norm_relu import fuse_norm_relu
from utils.training.precision import MasterWeights, Precision, choose_precision
from utils.training.recipe import Ema, build_ema
from utils.training.stem import pad_stem

SomeKeys = TypeVar("SomeKeys", bound=TrainingKeys)


@dataclass
class Classifier:
    """A network in the precision and memory format of training, with its moving average."""

    keys: TrainingKeys
    model: nn.Module
    precision: Precision
    weights: MasterWeights
    ema: Ema | None
    notes: list[str]

    @property
    def validated(self) -> nn.Module:
        """The network that is validated: the moving average where there is one."""
        return self.model if self.ema is None else self.ema.network

    def predict(self, images: Tensor) -> Tensor:
        """Images [N, 3, H, W] -> float32 logits [N, classes] of the network that is validated.

        AMP: in the precision of training."""
        views = [images, *other_views(self.keys, images)]
        outputs = [self.precision.forward(self.validated, view) for view in views]
        return reduce(torch.add, outputs) / len(outputs) if len(outputs) > 1 else outputs[0]

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """BatchNorm's buffers of the network and of its average."""
        yield from self.model.named_buffers()
        if self.ema is not None:
            yield from self.ema.network.named_buffers(prefix="average")

    def load_network(self, state: dict[str, Any]) -> None:
        """Weights and average from these keys of a checkpoint's table: model, average."""
        self.weights.load_state_dict(state["model"])
        self.ema = build_ema(self.keys, self.model)  # where none was saved, it begins with these weights
        if self.ema is not None and state["average"] is not None:
            self.ema.load_state_dict(state["average"])


def other_views(keys: TrainingKeys, images: Tensor) -> Iterator[Tensor]:
    """What is validated beside the images [N, 3, H, W] themselves, in the same size: `test_time_flip`,
    `test_time_shift`."""
    if keys.test_time_flip:
        yield images.flip(-1)
    if not keys.test_time_shift:
        return
    height, width = images.shape[-2:]
    padded = nn.functional.pad(images, [keys.test_time_shift] * 4, mode="replicate")
    for first in (0, 2 * keys.test_time_shift):
        shifted = padded[..., first : first + height, first : first + width]
        yield shifted
        if keys.test_time_flip:
            yield shifted.flip(-1)


def build_classifier(keys: SomeKeys, build_model: Callable[[SomeKeys], nn.Module], world: World) -> Classifier:
    """The network that `build_model` makes, with weights that follow from `seed`.

    Seeds the random generators, and sets PyTorch's process-wide switches. Raises `ConfigError` for what this device
    cannot do.
    """
    precision = choose_precision(keys, world.device)
    notes = prepare_backends(keys, world.device)
    seeds.seed_random_state(keys.seed)
    model = pad_stem(keys, build_model(keys))  # STEM: zeros beside the three colours
    notes += fuse_norm_relu(keys, model, world.device)  # FUSE: BatchNorm, shortcut and ReLU as one
    notes += use_winograd(keys, model, precision, world.device)  # CONV: 3x3 convolutions with fewer multiplications
    notes += use_products(keys, model, precision, world.device)  # CONV: gradients of weights as products
    model = synchronise_batch_norm(keys, model, world).to(world.device)
    check_deterministic_kernels(keys, model, world.device)
    if keys.enable_nhwc:
        # NHWC: weights in the channels_last memory format; the loaders bring the images in the same one
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Classifier(keys, model, precision, MasterWeights(model, precision), build_ema(keys, model), notes)
