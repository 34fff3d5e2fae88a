"""Collectives from 8 bytes to 1 GiB, and the bandwidth between every pair of nodes, to find slow links.

Reports the bus bandwidth of nccl-tests (its doc/PERFORMANCE.md): bytes / seconds * factor. The bytes are the result of
an all-reduce or all-gather, or the input of a reduce-scatter. Over n ranks the factor is 2(n-1)/n for all-reduce and
(n-1)/n for the others.
"""

import math
import os
import socket
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.filesize import decimal

from tools.bench.common import time_action
from tools.doctor.findings import GIGABYTE, Finding
from utils.distributed.world import World

SIZES = (*(8 * 8**power for power in range(9)), 2**30)  # bytes: 8 to 134,217,728, and 1 GiB
PAIR_BYTES = 2**25
TRIALS = 5
SECONDS = 2.0  # if one size takes longer, larger sizes of this collective are skipped
SLOW_PAIR = 1.5  # a pair this many times slower than the median fails


class Measured(NamedTuple):
    """One collective at one size: the median over trials of the slowest rank's seconds."""

    name: str
    size: int  # bytes
    seconds: float
    bus_factor: float

    @property
    def bus_rate(self) -> float:
        return self.size / self.seconds / GIGABYTE * self.bus_factor


class PairRate(NamedTuple):
    """GB/s in each direction between two ranks that send to each other while other pairs do the same."""

    first: int
    second: int
    rate: float


def sweep_checks(world: World) -> list[Finding]:
    """Collective: run all checks of this module."""
    hosts = world.all_gather(socket.gethostname())
    one_node = len(set(hosts)) == 1
    names = {rank: f"rank {rank}" if one_node else host for rank, host in enumerate(hosts)}
    # between processes that share a CPU's cores, rates vary by chance
    allowed = SLOW_PAIR if world.device.type == "cuda" or not one_node else math.inf
    return [*check_sweep(sweep(world)), check_pairs(measure_pairs(world), names, allowed)]


def sweep(world: World, sizes: Sequence[int] = SIZES) -> list[Measured]:
    """Collective: measure every collective at all sizes that memory and `SECONDS` allow."""
    n, found = world.world_size, []
    room = _room(world)
    for name, action, factor in _collectives(n):
        for size in sizes:
            per_rank = max(1, size // 4 // n)
            if 2 * size > room:
                break
            shard = torch.ones(per_rank, device=world.device)
            whole = torch.ones(per_rank * n, device=world.device)
            trials = zip(*_time(world, partial(action, shard, whole)), strict=True)
            seconds = statistics.median(max(of_ranks) for of_ranks in trials)
            found.append(Measured(name, whole.nbytes, seconds, factor))
            if seconds * TRIALS > SECONDS:
                break
    return found


def _collectives(n: int) -> Iterator[tuple[str, Callable[[torch.Tensor, torch.Tensor], object], float]]:
    # torch 2.14 renamed them
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    yield "all-reduce", lambda shard, whole: dist.all_reduce(whole), 2 * (n - 1) / n
    yield "all-gather", lambda shard, whole: gather(whole, shard), (n - 1) / n
    yield "reduce-scatter", scatter, (n - 1) / n


def _room(world: World) -> float:
    """Collective: return the bytes that every rank may use, a quarter of the free memory; ranks on a CPU share it."""
    if world.device.type == "cuda":
        free = torch.cuda.mem_get_info(world.device)[0] / 4
    else:
        ranks_here = world.all_gather(socket.gethostname()).count(socket.gethostname())
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 4 / ranks_here
    return min(world.all_gather(free))


def _time(world: World, action: Callable[[], object]) -> list[list[float]]:
    """Collective: return each rank's seconds of each trial, without the first one."""
    seconds = []
    for _ in range(TRIALS + 1):
        world.barrier()
        seconds.append(time_action(world.device, action))
    return world.all_gather(seconds[1:])


def measure_pairs(world: World, size: int = PAIR_BYTES) -> list[PairRate]:
    """Collective: measure every pair of nodes, through the first rank of each; on one node every pair of ranks.

    In each round every node has one partner. So n nodes need n - 1 rounds, and a slow cable affects only its own pairs.
    """
    hosts = world.all_gather(socket.gethostname())
    ranks = [rank for rank, host in enumerate(hosts) if hosts.index(host) == rank]
    ranks = ranks if len(ranks) > 1 else list(range(world.world_size))
    data, received = (torch.ones(size // 4, device=world.device) for _ in range(2))
    found = []
    for meetings in rounds(ranks):
        partner = next((b if a == world.rank else a for a, b in meetings if world.rank in (a, b)), None)
        medians = [statistics.median(seconds) for seconds in _time(world, partial(_exchange, data, received, partner))]
        found += [PairRate(a, b, size / max(medians[a], medians[b]) / GIGABYTE) for a, b in meetings]
    return found


def _exchange(data: torch.Tensor, received: torch.Tensor, partner: int | None) -> None:
    """Send `data` to the partner and receive as much; do nothing without a partner."""
    if partner is not None:
        calls = [dist.P2POp(dist.isend, data, partner), dist.P2POp(dist.irecv, received, partner)]
        for work in dist.batch_isend_irecv(calls):
            work.wait()


def rounds(ranks: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Schedule every pair once, each rank at most once per round: the circle method of round-robin tournaments."""
    circle: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    result = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        meetings = zip(circle[:half], reversed(circle[half:]), strict=True)
        result.append([(min(a, b), max(a, b)) for a, b in meetings if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return result


def check_sweep(measured: Sequence[Measured]) -> list[Finding]:
    """Report each collective's best bus bandwidth, and its time at the smallest size."""
    findings = []
    for name in dict.fromkeys(one.name for one in measured):
        own = [one for one in measured if one.name == name]
        best = max(own, key=lambda one: one.bus_rate)
        shortest = f"{decimal(own[0].size)}: {1e6 * own[0].seconds:,.0f} us"
        most = f"best bus bandwidth {best.bus_rate:.3g} GB/s at {decimal(best.size)}"
        findings.append(Finding("sweep", "ok", f"{name} up to {decimal(own[-1].size)}, {most}; {shortest}"))
    return findings


def check_pairs(pairs: Sequence[PairRate], names: Mapping[int, str], allowed: float = SLOW_PAIR) -> Finding:
    """Name the pairs that are more than `allowed` times slower than the median, and the node that they all include."""
    rates = [pair.rate for pair in pairs]
    # With three nodes, most pairs include the bad one. So use the best median over the pairs without some node.
    nodes = {node for pair in pairs for node in (pair.first, pair.second)}
    without = [[pair.rate for pair in pairs if node not in (pair.first, pair.second)] for node in nodes]
    median = max(statistics.median(some) for some in [rates, *without] if some)
    message = f"{len(pairs)} pairs, each way {median:.3g} GB/s ({min(rates):.3g} to {max(rates):.3g})"
    slow = [pair for pair in pairs if pair.rate * allowed < median]
    if not slow:
        return Finding("pairs", "ok", message)
    common = set.intersection(*({pair.first, pair.second} for pair in slow))
    culprits = [names[rank] for rank in sorted(common)] if len(slow) > 1 else []
    listed = ", ".join(f"{names[pair.first]} and {names[pair.second]} {pair.rate:.3g} GB/s" for pair in slow[:4])
    more = f" and {len(slow) - 4} more" if len(slow) > 4 else ""
    message += f"; slow: {listed}{more}" + (f"; all include {culprits[0]}" if culprits else "")
    where = culprits[0] if culprits else "these nodes"
    return Finding("pairs", "fail", message, f"check the cable, port and switch of {where}")
