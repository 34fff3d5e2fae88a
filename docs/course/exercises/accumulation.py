"""Gradient accumulation.

A batch that does not fit into memory is split into micro-batches. Their gradients add up in `.grad`, and one optimizer
step follows. The result equals the step on the whole batch only if each micro-batch is weighted by its number of
images: the loss is a mean, and the last micro-batch may be smaller. (BatchNorm still sees micro-batches: its statistics
are of fewer images. So this network has none.)

Write `accumulated_step`.

    python -m pytest -n 0 docs/course/exercises/accumulation.py
"""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional


def accumulated_step(
    network: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor, micro_batch_size: int
) -> float:
    """Take one optimizer step on the whole batch, at most `micro_batch_size` images at a time.

    Return the mean cross-entropy over all images of the batch, before the step.
    """
    raise NotImplementedError


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
    return network, torch.optim.SGD(network.parameters(), lr=0.5, momentum=0.9)


@pytest.mark.parametrize("micro_batch_size", [10, 5, 4, 1])
def test_equals_one_large_batch(micro_batch_size: int) -> None:
    torch.manual_seed(1)
    batches = [(torch.randn(10, 3, 2, 2), torch.randint(4, (10,))) for _ in range(3)]
    network, optimizer = make()
    expected = []
    for images, labels in batches:
        loss = functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    accumulated, its_optimizer = make()
    losses = [accumulated_step(accumulated, its_optimizer, *batch, micro_batch_size) for batch in batches]
    torch.testing.assert_close(losses, expected)
    for weight, whole in zip(accumulated.parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(weight, whole)


def test_no_more_images_at_once_than_allowed() -> None:
    network, optimizer = make()
    sizes = []
    network.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    accumulated_step(network, optimizer, torch.randn(10, 3, 2, 2), torch.randint(4, (10,)), 4)
    assert sum(sizes) == 10 and max(sizes) <= 4
