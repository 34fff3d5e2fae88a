"""Channels last, in training and in validation.

Tensor cores and the CPU's bf16 units read the channels of a pixel together. With the layout [N, C, H, W] the library
must reorder the images before a convolution and after it. With channels last (`torch.channels_last`) it need not. Two
mistakes are common: converting the network but not the images, and converting the training images only. Then each
validation batch is reordered in the first layer, and with `torch.compile` a second version of the network is compiled
for the other layout.

Write `prepare`, `train_step` and `validate`.

    python -m pytest -n 0 docs/course/exercises/channels_last.py
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional


def prepare(network: nn.Module) -> nn.Module:
    """Return the network with its convolution weights in channels-last layout. Hint: `.to(memory_format=...)`."""
    raise NotImplementedError


def train_step(network: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> float:
    """Take one step in training mode on images [N, C, H, W] of any layout; return the loss (cross-entropy)."""
    raise NotImplementedError


def validate(network: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the fraction of images classified correctly, without gradients and in evaluation mode."""
    raise NotImplementedError


class Seen:
    """Records, for every input of a convolution, whether its layout is channels last and gradients are enabled."""

    def __init__(self, network: nn.Module) -> None:
        self.channels_last: list[bool] = []
        self.gradients: list[bool] = []
        for layer in network.modules():
            if isinstance(layer, nn.Conv2d):
                layer.register_forward_pre_hook(self.record)

    def record(self, layer: nn.Module, inputs: tuple[Tensor]) -> None:
        self.channels_last.append(inputs[0].is_contiguous(memory_format=torch.channels_last))
        self.gradients.append(torch.is_grad_enabled())


def make_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 4),
    )  # fmt: skip


def test_weights_are_channels_last() -> None:
    network = prepare(make_network())
    assert all(
        layer.weight.is_contiguous(memory_format=torch.channels_last)
        for layer in network.modules()
        if isinstance(layer, nn.Conv2d)
    )


def test_training_reads_channels_last_and_learns_the_same() -> None:
    plain, network = make_network(), prepare(make_network())
    its_optimizer, optimizer = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, network))
    network.eval()  # as after a validation
    seen = Seen(network)
    for _ in range(2):
        images, labels = torch.randn(6, 3, 12, 12), torch.arange(6) % 4
        expected = functional.cross_entropy(plain(images), labels)
        its_optimizer.zero_grad()
        expected.backward()
        its_optimizer.step()
        assert abs(train_step(network, optimizer, images, labels) - expected.item()) < 1e-5
    assert seen.channels_last and all(seen.channels_last)
    for weight, its_weight in zip(network.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight, its_weight)


def test_validation_reads_channels_last_too() -> None:
    network = prepare(make_network())
    batches = [(torch.randn(5, 3, 12, 12), torch.arange(5) % 4), (torch.randn(2, 3, 12, 12), torch.arange(2))]
    network.eval()
    with torch.no_grad():
        correct = sum(int((network(images).argmax(1) == labels).sum()) for images, labels in batches)
    network.train()
    seen = Seen(network)
    statistics = network[1].running_mean.clone()  # type: ignore[index, operator, union-attr]
    assert abs(validate(network, batches) - correct / 7) < 1e-9
    assert seen.channels_last and all(seen.channels_last)
    assert not any(seen.gradients), "validation must not compute gradients"
    assert torch.equal(statistics, network[1].running_mean), "validation must not change BatchNorm's statistics"  # type: ignore[index, arg-type]
