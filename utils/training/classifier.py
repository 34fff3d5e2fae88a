"""The part of the learner that predicts: validation in training and the evaluation of a checkpoint use it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from utils import seeds
from utils.distributed.ddp import synchronise_batch_norm
from utils.distributed.world import World
from utils.training.averages import Ema, build_ema
from utils.training.config import TrainingConfig
from utils.training.kernels.process import prepare_backends
from utils.training.kernels.use import use_kernels
from utils.training.precision import MasterWeights, Precision, choose_precision
from utils.training.step import compile_for_shapes

SomeConfig = TypeVar("SomeConfig", bound=TrainingConfig)
Forward = Callable[[nn.Module, Tensor], Tensor]  # network, images [N, 3, H, W] -> float32 logits [N, classes]


@dataclass
class Classifier:
    """A network in the precision and memory format of training, with its moving average."""

    config: TrainingConfig
    model: nn.Module
    precision: Precision
    weights: MasterWeights
    ema: Ema | None
    notes: list[str]
    compiled: tuple[int, Forward] | None = field(default=None, init=False)  # for batches with this many images

    @property
    def validated(self) -> nn.Module:
        """The network that is validated: the moving average if there is one."""
        return self.model if self.ema is None else self.ema.network

    def compile(self, batch_size: int) -> None:
        """COMPILE: compile the prediction of batches of `batch_size` images. Others stay eager: a validation has at
        most one shorter batch, which would not pay for a second compilation. Names of weights do not change."""
        self.compiled = batch_size, compile_for_shapes(self.precision.forward, 1)

    def predict(self, images: Tensor) -> Tensor:
        """Images [N, 3, H, W] -> float32 logits [N, classes] of the validated network, averaged over test-time
        augmentation. AMP: computed in the precision of training."""
        views = [images, *augmented_views(self.config, images)]
        batch_size, compiled = self.compiled or (0, self.precision.forward)
        forward = compiled if len(images) == batch_size else self.precision.forward
        outputs = [forward(self.validated, view) for view in views]
        return reduce(torch.add, outputs) / len(outputs) if len(outputs) > 1 else outputs[0]

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers of the network and of its moving average."""
        yield from self.model.named_buffers()
        if self.ema is not None:
            yield from self.ema.network.named_buffers(prefix="average")

    def load_network(self, state: dict[str, Any]) -> None:
        """Load weights and moving average from the entries `model` and `average` of a checkpoint."""
        self.weights.load_state_dict(state["model"])
        self.ema = build_ema(self.config, self.model)  # if none was saved, it starts from these weights
        if self.ema is not None and state["average"] is not None:
            self.ema.load_state_dict(state["average"])


def augmented_views(config: TrainingConfig, images: Tensor) -> Iterator[Tensor]:
    """Yield the other `test_time_views` of images [N, 3, H, W], in the same memory format."""
    if config.test_time_views == 1:
        return
    yield images.flip(-1)
    if config.test_time_views == 2:
        return
    height, width = images.shape[-2:]
    padded = nn.functional.pad(images, [1] * 4, mode="replicate")
    for first in (0, 2):
        # a copy, as convolutions make one anyway and a compiled prediction is for one memory format
        shifted = torch.empty_like(images).copy_(padded[..., first : first + height, first : first + width])
        yield shifted
        yield shifted.flip(-1)


def build_classifier(config: SomeConfig, build_model: Callable[[SomeConfig], nn.Module], world: World) -> Classifier:
    """Build the network by `build_model`, with weights from `seed`.

    Seeds the random generators and sets PyTorch's process-wide switches. Raises `ConfigError` for settings that this
    device cannot meet.
    """
    precision = choose_precision(config, world.device)
    notes = prepare_backends(config, world.device)
    seeds.seed_random_state(config.seed)
    model = build_model(config)
    notes += use_kernels(config, model, precision, world.device)  # STEM, FUSE, CONV
    model = synchronise_batch_norm(config, model, world).to(world.device)
    if config.enable_nhwc:
        # NHWC: weights in the channels_last memory format, as the loaders' images
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Classifier(config, model, precision, MasterWeights(model, precision), build_ema(config, model), notes)
