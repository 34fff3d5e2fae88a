"""A run: its log, clock, position and results, and its whole state: `CONTENT` in checkpoint.py."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils import seeds
from utils.data.datasets.dataset import STATISTICS
from utils.distributed.world import World
from utils.environment import describe_arithmetic
from utils.errors import ExpectedError
from utils.run import checkpoint
from utils.run.clock import WORK, Clock, Window
from utils.run.logger import RunLogger
from utils.run.pretrained import Pretrained, read_pretrained
from utils.training.learner import Classifier, Learner

COMPLETE = 0.99  # of the images, at least, for a validation to count: the others may be unreadable


class Run:
    """One run in its folder. The learner counts the steps."""

    def __init__(
        self, config: Any, name: str, folder: Path, world: World, learner: Learner, data: dict[str, Any],
        valid_images: int, clock: Clock,
    ) -> None:  # fmt: skip
        """`data` describes the data; a whole validation sees `valid_images`. `measures` says what a validation does."""
        self.config, self.name, self.folder, self.world = config, name, folder, world
        self.learner, self.data, self.clock = learner, data, clock
        self.measures = {"images": valid_images} | config.model_dump(include={"test_time_views", "ema_decay"})
        self.log = RunLogger(folder, enabled=world.is_main, to_screen=config.log_to_screen, clock=clock)
        self.epoch = self.batch = 0  # finished epochs; batches trained in the next one
        self.best: dict[str, Any] = checkpoint.NO_BEST
        self.earlier_seconds = 0.0  # of training, in the starts before this one
        self.epoch_began = 0.0  # `seconds` when the epoch began
        self.saved_step = 0
        self.resumed_from: Path | None = None

    @property
    def seconds(self) -> float:
        """Training time over all starts of the run."""
        return self.earlier_seconds + self.clock.seconds(*WORK)

    @property
    def finished(self) -> bool:
        return self.is_finished_with(self.epoch, self.best)

    def is_finished_with(self, epochs: int, best: Mapping[str, Any]) -> bool:
        target = self.config.stop_at_accuracy
        return epochs >= self.config.max_epochs or (target is not None and best["acc1"] >= target)

    def best_with(self, valid: Mapping[str, float]) -> dict[str, Any]:
        """Return the best validation if the epoch that ends has the results `valid`, {} without validation. One that
        has missed many images, or more than the best one so far, is never the best."""
        if not valid:
            return self.best
        if valid["images"] < max(COMPLETE * self.measures["images"], self.best["images"]):
            self.log.say(f"Only {valid['images']:.0f} images were validated: such an epoch is never the best one")
            return self.best
        if valid["acc1"] <= self.best["acc1"]:
            return self.best
        return {"acc1": valid["acc1"], "images": valid["images"], "epoch": self.epoch + 1, "measures": self.measures}

    def time_left(self) -> float | None:
        position = self.epoch + self.batch / self.data["steps_per_epoch"]
        return self.clock.time_left(position, self.config.max_epochs)

    def summarise(self, finished_before: bool) -> str:
        """Return the last line of a run's log."""
        best = f"best acc1 {100 * self.best['acc1']:.2f} % in epoch {self.best['epoch']} of {self.epoch}"
        if not self.best["epoch"]:
            best = f"the best weights are lost, the last ones are of epoch {self.epoch}"
        if finished_before:
            return f"Already finished: {best}; to train it again add --resume never"
        speed = self.clock.whole.images_per_sec
        per_image = f" ({1 / speed:.3g} seconds per image)" if speed else ""
        return f"Finished: {best}, {self.seconds:.1f} s, {speed:.1f} images/s{per_image}"

    def read_pretrained(self) -> Pretrained | None:
        """Return the weights that a new run starts with, if it has `pretrained`."""
        return read_pretrained(self.config.pretrained, self.learner.weights.state_dict(), self.data["class_names"])

    def save(self, *, is_best: bool) -> None:
        """Collective: write the last checkpoint, and also the best one if `is_best`."""
        if not self.config.save_checkpoint:
            return
        with self.clock.during("checkpoint"):
            state = self.gather()

            def write() -> None:
                self.log.sync()  # after a power cut, the records must reach to the checkpoint
                folder = self.folder / "checkpoints"
                checkpoint.save_checkpoint(folder, state, self.config.keep_checkpoints, is_best=is_best)

            self.world.main_only(write)
        self.saved_step = self.learner.steps

    def gather(self) -> dict[str, Any]:
        """Collective: return everything that training resumes from."""
        learner = self.learner
        # buffers only in mid-epoch, as they are averaged before validation
        buffers = learner.named_buffers() if self.world.world_size > 1 and self.batch else ()
        rank = {
            "random": seeds.random_state(),
            "metric_sums": learner.sums.sums.cpu(),
            "buffers": {name: buffer.cpu() for name, buffer in buffers},
        }
        return learner.state_dict() | {
            "format": checkpoint.FORMAT, "config": self.config.model_dump(mode="json"), "config_name": self.name,
            "data": self.data, "epoch": self.epoch, "batch": self.batch, "logged_sums": learner.sums.logged,
            "best": self.best, "seconds": self.seconds, "timing": [self.epoch_began, *self.clock.whole[:2]],
            "ranks": self.world.all_gather(rank), "versions": describe_arithmetic(self.world.device),
        }  # fmt: skip

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `gather` returned, at the same or another world size; at another one with new random
        streams, and BatchNorm's statistics averaged over the ranks. The pixels' statistics stay the saved ones."""
        learner, world, ranks = self.learner, self.world, state["ranks"]
        saved = {name: state["data"][name] for name in STATISTICS}
        if any(tuple(self.data[name]) != tuple(value) for name, value in saved.items()):
            self.log.say(f"Normalising with the checkpoint's {saved}; the data now give other values")
        self.data |= saved
        learner.load_state_dict(state)
        self.epoch, self.batch, self.best = state["epoch"], state["batch"], state["best"]
        self.earlier_seconds = state["seconds"]
        self.epoch_began, images, seconds = state["timing"]
        self.clock.total = Window(images, seconds)
        self.saved_step = self.clock.step = learner.steps
        if len(ranks) == world.world_size:
            ranks = [ranks[world.rank]]
            seeds.restore_random_state(ranks[0]["random"])
            sums: Tensor = ranks[0]["metric_sums"]
        else:
            seeds.seed_random_state(seeds.seed_of(learner.config.seed, world.rank, learner.steps))
            total = torch.stack([rank["metric_sums"] for rank in ranks]).sum(0)
            sums = total if world.is_main else torch.zeros_like(total)
        merge_buffers(learner, ranks)
        learner.sums.load(sums, state["logged_sums"], self.batch * learner.plan.global_batch.accumulation)

    def check_finite(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return `metrics` unchanged; raise `ExpectedError`, on all ranks alike, if their common loss is not finite."""
        if math.isfinite(metrics["loss"]):
            return metrics
        learner = self.learner
        accumulation = learner.plan.global_batch.accumulation
        first_bad = min(self.world.all_gather(learner.sums.finite_micro_batches())) // accumulation
        where = f"epoch {self.epoch + 1}, iteration {first_bad}, learning rate {learner.learning_rate:.4g}"
        problem = f"the loss stopped being a finite number in {where}"
        raise ExpectedError(f"{problem}; {checkpoint.NOT_SAVED}\n{checkpoint.REMEDIES}")


def merge_buffers(classifier: Classifier, ranks: list[dict[str, Any]]) -> None:
    """Set the buffers that the `ranks` of a checkpoint hold, which are BatchNorm's in mid-epoch, to the mean over these
    ranks, and integers to the first rank's. Other buffers stay as they are."""
    for name, buffer in classifier.named_buffers():
        if name in ranks[0]["buffers"]:
            saved = torch.stack([rank["buffers"][name] for rank in ranks])
            buffer.copy_(saved.mean(0) if buffer.is_floating_point() else saved[0])
