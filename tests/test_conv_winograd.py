"""Convolutions by Winograd's method equal PyTorch's."""

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from models import build_model
from utils.config import Config
from utils.distributed.world import World
from utils.errors import ConfigError
from utils.training.classifier import build_classifier
from utils.training.kernels import use, winograd
from utils.training.kernels.build import build, missing_compiler
from utils.training.kernels.use import use_kernels
from utils.training.kernels.winograd import WinogradConv2d, best_side, convolve
from utils.training.precision import Precision

Tiny = Callable[..., Config]
CPU = torch.device("cpu")
ON = {"cpu_kernels": ["winograd"], "enable_nhwc": True}

pytestmark = pytest.mark.skipif(bool(missing_compiler(CPU)), reason="no C++ compiler")


def random(*sizes: int, seed: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def results(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Return output and gradients."""
    leaves = [value.detach().clone().requires_grad_() for value in inputs]
    out = function(*leaves)
    out.backward(random(*out.shape, seed=9).to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def directly(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return nn.functional.conv2d(images, weight, bias, padding=1)


def by_winograd(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return convolve(images, weight, bias, (1, 1), (1, 1))


def in_bf16(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return by_winograd(images, weight, bias)


def set_side(monkeypatch: pytest.MonkeyPatch, side: int, height: int, width: int) -> None:
    """Use tiles of this side, one image at a time per thread."""
    per_image = -(-height // side) * -(-width // side)
    monkeypatch.setattr(winograd, "TILES", dict.fromkeys(winograd.TILES, per_image))
    monkeypatch.setattr(winograd, "best_side", lambda *sizes: side)


@pytest.mark.parametrize("side", [2, 3, 4, 6])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 3), (2, 5), (8, 8), (9, 7), (12, 13)])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_each_tile_equals_a_direct_convolution(
    side: int, height: int, width: int, layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output and all gradients, with and without tiles beyond the border, and with a smaller last part. Compared with
    float64: float32's rounding, 6e-8, is amplified by the transforms' factors, up to 8, and by sums of 288 terms."""
    set_side(monkeypatch, side, height, width)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    images, weight = random(5, 32, height, width, seed=0).contiguous(memory_format=layout), random(48, 32, 3, 3, seed=1)
    inputs = images, weight.contiguous(memory_format=layout), random(48, seed=2)
    found = results(by_winograd, *inputs)
    exact = results(directly, *(value.double() for value in inputs))
    assert len(found) == len(exact) == 4
    for value, expected in zip(found, exact, strict=True):
        assert value.dtype == torch.float32 and value.shape == expected.shape
        assert (value - expected).norm() < 1e-5 * expected.norm()
        assert (value - expected).abs().max() < 1e-4 * expected.abs().max()
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    assert found[2].stride() == inputs[1].stride()


@pytest.mark.parametrize(("side", "bound"), [(2, 0.008), (3, 0.025), (4, 0.025)])
@pytest.mark.parametrize(("height", "width"), [(1, 3), (8, 8), (9, 7), (12, 13)])
def test_in_bf16_only_rounding_differs(
    side: int, bound: float, height: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output and all gradients, of bf16 images and of images cast by autocast, compared with float64. A direct bf16
    convolution is off by 0.003: one rounding is 0.0017 on average; here planes are rounded too, and it is amplified."""
    set_side(monkeypatch, side, height, width)
    images, weight, bias = random(5, 32, height, width, seed=0), random(48, 32, 3, 3, seed=1), random(48, seed=2)
    images = images.bfloat16().float()
    exact = results(directly, images.double(), weight.double(), bias.double())
    for inputs, formats in (
        ((images, weight, bias), (torch.float32,) * 3),
        ((images.bfloat16(), weight, bias), (torch.bfloat16, torch.float32, torch.float32)),
    ):
        found = results(in_bf16, *inputs)
        assert [value.dtype for value in found] == [torch.bfloat16, *formats]
        for value, expected in zip(found, exact, strict=True):
            assert 1e-4 * expected.norm() < (value - expected).norm() < bound * expected.norm()
    halves = images.bfloat16(), weight.bfloat16(), bias.bfloat16()  # O2
    exact = results(directly, *(value.double() for value in halves))
    for value, expected in zip(results(by_winograd, *halves), exact, strict=True):
        assert value.dtype == torch.bfloat16 and (value - expected).norm() < bound * expected.norm()


def test_gradients_of_weights_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of 64 equal parts in bf16 would stop growing or be rounded 64 times."""
    set_side(monkeypatch, 2, 4, 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    image, weight, bias = random(1, 32, 4, 4, seed=0), random(32, 32, 3, 3, seed=1), random(32, seed=2)

    def gradient(images: Tensor) -> Tensor:
        leaf = weight.clone().requires_grad_()
        in_bf16(images, leaf, bias).sum().backward()
        return leaf.grad

    torch.testing.assert_close(gradient(image.repeat(64, 1, 1, 1)), 64 * gradient(image), rtol=1e-4, atol=1e-2)


def test_numbers_are_rounded_to_bf16_as_in_pytorch() -> None:
    """To nearest even; NaN stays NaN. The first plane holds each kernel's first weight unchanged."""
    bits = torch.randint(-(2**31), 2**31, (16, 256), generator=torch.Generator().manual_seed(0)).int()
    bits[0] = torch.arange(256) << 15 | 0x3F800000  # every second one halfway between two bf16 numbers
    values = bits.view(torch.float32)
    values[1, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.4e38])
    values[values.abs() < torch.finfo(torch.float32).tiny] = 0.0  # some processors flush denormals to 0
    weight = torch.zeros(16, 256, 3, 3)
    weight[:, :, 0, 0] = values
    tiles = winograd._Tiles(2, torch.zeros(1, 16, 4, 4, dtype=torch.bfloat16))
    found, expected = tiles.weights_to_planes(weight)[0], values.bfloat16()
    assert expected.isnan().any() and torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_the_best_side_needs_the_least_work() -> None:
    """A tile costs 16 multiplications for 4 outputs, 25 for 9, 36 for 16, 64 for 36, which count as 83; direct, 9 per
    output. In bf16, 6 x 6 would be too inaccurate."""
    expected = {1: None, 2: 2, 3: 3, 4: 4, 5: 6, 6: 6, 7: 4, 8: 4, 9: 3, 12: 4, 14: 4, 16: 4, 18: 6, 32: 4, 56: 4}
    assert {size: best_side(size, size) for size in expected} == expected
    assert best_side(1, 8) is None
    in_half = {size: best_side(size, size, torch.bfloat16) for size in (1, 2, 5, 6, 8, 18)}
    assert in_half == {1: None, 2: 2, 5: 3, 6: 3, 8: 4, 18: 3}


@pytest.mark.parametrize("function", [by_winograd, in_bf16])
def test_two_runs_give_the_same_bits(function: Callable[..., Tensor]) -> None:
    """With another number of threads, up to the rounding of PyTorch's products."""
    inputs = random(6, 32, 10, 10, seed=0), random(32, 32, 3, 3, seed=1), random(32, seed=2)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found += [results(function, *inputs) for _ in range(2)]
    finally:
        torch.set_num_threads(threads)
    for first, second in (found[:2], found[2:]):
        assert all(map(torch.equal, first, second))
    for value, expected in zip(found[2], found[0], strict=True):
        assert (value - expected).norm() <= (1e-5 if function is by_winograd else 1e-2) * expected.norm()


def test_only_needed_gradients_are_computed() -> None:
    layer = nn.Conv2d(32, 32, 3, padding=1)
    layer.__class__ = WinogradConv2d
    images = random(2, 32, 6, 6, seed=0).requires_grad_()
    with torch.no_grad():
        assert layer(images).grad_fn is None
    layer.weight.requires_grad_(False)
    layer(images).square().sum().backward()
    leaves = images.detach().clone().requires_grad_(), layer.weight.detach().clone().requires_grad_()
    expected = torch.autograd.grad(directly(*leaves, layer.bias.detach()).square().sum(), leaves)
    assert layer.weight.grad is None and layer.bias.grad is not None
    torch.testing.assert_close(images.grad, expected[0], rtol=1e-3, atol=1e-3)
    layer.weight.requires_grad_(True)
    layer(images.detach()).square().sum().backward()  # a first layer
    torch.testing.assert_close(layer.weight.grad, expected[1], rtol=1e-3, atol=1e-3)


def test_unsupported_tensors_use_pytorch() -> None:
    """No batch dimension, an empty batch, other, different or meta tensors; channels that do not match."""
    plain = nn.Conv2d(32, 32, 3, padding=1)
    layer = nn.Conv2d(32, 32, 3, padding=1)
    layer.load_state_dict(plain.state_dict())
    layer.__class__ = WinogradConv2d
    for images in (random(32, 6, 6, seed=0), torch.empty(0, 32, 6, 6), random(2, 32, 1, 3, seed=0)):
        assert torch.equal(layer(images), plain(images))
    with pytest.raises(RuntimeError, match="should be the same"):
        layer(random(2, 32, 6, 6, seed=0).bfloat16())
    for channels in (16, 64):
        with pytest.raises(RuntimeError, match=f"to have 32 channels, but got {channels}"):
            layer(random(2, channels, 8, 8, seed=0))
    with torch.autocast("cpu", dtype=torch.float16):
        images = random(2, 32, 6, 6, seed=0)
        assert torch.equal(layer(images), plain(images))
    assert torch.equal(layer.double()(images.double()), plain.double()(images.double()))
    with torch.device("meta"):
        assert layer.to("meta")(torch.empty(2, 32, 6, 6, dtype=torch.float64)).shape == (2, 32, 6, 6)


@pytest.mark.parametrize("in_half", [False, True])
def test_uninitialised_memory_is_never_read(in_half: bool) -> None:
    """In its deterministic mode PyTorch fills new memory with NaN."""
    inputs = random(6, 32, 7, 10, seed=0), random(32, 32, 3, 3, seed=1), random(32, seed=2)

    def function(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=in_half):
            return convolve(images, weight, bias, (1, 1), (1, 1))

    expected = results(function, *inputs)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        found = results(function, *inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, found, expected))


def test_a_checkpoint_is_evaluated_equally_with_and_without_it(
    tiny: Tiny, one_rank: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(winograd, "MIN_CHANNEL_PAIRS", 1)
    images = random(4, 3, 32, 32, seed=0)
    configs = [tiny(ema_decay=0.9, **ON), tiny(ema_decay=0.9, enable_nhwc=True)]
    first, second = (build_classifier(config, build_model, one_rank) for config in configs)
    assert "WinogradConv2d" in kinds(first.ema.network) and "WinogradConv2d" not in kinds(second.validated)
    second.load_network({"model": first.weights.state_dict(), "average": first.ema.state_dict()})
    for one in (first, second):
        one.validated.eval()
    torch.testing.assert_close(first.predict(images), second.predict(images), rtol=1e-3, atol=1e-4)


def test_weight_products_replace_the_other_convolutions(tiny: Tiny) -> None:
    """In ResNet50 the 1x1 convolutions and those with a stride; in resnet9 none."""
    both = ON | {"cpu_kernels": ["winograd", "weight_products"]}
    for model, counts in (
        ("resnet50", {"WinogradConv2d": 13, "ProductConv2d": 31}),
        ("resnet9", {"WinogradConv2d": 7}),
    ):
        config = tiny(model=model, width=4 if model == "resnet9" else 1, **both)
        network = build_model(config)
        assert use_kernels(config, network, Precision("cpu"), CPU) == []
        found = Counter(kinds(network))
        assert {name: found[name] for name in found if name.endswith(("WinogradConv2d", "ProductConv2d"))} == counts


def kinds(model: nn.Module) -> Iterator[str]:
    return (type(module).__name__ for module in model.modules())


def test_layers_it_replaces(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """13 of ResNet50's 16 3x3 convolutions have stride 1; resnet9's first has 3 channels."""
    float32, bf16 = Precision("cpu"), Precision("cpu", level="O1")

    def found(config: Config, precision: Precision = float32, device: torch.device = CPU) -> int:
        model = build_model(config)
        use_kernels(config, model, precision, device)
        return sum(isinstance(module, WinogradConv2d) for module in model.modules())

    auto = {"cpu_kernels": "auto", "enable_nhwc": True}
    assert found(tiny(**auto, model="resnet50")) == 13
    assert found(tiny(**auto, model="resnet9", width=2)) == 7
    assert found(tiny(**auto, model="resnet9", width=1)) == 6, "16 x 32 channels are too few"
    assert not found(tiny(model="resnet9"))
    monkeypatch.setattr(use, "has_bf16_kernels", lambda: True)
    assert found(tiny(**auto, model="resnet9", width=2), bf16) == 7
    monkeypatch.setattr(use, "has_bf16_kernels", lambda: False)
    assert not found(tiny(**auto, model="resnet9", width=2), bf16), "slow without bf16 instructions"
    assert found(tiny(**ON, model="resnet9", width=2), bf16) == 7
    assert not found(tiny(**auto | {"enable_nhwc": False}, model="resnet9"))
    assert not found(tiny(**auto, enable_compile=True, model="resnet9"))
    cuda = torch.device("cuda", 0)
    assert not found(tiny(**auto, model="resnet9"), device=cuda)
    assert not found(tiny(**ON, model="resnet9"), device=cuda)


def test_a_network_without_fitting_layers_or_a_missing_compiler_is_an_error(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    on, auto, float32 = tiny(**ON), tiny(**ON | {"cpu_kernels": "auto"}), Precision("cpu")
    others = nn.Sequential(
        nn.Conv2d(3, 512, 3, padding=1), nn.Conv2d(64, 64, 3), nn.Conv2d(64, 64, 3, padding=1, stride=2),
        nn.Conv2d(64, 64, 3, padding=1, groups=2), nn.Conv2d(64, 64, 3, padding=2, dilation=2),
        nn.Conv2d(64, 64, 3, padding=1, padding_mode="circular"), nn.Conv2d(64, 64, 1), nn.Conv2d(64, 72, 3, padding=1),
        nn.Conv2d(64, 64, 3, padding="same"), nn.Conv2d(16, 48, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1).double(),
    )  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"cpu_kernels \[winograd\]: the network has no 3x3 convolution with stride 1"
    ):
        use_kernels(on, others, float32, CPU)
    assert "has no 3x3" in use_kernels(auto, others, float32, CPU)[0] and "WinogradConv2d" not in kinds(others)
    monkeypatch.setenv("CXX", "no-such-compiler")
    build.cache_clear()  # another test may have built them
    with pytest.raises(ConfigError, match=r"cpu_kernels \[winograd\] needs .*no-such-compiler is not found"):
        use_kernels(on, build_model(on), float32, CPU)


def test_a_failing_compiler_is_an_error_or_with_auto_a_note(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ConfigError("cpu_kernels [winograd]: its kernels could not be built: no space left")

    monkeypatch.setattr(winograd, "build", fail)
    config = tiny(**ON, model="resnet9")
    with pytest.raises(ConfigError, match="no space left"):
        use_kernels(config, build_model(config), Precision("cpu"), CPU)
    auto = tiny(**ON | {"cpu_kernels": "auto"}, model="resnet9")
    model = build_model(auto)
    note = "skipped: cpu_kernels [winograd]: its kernels could not be built: no space left"
    assert use_kernels(auto, model, Precision("cpu"), CPU)[0] == note
    assert "WinogradConv2d" not in kinds(model)
