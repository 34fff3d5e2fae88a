"""One run of `python -m tools.bench scaling`: a rank under torchrun, which measures and writes one JSON record.

Arguments: the configuration as JSON, steps, steps that are dropped first, and the record's path.
"""

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tools.bench import common
from tools.bench.training import build_measured, capture_steps
from tools.shared.output import write_json
from utils.config import Config
from utils.data.build import Loaders, build_loaders, open_dataset
from utils.distributed.world import World
from utils.run.environment import describe_environment
from utils.training.batches import prefetch
from utils.training.learner import Learner
from utils.training.metrics import MetricSums

ROUNDS = 3  # with and without communication take turns


def measure(config: Config, world: World, steps: int, dropped: int) -> dict[str, Any]:
    """Collective: seconds of a training step with and without communication, and images/s of a whole epoch."""
    loaders = build_loaders(config, open_dataset(config, world), world)
    images, labels = next(iter(loaders.train))
    cases = {"ddp": build_measured(config, world)}
    if world.world_size > 1:
        silent = Config(**config.model_dump() | {"parallel": "no_communication"})
        cases["no_communication"] = build_measured(silent, world)
    for learner in cases.values():
        _time_steps(learner, images, labels, world, max(dropped, capture_steps(config, world.device)))
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, learner in cases.items():
            seconds[name].append(_time_steps(learner, images, labels, world, -(-steps // ROUNDS)))
    medians = {name: median(values) for name, values in seconds.items()}
    record = {
        "step_seconds": medians["ddp"],
        "train_images_per_sec": config.batch_size / medians["ddp"],
        "epoch_images_per_sec": _time_epoch(cases["ddp"], loaders, config, world, steps),
    }
    if world.world_size > 1:
        record["communication_share"] = 1 - medians["no_communication"] / medians["ddp"]
    return record


def _time_steps(learner: Learner, images: Tensor, labels: Tensor, world: World, steps: int) -> float:
    """Seconds a step of the slowest rank."""
    world.barrier()
    started = time.perf_counter()
    for _ in range(steps):
        learner.train(images, labels)
    common.synchronize(world.device)
    world.barrier()
    return max(world.gather((time.perf_counter() - started) / max(1, steps)))


def _time_epoch(learner: Learner, loaders: Loaders, config: Config, world: World, steps: int) -> float:
    """Training images/s over at most `steps` batches from the loader, with metrics and validation in the time."""
    world.barrier()
    started = time.perf_counter()
    loaders.train.set_epoch(0)
    batches = 0
    for images, labels in prefetch(config, iter(loaders.train), world.device):
        learner.train(images, labels)
        batches += 1
        if batches == steps:
            break
    learner.sums.average(world)
    learner.average_buffers(world)
    learner.model.eval()
    sums = MetricSums(world.device)
    with torch.no_grad():
        loaders.valid.set_epoch(0)
        for number, (images, labels) in enumerate(loaders.valid, start=1):
            outputs = learner.predict(images)
            sums.add(torch.nn.functional.cross_entropy(outputs, labels), outputs, labels)
            if number >= max(1, len(loaders.valid) * batches // len(loaders.train)):
                break  # of the validation the same share as of the training
    sums.average(world)
    learner.model.train()
    return batches * config.batch_size / max(world.gather(time.perf_counter() - started))


def main(arguments: list[str]) -> int:
    """Measure as one of the ranks; returns the exit status."""
    config, steps, dropped = Config(**json.loads(arguments[0])), int(arguments[1]), int(arguments[2])

    def action(world: World) -> None:
        record = measure(config, world, steps, dropped)
        environment = describe_environment(world.device, world.world_size)
        if world.is_main:
            content = {"values": record, "environment": environment, "config": config.model_dump(mode="json")}
            write_json(Path(arguments[3]), content)

    return common.on_all_ranks(config, action)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
