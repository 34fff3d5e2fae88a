"""The learning rate as a function of the step and, for a plateau, of the validation losses."""

import math
from typing import Any

from utils.training.config import ScheduleConfig

ONECYCLE_START = 1 / 25  # torch.optim.lr_scheduler.OneCycleLR: div_factor 25
ONECYCLE_END = 1 / 25e4  # and final_div_factor 1e4 below that
MIN_PROGRESS = 1e-4  # ReduceLROnPlateau's default: a loss counts as better if it is lower by this fraction


class Schedule:
    """Learning-rate factor of each optimizer step, and the cuts that torch's ReduceLROnPlateau(mode="min") would make.

    Steps count attempted updates: a step that loss scaling skips still advances the schedule.
    """

    def __init__(self, config: ScheduleConfig, steps_per_epoch: int) -> None:
        self.kind, self.decay_factor = config.schedule_kind, config.lr_decay_factor
        self.warmup_steps = round(config.warmup_epochs * steps_per_epoch)
        self.total_steps = config.max_epochs * steps_per_epoch
        # steps between two rises of the warm-up; divides warmup_steps
        self.warmup_stride = steps_per_epoch if config.lr_warmup_by == "epoch" else 1
        milestones = config.lr_schedule if isinstance(config.lr_schedule, tuple) else ()
        self.milestone_steps = [epoch * steps_per_epoch for epoch in milestones]
        self.patience = config.plateau_patience  # epochs without a better loss before a cut
        self.best, self.bad_epochs, self.cuts = math.inf, 0, 0

    def factor(self, step: int) -> float:
        """Return the factor on the peak learning rate for `step`, counted from 0."""
        if self.kind == "onecycle":
            return self._onecycle(step)
        if step < self.warmup_steps:
            return (step // self.warmup_stride + 1) * self.warmup_stride / self.warmup_steps
        if self.kind in ("cosine", "linear"):
            progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
            return 1 - progress if self.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
        if self.kind == "plateau":
            return self.decay_factor**self.cuts
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

    def observe(self, loss: float, steps: int) -> None:
        """Take an epoch's validation loss after `steps`; as in the tutorial, not during the warm-up."""
        if steps <= self.warmup_steps:
            return
        if loss < self.best * (1 - MIN_PROGRESS):
            self.best, self.bad_epochs = loss, 0
        else:
            self.bad_epochs += 1
        if self.bad_epochs > self.patience:
            self.cuts, self.bad_epochs = self.cuts + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "bad_epochs": self.bad_epochs, "cuts": self.cuts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the plateau's counts; the patience stays as configured."""
        self.best, self.bad_epochs, self.cuts = state["best"], state["bad_epochs"], state["cuts"]
