"""One rank of `python -m tools.bench fabric`: DDP's real communication around computing that is only waited for."""

import itertools
import os
import signal
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tools.bench.wires import INTERFACE, become_host, carry, end_with_parent, receive_ends
from tools.shared.scaling_model import BACKWARD_SHARE
from utils.distributed.ddp import wrap_in_ddp
from utils.distributed.keys import DistributedKeys
from utils.distributed.world import World

WARM_UP = 2  # steps that do not count


class Pace:
    """When the computing so far would be done: what one sleep lasted too long, the next are shorter."""

    def __init__(self) -> None:
        self.due = 0.0

    def compute(self, seconds: float) -> None:
        self.due += seconds
        time.sleep(max(0.0, self.due - time.perf_counter()))


class SleepingLayer(nn.Module):
    """A layer with `size` bytes of weights that sleeps for as long as its work would take, forward and backward."""

    def __init__(self, size: int, forward_seconds: float, backward_seconds: float, pace: Pace) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size // 4))
        self.seconds = forward_seconds, backward_seconds
        self.pace = pace

    def forward(self, images: Tensor) -> Tensor:
        output: Tensor = _Sleep.apply(images, self.weight, *self.seconds, self.pace)
        return output


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, images: Tensor, weight: Tensor, forward: float, backward: float, pace: Pace) -> Tensor:
        context.weight, context.seconds, context.pace = weight, backward, pace
        pace.compute(forward)
        return images.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        context.pace.compute(context.seconds)
        return gradient, torch.zeros_like(context.weight), None, None, None


class SleepingNetwork(nn.Module):
    """`layers` (bytes of gradients, multiplications) whose step of forward and backward lasts `step` seconds, each
    layer's part by its multiplications."""

    def __init__(self, layers: Sequence[tuple[int, float]], step: float) -> None:
        super().__init__()
        self.pace = Pace()
        total = sum(cost for _, cost in layers)
        forward, backward = (share * step / total for share in (1 - BACKWARD_SHARE, BACKWARD_SHARE))
        self.layers = nn.Sequential(
            *(SleepingLayer(size, forward * cost, backward * cost, self.pace) for size, cost in layers)
        )

    def forward(self, images: Tensor) -> Tensor:
        self.pace.due = time.perf_counter()
        output: Tensor = self.layers(images)
        return output


def run_rank(
    rank: int,
    ranks: int,
    layers: Sequence[tuple[int, float]],
    step: float,
    steps: int,
    limit: float,
    keys: DistributedKeys,
    store: str,
    carrier: Connection | None,
    answer: Connection,
) -> None:
    """Be one of `ranks` hosts, train `steps` steps, and send {"seconds": of a step, "deviation": of it, "buckets": in
    bytes}. `limit`: seconds of a collective. `store`: a file that all ranks share. One rank alone needs no
    `carrier`."""
    end_with_parent()
    torch.set_num_threads(1)
    world = World(rank, rank, ranks, torch.device("cpu"))
    model = SleepingNetwork(layers, step)
    trained: nn.Module = model
    if carrier is not None:
        become_host(rank, carrier)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=limit)
        )
        trained = wrap_in_ddp(keys, model, world)
    images = torch.zeros(1)
    ends = []
    for number in range(WARM_UP + steps):
        if number == WARM_UP:
            world.barrier()
            ends.append(time.perf_counter())
        trained(images).sum().backward()
        model.zero_grad()
        if ends:
            ends.append(time.perf_counter())
    buckets: list[int] = []
    if isinstance(trained, DistributedDataParallel):
        sizes = trained._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        buckets = [int(size) for size in str(sizes).split(",")]
    seconds = [end - start for start, end in itertools.pairwise(ends)]
    answer.send({"seconds": statistics.mean(seconds), "deviation": statistics.pstdev(seconds), "buckets": buckets})
    signal.pause()  # until all are ended together: nobody's network disappears under the others


def run_carrier(hosts: list[Connection], rate: float, delay: float) -> None:
    """Be the wires between all `hosts`."""
    end_with_parent()
    carry(receive_ends(hosts), rate, delay)
