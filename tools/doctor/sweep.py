"""Collectives from 8 bytes to a gigabyte, and every pair of nodes by itself: which link is slower than the others.

Bandwidths are those of the bus, as nccl-tests defines them (doc/PERFORMANCE.md there): the bytes of the whole result of
an all-reduce or all-gather, or of the whole input of a reduce-scatter, over the time, times 2(n-1)/n for all-reduce and
(n-1)/n for the others, n being the ranks, which is what the slowest link carries.
"""

import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from rich.filesize import decimal

from tools.doctor.findings import GIGABYTE, Finding

if TYPE_CHECKING:
    from utils.distributed.world import World

SIZES = (*(8 * 8**power for power in range(9)), 2**30)  # bytes: 8 to 134,217,728, and 1 GiB
PAIR_BYTES = 2**25
TRIALS = 5
SECONDS = 2.0  # for one size of one collective, after which no larger one is tried
SLOW_PAIR = 1.5  # times the median of all pairs


class Measured(NamedTuple):
    """One collective of one size: the median of its trials, over the slowest rank of each."""

    name: str
    size: int  # bytes
    seconds: float
    bus_factor: float

    @property
    def bus_rate(self) -> float:
        return self.size / self.seconds / GIGABYTE * self.bus_factor


class PairRate(NamedTuple):
    """Two ranks that sent to each other at the same time, while other pairs did; GB/s in one direction."""

    first: int
    second: int
    rate: float


def sweep_checks(world: "World") -> list[Finding]:
    """Collective: all of this module."""
    hosts = world.gather(socket.gethostname())
    one_node = len(set(hosts)) == 1
    names = {rank: f"rank {rank}" if one_node else host for rank, host in enumerate(hosts)}
    # processes that share a host's cores differ by chance
    allowed = SLOW_PAIR if world.device.type == "cuda" or not one_node else math.inf
    return [*check_sweep(sweep(world)), check_pairs(measure_pairs(world), names, allowed)]


def sweep(world: "World", sizes: Sequence[int] = SIZES) -> list[Measured]:
    """Collective: all collectives at all sizes that memory and `SECONDS` allow."""
    n, found = world.world_size, []
    room = _room(world)
    for name, action, factor in _collectives(n):
        for size in sizes:
            per_rank = max(1, size // 4 // n)
            if 2 * size > room:
                break
            shard = torch.ones(per_rank, device=world.device)
            whole = torch.ones(per_rank * n, device=world.device)
            seconds = _time(world, partial(action, shard, whole))
            found.append(Measured(name, whole.nbytes, seconds, factor))
            if seconds * TRIALS > SECONDS:
                break
    return found


def _collectives(n: int) -> Iterator[tuple[str, Callable[[torch.Tensor, torch.Tensor], object], float]]:
    # new names since torch 2.14
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    yield "all-reduce", lambda shard, whole: dist.all_reduce(whole), 2 * (n - 1) / n
    yield "all-gather", lambda shard, whole: gather(whole, shard), (n - 1) / n
    yield "reduce-scatter", scatter, (n - 1) / n


def _room(world: "World") -> float:
    """Collective: bytes that every rank may use: a quarter of what is free, which ranks of a CPU share."""
    if world.device.type == "cuda":
        free = torch.cuda.mem_get_info(world.device)[0] / 4
    else:
        ranks_here = world.gather(socket.gethostname()).count(socket.gethostname())
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 4 / ranks_here
    return min(world.gather(free))


def _time(world: "World", action: Callable[[], object], trials: int = TRIALS) -> float:
    """Collective: the median of the trials, each that of the slowest rank, the first left out."""
    from tools.bench.common import time_action

    seconds = []
    for _ in range(trials + 1):
        world.barrier()
        seconds.append(time_action(world.device, action))
    return statistics.median(max(times) for times in zip(*world.gather(seconds[1:]), strict=True))


def measure_pairs(world: "World", size: int = PAIR_BYTES) -> list[PairRate]:
    """Collective: every two nodes send to each other, by the first rank of each; on one node every two ranks.

    In each round every node has one partner, so that n nodes need n - 1 rounds, and a slow cable shows in its own
    pairs alone.
    """
    hosts = world.gather(socket.gethostname())
    ranks = [rank for rank, host in enumerate(hosts) if hosts.index(host) == rank]
    ranks = ranks if len(ranks) > 1 else list(range(world.world_size))
    data, received = (torch.ones(size // 4, device=world.device) for _ in range(2))
    found = []
    for meetings in rounds(ranks):
        partner = next((b if a == world.rank else a for a, b in meetings if world.rank in (a, b)), None)
        seconds = []
        for _ in range(TRIALS + 1):
            world.barrier()
            started = time.perf_counter()
            if partner is not None:
                calls = [dist.P2POp(dist.isend, data, partner), dist.P2POp(dist.irecv, received, partner)]
                for work in dist.batch_isend_irecv(calls):
                    work.wait()
                if world.device.type == "cuda":
                    torch.cuda.synchronize(world.device)
            seconds.append(time.perf_counter() - started)
        medians = world.gather(statistics.median(seconds[1:]))
        found += [PairRate(a, b, size / max(medians[a], medians[b]) / GIGABYTE) for a, b in meetings]
    return found


def rounds(ranks: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Every two ranks once, in rounds in which no rank comes twice: the circle method of tournaments."""
    circle: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    result = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        meetings = zip(circle[:half], reversed(circle[half:]), strict=True)
        result.append([(min(a, b), max(a, b)) for a, b in meetings if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return result


def check_sweep(measured: Sequence[Measured]) -> list[Finding]:
    """A line for each collective: its best bus bandwidth, and its time for the fewest bytes."""
    findings = []
    for name in dict.fromkeys(one.name for one in measured):
        own = [one for one in measured if one.name == name]
        best = max(own, key=lambda one: one.bus_rate)
        shortest = f"{decimal(own[0].size)}: {1e6 * own[0].seconds:,.0f} us"
        most = f"best {decimal(best.size)}: {best.bus_rate:.3g} GB/s on the bus"
        figures = {f"{name} of {decimal(one.size)}, bus GB/s": one.bus_rate for one in own}
        findings.append(
            Finding("sweep", "ok", f"{name} up to {decimal(own[-1].size)}, {most}; {shortest}", figures=figures)
        )
    return findings


def check_pairs(pairs: Sequence[PairRate], names: Mapping[int, str], allowed: float = SLOW_PAIR) -> Finding:
    """Names the pairs that take more than `allowed` times the median, and the node that all of them have in common.

    `names`: of the ranks that met.
    """
    rates = [pair.rate for pair in pairs]
    # of three nodes, the pairs with a bad one are most of all: what the others reach among themselves counts
    nodes = {node for pair in pairs for node in (pair.first, pair.second)}
    without = [[pair.rate for pair in pairs if node not in (pair.first, pair.second)] for node in nodes]
    median = max(statistics.median(some) for some in [rates, *without] if some)
    seen = f"{len(pairs)} pairs, each way {median:.3g} GB/s ({min(rates):.3g} to {max(rates):.3g})"
    figures = {f"{names[pair.first]} and {names[pair.second]} GB/s": pair.rate for pair in pairs}
    slow = [pair for pair in pairs if pair.rate * allowed < median]
    if not slow:
        return Finding("pairs", "ok", seen, figures=figures)
    common = set.intersection(*({pair.first, pair.second} for pair in slow))
    culprits = [names[rank] for rank in sorted(common)] if len(slow) > 1 else []
    listed = ", ".join(f"{names[pair.first]} and {names[pair.second]} {pair.rate:.3g} GB/s" for pair in slow[:4])
    more = f" and {len(slow) - 4} more" if len(slow) > 4 else ""
    seen += f"; slow: {listed}{more}" + (f"; all with {culprits[0]}" if culprits else "")
    where = culprits[0] if culprits else "these nodes"
    return Finding("pairs", "fail", seen, f"look at the cable, port and switch of {where}", figures=figures)
