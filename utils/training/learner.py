"""The learner: everything that a training step reads and changes; and the classifier, the part of it that predicts.

The Trainer and every bench build a `Learner`, the evaluation of a checkpoint only a `Classifier`.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from utils import seeds
from utils.base_config import as_yaml
from utils.distributed.ddp import distribute, synchronise_batch_norm
from utils.distributed.global_batch import divide_batch
from utils.distributed.world import World
from utils.errors import ConfigError
from utils.training.averages import build_ema
from utils.training.config import TrainingConfig
from utils.training.kernels.process import prepare_backends
from utils.training.kernels.use import use_kernels
from utils.training.metrics.sums import MetricSums
from utils.training.optimizers.build import build_optimizer, load_optimizer, set_learning_rate, uses_fused_kernel
from utils.training.optimizers.schedule import Plateau, Schedule
from utils.training.precision import LossScaler, MasterWeights, choose_precision
from utils.training.profiler import Profiler
from utils.training.step import (
    CompileTimer,
    TrainStep,
    check_graphs,
    choose_step,
    compile_for_shapes,
    on_capture_stream,
    wants_graphs,
)

SomeConfig = TypeVar("SomeConfig", bound=TrainingConfig)


def check_settings(config: TrainingConfig, world: World) -> None:
    """Collective: raise `ConfigError`, before data is downloaded, for settings that differ between ranks, or that this
    device or number of ranks cannot meet."""
    precision, exclude = choose_precision(config, world.device), {"data_path", "num_data_workers"}
    everyone = world.all_gather(config.model_dump(mode="json", exclude=exclude) | {"number format": str(precision)})
    for rank, values in enumerate(everyone):
        for key in [key for key in values if values[key] != everyone[0][key]]:
            found = f"{as_yaml(everyone[0][key])} on rank 0, but {as_yaml(values[key])} on rank {rank}"
            raise ConfigError(f"{key} is {found}; start every rank with the same settings")
    divide_batch(config.batch_size, world.world_size, config.micro_batch_size)
    check_graphs(config, precision, world.device)
    if config.verify_every_steps is not None and world.device.type == "cuda" and not config.deterministic:
        raise ConfigError("verify_every_steps compares bits, which vary on a GPU; it needs deterministic true")


class Classifier:
    """A network in the precision and memory format of training, with its moving average.

    The network is built by `build_model`, with weights from `seed`. That seeds the random generators and sets PyTorch's
    process-wide switches: learners that take turns in one process must call `prepare_backends` again. Raises
    `ConfigError` for settings that this device cannot meet."""

    def __init__(self, config: SomeConfig, build_model: Callable[[SomeConfig], nn.Module], world: World) -> None:
        self.config: TrainingConfig = config
        self.precision = choose_precision(config, world.device)
        self.notes = prepare_backends(config, world.device)  # for the log
        seeds.seed_random_state(config.seed)
        model = build_model(config)
        self.notes += use_kernels(config, model, self.precision, world.device)  # STEM, FUSE, CONV
        model = synchronise_batch_norm(config, model, world).to(world.device)
        if config.enable_nhwc:
            # NHWC: weights in the channels_last memory format, as the loaders' images
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model, self.weights, self.ema = model, MasterWeights(model, self.precision), build_ema(config, model)
        self.compiled = 0, self.precision.forward  # for batches with this many images; 0: none

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
        batch_size, compiled = self.compiled
        forward = compiled if len(images) == batch_size else self.precision.forward
        outputs = [forward(self.validated, view) for view in views(images, self.config.test_time_views)]
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


def views(images: Tensor, number: int) -> Iterator[Tensor]:
    """Yield the `test_time_views` of images [N, 3, H, W], in the same memory format."""
    yield images
    if number > 1:
        yield images.flip(-1)
    if number > 2:
        height, width = images.shape[-2:]
        padded = nn.functional.pad(images, [1] * 4, mode="replicate")
        for first in (0, 2):
            # a copy, as convolutions make one anyway and a compiled prediction is for one memory format
            shifted = torch.empty_like(images).copy_(padded[..., first : first + height, first : first + width])
            yield shifted
            yield shifted.flip(-1)


class Learner(Classifier):
    """A network and everything that trains it. `steps` counts the optimizer steps so far.

    Building it is collective; `wrap` distributes the network over the ranks. Steps are compiled and captured, when
    first trained, within `compile_timer()`. Raises `ConfigError` also for what this number of ranks cannot meet."""

    def __init__(
        self,
        config: SomeConfig,
        build_model: Callable[[SomeConfig], nn.Module],
        world: World,
        steps_per_epoch: int,
        *,
        wrap: Callable[..., nn.Module] = distribute,
        compile_timer: CompileTimer = nullcontext,
    ) -> None:
        self.batch = divide_batch(config.batch_size, world.world_size, config.micro_batch_size)
        super().__init__(config, build_model, world)
        seeds.seed_random_state(seeds.seed_of(config.seed, world.rank, step=0))
        graphed, precision, weights = wants_graphs(config, world.device), self.precision, self.weights
        self.optimizer = build_optimizer(config, weights.parameters(), graphed=graphed)
        self.loss_scaler = LossScaler(precision.device_type, precision.loss_scale)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)
        self.schedule, self.plateau = Schedule(config, steps_per_epoch), Plateau(config.plateau_patience)
        self.steps, self.sums, self.profiler = 0, MetricSums(world.device), Profiler(world.device)
        with on_capture_stream(world.device, graphed=graphed):
            wrapped = wrap(config, self.model, world)
        update = self.criterion, self.optimizer, self.loss_scaler, self.batch.accumulation
        train_step = TrainStep(config, wrapped, weights, precision, *update, self.profiler, compile_timer)
        self.step, notes = choose_step(config, train_step, world.device)
        if config.extra_opt("fused_optimizer") and not uses_fused_kernel(config, weights.parameters()):
            notes.append("fused_optimizer: no effect on half-precision weights on a CPU")
        self.notes += notes + self.schedule.notes

    def train_step(self, images: Tensor, labels: Tensor) -> None:
        """Train one optimizer step on this rank's part of a global batch."""
        set_learning_rate(self.optimizer, self.schedule.factor(self.steps, self.plateau.cuts))
        self.step(images, labels, self.sums)
        if self.ema is not None:
            self.ema.update()
        self.steps += 1

    def average_buffers(self, world: World) -> None:
        """Collective. DDP: set each rank's BatchNorm statistics to the mean over all ranks."""
        world.average_buffers(self.model)
        if self.ema is not None:
            world.average_buffers(self.ema.network)

    def observe_validation(self, loss: float) -> None:
        """Pass an epoch's validation loss to the plateau schedule; as in the tutorial, not during the warm-up."""
        if self.steps > self.schedule.warmup_steps:
            self.plateau.observe(loss)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the last step, of the first group; waits for the device if it is stored there."""
        return float(self.optimizer.param_groups[0]["lr"])

    def state_dict(self) -> dict[str, Any]:
        """Return the learner's part of a checkpoint."""
        return {
            "step": self.steps,
            "model": self.weights.state_dict(),
            "average": None if self.ema is None else self.ema.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "grad_scaler": self.loss_scaler.state_dict(),
            "plateau": asdict(self.plateau),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the `state_dict` of a learner with compatible settings."""
        self.load_network(state)
        load_optimizer(self.optimizer, state["optimizer"])
        if state["grad_scaler"]:
            self.loss_scaler.load_state_dict(state["grad_scaler"])
        self.plateau = Plateau(**state["plateau"] | {"patience": self.config.plateau_patience})
        self.steps = state["step"]
        if self.steps:  # so that the epoch's record has it if only the validation remains
            set_learning_rate(self.optimizer, self.schedule.factor(self.steps - 1, self.plateau.cuts))
