"""Mixed precision by hand.

`torch.autocast` runs convolutions and matrix products in bf16, where they are fastest, while the weights stay in
float32, so that small updates are not lost. It casts the inputs and the weights of each such layer right before the
layer. Every other layer of this network computes in the type of its input.

Write `forward` so that it gives the same bits as autocast, in the outputs and in the gradients.

    python -m pytest -n 0 docs/course/exercises/autocast.py
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


def forward(network: nn.Sequential, images: Tensor) -> Tensor:
    """Return the network's outputs, with every `nn.Conv2d` and `nn.Linear` computed in bf16.

    The layers are convolutions, linear layers, and layers without weights. Hint: `functional.conv2d`,
    `functional.linear` and `Tensor.bfloat16`, which autograd can differentiate.
    """
    raise NotImplementedError


def make_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


def test_outputs_equal_autocast() -> None:
    network, images = make_network(), torch.randn(4, 3, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        expected = network(images)
    outputs = forward(network, images)
    assert outputs.dtype == torch.bfloat16
    assert torch.equal(outputs, expected)


def test_gradients_equal_autocast_and_are_float32() -> None:
    network, images, labels = make_network(), torch.randn(4, 3, 16, 16), torch.arange(4)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = network(images)
    functional.cross_entropy(outputs.float(), labels).backward()
    expected = [parameter.grad for parameter in network.parameters()]
    network.zero_grad()
    functional.cross_entropy(forward(network, images).float(), labels).backward()
    for parameter, gradient in zip(network.parameters(), expected, strict=True):
        assert parameter.dtype == torch.float32, "the weights themselves must stay in float32"
        assert parameter.grad is not None and gradient is not None
        assert torch.equal(parameter.grad, gradient)
