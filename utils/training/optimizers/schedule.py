"""The learning rate as a function of the step."""

import math
from dataclasses import dataclass

from utils.training.config import ScheduleConfig

ONECYCLE_START = 1 / 25  # torch.optim.lr_scheduler.OneCycleLR: div_factor 25
ONECYCLE_END = 1 / 25e4  # and final_div_factor 1e4 below that


class Schedule:
    """Learning-rate factor of each optimizer step: a pure function of the step and the plateau's cuts.

    Steps count attempted updates: a step that loss scaling skips still advances the schedule. `notes`: for the log.
    """

    def __init__(self, config: ScheduleConfig, steps_per_epoch: int) -> None:
        self.kind, self.decay_factor = config.schedule_kind, config.lr_decay_factor
        epochs, problem = config.lr_warmup_epochs, ""
        if self.kind == "onecycle" and epochs >= config.max_epochs:  # its rise would not end within the run
            epochs = config.max_epochs / 2
            problem = f"onecycle peaks after {epochs:g} epochs"
        elif epochs > config.max_epochs:
            problem = f"the learning rate rises to {config.max_epochs / epochs:.2g} of its peak"
        too_long = f"lr_warmup_epochs {config.lr_warmup_epochs:g} does not fit into max_epochs {config.max_epochs}: "
        self.notes = [too_long + problem] if problem else []
        self.warmup_steps, self.total_steps = round(epochs * steps_per_epoch), config.max_epochs * steps_per_epoch
        # steps between two rises of the warm-up; divides warmup_steps
        self.warmup_stride = steps_per_epoch if config.lr_warmup_by == "epoch" else 1
        milestones = config.lr_schedule if isinstance(config.lr_schedule, tuple) else ()
        self.milestone_steps = [epoch * steps_per_epoch for epoch in milestones]

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
