"""A run's whole state: gathered from all ranks for a checkpoint, and restored (`CONTENT` in io.py lists it)."""

import math
import platform
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from utils import seeds
from utils.base_config import BaseConfig
from utils.distributed.world import World
from utils.errors import ExpectedError
from utils.run.checkpoint import io as checkpoint
from utils.timing.clock import WORK, Clock
from utils.training.classifier import Classifier
from utils.training.learner import Learner
from utils.training.metrics.throughput import Throughput


@dataclass
class Progress:
    """The position and results of a run; the learner counts the steps."""

    clock: Clock
    throughput: Throughput
    epoch: int = 0  # finished epochs
    batch: int = 0  # batches trained in the next one
    best: dict[str, float] = field(default_factory=checkpoint.NO_BEST.copy)
    earlier_seconds: float = 0.0  # of training, in the starts before this one
    epoch_began: float = 0.0  # `seconds` when the epoch began

    @property
    def seconds(self) -> float:
        """Training time over all starts of the run."""
        return self.earlier_seconds + self.clock.seconds(*WORK)

    def record_accuracy(self, accuracy: float) -> bool:
        """Record the validation accuracy of the epoch that ends; return whether it is the best so far."""
        is_best = accuracy > self.best["acc1"]
        if is_best:
            self.best = {"acc1": accuracy, "epoch": self.epoch + 1}
        return is_best

    def start_epoch(self) -> None:
        """Note the time, unless an earlier start began this epoch."""
        if not self.batch:
            self.epoch_began = self.seconds

    def finish_epoch(self) -> None:
        self.epoch, self.batch = self.epoch + 1, 0

    def summarise(self, finished_before: bool) -> str:
        """Return the last line of a run's log."""
        best = f"best acc1 {100 * self.best['acc1']:.2f} % in epoch {self.best['epoch']:.0f} of {self.epoch}"
        if not self.best["epoch"]:
            best = f"the best weights are lost, the last ones are of epoch {self.epoch}"
        if finished_before:
            return f"Already finished: {best}; --resume never trains it again"
        images_per_sec = self.throughput.overall()
        per_image = f" ({1 / images_per_sec:.3g} seconds per image)" if images_per_sec else ""
        return f"Finished: {best}, {self.seconds:.1f} s, {images_per_sec:.1f} images/s{per_image}"


@dataclass(frozen=True)
class RunState:
    """The objects whose state a checkpoint holds."""

    config: BaseConfig
    config_name: str
    data: dict[str, Any]
    learner: Learner
    progress: Progress
    world: World

    def gather(self) -> dict[str, Any]:
        """Collective: return everything that training resumes from."""
        progress = self.progress
        return {
            "format": checkpoint.FORMAT,
            "config": self.config.model_dump(mode="json"),
            "config_name": self.config_name,
            "data": self.data,
            "epoch": progress.epoch,
            "batch": progress.batch,
            **self.learner.state_dict(),
            "logged_sums": self.learner.sums.logged,
            "best": progress.best,
            "seconds": progress.seconds,
            "timing": [progress.epoch_began, *progress.throughput.counted()],
            "ranks": self.world.all_gather(self._describe_rank()),
            "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
        }

    def _describe_rank(self) -> dict[str, Any]:
        """Return what differs between ranks; buffers only in mid-epoch, as they are averaged before validation."""
        buffers = self.learner.named_buffers() if self.world.world_size > 1 and self.progress.batch else ()
        return {
            "random": seeds.random_state(),
            "metric_sums": self.learner.sums.sums.cpu(),
            "buffers": {name: buffer.cpu() for name, buffer in buffers},
        }

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `gather` returned, at the same or another world size; at another one with new random
        streams, and BatchNorm's statistics averaged over the ranks."""
        learner, progress, world, ranks = self.learner, self.progress, self.world, state["ranks"]
        learner.load_state_dict(state)
        progress.epoch, progress.batch, progress.best = state["epoch"], state["batch"], state["best"]
        progress.earlier_seconds = state["seconds"]
        progress.epoch_began, images, seconds = state["timing"]
        progress.throughput.earlier = images, seconds
        if len(ranks) == world.world_size:
            ranks = [ranks[world.rank]]
            seeds.restore_random_state(ranks[0]["random"])
            sums: Tensor = ranks[0]["metric_sums"]
        else:
            seeds.seed_random_state(seeds.seed_of(learner.config.seed, world.rank, learner.steps))
            total = torch.stack([rank["metric_sums"] for rank in ranks]).sum(0)
            sums = total if world.is_main else torch.zeros_like(total)
        merge_buffers(learner, ranks)
        learner.sums.load(sums, state["logged_sums"], progress.batch * learner.batch.accumulation)

    def check_finite(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return `metrics` unchanged; raise `ExpectedError`, on all ranks alike, if their common loss is not finite."""
        if math.isfinite(metrics["loss"]):
            return metrics
        learner = self.learner
        first_bad = min(self.world.all_gather(learner.sums.finite_batches())) // learner.batch.accumulation
        raise ExpectedError(
            f"the loss stopped being a finite number in epoch {self.progress.epoch + 1}, iteration {first_bad}, "
            f"learning rate {learner.learning_rate:.4g}; nothing was saved since the last checkpoint\n"
            f"{checkpoint.REMEDIES}"
        )


def merge_buffers(classifier: Classifier, ranks: list[dict[str, Any]]) -> None:
    """Set the buffers that the `ranks` of a checkpoint hold, which are BatchNorm's in mid-epoch, to the mean over these
    ranks, and integers to the first rank's. Other buffers stay as they are."""
    for name, buffer in classifier.named_buffers():
        if name in ranks[0]["buffers"]:
            saved = torch.stack([rank["buffers"][name] for rank in ranks])
            buffer.copy_(saved.mean(0) if buffer.is_floating_point() else saved[0])
