"""Loss scaling for fp16.

The smallest positive number of fp16 is 6e-8. Gradients below half of it become zero. Multiplying the loss by a scale S
multiplies every gradient by S, and dividing by S before the update undoes it in float32. With too large an S gradients
overflow to infinity. A dynamic scaler skips such a step and halves S; after `growth_interval` good steps in a row it
doubles S.

Write `Scaler.step`.

    python -m pytest -n 0 docs/course/exercises/loss_scaling.py
"""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn


@dataclass
class Scaler:
    scale: float = 2.0**14
    growth_interval: int = 3
    good_steps: int = 0  # in a row, since the scale was last changed

    def step(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> bool:
        """Run the backward pass of the scaled loss, then either update the weights with the true gradients or skip.

        Skip if any gradient of any parameter is infinite or NaN. Return whether the weights were updated. Leave no
        gradients behind (`optimizer.zero_grad()`).
        """
        raise NotImplementedError


def tiny_loss(weight: Tensor, size: float) -> Tensor:
    """A loss whose gradient passes through fp16 and is `size` times 1e-3."""
    return (weight.half() * 1e-3).float().sum() * size


def make() -> tuple[nn.Parameter, nn.Parameter, torch.optim.Optimizer]:
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    return weight, other, torch.optim.SGD([weight, other], lr=1.0)


def has_gradient(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and bool(parameter.grad.any())


def test_a_tiny_gradient_reaches_the_weights() -> None:
    weight, _, optimizer = make()
    tiny_loss(weight, 1e-6).backward()
    assert not has_gradient(weight), "without scaling, fp16 loses it"
    weight.data.zero_()
    assert Scaler().step(tiny_loss(weight, 1e-6), optimizer)
    torch.testing.assert_close(weight.data, torch.full((2,), -1e-9), rtol=0.01, atol=0)
    assert not has_gradient(weight)


@pytest.mark.parametrize("size", [1e30, -1e30, math.nan])
def test_an_overflow_is_skipped_and_halves_the_scale(size: float) -> None:
    weight, other, optimizer = make()
    scaler = Scaler(good_steps=2)
    assert not scaler.step(tiny_loss(weight, 1e-6) + tiny_loss(other, size), optimizer)
    assert torch.equal(weight, torch.ones(2)) and torch.equal(other, torch.ones(2)), "the weights must not change"
    assert (scaler.scale, scaler.good_steps) == (2.0**13, 0)
    assert not has_gradient(weight) and not has_gradient(other)


def test_the_scale_doubles_after_good_steps_in_a_row() -> None:
    weight, _, optimizer = make()
    scaler = Scaler()
    scales = []
    for _ in range(7):
        scaler.step(tiny_loss(weight, 1e-6), optimizer)
        scales.append(scaler.scale / 2**14)
    assert scales == [1, 1, 2, 2, 2, 4, 4]
