"""Fused BatchNorm, shortcut and ReLU: the same network, names and training."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet18

from models import build_model
from tests.conftest import ROOT
from utils.config import Config
from utils.errors import ConfigError
from utils.training.kernels.norm_relu import cpu as norm_relu_cpu
from utils.training.kernels.norm_relu.module import (
    NormReLU,
    NormSiLU,
    check_fusion,
    fuse_norm_relu,
    norm_relu,
    norm_relu_backward,
)

Tiny = Callable[..., Config]
CPU = torch.device("cpu")
ON = {"fuse_norm_relu": True, "enable_nhwc": True}
needs_compiler = pytest.mark.skipif(not norm_relu_cpu.has_compiler(), reason="no C++ compiler")
# class, and whether a shortcut is added, which SiLU has not
KINDS = pytest.mark.parametrize(("kind", "added"), [(NormReLU, False), (NormReLU, True), (NormSiLU, False)])


def fused(x: Tensor, shortcut: Tensor | None, norm: NormReLU) -> Tensor:
    return norm(x, shortcut)


def unfused(x: Tensor, shortcut: Tensor | None, norm: NormReLU) -> Tensor:
    out = nn.BatchNorm2d.forward(norm, x)
    return nn.functional.silu(out) if norm.silu else (out if shortcut is None else out + shortcut).relu()


def results(function: Callable[..., Tensor], norm: NormReLU, *inputs: Tensor | None) -> Iterator[Tensor]:
    """Output, gradients and buffers after one training step."""
    leaves = [value if value is None else value.detach().clone().requires_grad_() for value in inputs]
    out = function(*leaves, norm)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)).sum().backward()
    yield out
    for leaf in (*leaves, *norm.parameters()):
        if leaf is not None:
            assert leaf.grad is not None
            yield leaf.grad
    yield from norm.buffers()


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, *, added: bool) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    inputs = [3 + 2 * torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)]
    nhwc = [value.to(dtype).contiguous(memory_format=torch.channels_last) for value in inputs]
    return [nhwc[0], nhwc[1] if added else None]


def make_norm(channels: int, kind: type[NormReLU] = NormReLU) -> NormReLU:
    norm, generator = kind(channels), torch.Generator().manual_seed(1)
    for value in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        value.data = torch.rand(channels, generator=generator) + 0.5
    return norm


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_weights_keep_statistics_in_float32(half: torch.dtype) -> None:
    """As on a GPU, and as declared for the tensors saved for backward."""
    (x, _), norm = make_inputs((4, 6, 5, 5), half, added=False), make_norm(6).to(half)
    assert x is not None
    known = x, None, norm.weight, norm.bias, norm.running_mean, norm.running_var
    _, *kept = norm_relu(*known, norm.momentum, norm.eps, False)
    assert [value.dtype for value in kept] == [torch.float32] * 2
    found = list(results(lambda x, norm: norm(x), norm, x))
    assert {value.dtype for value in found[:4]} == {half}


@KINDS
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_fused_function_is_equal(kind: type[NormReLU], added: bool, layout: torch.memory_format) -> None:
    """The output bit for bit; gradients in float64, where sums in another order differ in the last of 16 digits."""
    inputs = make_inputs((4, 6, 5, 5), torch.float64, added=added)
    inputs = [value if value is None else value.contiguous(memory_format=layout) for value in inputs]
    norm = make_norm(6, kind=kind).double()
    other = copy.deepcopy(norm)
    found = list(results(fused, norm, *inputs))
    expected = list(results(unfused, other, *inputs))
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    evaluated = norm.eval()(*inputs)
    assert torch.equal(evaluated, unfused(*inputs, other.eval()))


@pytest.mark.parametrize(
    ("model", "layers"),
    [("resnet8", 6), ("resnet9", 8), ("resnet18", 17), ("resnet50", 49), ("vgg16_bn", 13), ("airbench96", 8)],
)
def test_each_network_keeps_its_names_and_its_outputs(tiny: Tiny, model: str, layers: int) -> None:
    """In training and evaluation."""
    if model == "vgg16_bn":
        expected: nn.Module = nn.Sequential(*list(build_model(tiny(model=model)).children())[:1])
    else:
        expected = build_model(tiny(model=model))
    found = copy.deepcopy(expected)
    assert not fuse_norm_relu(tiny(**ON), found, CPU)
    images = torch.randn(2, 3, 32, 32)
    assert sum(isinstance(module, NormReLU) for module in found.modules()) == layers
    assert torch.equal(found(images), expected(images))
    states = found.state_dict(), expected.state_dict()
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert torch.equal(found.eval()(images), expected.eval()(images))


def test_unsupported_settings_are_errors(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no BatchNorm over all ranks"):
        tiny(**ON, enable_sync_bn=True)
    with pytest.raises(ConfigError, match="no BatchNorm2d before ReLU or SiLU that can be fused; use false"):
        fuse_norm_relu(tiny(**ON), nn.Sequential(nn.BatchNorm2d(3, momentum=None), nn.ReLU(), nn.BatchNorm2d(3)), CPU)
    monkeypatch.setattr("utils.training.kernels.build.missing_compiler", lambda device: "")
    with pytest.raises(ConfigError, match="enable_compile auto compiles here"):
        check_fusion(tiny(**ON, enable_compile="auto"), torch.device("cuda", 0))


@needs_compiler
@KINDS
@pytest.mark.parametrize("shape", [(1, 3, 1, 2), (3, 5, 4, 4), (4, 70, 9, 9), (2, 17, 33, 31), (7, 260, 16, 16)])
def test_the_cpu_kernels_equal_pytorchs_operations(
    shape: tuple[int, ...], kind: type[NormReLU], added: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one part and several, whole blocks of rows and a rest, within the rounding of float32 sums."""
    inputs = make_inputs(shape, torch.float32, added=added)
    assert inputs[0] is not None and norm_relu_cpu.fits(inputs[0])
    found_values = list(results(fused, make_norm(shape[1], kind=kind), *inputs))
    monkeypatch.setattr(norm_relu_cpu, "has_compiler", lambda: False)
    expected_values = results(fused, make_norm(shape[1], kind=kind), *inputs)
    for found, expected in zip(found_values, expected_values, strict=True):
        assert found.stride() == expected.stride()
        tolerance = 2e-5 * max(1, expected.abs().max().item())
        wrong = ~torch.isclose(found, expected, rtol=2e-5, atol=tolerance)
        assert wrong.sum() <= wrong.numel() / 1000  # where rounding decides the sign before ReLU


@needs_compiler
def test_silu_and_its_derivative_are_within_rounding_of_float64() -> None:
    """Also where the exponential is 0 or overflows float32. Each value is the weight of a channel of two pixels, 1 and
    -1, with mean 0 and deviation 1, so that BatchNorm returns the weight itself."""
    z = torch.cat([torch.linspace(-200, 200, 4001), torch.tensor([0.0, 1e-30, -1e-30, 88.5, -88.5, 3e30, -3e30])])
    zero, one = torch.zeros(len(z)), torch.ones(len(z))
    x = torch.stack([one, -one]).view(2, -1, 1, 1).contiguous(memory_format=torch.channels_last)
    exact = z.double().requires_grad_()
    expected = nn.functional.silu(exact)
    expected.sum().backward()
    out, mean, invstd = norm_relu_cpu.forward(x, None, z, zero, zero.clone(), one.clone(), 0.1, 0.0, True)
    assert not mean.any() and torch.equal(invstd, one)
    torch.testing.assert_close(out[0].flatten().double(), expected, rtol=5e-7, atol=1e-30)
    only_first = torch.stack([one, zero]).view_as(x).contiguous(memory_format=torch.channels_last)
    _, _, _, grad_bias = norm_relu_cpu.backward(only_first, x, None, z, zero, mean, invstd, True)
    # as in PyTorch, 1 - sigmoid(z) is rounded by 6e-8 before it is multiplied by z, up to 17
    torch.testing.assert_close(grad_bias.double(), exact.grad, rtol=5e-7, atol=2e-6)
    of_nan, *_ = norm_relu_cpu.forward(x, None, z * torch.nan, zero, zero.clone(), one.clone(), 0.1, 0.0, True)
    assert of_nan.isnan().all()


@needs_compiler
@KINDS
def test_the_cpu_kernels_round_bf16_once(kind: type[NormReLU], added: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward equals rounded float32; backward, from the same saved tensors, is within 2 units in the last of bf16's 8
    bits of PyTorch's operations, which round in between."""
    (x, shortcut), norm = make_inputs((4, 70, 9, 9), torch.bfloat16, added=added), make_norm(70)
    assert x is not None
    wide = fused(x.float(), None if shortcut is None else shortcut.float(), make_norm(70, kind=kind))
    weights, numbers = (norm.weight.data, norm.bias.data), (norm.momentum, norm.eps, kind.silu)
    out, *kept = norm_relu(x, shortcut, *weights, norm.running_mean, norm.running_var, *numbers)
    assert torch.equal(out, wide.to(torch.bfloat16))
    gradient = make_inputs((4, 70, 9, 9), torch.bfloat16, added=True)[1]
    known = gradient, x, out if added else None, *weights, *kept, *numbers[1:]
    found = norm_relu_backward(*known)
    monkeypatch.setattr(norm_relu_cpu, "has_compiler", lambda: False)
    for mine, reference in zip(found, norm_relu_backward(*known), strict=True):
        assert mine.dtype == reference.dtype
        tolerance = 2**-7 * max([1.0, *reference.float().abs().flatten().tolist()])
        torch.testing.assert_close(mine.float(), reference.float(), rtol=2**-6, atol=tolerance)


@needs_compiler
def test_the_cpu_kernels_give_the_same_bits_with_any_number_of_threads() -> None:
    """And with any layout of the shortcut; NaN passes through."""
    x, shortcut = make_inputs((7, 260, 16, 16), torch.float32, added=True)
    assert x is not None and shortcut is not None
    runs, threads = [], torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        runs.append(list(results(fused, make_norm(260), x, shortcut)))
    torch.set_num_threads(threads)
    runs.append(list(results(fused, make_norm(260), x, shortcut.contiguous())))
    assert all(torch.equal(one, other) for run in runs[1:] for one, other in zip(runs[0], run, strict=True))
    shortcut[0, 0, 0, 0] = torch.nan
    assert make_norm(260)(x, shortcut)[0, 0, 0, 0].isnan()


def test_a_shortcut_of_another_format_or_shape_is_accepted_as_in_pytorch() -> None:
    """And an empty batch is an error as in PyTorch."""
    (x, shortcut), norm = make_inputs((2, 6, 4, 4), torch.bfloat16, added=True), make_norm(6)
    assert x is not None and shortcut is not None
    for other in (shortcut.float(), shortcut[:, :, :1, :1]):
        like_x = other.to(x.dtype).expand(x.shape)
        assert torch.equal(norm(x, other), norm(x, like_x))
    with pytest.raises(RuntimeError, match="at least one element"):
        norm(x[:0])


@pytest.mark.parametrize("which", [2, 3, 4, 5])
def test_weights_and_statistics_of_another_format_or_layout_use_pytorch(which: int) -> None:
    (x, _), norm = make_inputs((2, 6, 4, 4), torch.float32, added=False), make_norm(6)
    known = [x, None, norm.weight.data, norm.bias.data, norm.running_mean, norm.running_var]
    strided = [*known]
    strided[which] = torch.stack((known[which], torch.zeros(6)), 1)[:, 0]  # type: ignore[list-item]
    assert x is not None and norm_relu_cpu.fits(x, *known[2:]) == norm_relu_cpu.has_compiler()  # type: ignore[arg-type]
    assert not norm_relu_cpu.fits(x, *strided[2:])  # type: ignore[arg-type]
    assert not norm_relu_cpu.fits(x, *known[2:5], norm.running_var.double())  # type: ignore[arg-type]
    numbers = 0.1, 1e-5, False
    found, expected = norm_relu(*strided, *numbers), norm_relu(*map(copy.deepcopy, known), *numbers)
    torch.testing.assert_close(found, expected)


def test_one_value_per_channel_is_an_error_as_in_pytorch() -> None:
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        make_norm(6)(torch.randn(1, 6, 1, 1))


def test_torchvisions_blocks_with_another_activation_are_not_fused(tiny: Tiny) -> None:
    model = resnet18()
    for module in list(model.modules()):
        if hasattr(module, "relu"):
            module.relu = nn.SiLU()
    with pytest.raises(ConfigError, match="no BatchNorm2d before ReLU or SiLU that can be fused"):
        fuse_norm_relu(tiny(**ON), model, CPU)
    images = torch.randn(2, 3, 32, 32)
    expected = model(images)
    fuse_norm_relu(tiny(**ON | {"fuse_norm_relu": "auto"}), model, CPU)
    assert torch.equal(model(images), expected)


def test_half_weights_use_pytorchs_operations(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_relu_cpu, "build", lambda: pytest.fail("kernels are built that cannot be used"))
    half = {"opt_level": "O3", "amp_dtype": "bf16"}
    model = build_model(tiny())
    assert fuse_norm_relu(tiny(**ON | half), model, CPU)[0].endswith("its kernels need BatchNorm in float32")
    model = build_model(tiny())
    assert fuse_norm_relu(tiny(**ON | half | {"fuse_norm_relu": "auto"}), model, CPU) == []
    assert not any(isinstance(module, NormReLU) for module in model.modules())


def test_a_failing_compiler_is_a_one_line_error(tmp_path: Path) -> None:
    """In a process of its own, since Inductor caches what it knows of a compiler."""
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit\necho 'fatal error: no space left' >&2\nexit 1\n")
    compiler.chmod(0o755)
    environment = os.environ | {"CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    program = "from utils.training.kernels.norm_relu import cpu; cpu.build()"
    command = [sys.executable, "-c", program]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    last = result.stderr.splitlines()[-1]
    assert result.returncode == 1 and "fuse_norm_relu: its kernels could not be built" in last
    assert "no space left; repair the compiler" in last


def test_a_cpu_without_a_compiler_logs_that_nothing_gets_faster(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_relu_cpu, "has_compiler", lambda: False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    notes = fuse_norm_relu(tiny(**ON), build_model(tiny()), CPU)
    assert len(notes) == 1 and "without speed-up" in notes[0] and "no-such-compiler is not found" in notes[0]


@needs_compiler
def test_auto_fuses_eager_steps_over_nhwc_on_a_cpu(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_fused(device: torch.device, **changes: object) -> bool:
        model = build_model(tiny())
        fuse_norm_relu(tiny(**{"fuse_norm_relu": "auto", "enable_nhwc": True} | changes), model, device)
        return any(isinstance(module, NormReLU) for module in model.modules())

    assert is_fused(CPU)
    assert not is_fused(CPU, enable_nhwc=False)
    assert not is_fused(CPU, enable_compile=True)
    assert not is_fused(CPU, enable_sync_bn=True)
    assert not is_fused(torch.device("cuda", 0))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not is_fused(CPU)


def check_kernels(device: str) -> None:
    """The Triton kernels equal the CPU's operations: in float32 within the rounding of sums, in bf16 within 2 units in
    the last of 8 bits, since the kernels round once, after ReLU, and the operations two or three times. Where rounding
    decides the sign before ReLU, gradients may differ: in at most 1 of 1000."""
    from utils.training.kernels.norm_relu import triton_kernels as norm_relu_kernels

    for shape in ((3, 5, 4, 4), (4, 70, 9, 9)):
        for added, silu in ((False, False), (True, False), (False, True)):
            for dtype in (torch.float32, torch.bfloat16):
                x, shortcut = make_inputs(shape, dtype, added=added)
                (gradient, _) = make_inputs(shape, dtype, added=False)
                norm = make_norm(shape[1])
                weights = [norm.weight.data, norm.bias.data]
                buffers = [[norm.running_mean.clone(), norm.running_var.clone()] for _ in range(2)]
                cpu = norm_relu(x, shortcut, *weights, *buffers[0], 0.1, 1e-5, silu)
                moved = [value if value is None else value.to(device) for value in (x, shortcut, *weights, *buffers[1])]
                found = norm_relu_kernels.forward(*moved, 0.1, 1e-5, silu)
                kept = (x, cpu[0] if added else None, *weights, *cpu[1:])
                gradients = norm_relu_backward(gradient, *kept, 1e-5, silu)
                moved_kept = [value if value is None else value.to(device) for value in (gradient, *kept)]
                found_gradients = norm_relu_kernels.backward(*moved_kept, silu)
                pairs = [*zip(found, cpu, strict=True), *zip(moved[-2:], buffers[0], strict=True)]
                for mine, reference in [*pairs, *zip(found_gradients, gradients, strict=True)]:
                    tolerance = 2e-5 if mine.dtype == torch.float32 else 2**-6
                    wrong = ~torch.isclose(mine.cpu().float(), reference.float(), rtol=tolerance, atol=tolerance)
                    assert wrong.sum() <= wrong.numel() / 1000, (shape, added, silu, dtype, mine.shape)


def test_the_triton_kernels_in_tritons_interpreter() -> None:
    pytest.importorskip("triton")
    program = "from tests.test_norm_relu import check_kernels; check_kernels('cpu')"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_triton_kernels_compile_for_an_h100_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter accepts code that Triton's compiler refuses."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from utils.training.kernels.norm_relu import triton_kernels as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    maps, numbers = ("x", "shortcut", "out", "gradient", "passed", "grad_x"), ("momentum", "eps")
    counts = ("pixels", "channels", "part_pixels", "num_parts")
    kinds = dict.fromkeys(maps, "*bf16") | dict.fromkeys(numbers, "fp32") | dict.fromkeys(counts, "i32")
    every = kernels._sum_x, kernels._statistics, kernels._apply, kernels._sum_gradient, kernels._apply_gradient
    for kernel, silu in product(every, (False, True)):
        names = kernel.arg_names
        constants = {"rows": kernels.ROWS, "columns": kernels.COLUMNS, "added": not silu, "masked": False, "silu": silu}
        constants = {name: value for name, value in constants.items() if name in names}
        signature = {name: "constexpr" if name in constants else kinds.get(name, "*fp32") for name in names}
        source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


@pytest.mark.gpu
@pytest.mark.real_gpu("the fake runtime computes by the CPU's operations")
def test_the_triton_kernels_on_a_gpu() -> None:
    check_kernels("cuda")


def test_sequentials_are_fused_and_other_layers_are_not(tiny: Tiny) -> None:
    layers = nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4), nn.SiLU(), nn.BatchNorm2d(4), nn.GELU()
    model = nn.Sequential(nn.Conv2d(3, 4, 3), *layers)
    fused = copy.deepcopy(model)
    fuse_norm_relu(tiny(**ON), fused, CPU)
    kinds = [NormReLU, nn.Identity, NormSiLU, nn.Identity, nn.BatchNorm2d, nn.GELU]
    assert [type(layer) for layer in fused] == [nn.Conv2d, *kinds]
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(fused(images), model(images))
    norm = nn.BatchNorm2d(3)
    shared = nn.Sequential(nn.Sequential(norm, nn.ReLU()), nn.Sequential(norm, nn.SiLU()), *layers[:2])
    fuse_norm_relu(tiny(**ON), shared, CPU)
    assert type(norm) is nn.BatchNorm2d
    large = resnet18()
    fuse_norm_relu(tiny(**ON), large, CPU)
    assert isinstance(large.relu, nn.Identity) and isinstance(large.bn1, NormReLU)
