"""A run's whole state: gathered from all ranks for a checkpoint, and restored (`CONTENT` in io.py lists it)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from utils import seeds
from utils.base_config import BaseConfig
from utils.distributed.world import World
from utils.errors import ExpectedError
from utils.run.checkpoint import io as checkpoint
from utils.run.logging.environment import describe_arithmetic
from utils.timing.clock import WORK, Clock
from utils.training.learner import Classifier, Learner
from utils.training.metrics.throughput import Throughput

COMPLETE = 0.99  # of the images, at least, for a validation to count: the others may be unreadable


@dataclass
class Progress:
    """The position and results of a run; the learner counts the steps."""

    clock: Clock
    throughput: Throughput
    measures: dict[str, Any]  # what a validation measures: the number of images, their views ...
    epoch: int = 0  # finished epochs
    batch: int = 0  # batches trained in the next one
    best: dict[str, Any] = field(default_factory=checkpoint.NO_BEST.copy)
    earlier_seconds: float = 0.0  # of training, in the starts before this one
    epoch_began: float = 0.0  # `seconds` when the epoch began

    @property
    def seconds(self) -> float:
        """Training time over all starts of the run."""
        return self.earlier_seconds + self.clock.seconds(*WORK)

    def is_complete(self, valid: Mapping[str, float]) -> bool:
        """Whether the validation with the results `valid` has seen nearly all images, and no fewer than the best's."""
        return valid["images"] >= max(COMPLETE * self.measures["images"], self.best["images"])

    def best_with(self, valid: Mapping[str, float]) -> dict[str, Any]:
        """Return the best validation if the epoch that ends has the results `valid`, {} without validation."""
        if not valid or not self.is_complete(valid) or valid["acc1"] <= self.best["acc1"]:
            return self.best
        found = {"acc1": valid["acc1"], "images": valid["images"]}
        return {**found, "epoch": self.epoch + 1, "measures": self.measures}

    def finish_epoch(self, best: dict[str, Any]) -> None:
        self.epoch, self.batch, self.best = self.epoch + 1, 0, best

    def summarise(self, finished_before: bool) -> str:
        """Return the last line of a run's log."""
        best = f"best acc1 {100 * self.best['acc1']:.2f} % in epoch {self.best['epoch']} of {self.epoch}"
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
        progress, learner = self.progress, self.learner
        # buffers only in mid-epoch, as they are averaged before validation
        buffers = learner.named_buffers() if self.world.world_size > 1 and progress.batch else ()
        rank = {
            "random": seeds.random_state(),
            "metric_sums": learner.sums.sums.cpu(),
            "buffers": {name: buffer.cpu() for name, buffer in buffers},
        }
        return {
            "format": checkpoint.FORMAT,
            "config": self.config.model_dump(mode="json"),
            "config_name": self.config_name,
            "data": self.data,
            "epoch": progress.epoch,
            "batch": progress.batch,
            **learner.state_dict(),
            "logged_sums": learner.sums.logged,
            "best": progress.best,
            "seconds": progress.seconds,
            "timing": [progress.epoch_began, *progress.throughput.counted()],
            "ranks": self.world.all_gather(rank),
            "versions": describe_arithmetic(self.world.device),
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
