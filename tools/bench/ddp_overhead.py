"""The overhead of the distributed path in a single process: DDP in a process group of one rank."""

import argparse
import math
import time
from functools import partial

import torch
import torch.distributed as dist

from tools.bench import common
from tools.bench.training import build_measured, capture_steps
from tools.shared.command_line import add_count
from tools.shared.output import print_table
from utils.data.build import build_loaders, open_dataset
from utils.distributed.ddp import distribute, wrap_in_ddp
from utils.distributed.world import World
from utils.training.learner import Learner

CASES = {"plain": lambda config, model, world: model, "as train.py does": distribute, "DDP, one rank": wrap_in_ddp}
QUANTITIES = ("milliseconds", "processor_milliseconds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_arguments(parser, config="bs128-opt", trials=15)
    add_count(parser, "--steps", 5, "training steps of a trial")


def run(options: argparse.Namespace) -> int:
    config = common.read_config(options)

    def measure(world: World) -> None:
        backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        images, labels = next(iter(build_loaders(config, open_dataset(config, world), world).train))

        def trial(learner: Learner) -> dict[str, float]:
            started, busy = time.perf_counter(), time.process_time()
            for _ in range(options.steps):
                learner.train_step(images, labels)
            common.synchronize(world.device)
            seconds = time.perf_counter() - started, time.process_time() - busy
            return {name: 1000 * spent / options.steps for name, spent in zip(QUANTITIES, seconds, strict=True)}

        warm_up = max(1, math.ceil(capture_steps(config, world.device) / options.steps))
        cases = {name: partial(trial, build_measured(config, world, wrap)) for name, wrap in CASES.items()}
        results = common.measure(cases, options.trials, warm_up=warm_up)
        rows, overheads = [], {}
        for name in CASES:
            row = [name]
            for quantity in QUANTITIES:
                # pair each trial with its neighbour: a change of the machine affects both
                pairs = zip(results[name][quantity].values, results["plain"][quantity].values, strict=True)
                overheads[name, quantity] = common.Trials(tuple(100 * (mine / plain - 1) for mine, plain in pairs))
                row += [f"{results[name][quantity].median:.1f}", f"{overheads[name, quantity].median:+.1f}"]
            rows.append(row)
        title = f"{config.model}, batch {config.batch_size}, {world.device}, torch {torch.__version__}: a training step"
        print_table(title, ("", "ms", "overhead %", "CPU ms", "overhead %"), rows)
        print("train.py uses no DDP and no process group for a single process, whoever starts it.")
        percent = {f"{name}: overhead, % of {quantity}": sample for (name, quantity), sample in overheads.items()}
        common.write_report(options.json, "ddp_overhead", config, world, results | percent)
        dist.destroy_process_group()

    return common.on_all_ranks(config, measure)
