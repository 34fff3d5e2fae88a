"""Convolution weight gradients by matrix products equal PyTorch's."""

import pytest
import torch
from torch import nn

from models import build_model
from tests.conftest import replace_layers
from utils.errors import ConfigError
from utils.kernels import weight_products
from utils.kernels.weight_products import ProductConv2d, weight_gradient

BF16 = {"enable_amp": True, "amp_dtype": "bf16"}
ON = {"cpu_kernels": ["weight_products"], "enable_nhwc": True}


def make_layer(kernel, dtype=torch.float64, **settings):
    generator = torch.Generator().manual_seed(0)
    layer = nn.Conv2d(16, 24, kernel, **settings)
    for value in layer.parameters():
        value.data = torch.randn(value.shape, generator=generator)
    return layer.to(dtype=dtype, memory_format=torch.channels_last)


def make_images(count=5, height=9, width=7, dtype=torch.float64):
    images = torch.randn(count, 16, height, width, generator=torch.Generator().manual_seed(1))
    return images.to(dtype).contiguous(memory_format=torch.channels_last)


def gradients(layer, images):
    """Return output and gradients of images, weight and bias."""
    leaf = images.detach().clone().requires_grad_()
    out = layer(leaf)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    layer_gradients = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    return [out, leaf.grad, *layer_gradients]


@pytest.mark.parametrize("rows", [1, 150, 10_000])
@pytest.mark.parametrize(("kernel", "settings"), [
    (1, {}), (1, {"stride": 2}), (1, {"padding": 1}), (3, {"padding": 1}), (7, {"padding": 3}), (2, {}),
    (3, {"padding": 1, "stride": 2, "bias": False}), ((3, 5), {"padding": (0, 2), "stride": (2, 3)}),
])  # fmt: skip
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_all_gradients_equal_pytorchs(kernel, settings, rows, layout, monkeypatch):
    """In float64, for products over one image, some and all, with a smaller last part."""
    monkeypatch.setattr(weight_products, "ROWS", rows)
    layer, images = make_layer(kernel, **settings), make_images().contiguous(memory_format=layout)
    expected = gradients(layer, images)
    layer.__class__ = ProductConv2d
    found = gradients(layer, images)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    torch.testing.assert_close(found[2:], expected[2:], rtol=1e-12, atol=1e-11)
    assert found[2].stride() == layer.weight.stride()  # so that accumulating it copies nothing


def test_bf16_is_within_rounding_of_float32(monkeypatch):
    """Under autocast, within 2 units in the last of bf16's 8 bits; also a sum of many parts."""
    monkeypatch.setattr(weight_products, "ROWS", 64)
    layer = make_layer(3, torch.float32, padding=1)
    layer.__class__ = ProductConv2d
    images = make_images(400, 8, 8, torch.bfloat16).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(images)
    assert out.dtype == torch.bfloat16
    slopes = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    out.backward(slopes)
    exact = weight_gradient(images, slopes.float(), (3, 3), (1, 1), (1, 1))
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32
    torch.testing.assert_close(layer.weight.grad, exact, rtol=2**-7, atol=2**-7 * exact.abs().max().item())


def test_layers_it_replaces(tiny):
    """In ResNet50, 38 of 53 convolutions have over 128 x 128 channels, and 24 over 256 x 256, the minimum for bf16."""
    for changes, device, number in (({}, "cpu", 38), (BF16, "cpu", 24), ({}, "cuda", 0)):
        with torch.device("meta"):
            model = build_model(tiny(model="resnet50"))
        replace_layers(tiny(**ON | changes), model, device)
        assert sum(isinstance(module, ProductConv2d) for module in model.modules()) == number


def test_a_network_without_fitting_layers_is_an_error(tiny, monkeypatch):
    monkeypatch.setitem(weight_products.MIN_CHANNEL_PAIRS, torch.float32, 16 * 16 - 1)
    others = nn.Sequential(
        nn.Conv2d(15, 16, 3), nn.Conv2d(16, 16, 3, groups=2), nn.Conv2d(16, 16, 3, dilation=2),
        nn.Conv2d(16, 16, 3, padding="same"), nn.Conv2d(16, 16, 3, padding=1, padding_mode="circular"),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"cpu_kernels \[weight_products\]: the network has no convolution"):
        replace_layers(tiny(**ON), others)
    fitting = nn.Sequential(nn.Conv2d(16, 16, 3), *others)
    assert replace_layers(tiny(**ON), fitting) == {}
    assert [type(layer) for layer in fitting] == [ProductConv2d] + [nn.Conv2d] * len(others)
