"""The stem with padded channels: the same function, names and random numbers."""

import copy

import pytest
import torch
from torch import nn

from models import build_model
from utils.errors import ConfigError
from utils.kernels.stem import ChannelPaddedConv2d, pad_stem


def outputs_and_gradients(model, images):
    outputs = model(images)
    outputs.square().mean().backward()
    return [outputs, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("channels", [4, 8])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_padded_stem_is_the_same_function(tiny, channels, layout):
    """In float64, where sums in another order differ in the last of 16 digits."""
    plain = build_model(tiny(model="resnet8")).double().to(memory_format=layout)
    padded = copy.deepcopy(plain)
    pad_stem(padded, channels)
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64).contiguous(memory_format=layout)
    found, expected = (outputs_and_gradients(model, images) for model in (padded, plain))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert padded.conv1(images).is_contiguous(memory_format=layout)
    inputs = []
    padded.conv1._conv_forward = lambda images, weight, bias: inputs.extend([images, weight])
    padded.conv1(images)
    assert [tensor.shape[1] for tensor in inputs] == [channels, channels]
    assert all(tensor.is_contiguous(memory_format=layout) for tensor in inputs), "transposed"


def test_any_first_convolution_is_padded_and_its_absence_an_error():
    nested = nn.Sequential(nn.Sequential(nn.Conv2d(3, 2, 3, bias=True, padding="same")), nn.Conv2d(2, 3, 1))
    images = torch.randn(2, 3, 8, 8)
    expected = nested(images)
    pad_stem(nested, 4)
    torch.testing.assert_close(nested(images), expected)
    assert isinstance(nested[0][0], ChannelPaddedConv2d) and type(nested[1]) is nn.Conv2d
    with pytest.raises(ConfigError, match="stem_channels 4: the network has no plain convolution of 3 channels; use 3"):
        pad_stem(nn.Sequential(nn.Linear(3, 4), nn.Conv2d(3, 6, 3, groups=3)), 4)
