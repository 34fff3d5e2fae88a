"""Hardware limits, measured within seconds: products, convolutions, memory, copies to the device, all-reduce.
`python -m tools.bench limits` prints them; other benches give their results as fractions of them."""

import argparse
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from tools.bench import common
from utils.distributed.world import World

DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_arguments(parser, config="fastest")


def run(options: argparse.Namespace) -> int:
    config = common.read_config(options)

    def measure(world: World) -> None:
        results = measure_limits(world, options.trials)
        if world.is_main:
            rows = [{"limit": name, "value": f"{sample:,.2f}"} for name, sample in results.items()]
            common.print_rows(f"limits of {world.device.type}: median (min-max)", rows)
        common.write_report(options.json, "limits", config, world, results)

    return common.on_all_ranks(config, measure)


def measure_limits(world: World, trials: int) -> dict[str, common.Trials]:
    """Collective: return each limit by name and unit; TFLOP/s count a multiply-add as two."""
    device, results = world.device, {}
    cuda = device.type == "cuda"
    for name, dtype in DTYPES.items():
        if name in ("tf32", "fp16") and not cuda:
            continue  # CPUs have no tf32, and only emulate fp16
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = name == "tf32"
        results[f"product {name}, TFLOP/s"] = product(device, dtype, trials)
        results[f"convolution {name} NHWC, TFLOP/s"] = convolution(device, dtype, trials)
    results["memory, GB/s"] = memory(device, trials)
    if cuda:
        results["host to device, GB/s"] = host_to_device(device, trials)
    if world.world_size > 1:
        results["all-reduce of 100 MB, GB/s"] = all_reduce(device, trials)
    return results


def _rate(
    amount: float, action: Callable[[], object], device: torch.device, trials: int, unit: float = 1e9
) -> common.Trials:
    """Return `amount` / `unit` per second of an action; a trial repeats it for at least 50 ms."""
    action()
    repeats = math.ceil(0.05 / common.time_action(device, action))

    def repeat() -> None:
        for _ in range(repeats):
            action()

    return common.Trials(tuple(repeats * amount / unit / common.time_action(device, repeat) for _ in range(trials)))


def product(device: torch.device, dtype: torch.dtype, trials: int) -> common.Trials:
    """Measure TFLOP/s of a large matrix product."""
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return _rate(2 * size**3, lambda: left @ right, device, trials, unit=1e12)


def convolution(device: torch.device, dtype: torch.dtype, trials: int) -> common.Trials:
    """Measure TFLOP/s of the 3x3 convolution in ResNet50's third stage, 256 channels on 8x8 pixels, forward only."""
    num_images, channels, size = (256 if device.type == "cuda" else 32), 256, 8
    images = torch.randn(num_images, channels, size, size, device=device).to(dtype, memory_format=torch.channels_last)
    kernel = torch.randn(channels, channels, 3, 3, device=device).to(dtype, memory_format=torch.channels_last)
    flops = 2 * num_images * size**2 * channels**2 * 9
    with torch.no_grad():
        return _rate(flops, lambda: torch.conv2d(images, kernel, padding=1), device, trials, unit=1e12)


def memory(device: torch.device, trials: int) -> common.Trials:
    """Measure GB/s read and written by a copy larger than the caches."""
    source = torch.ones((1 << 30 if device.type == "cuda" else 1 << 28) // 4, device=device)
    target = torch.empty_like(source)
    return _rate(2 * source.nbytes, lambda: target.copy_(source), device, trials)


def host_to_device(device: torch.device, trials: int) -> common.Trials:
    """Measure GB/s from pinned host memory."""
    source = torch.ones(1 << 26).pin_memory()
    target = torch.empty_like(source, device=device)
    return _rate(source.nbytes, lambda: target.copy_(source, non_blocking=True), device, trials)


def all_reduce(device: torch.device, trials: int) -> common.Trials:
    """Collective: measure GB/s of an all-reduce, the tensor's bytes over the time."""
    gradient: Tensor = torch.ones(25_000_000, device=device)
    values = []
    for _ in range(trials + 1):
        dist.barrier()
        values.append(gradient.nbytes / 1e9 / common.time_action(device, lambda: dist.all_reduce(gradient)))
    return common.Trials(tuple(values[1:]))
