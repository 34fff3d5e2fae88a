"""The stem with padded channels: the same function, names and random numbers."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from models import build_model
from utils.config import Config
from utils.errors import ConfigError
from utils.training.kernels.stem import ChannelPaddedConv2d, pad_stem

Tiny = Callable[..., Config]


def outputs_and_gradients(model: nn.Module, images: Tensor) -> list[Tensor]:
    model.zero_grad()
    outputs = model(images)
    outputs.square().mean().backward()
    return [outputs, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("channels", [4, 8])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_padded_stem_is_the_same_function(tiny: Tiny, channels: int, layout: torch.memory_format) -> None:
    """In float64, where sums in another order differ in the last of 16 digits."""
    plain = build_model(tiny(model="resnet8")).double().to(memory_format=layout)  # type: ignore[call-overload]
    padded = pad_stem(tiny(stem_channels=channels), copy.deepcopy(plain))
    assert isinstance(padded.conv1, ChannelPaddedConv2d)
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64).contiguous(memory_format=layout)
    found, expected = (outputs_and_gradients(model, images) for model in (padded, plain))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert padded.conv1.weight.grad.shape == plain.conv1.weight.shape
    assert padded.conv1(images).is_contiguous(memory_format=layout)
    inputs: list[Tensor] = []
    padded.conv1._conv_forward = lambda images, weight, bias: inputs.extend([images, weight])
    padded.conv1(images)
    assert [tensor.shape[1] for tensor in inputs] == [channels, channels]
    assert all(tensor.is_contiguous(memory_format=layout) for tensor in inputs), "transposed"


def test_any_first_convolution_is_padded_and_its_absence_an_error(tiny: Tiny) -> None:
    config = tiny(stem_channels=4)
    nested = nn.Sequential(nn.Sequential(nn.Conv2d(3, 2, 3, bias=True, padding="same")), nn.Conv2d(2, 3, 1))
    images = torch.randn(2, 3, 8, 8)
    expected = nested(images)
    torch.testing.assert_close(pad_stem(config, nested)(images), expected)
    assert isinstance(nested[0][0], ChannelPaddedConv2d) and type(nested[1]) is nn.Conv2d
    assert isinstance(pad_stem(config, nn.Conv2d(3, 2, 1)), ChannelPaddedConv2d)
    with pytest.raises(ConfigError, match="stem_channels 4: the network has no plain convolution of 3 channels; use 3"):
        pad_stem(config, nn.Linear(3, 4))
