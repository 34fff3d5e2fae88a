"""Buffers over micro-batches."""

import copy

import torch
from torch import nn

from utils.run.run import merge_buffers
from utils.training.averages import RunningStatistics


class OwnBuffers(nn.Module):
    """Statistics of several kinds: without momentum, of InstanceNorm, assigned again; a constant that two
    layers share, a mask and a counter."""

    def __init__(self):
        super().__init__()
        self.by_count, self.instance = nn.BatchNorm2d(3, momentum=None), nn.InstanceNorm2d(3, track_running_stats=True)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("constant", torch.tensor(0.1))
        self.instance.register_buffer("constant", self.constant)
        self.instance.register_buffer("none", None)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]), persistent=False)
        self.register_buffer("last", torch.tensor(-1e30))
        self.register_buffer("first", torch.tensor(-torch.inf))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, images):
        self.mean = 0.9 * self.mean + 0.1 * images.mean()
        self.last = images.mean()
        self.first = images.mean()
        self.count += 1
        return self.instance(self.by_count(images))


def test_micro_batches_and_a_resume_leave_the_buffers_of_as_many_ranks():
    one = OwnBuffers()
    ranks = [copy.deepcopy(one) for _ in range(3)]
    statistics = RunningStatistics(one)
    for _ in range(4):
        statistics.start()
        for rank, network in enumerate(ranks):
            images = rank + torch.randn(4, 3, 5, 5)
            one(images)
            statistics.collect(last=rank == 2)
            network(images)
    merge_buffers(merged := OwnBuffers(), [{"buffers": dict(network.named_buffers())} for network in ranks])
    for name, buffer in [*one.named_buffers(), *merged.named_buffers()]:
        mean = torch.stack([network.get_buffer(name).double() for network in ranks]).mean(0)
        torch.testing.assert_close(buffer.float(), mean.float(), msg=name)
    assert one.constant == torch.tensor(0.1) and one.by_count.num_batches_tracked == one.count == merged.count == 4
