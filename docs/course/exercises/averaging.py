"""DistributedDataParallel's work by hand.

Each rank computes gradients on its own images. Before the update the ranks must average them, so that all take the same
step: one `all_reduce`, a sum over ranks, and a division. One call per tensor is slow, since ResNet50 has 161 tensors,
most of them tiny, and each call costs a latency. One call for everything cannot overlap the backward pass. So gradients
travel in buckets: several tensors flattened into one.

Write `average_gradients`.

    python -m pytest -n 0 docs/course/exercises/averaging.py
"""

import copy
from collections.abc import Iterable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

WORLD_SIZE = 2


def average_gradients(parameters: Iterable[nn.Parameter], bucket_bytes: int) -> None:
    """Replace the gradient of each parameter by its mean over all ranks of the default process group.

    The test counts the calls of `dist.all_reduce`. Each sends one flat tensor with the gradients of several parameters,
    at most `bucket_bytes` of them; a larger gradient is sent in a call of its own.
    """
    raise NotImplementedError


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def compare_with_ddp(rank: int, end: Barrier, folder: str, bucket_bytes: int, most_calls: int) -> None:
    """Run on each rank: equal gradients, and no more calls of all_reduce than `most_calls`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE)
    torch.manual_seed(rank)
    images = torch.randn(6, 8)
    network = make_network()
    reference = DistributedDataParallel(copy.deepcopy(network))
    reference(images).square().mean().backward()
    network(images).square().mean().backward()

    calls, all_reduce = [], dist.all_reduce

    def count(tensor: torch.Tensor, *arguments: object, **options: object) -> object:
        calls.append(tensor.numel() * tensor.element_size())
        return all_reduce(tensor, *arguments, **options)

    dist.all_reduce = count
    average_gradients(network.parameters(), bucket_bytes)
    for parameter, expected in zip(network.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)
    assert len(calls) <= most_calls, f"{len(calls)} calls of all_reduce, {most_calls} are enough"
    largest = max(parameter.numel() * 4 for parameter in network.parameters())
    assert max(calls) <= max(bucket_bytes, largest), f"a bucket of {max(calls)} bytes"
    end.wait()  # a rank that closes its connections may cut off the other's last call
    dist.destroy_process_group()


@pytest.mark.parametrize(("bucket_bytes", "most_calls"), [(2**20, 1), (1500, 4)], ids=["one bucket", "several"])
def test_gradients_equal_ddp(bucket_bytes: int, most_calls: int, tmp_path: Path) -> None:
    end = multiprocessing.get_context("fork").Barrier(WORLD_SIZE)
    arguments = (end, str(tmp_path), bucket_bytes, most_calls)
    multiprocessing.start_processes(compare_with_ddp, arguments, WORLD_SIZE, start_method="fork")
