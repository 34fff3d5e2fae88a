"""Builds and times the training step of a configuration, with the code that the Trainer uses."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from models import build_model
from tools.bench.common import time_action
from utils.config import Config
from utils.data.build import Loader, build_loaders, open_dataset
from utils.data.datasets.dataset import Dataset
from utils.distributed.world import World, choose_device
from utils.run.meters import peak_memory
from utils.training.batches import Batch, prefetch
from utils.training.learner import Learner
from utils.training.plan import Plan, make_plan

Consumer = Callable[[Tensor, Tensor], object]
STEPS_PER_EPOCH = 1000  # only for the schedule: no measurement lasts longer


def alone(config: Config) -> World:
    """Return the world of a single process on the configuration's device."""
    return World(rank=0, local_rank=0, world_size=1, device=choose_device(config.device, 0))


def build_measured(config: Config, world: World, image_side: int | None = None, **options: Any) -> Learner:
    """Collective: build train.py's learner for images of `image_side` pixels; `options` are the learner's."""
    plan, build = make_plan(config, world), partial(build_model, image_side=image_side)
    learner = Learner(config, plan, build, world, STEPS_PER_EPOCH, **options)
    learner.model.train()
    return learner


def endless(loader: Loader) -> Iterator[Batch]:
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        yield from loader


def images_per_sec(
    config: Config, device: torch.device, warmup: int, iters: int, batches: Iterator[Batch], consume: Consumer
) -> float:
    """Return images per second of `iters` batches given to `consume`, after `warmup` batches that do not count."""

    def consume_next(count: int) -> None:
        for images, labels in itertools.islice(batches, count):
            consume(images, labels)

    consume_next(warmup)
    return iters * config.batch_size / time_action(device, lambda: consume_next(iters))


class Fed:
    """Measures images per second of a step fed by the configuration's loader: {"full": images/s}."""

    def __init__(self, config: Config, plan: Plan, step: Consumer, warmup: int, iters: int, dataset: Dataset) -> None:
        world = alone(config)
        self.device, self.plan, self.step = world.device, plan, step
        self.time = partial(images_per_sec, config, world.device, warmup, iters)
        self.loader = build_loaders(config, dataset, world).train

    def __call__(self) -> dict[str, float]:
        return {"full": self.time(prefetch(self.plan, endless(self.loader), self.device), self.step)}


class OurStep(Fed):
    """Measures train.py's step and loader together."""

    def __init__(self, config: Config, warmup: int, iters: int) -> None:
        dataset = open_dataset(config, alone(config))
        self.learner = build_measured(config, alone(config), image_side=dataset.train.image_shape[-1])
        super().__init__(config, self.learner.plan, self.learner.train_step, warmup, iters, dataset)
        self.batch = next(iter(self.loader))
        for _ in range(self.plan.capture_steps):
            self.step(*self.batch)


class Rung(OurStep):
    """Measures the step on one batch, the loader without a step, and both together, in images/s; and peak bytes."""

    def __call__(self) -> dict[str, float]:
        compute = self.time(itertools.repeat(self.batch), self.step)
        loading = self.time(endless(self.loader), lambda *_: None)
        values = {"compute": compute, "io": loading, **super().__call__(), "memory": float(peak_memory(self.device))}
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # for the other rungs; the next warm-up allocates it again
        return values
