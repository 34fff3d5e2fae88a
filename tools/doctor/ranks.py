"""What only several ranks together show: meeting, clocks, all-reduce."""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tools.doctor.finding import Finding

if TYPE_CHECKING:
    from utils.distributed.world import World

SLOW_BUS = 3.0  # GB/s, where the link's sheet is not known: less than one card of 25 Gb/s reaches


def check_meeting(seconds: float, world_size: int) -> Finding:
    """How long the ranks took to find each other, the import of PyTorch included."""
    seen = f"{world_size} ranks met after {seconds:.1f} s"
    if seconds > 60:
        return Finding("rendezvous", "warn", seen, "a slow file system under Python?")
    return Finding("rendezvous", "ok", seen)


def check_versions(versions: Sequence[tuple[str, Mapping[str, str]]]) -> Finding:
    """Whether all ranks have the same software. `versions`: (where, {name: version}), one for each rank."""
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
        return Finding("versions", "fail", "; ".join(differing), "one environment or image for all nodes")
    return Finding("versions", "ok", ", ".join(f"{name} {version}" for name, version in versions[0][1].items()))


def clock_offsets(world: "World", rounds: int = 5) -> list[float]:
    """Collective: seconds by which each rank's clock is ahead of rank 0's; the rounds' median, since leaving a barrier
    takes a moment that differs."""
    seen = []
    for _ in range(rounds):
        world.barrier()
        times = world.gather(time.time())
        seen.append([moment - times[0] for moment in times])
    return [statistics.median(column) for column in zip(*seen, strict=True)]


def check_clocks(offsets: Sequence[float], allowed: float = 1.0) -> Finding:
    """Whether the clocks agree: logs of several nodes are read together."""
    worst = max(range(len(offsets)), key=lambda rank: abs(offsets[rank]))
    seen = f"clocks differ by at most {abs(offsets[worst]):.3f} s (rank {worst})"
    if abs(offsets[worst]) > allowed:
        return Finding("clocks", "warn", seen, "is chrony or ntpd running on its node?")
    return Finding("clocks", "ok", seen)


def check_all_reduce(rate: float, world: "World", expected: tuple[float, str] | None) -> Finding:
    """The bandwidth that gradients get, GB/s, and what the links should give: `sweep.expected_rate`."""
    bus = 2 * (world.world_size - 1) / world.world_size * rate
    seen = f"100 MB over {world.world_size} ranks: {rate:.2f} GB/s, {bus:.2f} GB/s on the bus"
    figures = {"GB/s": rate}
    limit, by = SLOW_BUS, ""
    if expected is not None:
        limit, by = expected[0] / 3, f", less than a third of the {expected[0]:g} GB/s of {expected[1]}"
    if world.device.type == "cuda" and bus < limit:
        remedy = "NCCL_DEBUG=INFO prints which network it took; NCCL_SOCKET_IFNAME and NCCL_IB_HCA choose another"
        return Finding("all-reduce", "warn", seen + by, remedy, figures=figures)
    return Finding("all-reduce", "ok", seen, figures=figures)
