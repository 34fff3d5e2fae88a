"""Images per second of each data loader, by itself and feeding a training step, and the time that a step waits."""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tools.bench import common
from tools.bench.training import build_measured, capture_steps, images_per_sec
from tools.shared.command_line import add_count
from tools.shared.output import print_table
from utils.base_config import as_yaml
from utils.config import Config, load_config
from utils.data.build import Dataset, Loader, build_loaders, open_dataset
from utils.distributed.world import World
from utils.errors import ConfigError
from utils.run.logging.environment import dali_version, device_name
from utils.training.batches import prefetch
from utils.training.kernels.backends import prepare_backends

BACKENDS = ",".join(["torchvision", *(["dali"] if dali_version() else []), "device", "synthetic"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_arguments(parser, config="bs256-amp-nhwc-extra-opts")
    parser.add_argument(
        "--loaders", default=BACKENDS, metavar="A,B", help=f"loaders (default: the installed ones, {BACKENDS})"
    )
    parser.add_argument(
        "--data_paths", metavar="A,B", help="measure each loader on each of these folders (default: data_path)"
    )
    parser.add_argument(
        "--cold", action="store_true",
        help="also measure with a cold page cache: drop it before each trial (needs root), then read again",
    )  # fmt: skip
    add_count(parser, "--batches", 100, "batches of a trial without training")
    add_count(parser, "--steps", 20, "training steps of a trial; 0: no training", least=0)


def run(options: argparse.Namespace) -> int:
    config = common.read_config(options)
    if options.cold:
        drop_page_cache()
    names = without_missing_dali(options.loaders.split(","), dali_version())
    configs: dict[str, Config] = {}
    for path in options.data_paths.split(",") if options.data_paths else [None]:
        changes = [] if path is None else [f"data_path={as_yaml(path)}"]
        for name in names:
            settings = [*options.set, *changes, f"data_loader={name}"]
            case = name if path is None else f"{name}, {path}"
            configs[case] = load_config(options.yaml_config, options.config, settings)

    def measure(world: World) -> None:
        prepare_backends(config, world.device)
        datasets: dict[str, Dataset] = {}
        step = build_measured(config, world).train_step if options.steps else None
        cases: dict[str, Callable[[], Mapping[str, float]]] = {}
        for name, chosen in configs.items():
            if chosen.data_path not in datasets:
                datasets[chosen.data_path] = open_dataset(chosen, world)
            built = build_loaders(chosen, datasets[chosen.data_path], world)
            cases[name] = LoaderTrial(chosen, built.train, step, world, options.batches, options.steps, options.cold)
            if world.is_main:
                print(*(f"{name}: {note}" for note in built.notes), sep="\n", end="\n" if built.notes else "")
        # several ranks must all skip a case, or none
        results = common.measure(cases, options.trials, skip_unavailable=world.world_size == 1)
        if world.is_main:
            show(config, next(iter(datasets.values())), world, results)
        common.write_report(options.json, "loaders", config, world, results)

    return common.on_all_ranks(config, measure)


def without_missing_dali(names: list[str], dali: str | None) -> list[str]:
    """Skip DALI, with a message, if it is not installed and there are other loaders to measure."""
    if dali is None and "dali" in names and len(names) > 1:
        print('dali: skipped: NVIDIA DALI is not installed; pip install ".[dali]"', file=sys.stderr)
        return [name for name in names if name != "dali"]
    return names


def drop_page_cache() -> None:
    """Drop this machine's page cache. Raises `ConfigError` without the permission."""
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError as error:
        raise ConfigError(f"--cold: the page cache cannot be dropped: {error.strerror}; run as root") from None


@dataclass
class LoaderTrial:
    """Measures one loader. Each trial continues in the epochs where the last one stopped."""

    config: Config
    loader: Loader
    step: Callable[[Tensor, Tensor], None] | None
    world: World
    num_batches: int
    num_steps: int
    cold: bool = False

    def __post_init__(self) -> None:
        self.epochs = itertools.count()
        self.num_dropped = max(1, self.num_batches // 4)
        if self.cold and len(self.loader) < self.num_dropped + self.num_batches:
            raise ConfigError(
                f"--cold: a trial's {self.num_dropped} + {self.num_batches} batches exceed an epoch's "
                f"{len(self.loader)}, so some would be read twice; use fewer --batches or a smaller batch_size"
            )

    def __call__(self) -> Mapping[str, float]:
        values = {}
        if self.cold:
            epoch = next(self.epochs)
            drop_page_cache()
            values["cold_images_per_sec"] = self._time_loader([epoch])
            values["images_per_sec"] = self._time_loader([epoch])  # the same files, now cached
        else:
            values["images_per_sec"] = self._time_loader(self.epochs)
        if self.step is not None:
            values |= self._time_training(self.step)
        return values

    def _batches(self, epochs: Iterable[int]) -> Iterator[tuple[Tensor, Tensor]]:
        for epoch in epochs:
            self.loader.set_epoch(epoch)
            yield from self.loader

    def _time_loader(self, epochs: Iterable[int]) -> float:
        """Return images per second over all ranks without training. The first batches do not count: they start
        workers, or were prepared ahead."""
        batches, device = self._batches(epochs), self.world.device
        return images_per_sec(self.config, device, batches, self.num_dropped, self.num_batches, lambda *_: None)

    def _time_training(self, step: Callable[[Tensor, Tensor], None]) -> dict[str, float]:
        """Return images per second of training, and the fraction of time that the host waited for a batch."""
        batches = prefetch(self.config, self._batches(self.epochs), self.world.device)
        for images, labels in itertools.islice(batches, max(1, capture_steps(self.config, self.world.device))):
            step(images, labels)
        common.synchronize(self.world.device)
        waiting, started = 0.0, time.perf_counter()
        for _ in range(self.num_steps):
            before = time.perf_counter()
            images, labels = next(batches)
            waiting += time.perf_counter() - before
            step(images, labels)
        common.synchronize(self.world.device)
        seconds = time.perf_counter() - started
        trained = self.num_steps * self.config.batch_size
        return {"training_images_per_sec": trained / seconds, "waiting": waiting / seconds}


def show(config: Config, dataset: Dataset, world: World, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Print median and spread of the trials; the last column compares with the synthetic loader's training."""
    feeding = any("waiting" in values for values in results.values())
    cold = any("cold_images_per_sec" in values for values in results.values())
    columns = ["loader", "images/s", *(["cold cache"] if cold else [])]
    if feeding:
        columns += ["images/s training", "waiting, % of a step", "slower than without input, %"]
    rows = []
    for name, values in results.items():
        row = [name, f"{values['images_per_sec']:,.0f}"]
        if cold:
            row.append(f"{values['cold_images_per_sec']:,.0f}")
        if feeding:
            training = values["training_images_per_sec"]
            percent = common.Trials(tuple(100 * share for share in values["waiting"].values))
            row += [f"{training:,.0f}", f"{percent:.1f}"]
            best = results["synthetic"]["training_images_per_sec"] if "synthetic" in results else None
            row.append("" if best is None else f"{100 * (1 - training.median / best.median):.1f}")
        rows.append(row)
    setting = f"{dataset.name}, batch {config.batch_size}, {world.world_size} rank(s) on {device_name(world.device)}"
    print_table(f"{setting}: median (min-max)", columns, rows)
