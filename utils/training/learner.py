"""The learner: all that a training step reads and changes, built in one place for the Trainer and for every bench."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from utils import seeds
from utils.distributed.ddp import distribute
from utils.distributed.global_batch import GlobalBatch, divide_batch
from utils.distributed.world import World
from utils.errors import ConfigError
from utils.timing.profiler import Profiler
from utils.training.checks.fingerprints import OwnGradients, describe_verification, rounds_each_time_anew
from utils.training.classifier import Classifier, build_classifier
from utils.training.config import TrainingConfig
from utils.training.metrics.sums import MetricSums
from utils.training.optimizers.build import build_optimizer, fuses, learning_rate, load_optimizer, set_learning_rate
from utils.training.optimizers.schedule import Plateau, Schedule, build_schedule
from utils.training.precision import LossScaler, choose_precision
from utils.training.step import Preparing, Step, TrainStep, choose_step, on_capture_stream, wants_graphs
from utils.user_code import user_code_errors

SomeConfig = TypeVar("SomeConfig", bound=TrainingConfig)


@dataclass
class Learner(Classifier):
    """A network with all that trains it. `steps` counts the optimizer steps so far."""

    batch: GlobalBatch
    optimizer: torch.optim.Optimizer
    loss_scaler: LossScaler
    criterion: nn.Module
    schedule: Schedule
    step: Step
    sums: MetricSums
    profiler: Profiler
    own_gradients: OwnGradients | None  # where steps are verified on several ranks
    steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.plateau = Plateau(self.config.lr_plateau_patience)

    def train_step(self, images: Tensor, labels: Tensor) -> None:
        """One optimizer step on this rank's share of a global batch, at the learning rate of this step."""
        set_learning_rate(self.optimizer, self.schedule.factor(self.steps, self.plateau.cuts))
        self.step(images, labels, self.sums)
        if self.ema is not None:
            self.ema.update()
        self.steps += 1

    def average_buffers(self, world: World) -> None:
        """Collective. DDP: each rank's BatchNorm statistics become the mean over all ranks."""
        world.average_buffers(self.model)
        if self.ema is not None:
            world.average_buffers(self.ema.network)

    def observe_validation(self, loss: float) -> None:
        """Tell the plateau schedule an epoch's validation loss; as in the tutorial, not in the warm-up's epochs."""
        if self.steps > self.schedule.warmup_steps:
            self.plateau.observe(loss)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the last step; waits for the device where it is kept there."""
        return learning_rate(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """These keys of a checkpoint's table: step, model, average, optimizer, grad_scaler, plateau."""
        return {
            "step": self.steps,
            "model": self.weights.state_dict(),
            "average": None if self.ema is None else self.ema.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "grad_scaler": self.loss_scaler.state_dict(),
            "plateau": asdict(self.plateau),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict` of a learner with keys that fit."""
        self.load_network(state)
        load_optimizer(self.optimizer, state["optimizer"])
        if state["grad_scaler"]:
            self.loss_scaler.load_state_dict(state["grad_scaler"])
        self.plateau = Plateau(**state["plateau"] | {"patience": self.config.lr_plateau_patience})
        self.steps = state["step"]
        if self.steps:  # for the epoch's record, where only its validation is left
            set_learning_rate(self.optimizer, self.schedule.factor(self.steps - 1, self.plateau.cuts))


def check_keys(config: TrainingConfig, world: World) -> None:
    """`ConfigError` for what this device or number of ranks cannot do, to be known before data is fetched."""
    divide_batch(config.batch_size, world.world_size, config.micro_batch_size)
    choose_precision(config, world.device)


def check_outputs(learner: Learner, model_name: str, image_shape: tuple[int, int, int]) -> None:
    """Collective: `ConfigError` where the network does not turn images [2, *image_shape] into logits [2, num_classes],
    in validation or in training, or trains nothing by them. Leaves the network and the random generators as they are.
    """
    model, precision, num_classes = learner.model, learner.precision, learner.config.num_classes
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise ConfigError(f"model {model_name}: has no parameters, so that there is nothing to train")
    images = torch.zeros(2, *image_shape, device=parameter.device)
    images = images.to(precision.half) if precision.casts_weights else images
    random, was_training = seeds.random_state(), model.training
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    for training in (False, True):
        what = f"images {list(images.shape)}{' in training' if training else ''}"
        model.train(training)
        cannot = f"model {model_name} cannot take {what}"
        with user_code_errors(cannot, ConfigError), torch.set_grad_enabled(training), precision.autocast():
            outputs = model(images.clone())
        if not isinstance(outputs, Tensor) or outputs.shape != (2, num_classes):
            found = list(outputs.shape) if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
            raise ConfigError(f"model {model_name}: turns {what} into {found}; expected logits {[2, num_classes]}")
    if not outputs.requires_grad:
        raise ConfigError(f"model {model_name}: its outputs depend on no parameter that is trained (requires_grad)")
    model.train(was_training)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    seeds.restore_random_state(random)


def build_learner(
    config: SomeConfig,
    build_model: Callable[[SomeConfig], nn.Module],
    world: World,
    steps_per_epoch: int,
    *,
    wrap: Callable[..., nn.Module] = distribute,
    preparing: Preparing = nullcontext,
) -> Learner:
    """Collective: the network that `build_model` makes, and what trains it; `wrap` spreads it over the ranks.
    Within `preparing()` steps are compiled and captured, when they first are trained.

    Seeds the random generators, and sets PyTorch's process-wide switches: learners that take turns in one process set
    them again by `prepare_backends`. Raises `ConfigError` for what this device or number of ranks cannot do.
    """
    batch = divide_batch(config.batch_size, world.world_size, config.micro_batch_size)
    classifier = build_classifier(config, build_model, world)
    model, precision, weights, notes = classifier.model, classifier.precision, classifier.weights, classifier.notes
    seeds.seed_random_state(seeds.seed_of(config.seed, world.rank, step=0))
    graphed = wants_graphs(config, world.device)
    optimizer = build_optimizer(config, weights.parameters(), graphed=graphed)
    loss_scaler = precision.loss_scaler()
    criterion = nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)
    profiler, own_gradients = Profiler(world.device), None
    if config.verify_every_steps is not None and world.world_size > 1:
        own_gradients = OwnGradients(model, world.device, rounds_each_time_anew(config, world.device))
        wrap = partial(wrap, hook=own_gradients.look)
    with on_capture_stream(world.device, graphed=graphed):
        spread = wrap(config, model, world)
    train_step = TrainStep(
        config, spread, weights, precision, criterion, optimizer, loss_scaler, batch.accumulation, profiler, preparing
    )
    step, step_notes = choose_step(config, train_step, world.device)
    notes += step_notes + describe_verification(config, world.device)
    if config.extra_opt("fused_optimizer") and not fuses(config, weights.parameters()):
        notes.append(f"fused_optimizer left out: torch {torch.__version__} is wrong for half weights on a CPU")
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
        own_gradients=own_gradients,
    )
