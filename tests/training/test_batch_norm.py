"""BatchNorm's batch counters: incremented together, with the same result as layer by layer."""

import copy

import pytest
import torch
from torch import nn

from utils.training.averages import RunningStatistics, defer_batch_counters


class MixedNetwork(nn.Module):
    """Layers that are called twice, never, frozen, compute with their counter, or have none."""

    def __init__(self):
        super().__init__()
        self.twice, self.never, self.frozen = nn.BatchNorm2d(3), nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.by_count, self.without = nn.BatchNorm2d(3, momentum=None), nn.BatchNorm2d(3, track_running_stats=False)
        self.frozen.eval()

    def forward(self, images):
        return self.without(self.by_count(self.frozen(self.twice(self.twice(images)))))


def test_counters_equal_those_of_separate_layers():
    expected = MixedNetwork()
    found = copy.deepcopy(expected)
    defer_batch_counters(found)
    counter = found.twice.num_batches_tracked
    for number in range(3):
        images = torch.randn(4, 3, 5, 5)
        assert torch.equal(found(images), expected(images))
        torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=0, atol=0)
        assert counter == 2 * number + 2, "must stay the same tensor: the average and a CUDA graph hold it"
    other = copy.deepcopy(found)  # as for the average of the weights
    assert torch.equal(other.eval()(images), expected.eval()(images))
    torch.testing.assert_close(other.state_dict(), expected.state_dict(), rtol=0, atol=0)
    with pytest.raises(RuntimeError):
        found(torch.randn(4, 2, 5, 5))
    assert found.twice.num_batches_tracked is counter


class OwnBuffers(nn.Module):
    """Statistics of several kinds: without momentum, of InstanceNorm, assigned again; a constant that two
    layers share, a mask and a counter."""

    def __init__(self):
        super().__init__()
        self.by_count, self.instance = nn.BatchNorm2d(3, momentum=None), nn.InstanceNorm2d(3, track_running_stats=True)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("constant", torch.tensor(0.1))
        self.instance.register_buffer("constant", self.constant)
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


def test_micro_batches_leave_the_buffers_of_as_many_ranks():
    one = OwnBuffers()
    ranks = [copy.deepcopy(one) for _ in range(3)]
    defer_batch_counters(one)
    statistics = RunningStatistics(one)
    for _ in range(4):
        statistics.start()
        for rank, network in enumerate(ranks):
            images = rank + torch.randn(4, 3, 5, 5)
            one(images)
            statistics.collect(last=rank == 2)
            network(images)
    for name, buffer in one.named_buffers():
        mean = torch.stack([network.get_buffer(name).double() for network in ranks]).mean(0)
        torch.testing.assert_close(buffer.float(), mean.float(), msg=name)
    assert one.constant == torch.tensor(0.1) and one.by_count.num_batches_tracked == one.count == 4
