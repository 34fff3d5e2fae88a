"""Builds and times the training step of a configuration, with the code that the Trainer uses."""

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from models import build_model
from tools.bench.common import time_action
from utils.config import Config
from utils.data.build import Loader, build_loaders, image_side, open_dataset
from utils.distributed.config import DistributedConfig
from utils.distributed.ddp import distribute
from utils.distributed.world import World, choose_device
from utils.training.batches import Batch, prefetch
from utils.training.checks.stragglers import peak_memory
from utils.training.kernels.compilers import wants_graphs
from utils.training.learner import Learner, build_learner
from utils.training.step import GRAPH_WARMUP_STEPS

Consumer = Callable[[Tensor, Tensor], object]
STEPS_PER_EPOCH = 1000  # only for the schedule: no measurement lasts longer


def build_measured(
    config: Config, world: World, wrap: Callable[[DistributedConfig, nn.Module, World], nn.Module] = distribute
) -> Learner:
    """Collective: build train.py's learner, distributed over the ranks by `wrap`."""
    build = partial(build_model, image_side=image_side(config))
    learner = build_learner(config, build, world, STEPS_PER_EPOCH, wrap=wrap)
    learner.model.train()
    return learner


def capture_steps(config: Config, device: torch.device) -> int:
    """Return the number of steps up to the one that captures a graph, which are slow; 0 without graphs."""
    return GRAPH_WARMUP_STEPS + 1 if wants_graphs(config, device) else 0


class Rung:
    """Measures images per second of a configuration's training step, of its loader, and of both together."""

    def __init__(self, config: Config) -> None:
        self.world = alone(config)
        self.learner = build_measured(config, self.world)
        self.config = config
        self.loader = build_loaders(config, open_dataset(config, self.world), self.world).train
        self.batch = next(iter(self.loader))
        for _ in range(capture_steps(config, self.world.device)):
            self.learner.train_step(*self.batch)

    def __call__(self, warmup: int, iters: int) -> dict[str, float]:
        """Run a trial: {"compute", "io", "full": images/s, "seconds": of the trial, "memory": peak bytes}."""
        started = time.perf_counter()
        device, train = self.world.device, self.learner.train_step
        values = {
            "compute": images_per_sec(self.config, device, itertools.repeat(self.batch), warmup, iters, train),
            "io": images_per_sec(self.config, device, endless(self.loader), warmup, iters, lambda *_: None),
            "full": fed_images_per_sec(self.config, self.world, self.loader, warmup, iters, train),
            "memory": float(peak_memory(device)),
        }
        if device.type == "cuda":
            torch.cuda.empty_cache()  # for the other rungs; the next warm-up allocates it again
        return values | {"seconds": time.perf_counter() - started}


def images_per_sec(
    config: Config, device: torch.device, batches: Iterator[Batch], warmup: int, iters: int, consume: Consumer
) -> float:
    """Return images per second of `iters` batches given to `consume`, after `warmup` that do not count."""

    def consume_next(count: int) -> None:
        for images, labels in itertools.islice(batches, count):
            consume(images, labels)

    consume_next(warmup)
    return iters * config.batch_size / time_action(device, lambda: consume_next(iters))


def fed_images_per_sec(config: Config, world: World, loader: Loader, warmup: int, iters: int, step: Consumer) -> float:
    """Return images per second of loader and step together."""
    batches = prefetch(config, endless(loader), world.device)
    return images_per_sec(config, world.device, batches, warmup, iters, step)


def alone(config: Config) -> World:
    """Return the world of a single process on the configuration's device."""
    return World(rank=0, local_rank=0, world_size=1, device=choose_device(config.device, 0))


def endless(loader: Loader) -> Iterator[Batch]:
    """Yield the batches of one epoch after the other."""
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        yield from loader
