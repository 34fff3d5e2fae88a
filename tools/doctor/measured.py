"""Measurements: rates of a device and slow devices; over several ranks also versions and all-reduce."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from tools.bench.limits import ALL_REDUCE, measure_limits
from tools.doctor.findings import Finding, compare_fingerprints, compare_values, judge, read_figures
from utils.distributed.world import World

TRIALS = 3
SLOW_BUS = 3.0  # GB/s, just below one 25 Gb/s network card


def check_limits(device: torch.device) -> Finding:
    """Measure matrix products, copies of memory, and on a GPU copies from the host; warn if its memory is in use."""
    gpu = device.type == "cuda"
    free, total = torch.cuda.mem_get_info(device) if gpu else (1, 1)
    kind = "bf16" if gpu else "float32"
    found = measure_limits(World(0, 0, 1, device), TRIALS, (f"product {kind}", "memory", "host"))
    product = max(found[f"product {kind}, TFLOP/s"].values)  # the best trial, since other processes disturb some
    figures = {f"{kind} TFLOP/s": product, "memory GB/s": found["memory, GB/s"].median}
    if gpu:
        figures["from the host GB/s"] = found["host to device, GB/s"].median
    name = f"{torch.cuda.get_device_name(device)}, {free / total:.0%} of its memory free" if gpu else "CPU"
    message = ", ".join([name, *(f"{what} {value:,.3g}" for what, value in figures.items())])
    remedy = "another process uses its memory: nvidia-smi shows which"
    return replace(judge("limits", message, remedy, warn=free < 0.8 * total), figures=figures)


def compare_devices(findings: Sequence[Finding]) -> list[Finding]:
    """Compare fingerprints, and rates of matrix products only: ranks that copy at the same time disturb each other."""
    compared = compare_fingerprints(findings)
    for name, values in read_figures(findings).items():
        if name.endswith("TFLOP/s") and len(values) > 1:
            compared += compare_values(name, values, values, "the median")
    return compared


def check_versions(versions: Sequence[tuple[str, Mapping[str, str]]]) -> list[Finding]:
    """Check that all ranks have the software of most ranks. `versions`: (where, {name: version}) for each rank."""
    texts = [", ".join(f"{name} {version}" for name, version in found.items()) for _, found in versions]
    usual, remedy = statistics.mode(texts), "use one environment or image on all nodes"
    differing = [
        Finding("versions", "fail", f"{text}; most ranks: {usual}", remedy, where)
        for (where, _), text in zip(versions, texts, strict=True)
        if text != usual
    ]
    return differing or [Finding("versions", "ok", usual)]


def check_all_reduce(world: World) -> Finding:
    """Collective: measure an all-reduce of 100 MB, and check its bus bandwidth on GPUs."""
    rate = measure_limits(world, TRIALS, (ALL_REDUCE,))[ALL_REDUCE].median
    bus = 2 * (world.world_size - 1) / world.world_size * rate
    message = f"100 MB over {world.world_size} ranks: {rate:.2f} GB/s, bus bandwidth {bus:.2f} GB/s"
    remedy = "NCCL_DEBUG=INFO prints the network in use; NCCL_SOCKET_IFNAME and NCCL_IB_HCA choose another"
    slow = world.device.type == "cuda" and bus < SLOW_BUS
    return replace(judge("all-reduce", message, remedy, warn=slow), figures={"GB/s": rate})
