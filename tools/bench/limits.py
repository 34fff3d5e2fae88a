"""Measure the hardware limits within seconds."""

import argparse

from tools.bench import common
from tools.bench.ceilings import measure_limits
from tools.shared.output import print_table
from utils.distributed.world import World


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m tools.bench limits`."""
    common.add_arguments(parser, config="fastest", trials=5)


def run(options: argparse.Namespace) -> int:
    """Measure, print a table, write the report."""
    config = common.read_config(options)

    def measure(world: World) -> None:
        results = measure_limits(world, options.trials)
        if world.is_main:
            rows = [(name, f"{sample:,.2f}") for name, sample in results.items()]
            print_table(f"limits of {world.device.type}: median (min-max)", ["limit", "value"], rows)
        common.write_report(options.json, "limits", config, world, results)

    return common.on_all_ranks(config, measure)
