"""The protocol of every measurement: a warm-up, interleaved trials, median and spread, a JSON report. And the training
step that is measured, built with the Trainer's code."""

import argparse
import itertools
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models import build_model
from tools.common import add_count, check_writable, path_argument, write_json
from utils.config import Config, load_config
from utils.config.command_line import add_config_arguments
from utils.data.build import Loader, build_loaders, open_dataset
from utils.data.datasets.dataset import Dataset
from utils.distributed.world import World, choose_device
from utils.environment import describe_environment
from utils.errors import ConfigError, ExpectedError
from utils.program import end_with_parent
from utils.run.meters import peak_memory
from utils.training.batches import Batch, prefetch
from utils.training.learner import Learner
from utils.training.plan import Plan, make_plan

Consumer = Callable[[Tensor, Tensor], object]
STEPS_PER_EPOCH = 1000  # only for the schedule: no measurement lasts longer


def add_arguments(
    parser: argparse.ArgumentParser, *, config: str = "default", trials: int = 5, iters: int = 0, warmup: int = 0
) -> None:
    """Add the options that measurements share: configuration, number of trials, report, and with `iters` steps."""
    add_config_arguments(parser, config=config)
    add_count(parser, "--trials", trials, "trials that count")
    if iters:
        add_count(parser, "--iters", iters, "timed steps of a trial")
        add_count(parser, "--warmup", warmup, "steps before them", least=0)
    report = "write figures, configuration and environment here"
    parser.add_argument("--json", type=path_argument, metavar="PATH", help=report)


def read_config(options: argparse.Namespace) -> Config:
    """Return the configuration that the options name. Raises `ConfigError` if it, or the report's file, is unusable."""
    check_writable("--json", options.json)
    return load_config(options.yaml_config, options.config, options.set)


def write_report(
    path: Path | None, command: str, config: Config, world: World, results: Mapping[str, Any],
    plans: Mapping[str, Any] | None = None, **environment: Any,
) -> None:  # fmt: skip
    """Write a report, only on the main rank and if there is a path. `plans`: of each case that trains; `environment`:
    values that differ from this process's."""
    if path is not None and world.is_main:
        environment = describe_environment(world.device, world.world_size) | environment
        report = {"bench": command, "config": config.model_dump(mode="json"), "plans": plans, "results": results}
        write_json(path, report | {"environment": environment}, default=Trials.as_json)


@dataclass(frozen=True)
class Trials:
    """The values of one quantity in the trials of one case, in the order they ran."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def as_json(self) -> dict[str, Any]:
        return {"median": self.median, "min": min(self.values), "max": max(self.values), "values": list(self.values)}

    def __format__(self, spec: str) -> str:
        """Return `median (min-max)`, each number in the format `spec`."""
        return f"{self.median:{spec}} ({min(self.values):{spec}}-{max(self.values):{spec}})"


Results = dict[str, dict[str, Trials]]  # {case: {quantity: trials}}
Case = Callable[[], Mapping[str, float]]  # runs a trial: {quantity: value}


def measure(cases: Mapping[str, Case], trials: int, *, warm_up: int = 1, skip: bool = True) -> Iterator[Results]:
    """Run every case `warm_up` times, then `trials` times that count, one case after the other, so that a machine that
    becomes slower affects all alike; after each of these yield all values so far. `skip`: name and skip a case whose
    first trial raises `ConfigError` or lacks a package, unless it is the only one left."""
    seen = {name: list[Mapping[str, float]]() for name in cases}
    for trial in range(-warm_up, trials):
        started = time.monotonic()
        for name in list(seen):
            try:
                seen[name].append(cases[name]())
            except (ConfigError, ImportError) as error:
                if trial > -warm_up or not skip or len(seen) == 1:
                    raise
                print(f"{name}: skipped: {error}", file=sys.stderr)
                del seen[name]
        if trial >= 0:
            print(f"trial {trial + 1} of {trials}: {time.monotonic() - started:.1f} s", file=sys.stderr)
            yield {
                name: {quantity: Trials(tuple(row[quantity] for row in rows[warm_up:])) for quantity in rows[0]}
                for name, rows in seen.items()
            }


@contextmanager
def in_processes(builds: Mapping[str, Callable[[], Case]], plans: dict[str, Any]) -> Iterator[dict[str, Case]]:
    """Yield for each case a function that runs its trials in a process of its own, so that its switches, caches and
    memory cannot affect another. The first trial starts the process and builds the case; `plans` gets its plan."""

    def trial(name: str, pool: ProcessPoolExecutor, build: Callable[[], Case]) -> Mapping[str, float]:
        try:
            values, plans[name] = pool.submit(_run, build).result()
            return values
        except BrokenProcessPool:
            advice = "its output above says why, or it was killed, as if out of memory; lower batch_size"
            raise ExpectedError(f"a measuring process ended: {advice}") from None

    with ExitStack() as stack:
        start = partial(ProcessPoolExecutor, 1, get_context("spawn"), _begin)
        yield {name: partial(trial, name, stack.enter_context(start()), build) for name, build in builds.items()}


def _begin() -> None:
    end_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent reports an interruption


_built: list[Case] = []  # in such a process: its case


def _run(build: Callable[[], Case]) -> tuple[Mapping[str, float], dict[str, Any] | None]:
    if not _built:
        _built.append(build())
    plan = getattr(_built[0], "plan", None)
    return _built[0](), plan.describe() if plan else None


def time_action(device: torch.device, action: Callable[[], object]) -> float:
    """Return the seconds until the action and its work on the device are done. The device must be idle before."""
    wait_for = torch.get_device_module(device).synchronize
    wait_for(device)
    started = time.perf_counter()
    action()
    wait_for(device)
    return time.perf_counter() - started


def alone(config: Config) -> World:
    """Return the world of a single process on the configuration's device."""
    return World(rank=0, local_rank=0, world_size=1, device=choose_device(config.device, 0))


def build_measured(config: Config, world: World, image_side: int | None = None) -> Learner:
    """Collective: build train.py's learner for images of `image_side` pixels."""
    plan, build = make_plan(config, world), partial(build_model, image_side=image_side)
    learner = Learner(config, plan, build, world, STEPS_PER_EPOCH)
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
