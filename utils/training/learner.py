"""The learner: everything that a training step reads and changes. The Trainer and every bench build it here."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from utils import seeds
from utils.base_config import as_yaml
from utils.distributed.ddp import distribute
from utils.distributed.global_batch import GlobalBatch, divide_batch
from utils.distributed.world import World
from utils.errors import ConfigError
from utils.timing.profiler import Profiler
from utils.training.classifier import Classifier, SomeConfig, build_classifier
from utils.training.config import TrainingConfig
from utils.training.metrics.sums import MetricSums
from utils.training.optimizers.build import (
    build_optimizer,
    learning_rate,
    load_optimizer,
    set_learning_rate,
    uses_fused_kernel,
)
from utils.training.optimizers.schedule import Plateau, Schedule, build_schedule, explain_warmup
from utils.training.precision import LossScaler, choose_precision
from utils.training.step import (
    CompileTimer,
    Step,
    TrainStep,
    check_graphs,
    choose_step,
    on_capture_stream,
    wants_graphs,
)


@dataclass
class Learner(Classifier):
    """A network and everything that trains it. `steps` counts the optimizer steps so far."""

    batch: GlobalBatch
    optimizer: torch.optim.Optimizer
    loss_scaler: LossScaler
    criterion: nn.Module
    schedule: Schedule
    step: Step
    sums: MetricSums
    profiler: Profiler
    steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.plateau = Plateau(self.config.plateau_patience)

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
        """Learning rate of the last step; waits for the device if it is stored there."""
        return learning_rate(self.optimizer)

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


def check_settings(config: TrainingConfig, world: World) -> None:
    """Collective: raise `ConfigError`, before data is downloaded, for settings that differ between ranks, or that this
    device or number of ranks cannot meet."""
    everyone = world.all_gather(config.model_dump(mode="json", exclude={"data_path", "num_data_workers"}))
    for rank, values in enumerate(everyone):
        for key in [key for key in values if values[key] != everyone[0][key]]:
            raise ConfigError(
                f"{key} is {as_yaml(everyone[0][key])} on rank 0, but {as_yaml(values[key])} on rank {rank}; start "
                "every rank with the same settings"
            )
    divide_batch(config.batch_size, world.world_size, config.micro_batch_size)
    check_graphs(config, choose_precision(config, world.device), world.device)
    if config.verify_every_steps is not None and world.device.type == "cuda" and not config.deterministic:
        raise ConfigError("verify_every_steps compares bits, which vary on a GPU; it needs deterministic true")


def build_learner(
    config: SomeConfig,
    build_model: Callable[[SomeConfig], nn.Module],
    world: World,
    steps_per_epoch: int,
    *,
    wrap: Callable[..., nn.Module] = distribute,
    compile_timer: CompileTimer = nullcontext,
) -> Learner:
    """Collective: build the network by `build_model` and everything that trains it; `wrap` distributes the network over
    the ranks. Steps are compiled and captured, when first trained, within `compile_timer()`.

    Seeds the random generators and sets PyTorch's process-wide switches: learners that take turns in one process must
    call `prepare_backends` again. Raises `ConfigError` for settings that this device or number of ranks cannot meet.
    """
    batch = divide_batch(config.batch_size, world.world_size, config.micro_batch_size)
    classifier = build_classifier(config, build_model, world)
    model, precision, weights, notes = classifier.model, classifier.precision, classifier.weights, classifier.notes
    seeds.seed_random_state(seeds.seed_of(config.seed, world.rank, step=0))
    graphed = wants_graphs(config, world.device)
    optimizer = build_optimizer(config, weights.parameters(), graphed=graphed)
    loss_scaler = LossScaler(precision.device_type, precision.loss_scale)
    criterion = nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)
    profiler = Profiler(world.device)
    with on_capture_stream(world.device, graphed=graphed):
        wrapped = wrap(config, model, world)
    update = criterion, optimizer, loss_scaler, batch.accumulation
    train_step = TrainStep(config, wrapped, weights, precision, *update, profiler, compile_timer)
    step, step_notes = choose_step(config, train_step, world.device)
    notes += step_notes
    if config.extra_opt("fused_optimizer") and not uses_fused_kernel(config, weights.parameters()):
        notes.append("fused_optimizer: no effect on half-precision weights on a CPU")
    notes += explain_warmup(config)
    return Learner(
        **vars(classifier),
        batch=batch,
        optimizer=optimizer,
        loss_scaler=loss_scaler,
        criterion=criterion,
        schedule=build_schedule(config, steps_per_epoch),
        step=step,
        sums=MetricSums(world.device),
        profiler=profiler,
    )
