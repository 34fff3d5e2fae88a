"""Hardware limits, measured within seconds: products, convolutions, memory, copies to the device, all-reduce.
`python -m tools.bench limits` prints them; other benches give their results as fractions of them."""

import argparse
import math
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from tools.bench import common
from tools.common import print_table
from utils.distributed.ranks import run_ranks
from utils.distributed.world import World

DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ALL_REDUCE = "all-reduce of 100 MB, GB/s"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_arguments(parser, config="fastest")


def run(options: argparse.Namespace) -> int:
    config = common.read_config(options)

    def measure(world: World) -> None:
        results = measure_limits(world, options.trials)
        if world.is_main:
            rows = [(name, f"{sample:,.2f}") for name, sample in results.items()]
            print_table(f"limits of {world.device.type}: median (min-max)", ("limit", "value"), rows)
        common.write_report(options.json, "limits", config, world, results)

    return run_ranks(measure, config.device, config.rank_timeout_seconds)


def measure_limits(world: World, trials: int, beginnings: tuple[str, ...] = ("",)) -> dict[str, common.Trials]:
    """Collective: return {name with unit: limit} for these beginnings; TFLOP/s count a multiply-add as two."""
    device, cuda, results = world.device, world.device.type == "cuda", dict[str, common.Trials]()

    def measure(name: str, amount: float, action: Callable[[], object]) -> None:
        """Add `amount` per second of an action; a trial repeats it for at least 50 ms."""
        if not name.startswith(beginnings):
            return
        action()
        repeats = math.ceil(0.05 / common.time_action(device, action))
        seconds = [common.time_action(device, lambda: [action() for _ in range(repeats)]) for _ in range(trials)]
        results[name] = common.Trials(tuple(repeats * amount / value for value in seconds))

    size, number = (8192, 256) if cuda else (1024, 32)  # rows of a square matrix, images
    channels, side = 256, 8
    for name, dtype in DTYPES.items():
        if name in ("tf32", "fp16") and not cuda:
            continue  # CPUs have no tf32, and only emulate fp16
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = name == "tf32"
        left, right = torch.randn(2, size, size, device=device).to(dtype)
        measure(f"product {name}, TFLOP/s", 2e-12 * size**3, partial(torch.matmul, left, right))
        # the 3x3 convolution in ResNet50's third stage, 256 channels on 8x8 pixels, forward only
        shapes = (number, channels, side, side), (channels, channels, 3, 3)
        images, kernel = (torch.randn(s, device=device).to(dtype, memory_format=torch.channels_last) for s in shapes)
        flops = 2e-12 * number * side**2 * channels**2 * 9
        measure(f"convolution {name} NHWC, TFLOP/s", flops, partial(torch.conv2d, images, kernel, padding=1))
    source = torch.ones((1 << 30 if cuda else 1 << 28) // 4, device=device)  # larger than the caches
    measure("memory, GB/s", 2e-9 * source.nbytes, partial(torch.empty_like(source).copy_, source))
    if cuda:
        pinned = torch.ones(1 << 26).pin_memory()
        target = torch.empty_like(pinned, device=device)
        measure("host to device, GB/s", 1e-9 * pinned.nbytes, partial(target.copy_, pinned, non_blocking=True))
    if world.world_size > 1 and ALL_REDUCE.startswith(beginnings):
        gradient, rates = torch.ones(25_000_000, device=device), list[float]()
        for _ in range(trials + 1):
            dist.barrier()
            rates.append(1e-9 * gradient.nbytes / common.time_action(device, partial(dist.all_reduce, gradient)))
        results[ALL_REDUCE] = common.Trials(tuple(rates[1:]))
    return results
