"""The learning rate as a function of the step."""

import math
from dataclasses import dataclass

from utils.training.config import ScheduleConfig

ONECYCLE_START = 1 / 25  # torch.optim.lr_scheduler.OneCycleLR: div_factor 25
ONECYCLE_END = 1 / 25e4  # and final_div_factor 1e4 below that


@dataclass(frozen=True)
class Schedule:
    """Learning-rate factor of each optimizer step: a pure function of the step and the plateau's cuts.

    Steps count attempted updates: a step that loss scaling skips still advances the schedule.
    """

    kind: str
    warmup_steps: int
    total_steps: int
    decay_factor: float = 0.2
    milestone_steps: tuple[int, ...] = ()
    warmup_stride: int = 1  # steps between two rises of the warm-up; divides warmup_steps

    def factor(self, step: int, plateau_cuts: int = 0) -> float:
        """Return the factor on the peak learning rate for `step`, counted from 0."""
        if self.kind == "onecycle":
            return self._onecycle(step)
        if step < self.warmup_steps:
            return (step // self.warmup_stride + 1) * self.warmup_stride / self.warmup_steps
        if self.kind in ("cosine", "linear"):
            progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
            return 1 - progress if self.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
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


def warmup_epochs(config: ScheduleConfig) -> float:
    """Return `lr_warmup_epochs`, or half of the run if the rise of onecycle would not end within the run."""
    if config.lr_schedule == "onecycle" and config.lr_warmup_epochs >= config.max_epochs:
        return config.max_epochs / 2
    return config.lr_warmup_epochs


def explain_warmup(config: ScheduleConfig) -> list[str]:
    """Return a note for the log if the warm-up does not fit into the run."""
    epochs = warmup_epochs(config)
    too_long = f"lr_warmup_epochs {config.lr_warmup_epochs:g} does not fit into max_epochs {config.max_epochs}: "
    if epochs != config.lr_warmup_epochs:
        return [f"{too_long}onecycle peaks after {epochs:g} epochs"]
    if epochs > config.max_epochs:
        return [f"{too_long}the learning rate rises to {config.max_epochs / epochs:.2g} of its peak"]
    return []


def build_schedule(config: ScheduleConfig, steps_per_epoch: int) -> Schedule:
    """Build the schedule, with the configured epochs converted to steps."""
    milestones = config.lr_schedule if isinstance(config.lr_schedule, tuple) else ()
    return Schedule(
        kind=config.schedule_kind,
        warmup_steps=round(warmup_epochs(config) * steps_per_epoch),
        total_steps=config.max_epochs * steps_per_epoch,
        decay_factor=config.lr_decay_factor,
        milestone_steps=tuple(epoch * steps_per_epoch for epoch in milestones),
        warmup_stride=steps_per_epoch if config.lr_warmup_by == "epoch" else 1,
    )


@dataclass
class Plateau:
    """Counts the cuts that torch's ReduceLROnPlateau(mode="min", threshold=1e-4 relative) would make."""

    patience: int
    best: float = math.inf
    bad_epochs: int = 0
    cuts: int = 0

    def observe(self, loss: float) -> None:
        """Take the validation loss of one more epoch."""
        if loss < self.best * (1 - 1e-4):
            self.best, self.bad_epochs = loss, 0
        else:
            self.bad_epochs += 1
        if self.bad_epochs > self.patience:
            self.cuts, self.bad_epochs = self.cuts + 1, 0
