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
from utils.training.config import TrainingConfig
from utils.training.ema import Ema, build_ema
from utils.training.kernels.backends import check_deterministic_kernels, prepare_backends
from utils.training.kernels.conv.weight_gradient import use_products
from utils.training.kernels.conv.winograd import use_winograd
from utils.training.kernels.norm_relu.module import fuse_norm_relu
from utils.training.kernels.stem import pad_stem
from utils.training.precision import MasterWeights, Precision, choose_precision

SomeConfig = TypeVar("SomeConfig", bound=TrainingConfig)


@dataclass
class Classifier:
    """A network in the precision and memory format of training, with its moving average."""

    config: TrainingConfig
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
        views = [images, *other_views(self.config, images)]
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
        self.ema = build_ema(self.config, self.model)  # where none was saved, it begins with these weights
        if self.ema is not None and state["average"] is not None:
            self.ema.load_state_dict(state["average"])


def other_views(config: TrainingConfig, images: Tensor) -> Iterator[Tensor]:
    """What is validated beside the images [N, 3, H, W] themselves, in the same size: `test_time_flip`,
    `test_time_shift`."""
    if config.test_time_flip:
        yield images.flip(-1)
    if not config.test_time_shift:
        return
    height, width = images.shape[-2:]
    padded = nn.functional.pad(images, [config.test_time_shift] * 4, mode="replicate")
    for first in (0, 2 * config.test_time_shift):
        shifted = padded[..., first : first + height, first : first + width]
        yield shifted
        if config.test_time_flip:
            yield shifted.flip(-1)


def build_classifier(config: SomeConfig, build_model: Callable[[SomeConfig], nn.Module], world: World) -> Classifier:
    """The network that `build_model` makes, with weights that follow from `seed`.

    Seeds the random generators, and sets PyTorch's process-wide switches. Raises `ConfigError` for what this device
    cannot do.
    """
    precision = choose_precision(config, world.device)
    notes = prepare_backends(config, world.device)
    seeds.seed_random_state(config.seed)
    model = pad_stem(config, build_model(config))  # STEM: zeros beside the three colours
    notes += fuse_norm_relu(config, model, world.device)  # FUSE: BatchNorm, shortcut and ReLU as one
    notes += use_winograd(config, model, precision, world.device)  # CONV: 3x3 convolutions with fewer multiplications
    notes += use_products(config, model, precision, world.device)  # CONV: gradients of weights as products
    model = synchronise_batch_norm(config, model, world).to(world.device)
    check_deterministic_kernels(config, model, world.device)
    if config.enable_nhwc:
        # NHWC: weights in the channels_last memory format; the loaders bring the images in the same one
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Classifier(config, model, precision, MasterWeights(model, precision), build_ema(config, model), notes)
