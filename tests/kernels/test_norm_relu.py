"""Fused BatchNorm, shortcut and ReLU: the same network, names and training."""

import copy
import itertools
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torchvision.models import resnet18
from torchvision.models.resnet import BasicBlock, ResNet

from models import build_model
from tests.conftest import ROOT, is_fused, plan_on, replace_layers
from utils.errors import ConfigError
from utils.kernels import norm_relu as fusion
from utils.kernels.norm_relu import norm_relu, norm_relu_backward, normalise
from utils.program import missing_compiler

ON = {"fuse_norm_relu": True, "enable_nhwc": True}
needs_compiler = pytest.mark.skipif(bool(missing_compiler(gpu=False)), reason="no C++ compiler")


def make_inputs(shape, dtype=torch.float32):
    """Return three random maps in NHWC memory; the first channel of the first map is 0."""
    x, shortcut, gradient = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    x[:, 0] = -1.5
    return [value.to(dtype, memory_format=torch.channels_last) for value in (3 + 2 * x, shortcut, gradient)]


def make_norm(channels):
    norm, generator = nn.BatchNorm2d(channels), torch.Generator().manual_seed(1)
    for value in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        value.data = torch.rand(channels, generator=generator) + 0.5
    norm.bias.data[0] = norm.running_mean[0] = 0  # at an output of exactly 0 ReLU passes no gradient
    return norm


def separately(norm, activation, x, shortcut=None):
    out = norm(x)
    return activation(out if shortcut is None else out + shortcut)


def results(function, x, shortcut, norm):
    """Return output, gradients and buffers after one training step."""
    leaves = [value.detach().clone().requires_grad_() for value in (x, shortcut) if value is not None]
    out = function(norm, nn.ReLU(), *leaves)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out))
    return [out.detach(), *(leaf.grad for leaf in (*leaves, *norm.parameters())), *norm.buffers()]


@needs_compiler
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("shape", [(1, 3, 1, 2), (3, 5, 4, 4), (4, 70, 9, 9), (2, 17, 33, 31), (7, 260, 16, 16)])
def test_the_cpu_kernels_equal_pytorchs_operations(shape, added):
    """With one part and several, whole blocks of rows and a rest, within the rounding of float32 sums."""
    x, shortcut, _ = make_inputs(shape)
    inputs = x, shortcut if added else None, make_norm(shape[1])
    assert fusion._fits(inputs[2], x, inputs[1])
    expected_values = results(separately, *copy.deepcopy(inputs))
    for found, expected in zip(results(normalise, *inputs), expected_values, strict=True):
        assert found.stride() == expected.stride()
        tolerance = 2e-5 * max(1, expected.abs().max().item())
        wrong = ~torch.isclose(found, expected, rtol=2e-5, atol=tolerance)
        assert wrong.sum() <= wrong.numel() / 1000  # where rounding decides the sign before ReLU


@needs_compiler
@pytest.mark.parametrize("added", [False, True])
def test_the_cpu_kernels_round_bf16_once(added):
    """Output and gradients equal float32's of the same numbers, rounded."""
    x, shortcut, gradient = make_inputs((4, 70, 9, 9), torch.bfloat16)
    shortcut, norm = shortcut if added else None, make_norm(70)
    weights = [norm.weight.data, norm.bias.data]

    def run(cast):
        buffers = norm.running_mean.clone(), norm.running_var.clone()
        return norm_relu(cast(x), None if shortcut is None else cast(shortcut), *weights, *buffers, 0.1, 1e-5)

    out, *kept = run(Tensor.bfloat16)
    assert torch.equal(out, run(Tensor.float)[0].bfloat16())
    known = gradient, x, out if added else None
    found = norm_relu_backward(*known, *weights, *kept)
    wide = norm_relu_backward(*(value if value is None else value.float() for value in known), *weights, *kept)
    assert all(torch.equal(value, exact.to(value.dtype)) for value, exact in zip(found, wide, strict=True))


@needs_compiler
def test_the_cpu_kernels_give_the_same_bits_with_any_number_of_threads():
    """And with any layout of the shortcut; NaN passes through."""
    x, shortcut, _ = make_inputs((7, 260, 16, 16))
    runs, threads = [], torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        runs.append(results(normalise, x, shortcut, make_norm(260)))
    torch.set_num_threads(threads)
    runs.append(results(normalise, x, shortcut.contiguous(), make_norm(260)))
    assert all(torch.equal(one, other) for run in runs[1:] for one, other in zip(runs[0], run, strict=True))
    shortcut[0, 0, 0, 0] = torch.nan
    assert normalise(make_norm(260), nn.ReLU(), x, shortcut)[0, 0, 0, 0].isnan()


def test_other_inputs_weights_and_layers_are_pytorchs():
    x, shortcut, _ = make_inputs((2, 6, 4, 4))
    assert not fusion._fits(make_norm(6), x[:1, :, :1, :1], None), "one value has no deviation: PyTorch's error"
    without = make_norm(6)
    without.momentum = None
    for norm, *inputs in (
        (make_norm(6), x.bfloat16(), shortcut), (make_norm(6), x, shortcut[:, :, :1, :1]), (without, x),
        (make_norm(6), x.contiguous()), (make_norm(6).double(), x.double()), (make_norm(6).eval(), x, shortcut),
        (nn.InstanceNorm2d(6), x), (nn.BatchNorm2d(6, affine=False), x),
        (nn.BatchNorm2d(6, track_running_stats=False), x),
    ):  # fmt: skip
        expected = separately(copy.deepcopy(norm), nn.ReLU(), *inputs)
        assert torch.equal(normalise(norm, nn.ReLU(), *inputs), expected)


@pytest.fixture
def fused_calls(monkeypatch):
    """Let the fused function compute PyTorch's operations, which have the same bits; return the list of its calls."""
    calls = []

    def apply(x, shortcut, weight, bias, mean, var, momentum, eps):
        calls.append(x.shape)
        out = nn.functional.batch_norm(x, mean, var, weight, bias, True, momentum, eps)
        return (out if shortcut is None else out + shortcut).relu()

    monkeypatch.setattr(fusion._NormReLU, "apply", apply)
    monkeypatch.setattr(fusion, "build", lambda name: None)
    monkeypatch.setattr(fusion, "_fits", lambda norm, x, shortcut: True)
    return calls


@pytest.mark.parametrize(("model", "layers"), [("resnet8", 6), ("resnet9", 8), ("resnet18", 17), ("resnet50", 49),
    ("vgg16_bn", 13)])  # fmt: skip
def test_each_network_keeps_its_names_and_its_outputs(tiny, fused_calls, model, layers):
    expected = build_model(tiny(model=model))
    if model == "vgg16_bn":
        expected = expected.features
    found = copy.deepcopy(expected)
    assert not replace_layers(tiny(**ON), found)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(found(images), expected(images)) and len(fused_calls) == layers
    assert list(found.state_dict()) == list(expected.state_dict())
    assert all(map(torch.equal, found.state_dict().values(), expected.state_dict().values()))
    assert torch.equal(found.eval()(images), expected.eval()(images)) and len(fused_calls) == layers


class Calls(nn.Module):
    """A network that calls its parts as `function` says."""

    def __init__(self, function, *parts):
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, x):
        return self.function(x, *self.parts)


def make_block(*others, hooked=None, place=1):
    """Return convolution, BatchNorm, ReLU, or `others` after the convolution; `hooked` adds a hook to a layer."""
    layers = others or (nn.BatchNorm2d(32), nn.ReLU(inplace=hooked is None))
    block = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1, bias=False), *layers)
    if hooked == "forward":
        block[place].forward = torch.tanh
    elif hooked is not None:  # the last argument of a hook is the output, or a tuple
        add_hook = getattr(block[place], f"register_{hooked}")
        add_hook(lambda *given: given[-1] - 1 if isinstance(given[-1], Tensor) else (2 * given[-1][0],))
    return block


NORM = nn.BatchNorm2d(32)  # in two blocks


@needs_compiler
@pytest.mark.parametrize("network", [
    Calls(lambda x, block: block(block[2](block[1](block[0](x)) + x)), make_block()),
    Calls(lambda x, block: block(block[1](block[0](x) + x)), make_block(nn.MaxPool2d(2))),
    Calls(lambda x, block: block[:2](x) + block(x), make_block()),
    *(Calls(lambda x, block: block(x), make_block(hooked=hooked, place=place)) for place in (1, 2) for hooked in
      ("forward", "forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")),
    Calls(lambda x, one, other: other(one(one(x))), make_block(NORM, nn.ReLU()), make_block(NORM, nn.SiLU())),
    Calls(lambda x, block: block(block.relu(block.bn1(block.conv1(x)) + x)), BasicBlock(32, 32)),
    Calls(lambda x, net: net(x[:, :3]).sum() + net.relu(net.bn1(net.conv1(x[:, :3])) + 1), resnet18()),
])  # fmt: skip
def test_a_network_that_is_not_called_as_a_whole_stays_the_same_function(tiny, fused_calls, network):
    """In training and evaluation, gradients and statistics too, with all layers of ours. In float64, so that rounding
    decides no sign before a ReLU."""
    x, slopes = make_inputs((4, 32, 8, 8), torch.float64)[:2]
    networks = copy.deepcopy(network), copy.deepcopy(network)
    replace_layers(tiny(enable_nhwc=True, fuse_norm_relu="auto", cpu_kernels="auto"), networks[1])
    assert any(type(module).__module__.startswith("utils.") or is_fused(module) for module in networks[1].modules())
    for training in (True, False):
        found = []
        for one in networks:
            leaf = x.clone().requires_grad_()
            out = one.double().train(training)(leaf)
            (out * slopes.flatten()[: out.numel()].reshape(out.shape)).sum().backward()
            gradients = [value.grad for value in one.parameters() if value.grad is not None]
            found.append([out, leaf.grad, *gradients, *one.buffers()])
        for mine, expected in zip(*found, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-8, atol=1e-8 * expected.abs().max().item())


@pytest.mark.parametrize(("kind", "method"), [
    (BasicBlock, "forward"), (ResNet, "_forward_impl"), (nn.BatchNorm2d, "forward"), (nn.Sequential, "forward"),
])  # fmt: skip
def test_a_method_that_a_user_replaced_is_used(tiny, fused_calls, kind, method, monkeypatch):
    """And hooks of all modules are called."""
    usual, networks = getattr(kind, method), [resnet18(), nn.Sequential(nn.Sequential(*make_block()), *make_block())]
    monkeypatch.setattr(kind, method, lambda self, x: 0.5 * usual(self, x))
    for network, x in zip(networks, (torch.randn(2, 3, 32, 32), torch.randn(2, 32, 8, 8)), strict=True):
        expected = copy.deepcopy(network)(x)
        replace_layers(tiny(enable_nhwc=True, fuse_norm_relu="auto"), network)
        assert torch.equal(network(x), expected)
    monkeypatch.undo()
    fused_calls.clear()
    handle = register_module_forward_hook(lambda _module, _inputs, out: out + 1)
    network(x)
    handle.remove()
    assert not fused_calls


def test_only_pytorchs_own_layers_are_fused(tiny):
    """And without any, true is an error; auto says so and does not change the network."""
    half = {"opt_level": "O3", "amp_dtype": "bf16"}
    without = nn.Sequential(nn.BatchNorm2d(3, momentum=None), nn.ReLU(), nn.BatchNorm2d(3), nn.GELU())
    auto, message = tiny(**ON | {"fuse_norm_relu": "auto"}), "has no BatchNorm2d before ReLU that can be fused"
    with pytest.raises(ConfigError, match=message):
        replace_layers(tiny(**ON), without)
    [note] = replace_layers(auto, without).values()
    assert message in note and not any(map(is_fused, without.modules()))
    assert not plan_on(tiny(**ON | half | {"fuse_norm_relu": "auto"})).kernels


@needs_compiler
def test_auto_fuses_eager_steps_over_nhwc_on_a_cpu(tiny, monkeypatch):
    def fuses(device="cpu", **changes):
        return "fuse_norm_relu" in plan_on(tiny(**ON | {"fuse_norm_relu": "auto"} | changes), device).kernels

    assert fuses() and not fuses(fuse_norm_relu=False) and not fuses("cuda")
    assert not fuses(enable_nhwc=False) and not fuses(enable_compile=True)
    monkeypatch.setattr("utils.training.plan.missing_compiler", lambda gpu: "")
    with pytest.raises(ConfigError, match='enable_compile "auto" compiles here'):
        fuses("cuda", fuse_norm_relu=True, enable_compile="auto")


def check_kernels(device):
    """The Triton kernels equal the CPU's: in float32 within the rounding of sums, in bf16 within 2 units in the last of
    8 bits. Where rounding decides the sign before ReLU, gradients may differ: in at most 1 of 1000."""
    from utils.kernels import triton_kernels

    for shape in ((3, 5, 4, 4), (5, 70, 9, 9)):  # one part, and two of 203 and 202 pixels
        for added, dtype in itertools.product((False, True), (torch.float32, torch.bfloat16)):
            x, shortcut, gradient = make_inputs(shape, dtype)
            norm, shortcut = make_norm(shape[1]), shortcut if added else None
            weights = [norm.weight.data, norm.bias.data]
            buffers = [[norm.running_mean.clone(), norm.running_var.clone()] for _ in range(2)]
            cpu = norm_relu(x, shortcut, *weights, *buffers[0], 0.1, 1e-5)
            moved = [value if value is None else value.to(device) for value in (x, shortcut, *weights, *buffers[1])]
            found = [*triton_kernels.forward(*moved, 0.1, 1e-5), *moved[-2:]]
            kept = (gradient, x, cpu[0] if added else None, *weights, *cpu[1:])
            found += triton_kernels.backward(*(value if value is None else value.to(device) for value in kept))
            for mine, reference in zip(found, [*cpu, *buffers[0], *norm_relu_backward(*kept)], strict=True):
                tolerance = 2e-5 if mine.dtype == torch.float32 else 2**-6
                wrong = ~torch.isclose(mine.cpu().float(), reference.float(), rtol=tolerance, atol=tolerance)
                assert wrong.sum() <= wrong.numel() / 1000, (shape, added, dtype, mine.shape)


@needs_compiler
def test_the_triton_kernels_in_tritons_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-c", "from tests.kernels.test_norm_relu import check_kernels; check_kernels('cpu')"]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)


@pytest.mark.parametrize("added", [False, True])
def test_the_triton_kernels_compile_for_an_h100_without_one(tmp_path, monkeypatch, added):
    """The interpreter accepts code that Triton's compiler refuses."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from utils.kernels import triton_kernels as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    maps, numbers = ("x", "shortcut", "out", "gradient", "passed", "grad_x"), ("momentum", "eps")
    counts = ("pixels", "channels", "part_pixels", "num_parts")
    kinds = dict.fromkeys(maps, "*bf16") | dict.fromkeys(numbers, "fp32") | dict.fromkeys(counts, "i32")
    for name in ("_sum_x", "_statistics", "_apply", "_sum_gradient", "_apply_gradient"):
        kernel = getattr(kernels, name)
        names = kernel.arg_names
        constants = {"rows": kernels.ROWS, "columns": kernels.COLUMNS, "added": added, "masked": added}
        constants = {name: value for name, value in constants.items() if name in names}
        signature = {name: "constexpr" if name in constants else kinds.get(name, "*fp32") for name in names}
        source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


@pytest.mark.gpu
@pytest.mark.real_gpu("the fake runtime computes by the CPU's operations")
def test_the_triton_kernels_on_a_gpu():
    check_kernels("cuda")
