"""Convolutions by Winograd's method equal PyTorch's."""

from collections import Counter

import pytest
import torch
from torch import nn

from models import build_model
from tests.conftest import replace_layers
from utils.errors import ConfigError
from utils.kernels import winograd
from utils.kernels.build import build
from utils.kernels.winograd import WinogradConv2d
from utils.program import missing_compiler

BF16 = {"enable_amp": True, "amp_dtype": "bf16"}
ON = {"cpu_kernels": ["winograd"], "enable_nhwc": True}

pytestmark = pytest.mark.skipif(bool(missing_compiler(gpu=False)), reason="no C++ compiler")
SHAPES = pytest.mark.parametrize(("height", "width"), [(3, 3), (4, 4), (6, 6), (8, 8), (9, 7), (12, 13)])


def random(*sizes, seed):
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def make_inputs(height, width, count=5):
    return random(count, 32, height, width, seed=0), random(48, 32, 3, 3, seed=1), random(48, seed=2)


def make_layer(weight, bias, kind=WinogradConv2d):
    layer = nn.Conv2d(*weight.shape[1::-1], 3, padding=1)
    layer.weight, layer.bias = nn.Parameter(weight.detach().clone()), nn.Parameter(bias.detach().clone())
    layer.__class__ = kind
    return layer


def results(kind, images, weight, bias, *, autocast=False):
    """Return output and gradients of images, weight and bias."""
    layer, leaf = make_layer(weight, bias, kind), images.detach().clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = layer(leaf)
    out.backward(random(*out.shape, seed=9).to(out.dtype))
    return [out.detach(), leaf.grad, layer.weight.grad, layer.bias.grad]


@pytest.fixture
def small_parts(monkeypatch):
    """Process two images at a time if an image is one tile, else one."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(winograd, "TILES", dict.fromkeys(winograd.TILES, 1))


@SHAPES
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_each_tile_equals_a_direct_convolution(height, width, layout, small_parts):
    """Output and all gradients, with and without tiles beyond the border. Compared with float64: float32's rounding,
    6e-8, is amplified by the transforms' factors, up to 3, and by sums of 288 terms."""
    images, weight, bias = make_inputs(height, width)
    inputs = images.contiguous(memory_format=layout), weight.contiguous(memory_format=layout), bias
    found = results(WinogradConv2d, *inputs)
    exact = results(nn.Conv2d, *(value.double() for value in inputs))
    assert not torch.equal(found[0], results(nn.Conv2d, *inputs)[0]), "computed directly"
    for value, expected in zip(found, exact, strict=True):
        assert value.dtype == torch.float32 and value.shape == expected.shape
        assert (value - expected).norm() < 1e-5 * expected.norm()
        assert (value - expected).abs().max() < 1e-4 * expected.abs().max()
    assert found[0].is_contiguous(memory_format=torch.channels_last)


@SHAPES
def test_in_bf16_only_rounding_differs(height, width, small_parts):
    """Output and all gradients, of bf16 images and of images cast by autocast, compared with float64. A direct bf16
    convolution is off by 0.003: one rounding is 0.0017 on average; here planes are rounded too, and it is amplified."""
    images, weight, bias = make_inputs(height, width)
    images = images.bfloat16().float()
    exact = results(nn.Conv2d, images.double(), weight.double(), bias.double())
    half, single = torch.bfloat16, torch.float32
    for given in (images, images.bfloat16()):
        found = results(WinogradConv2d, given, weight, bias, autocast=True)
        assert [value.dtype for value in found] == [half, given.dtype, single, single]
        for value, expected in zip(found, exact, strict=True):
            assert 1e-4 * expected.norm() < (value - expected).norm() < 0.025 * expected.norm()
    halves = images.bfloat16(), weight.bfloat16(), bias.bfloat16()  # O2
    exact = results(nn.Conv2d, *(value.double() for value in halves))
    for value, expected in zip(results(WinogradConv2d, *halves), exact, strict=True):
        assert value.dtype == half and (value - expected).norm() < 0.025 * expected.norm()


def test_gradients_of_weights_are_summed_in_float32(small_parts):
    """A sum of 32 equal parts in bf16 would stop growing or be rounded 32 times."""
    images, weight, bias = make_inputs(4, 4, count=2)

    def gradient(images):
        layer = make_layer(weight, bias)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer(images).sum().backward()
        return layer.weight.grad

    torch.testing.assert_close(gradient(images.repeat(32, 1, 1, 1)), 32 * gradient(images), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("autocast", [False, True])
def test_two_runs_give_the_same_bits_and_uninitialised_memory_is_never_read(autocast):
    """In its deterministic mode PyTorch fills new memory with NaN."""
    inputs = make_inputs(7, 10, count=6)
    expected = results(WinogradConv2d, *inputs, autocast=autocast)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    assert all(map(torch.equal, results(WinogradConv2d, *inputs, autocast=autocast), expected))


def test_unsupported_tensors_use_pytorch():
    """No batch dimension, an empty batch, small, other or meta tensors."""
    _, weight, bias = make_inputs(1, 1)
    layer, plain = make_layer(weight, bias), make_layer(weight, bias, nn.Conv2d)
    for shape in ((32, 6, 6), (0, 32, 6, 6), (2, 32, 1, 3)):
        images = random(*shape, seed=0)
        assert torch.equal(layer(images), plain(images))
    images = random(2, 32, 6, 6, seed=0)
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(layer(images), plain(images))
    assert torch.equal(layer.double()(images.double()), plain.double()(images.double()))
    assert layer.to("meta")(torch.empty(2, 32, 6, 6, dtype=torch.float64, device="meta")).shape == (2, 48, 6, 6)


def kinds(model):
    return Counter(type(module).__name__ for module in model.modules())


def test_layers_it_replaces(tiny, monkeypatch):
    """13 of ResNet50's 16 3x3 convolutions have stride 1, and weight_products takes the other layers; resnet9's first
    convolution has 3 channels."""

    def found(device="cpu", **changes):
        model = build_model(tiny(**ON | {"model": "resnet9", "width": 2} | changes))
        replace_layers(tiny(**ON | changes), model, device)
        return kinds(model)["WinogradConv2d"], kinds(model)["ProductConv2d"]

    auto = {"cpu_kernels": "auto"}
    assert found(**auto, model="resnet50", width=1) == (13, 31)
    assert found() == (7, 0) and found(**auto)[0] == 7
    assert found(width=1)[0] == 6, "16 x 32 channels are too few"
    monkeypatch.setattr("utils.training.plan.has_bf16_kernels", lambda: True)
    assert found(**BF16, **auto)[0] == 7
    monkeypatch.setattr("utils.training.plan.has_bf16_kernels", lambda: False)
    assert found(**BF16, **auto) == (0, 0), "slow without bf16 instructions"
    assert found(**BF16)[0] == 7
    for changes in ({"cpu_kernels": False}, auto | {"enable_nhwc": False}, auto | {"enable_compile": True}):
        assert found(**changes) == (0, 0)
    assert found(device="cuda", **auto) == found(device="cuda") == (0, 0)


def test_a_network_without_fitting_layers_or_a_missing_compiler_is_an_error(tiny, monkeypatch):
    on, auto = tiny(**ON), tiny(**ON | {"cpu_kernels": "auto"})
    others = nn.Sequential(
        nn.Conv2d(3, 512, 3, padding=1), nn.Conv2d(64, 64, 3), nn.Conv2d(64, 64, 3, padding=1, stride=2),
        nn.Conv2d(64, 64, 3, padding=1, groups=2), nn.Conv2d(64, 64, 3, padding=2, dilation=2),
        nn.Conv2d(64, 64, 3, padding=1, padding_mode="circular"), nn.Conv2d(64, 64, 1), nn.Conv2d(64, 72, 3, padding=1),
        nn.Conv2d(64, 64, 3, padding="same"), nn.Conv2d(16, 48, 3, padding=1),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"cpu_kernels \[winograd\]: the network has no 3x3 convolution with stride"):
        replace_layers(on, others)
    assert "has no 3x3" in replace_layers(auto, others)["winograd"] and not kinds(others)["WinogradConv2d"]
    monkeypatch.setenv("CXX", "no-such-compiler")
    build.cache_clear()  # another test may have built them
    with pytest.raises(ConfigError, match=r"cpu_kernels \[winograd\] needs .*no-such-compiler is not found"):
        replace_layers(on, build_model(on))
