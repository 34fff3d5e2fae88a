"""Weak and strong scaling over processes of one machine; each trial is a torchrun.

Strong: constant global batch; weak: the global batch grows with the processes. Protocol of DLPerf: the first steps do
not count, several interleaved trials, median. Speed-up: images/s relative to the fewest processes. Efficiency: speed-up
over the ratio of processes. Communication: the fraction of a step that disappears when gradients are not averaged.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product, repeat
from pathlib import Path
from statistics import median
from typing import Any

from tools.bench import common
from tools.bench.common import alone, build_measured, images_per_sec
from tools.common import counts, print_table, write_json
from utils.config import Config
from utils.data.build import build_loaders, open_dataset
from utils.distributed.launch import torchrun_here
from utils.distributed.ranks import run_ranks
from utils.distributed.world import World
from utils.errors import ExpectedError
from utils.program import CODE
from utils.quotas import usable_cores
from utils.training.learner import Learner
from utils.training.plan import make_plan

MODES = ("strong", "weak")
ROUNDS = 3  # of alternating steps with and without communication


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_arguments(parser, config="bs128-opt", iters=60, warmup=20)
    parser.add_argument("--nproc", type=counts, default="1,2", metavar="N,M", help="processes (default: 1,2)")
    parser.add_argument("--mode", choices=MODES, help="only this kind of scaling")


def run(options: argparse.Namespace) -> int:
    config = common.read_config(options)
    configs = configs_of(config, options.nproc, [options.mode] if options.mode else MODES)
    threads = max(1, usable_cores() // max(options.nproc))
    plans = dict[str, Any]()
    cases = {
        f"{mode} {number}": partial(run_once, plans, mode, number, case, threads, options.warmup, options.iters)
        for (mode, number), case in configs.items()
    }
    *_, trials = common.measure(cases, options.trials, warm_up=0)
    results = summarise(trials)
    rows = [
        (name, f"{values['train_images_per_sec']:.0f}", f"{values['train_speed_up']:.2f}",
         f"{values['train_efficiency']:.0%}",
         f"{share.median:.1%}" if (share := values.get("communication_share")) else "-")
        for name, values in results.items()
    ]  # fmt: skip
    title = f"{config.model}, batch {config.batch_size} (weak: of each process), training steps only"
    print_table(title, ("processes", "images/s", "speed-up", "efficiency", "communication"), rows)
    common.write_report(options.json, "scaling", config, alone(config), results, plans, threads=threads)
    return 0


def configs_of(config: Config, processes: Sequence[int], modes: Sequence[str]) -> dict[tuple[str, int], Config]:
    """Return the configuration of every (mode, processes). Raises `ConfigError` if a batch cannot be split."""
    configs = {}
    for mode, number in product(modes, processes):
        batch_size = config.batch_size * (number if mode == "weak" else 1)
        configs[mode, number] = Config(**config.model_dump() | {"batch_size": batch_size})
        make_plan(configs[mode, number], replace(alone(config), world_size=number))
    return configs


def run_once(
    plans: dict[str, Any], mode: str, processes: int, config: Config, threads: int, warmup: int, iters: int
) -> dict[str, float]:
    """Run one trial under torchrun; `plans` gets its plan. On a CPU a process is a device of `threads` cores."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "values.json"
        command, rendezvous = torchrun_here(processes, Path(folder) / "rendezvous")
        command += [__file__, config.model_dump_json(), str(warmup), str(iters), str(path)]
        environment = {"OMP_NUM_THREADS": str(threads)} | os.environ | rendezvous
        # the code comes before the working directory, whose files may have the names of our modules
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CODE), os.environ.get("PYTHONPATH")]))
        if subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False).returncode:
            raise ExpectedError(f"a run with {processes} processes failed; its output above says why")
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        plans[f"{mode} {processes}"] = values.pop("plan")
        return values


def summarise(results: common.Results) -> dict[str, dict[str, Any]]:
    """Return {"strong 2": {quantity: trials, and its speed-up and efficiency by medians}}."""
    summary: dict[str, dict[str, Any]] = {}
    for name, trials in results.items():
        mode, processes = name.split()
        fewest = min(int(other.split()[1]) for other in results if other.startswith(mode))
        rate, reference = (results[case]["train_images_per_sec"].median for case in (name, f"{mode} {fewest}"))
        efficiency = rate / reference * fewest / int(processes)
        summary[name] = {**trials, "train_speed_up": rate / reference, "train_efficiency": efficiency}
    return summary


def measure_rank(config: Config, warmup: int, iters: int, path: Path, world: World) -> None:
    """Collective: measure a training step with and without communication; write the values to `path`."""
    images, labels = next(iter(build_loaders(config, open_dataset(config, world), world).train))
    silent = Config(**config.model_dump() | {"parallel": "no_communication"})
    cases = {"ddp": config} | ({"no_communication": silent} if world.world_size > 1 else {})
    learners = {name: build_measured(case, world, image_side=images.shape[-1]) for name, case in cases.items()}

    def rate(learner: Learner, steps: int) -> float:
        """Return images per second at the pace of the slowest rank."""
        world.barrier()
        own = images_per_sec(config, world.device, 0, steps, repeat((images, labels)), learner.train_step)
        return min(world.all_gather(own))

    for learner in learners.values():
        rate(learner, max(1, warmup, learner.plan.capture_steps))
    steps = -(-iters // ROUNDS)
    rounds = [{name: rate(learner, steps) for name, learner in learners.items()} for _ in range(ROUNDS)]
    medians = {name: median(rates[name] for rates in rounds) for name in cases}
    shares = {"communication_share": 1 - medians["ddp"] / medians["no_communication"]} if len(cases) > 1 else {}
    if world.is_main:
        write_json(path, {"train_images_per_sec": medians["ddp"], "plan": learners["ddp"].plan.describe()} | shares)


if __name__ == "__main__":  # a rank that `run_once` started
    settings, untimed, timed, file = sys.argv[1:]
    chosen = Config(**json.loads(settings))
    measure_steps = partial(measure_rank, chosen, int(untimed), int(timed), Path(file))
    sys.exit(run_ranks(measure_steps, chosen.device, chosen.rank_timeout_seconds))
