"""Measurements: device rates and slow devices; over several ranks also clocks, versions, all-reduce."""

import statistics
import time
from collections.abc import Mapping, Sequence

import torch

from tools.bench.limits import host_to_device, memory, product
from tools.doctor.findings import GIGABYTE, Finding, judge, with_others
from utils.distributed.world import World

TRIALS = 3
CLOCK_ROUNDS = 5
CLOCKS_DIFFER = 1.0  # seconds, above which logs cannot be read together
SLOW_BUS = 3.0  # GB/s, just below one 25 Gb/s network card


def device_checks(own_device: torch.device, *, only_rank: bool) -> list[Finding]:
    """Measure the peak rates of this rank's device, or of all visible GPUs if no other rank is on its node."""
    if own_device.type != "cuda":
        rate, copied = arithmetic(own_device), memory(own_device, TRIALS).median
        message = f"CPU: {1e3 * rate:,.0f} GFLOP/s in float32, memory {copied:.1f} GB/s"
        return [Finding("limits", "ok", message, figures={"float32 TFLOP/s": rate, "memory GB/s": copied})]
    findings, rates = [], []
    for device in devices_of_a_rank(own_device, only_rank=only_rank):
        free, total = torch.cuda.mem_get_info(device)
        rate, copied = arithmetic(device), memory(device, TRIALS).median
        from_host = host_to_device(device, TRIALS).median
        name = f"{torch.cuda.get_device_name(device)} {device.index}"
        rates.append((name, rate))
        message = (
            f"{name}: {rate:,.0f} TFLOP/s in bf16, memory {copied:,.0f} GB/s, from the host {from_host:.1f} GB/s, "
            f"{free / GIGABYTE:.0f} of {total / GIGABYTE:.0f} GB free"
        )
        busy = free < 0.8 * total
        remedy = "another process uses its memory: nvidia-smi shows which"
        figures = {"bf16 TFLOP/s": rate, "memory GB/s": copied, "from the host GB/s": from_host}
        findings.append(judge("limits", message, remedy, warn=busy, figures=figures))
    return findings + [finding for finding in check_rates(rates, "slow device") if finding.level != "ok"]


def devices_of_a_rank(own_device: torch.device, *, only_rank: bool) -> list[torch.device]:
    """Return the rank's own device, or all visible GPUs if no other rank is on its node."""
    if own_device.type != "cuda" or not only_rank:
        return [own_device]
    return [torch.device("cuda", number) for number in range(torch.cuda.device_count())]


def arithmetic(device: torch.device) -> float:
    """Measure TFLOP/s of matrix products, bf16 on GPUs and float32 on CPUs; the best trial, since other processes
    disturb some."""
    return max(product(device, torch.bfloat16 if device.type == "cuda" else torch.float32, TRIALS).values)


def check_rates(rates: Sequence[tuple[str, float]], check: str) -> list[Finding]:
    """Name every device or rank that is 15 % slower than the median of the others. Rates in TFLOP/s."""
    remedy = "exclude the node; look there for other processes, heat, a power limit (nvidia-smi -q -d PERFORMANCE)"
    slow = [
        Finding(
            check,
            "fail",
            f"{one.where} is {one.expected / one.value:.2f} times slower than the median of the others: "
            f"{one.value:,.4g} TFLOP/s",
            remedy,
        )
        for one in with_others(rates)
        if one.slow
    ]
    return slow or [Finding(check, "ok", f"none of {len(rates)} is 15 % slower than the others")]


def check_meeting(seconds: float, world_size: int) -> Finding:
    """Check how long the ranks took to meet, including the import of PyTorch."""
    message = f"{world_size} ranks met after {seconds:.1f} s"
    return judge("rendezvous", message, "move Python to a local disk", warn=seconds > 60)


def check_versions(versions: Sequence[tuple[str, Mapping[str, str]]]) -> Finding:
    """Check that all ranks have the same software. `versions`: (where, {name: version}) for each rank."""
    differing = []
    for name in versions[0][1]:
        groups: dict[str, list[str]] = {}
        for where, found in versions:
            groups.setdefault(found[name], []).append(where)
        if len(groups) > 1:
            most = max(groups, key=lambda version: len(groups[version]))
            others = (f"{version} on {wheres[0]}" for version, wheres in groups.items() if version != most)
            differing.append(f"{name} {most}, but {', '.join(others)}")
    if differing:
        return Finding("versions", "fail", "; ".join(differing), "use one environment or image on all nodes")
    return Finding("versions", "ok", ", ".join(f"{name} {version}" for name, version in versions[0][1].items()))


def clock_offsets(world: World) -> list[float]:
    """Collective: return the seconds by which each rank's clock is ahead of rank 0's. The median over rounds evens out
    the time to leave a barrier."""
    offsets = []
    for _ in range(CLOCK_ROUNDS):
        world.barrier()
        times = world.all_gather(time.time())
        offsets.append([moment - times[0] for moment in times])
    return [statistics.median(column) for column in zip(*offsets, strict=True)]


def check_clocks(offsets: Sequence[float]) -> Finding:
    """Check that the nodes' clocks agree, so that their logs can be read together."""
    first, last = min(offsets), max(offsets)
    behind, ahead = offsets.index(first), offsets.index(last)
    message = f"clocks differ by at most {last - first:.3f} s (ranks {behind} and {ahead})"
    return judge("clocks", message, "start chrony or ntpd on their nodes", warn=last - first > CLOCKS_DIFFER)


def check_all_reduce(rate: float, world: World) -> Finding:
    """Check the bandwidth of an all-reduce, in GB/s."""
    bus = 2 * (world.world_size - 1) / world.world_size * rate
    message = f"100 MB over {world.world_size} ranks: {rate:.2f} GB/s, bus bandwidth {bus:.2f} GB/s"
    remedy = "NCCL_DEBUG=INFO prints the network in use; NCCL_SOCKET_IFNAME and NCCL_IB_HCA choose another"
    slow = world.device.type == "cuda" and bus < SLOW_BUS
    return judge("all-reduce", message, remedy, warn=slow, figures={"GB/s": rate})
