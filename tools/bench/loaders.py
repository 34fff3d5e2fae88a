"""Images per second of each data loader, by itself and feeding a training step, and the time that a step waits."""

import argparse
import time
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from tools.bench import common
from tools.bench.common import Consumer, build_measured, endless, images_per_sec
from tools.common import add_count, print_table
from utils.config import Config, load_config
from utils.data.build import Loader, build_loaders, open_dataset
from utils.distributed.ranks import run_ranks
from utils.distributed.world import World
from utils.environment import dali_version, device_name
from utils.training.batches import Batch, prefetch
from utils.training.learner import prepare_backends
from utils.training.plan import Plan, make_plan

BACKENDS = ",".join(["torchvision", *(["dali"] if dali_version() else []), "device", "synthetic"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_arguments(parser, config="bs256-amp-nhwc-extra-opts", trials=3)
    parser.add_argument("--loaders", default=BACKENDS, metavar="A,B", help=f"loaders (default: installed: {BACKENDS})")
    add_count(parser, "--batches", 100, "batches of a trial without training")
    add_count(parser, "--steps", 20, "training steps of a trial; 0: no training", least=0)


def run(options: argparse.Namespace) -> int:
    config = common.read_config(options)
    configs = {
        name: load_config(options.yaml_config, options.config, [*options.set, f"data_loader={name}"])
        for name in options.loaders.split(",")
    }

    def measure(world: World) -> None:
        plan, step = make_plan(config, world), None
        prepare_backends(config, plan)
        if options.steps:
            learner = build_measured(config, world, open_dataset(config, world).train.image_shape[-1])
            plan, step = learner.plan, learner.train_step
        cases = {name: loader_trial(chosen, plan, world, step, options) for name, chosen in configs.items()}
        # several ranks must all skip a case, or none
        *_, results = common.measure(cases, options.trials, skip=world.world_size == 1)
        if world.is_main:
            show(config, world, results)
        common.write_report(options.json, "loaders", config, world, results, {"training": plan.describe()})

    return run_ranks(measure, config.device, config.rank_timeout_seconds)


def loader_trial(
    config: Config, plan: Plan, world: World, step: Consumer | None, options: argparse.Namespace
) -> common.Case:
    """Return a function that measures one loader, which it builds in the first trial."""

    @cache
    def loader() -> Loader:
        built = build_loaders(config, open_dataset(config, world), world)
        for note in built.notes if world.is_main else []:
            print(note)
        return built.train

    def trial() -> dict[str, float]:
        """Return images per second of the loader and of training, and the fraction of time that the host waited."""
        counted, steps, waits = options.batches, options.steps, list[float]()
        warmup = max(1, counted // 4)  # batches that start workers, or were prepared ahead
        rate = images_per_sec(config, world.device, warmup, counted, endless(loader()), lambda *_: None)
        if step is None:
            return {"images_per_sec": rate}

        def timed(batches: Iterator[Batch]) -> Iterator[Batch]:
            while True:
                before, batch = time.perf_counter(), next(batches)
                waits.append(time.perf_counter() - before)
                yield batch

        batches = timed(prefetch(plan, endless(loader()), world.device))
        training = images_per_sec(config, world.device, max(1, plan.capture_steps), steps, batches, step)
        waiting = sum(waits[-steps:]) * training / (steps * config.batch_size)
        return {"images_per_sec": rate, "training_images_per_sec": training, "waiting": waiting}

    return trial


def show(config: Config, world: World, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Print median and spread of the trials; the last column compares with the synthetic loader's training."""
    synthetic = results.get("synthetic", {}).get("training_images_per_sec")
    columns, rows = ["loader", "images/s"], []
    if "training_images_per_sec" in next(iter(results.values())):  # in all or in none
        columns += ["images/s training", "waiting, of a step", "slower than without input"]
    for name, values in results.items():
        row = [name, f"{values['images_per_sec']:,.0f}"]
        if training := values.get("training_images_per_sec"):
            slower = f"{1 - training.median / synthetic.median:.1%}" if synthetic else ""
            row += [f"{training:,.0f}", f"{values['waiting']:.1%}", slower]
        rows.append(row)
    setting = f"{config.dataset}, batch {config.batch_size}, {world.world_size} rank(s) on {device_name(world.device)}"
    print_table(f"{setting}: median (min-max)", columns, rows)
