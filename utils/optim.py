"""The optimizer, and the learning rate as a function of the step."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from utils.config import Config
from utils.large_batch import Lamb, Lars

ONECYCLE_START = 1 / 25  # torch.optim.lr_scheduler.OneCycleLR: div_factor 25
ONECYCLE_END = 1 / 25e4  # and final_div_factor 1e4 below that


def build_optimizer(
    config: Config, parameters: Iterable[nn.Parameter], *, graphed: bool = False
) -> torch.optim.Optimizer:
    """`optimizer` over `parameters`; EXTRA: SGD as one fused kernel. `graphed`: for a step that is captured as a CUDA
    graph, which reads the learning rate from a tensor on the device, as numbers are frozen into it."""
    parameters = list(parameters)
    groups = _parameter_groups(config, parameters)
    optimizer: torch.optim.Optimizer
    if config.optimizer == "lamb":
        optimizer = Lamb(groups, lr=config.peak_lr, beta1=config.momentum, weight_decay=config.weight_decay)
    elif config.optimizer == "lars":
        optimizer = Lars(
            groups,
            lr=config.peak_lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            nesterov=config.nesterov,
            trust_coefficient=config.lars_trust_coefficient,
        )
    else:
        optimizer = torch.optim.SGD(
            groups,
            lr=torch.tensor(config.peak_lr, device=parameters[0].device) if graphed else config.peak_lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            nesterov=config.nesterov,
            fused=config.extra_opt("fused_optimizer") or None,  # None: PyTorch's choice, a few kernels for all on a GPU
        )
        _fill_momentum(optimizer)
    for group in optimizer.param_groups:
        group["initial_lr"] = config.peak_lr
    return optimizer


def _parameter_groups(config: Config, parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """One group, or two where BatchNorm and biases, all the parameters with one dimension, are treated differently."""
    if config.optimizer == "sgd" and config.weight_decay_bn_bias:
        return [{"params": parameters}]
    vectors: dict[str, Any] = {"params": [parameter for parameter in parameters if parameter.ndim <= 1]}
    if not config.weight_decay_bn_bias:
        vectors["weight_decay"] = 0.0
    if config.optimizer != "sgd":
        vectors["adapt"] = False
    return [{"params": [parameter for parameter in parameters if parameter.ndim > 1]}, vectors]


def _fill_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give the fused SGD a momentum buffer for each parameter, in the parameter's own memory format.

    A missing one starts at zero, which gives the same trajectory as SGD's own first step. Without it, a GradScaler that
    skips the very first fused step (fp16 overflows at the initial scale of 65536) leaves a buffer that was allocated
    and never written, and the next step adds whatever memory held. One that was saved in another memory format
    (`enable_nhwc` may change when a run is resumed) would be added in the wrong order, as the kernel walks raw memory.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") and group["momentum"] else ():
            state = optimizer.state[parameter]
            saved = state.get("momentum_buffer")
            state["momentum_buffer"] = torch.zeros_like(parameter)
            if saved is not None:
                state["momentum_buffer"].copy_(saved)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Restore the optimizer's buffers; options such as momentum stay those of the present configuration."""
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)
    _fill_momentum(optimizer)


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Every parameter group's learning rate = its initial one x `factor`, without waiting for the device."""
    for group in optimizer.param_groups:
        initial = group.setdefault("initial_lr", float(group["lr"]))
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(initial * factor)
        else:
            group["lr"] = initial * factor


def learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """The first group's present learning rate; waits for the device where it is kept there."""
    return float(optimizer.param_groups[0]["lr"])


@dataclass(frozen=True)
class Schedule:
    """The learning-rate factor of each optimizer step: a pure function of the step and of the plateau's cuts.

    Steps count attempted updates: one that loss scaling skips still advances the schedule.
    """

    kind: str
    warmup_steps: int
    total_steps: int
    decay_factor: float = 0.2
    milestone_steps: tuple[int, ...] = ()

    def factor(self, step: int, plateau_cuts: int = 0) -> float:
        """Factor on the peak learning rate for `step`, counted from 0."""
        if self.kind == "onecycle":
            return self._onecycle(step)
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "cosine":
            progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
            return (1 + math.cos(math.pi * progress)) / 2
        if self.kind == "plateau":
            return self.decay_factor**plateau_cuts
        if self.kind == "step":
            return self.decay_factor ** sum(step >= milestone for milestone in self.milestone_steps)
        return 1.0

    def _onecycle(self, step: int) -> float:
        """Cosine up over the warm-up and down to the end: torch's OneCycleLR (Smith and Topin, arXiv:1708.07120)."""
        peak = self.warmup_steps - 1
        if step <= peak:
            start, end, progress = ONECYCLE_START, 1.0, step / max(1, peak)
        else:
            start, end, progress = 1.0, ONECYCLE_END, (step - peak) / max(1, self.total_steps - 1 - peak)
        return end + (start - end) / 2 * (1 + math.cos(math.pi * progress))


def build_schedule(config: Config, steps_per_epoch: int) -> Schedule:
    """Turns the epochs of the configuration into steps, once."""
    return Schedule(
        kind=config.lr_schedule,
        warmup_steps=round(config.lr_warmup_epochs * steps_per_epoch),
        total_steps=config.max_epochs * steps_per_epoch,
        decay_factor=config.lr_decay_factor,
        milestone_steps=tuple(epoch * steps_per_epoch for epoch in config.lr_milestones),
    )


@dataclass
class Plateau:
    """Counts the cuts that torch's ReduceLROnPlateau(mode="min", threshold=1e-4 relative) would make."""

    patience: int
    best: float = math.inf
    bad_epochs: int = 0
    cuts: int = 0

    def observe(self, loss: float) -> None:
        """Tell the loss of one more epoch."""
        if loss < self.best * (1 - 1e-4):
            self.best, self.bad_epochs = loss, 0
        else:
            self.bad_epochs += 1
        if self.bad_epochs > self.patience:
            self.cuts, self.bad_epochs = self.cuts + 1, 0
