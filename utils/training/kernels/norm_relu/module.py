"""FUSE: BatchNorm of training, the addition of a shortcut, and ReLU as one function; without a shortcut also SiLU.

One after the other they read or write a feature map 13 times in forward and backward, 16 times with a shortcut. As one
it is 8 and 11 times: the output is written once, and backward needs no pass for ReLU's mask. It computes the mask from
what BatchNorm keeps anyway; with a shortcut it reads it off the output, which the next convolution keeps anyway. SiLU
keeps its input otherwise, which as one it does not.
On a GPU Triton's kernels do so, on a CPU those of cpu.cpp where there is a compiler and memory is NHWC. Else
PyTorch's operations follow each other: a reference that saves nothing.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from utils.errors import ConfigError
from utils.training.config import SpeedConfig
from utils.training.kernels.compilers import compiles, failure_to_build, missing_compiler, wants_own_layers
from utils.training.kernels.norm_relu import cpu as norm_relu_cpu
from utils.training.precision import choose_precision

aten = torch.ops.aten


@torch.library.custom_op("resnet50_at_scale::norm_relu", mutates_args=("running_mean", "running_var"))
def norm_relu(
    x: Tensor, shortcut: Tensor | None, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor,
    momentum: float, eps: float, silu: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(relu(batch_norm(x) + shortcut), mean [C], 1 / deviation [C]) of x [N, C, H, W]; moves the running statistics.
    With `silu`, where there is no shortcut, SiLU in place of ReLU. Mean and deviation of half numbers are float32."""
    if norm_relu_cpu.fits(x, weight, bias, running_mean, running_var):
        return norm_relu_cpu.forward(x, shortcut, weight, bias, running_mean, running_var, momentum, eps, silu)
    out, mean, invstd = aten.native_batch_norm(x, weight, bias, running_mean, running_var, True, momentum, eps)
    if shortcut is not None:
        out += shortcut
    kept = torch.promote_types(mean.dtype, torch.float32)  # half where the weights are half
    return _activate(out, silu), mean.to(kept), invstd.to(kept)


@torch.library.custom_op("resnet50_at_scale::norm_relu_backward", mutates_args=())
def norm_relu_backward(
    gradient: Tensor, x: Tensor, out: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor,
    eps: float, silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, shortcut, weight and bias; `out` where there was a shortcut, else its gradient is empty."""
    if norm_relu_cpu.fits(x, weight, bias, mean, invstd):
        return norm_relu_cpu.backward(gradient, x, out, weight, bias, mean, invstd, silu)
    if out is None:
        mean_of, scale, shift = (value.view(1, -1, 1, 1) for value in (mean, invstd * weight, bias))
        z = (x - mean_of) * scale + shift
    else:
        z = out
    passed = aten.silu_backward(gradient, z.to(gradient.dtype)) if silu else torch.where(z > 0, gradient, 0)
    # PyTorch's kernel for CPUs asks for one type of weights and statistics; running ones are not read in training
    known = weight, None, None, mean.to(weight.dtype), invstd.to(weight.dtype)
    gradients = aten.native_batch_norm_backward(passed, x, *known, True, eps, [True] * 3)
    return gradients[0], x.new_empty(0) if out is None else passed, gradients[1], gradients[2]


@norm_relu.register_kernel("cuda")
def _(x: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    from utils.training.kernels.norm_relu import triton_kernels as norm_relu_kernels

    with torch.cuda.device(x.device):
        return norm_relu_kernels.forward(x, *others)


@norm_relu_backward.register_kernel("cuda")
def _(gradient: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from utils.training.kernels.norm_relu import triton_kernels as norm_relu_kernels

    with torch.cuda.device(gradient.device):
        return norm_relu_kernels.backward(gradient, *others[:-2], *others[-1:])  # without eps


@norm_relu.register_fake
def _(x: Tensor, shortcut: Tensor | None, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    channels = x.new_empty(x.shape[1], dtype=torch.float32)
    return torch.empty_like(x), channels, torch.empty_like(channels)


@norm_relu_backward.register_fake
def _(
    gradient: Tensor, x: Tensor, out: Tensor | None, weight: Tensor, bias: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_shortcut = x.new_empty(0) if out is None else torch.empty_like(x)
    return torch.empty_like(x), of_shortcut, torch.empty_like(weight), torch.empty_like(bias)


class _NormReLUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shortcut: Tensor | None, weight: Tensor, bias: Tensor, *others: Any) -> Tensor:
        out, mean, invstd = norm_relu(x, shortcut, weight, bias, *others)
        ctx.save_for_backward(x, None if shortcut is None else out, weight, bias, mean, invstd)
        ctx.numbers = others[-2:]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        of_x, of_shortcut, of_weight, of_bias = norm_relu_backward(gradient, *kept, *ctx.numbers)
        return of_x, None if kept[1] is None else of_shortcut, of_weight, of_bias, None, None, None, None, None


def _activate(z: Tensor, silu: bool) -> Tensor:
    """In place."""
    return nn.functional.silu(z, inplace=True) if silu else z.relu_()


class NormReLU(nn.BatchNorm2d):
    """BatchNorm2d and the ReLU behind it; a shortcut is added between them."""

    silu = False

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        """Features [N, C, H, W] and a shortcut of their shape -> the same shape."""
        assert shortcut is None or not self.silu
        if not self.training:
            out = super().forward(x)
            return _activate(out if shortcut is None else out + shortcut, self.silu)
        self._check_input_dim(x)
        if x.numel() == x.shape[1]:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")
        buffers: Any = self.num_batches_tracked, self.running_mean, self.running_var
        buffers[0].add_(1)
        known = x, shortcut, self.weight, self.bias, *buffers[1:], self.momentum, self.eps, self.silu
        return _NormReLUFunction.apply(*known)  # type: ignore[no-any-return]


class NormSiLU(NormReLU):
    """BatchNorm2d and the SiLU behind it, without a shortcut: its slope could not be read off the output."""

    silu = True


ACTIVATIONS = {nn.ReLU: NormReLU, nn.SiLU: NormSiLU}


class FusedBasicBlock(BasicBlock):
    """torchvision's, whose BatchNorms are `NormReLU`."""

    def forward(self, x: Tensor) -> Tensor:
        """Features [N, C, H, W] -> [N, channels, H / stride, W / stride]."""
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.bn2(self.conv2(self.bn1(self.conv1(x))), shortcut)


class FusedBottleneck(Bottleneck):
    """torchvision's, whose BatchNorms are `NormReLU`."""

    def forward(self, x: Tensor) -> Tensor:
        """Features [N, C, H, W] -> [N, 4 x channels, H / stride, W / stride]."""
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.bn3(self.conv3(self.bn2(self.conv2(self.bn1(self.conv1(x))))), shortcut)


def fuse_norm_relu(config: SpeedConfig, model: nn.Module, device: torch.device) -> list[str]:
    """Make one of each BatchNorm2d and ReLU in `model`'s Sequentials, torchvision's blocks and its ResNets' stems, in
    Sequentials also of SiLU, as `fuse_norm_relu` asks; names and parameters stay. Returns notes for the log.
    `ConfigError` where there is none."""
    precision = choose_precision(config, device)
    half_norms = precision.casts_weights and not precision.keep_batchnorm_fp32  # which the CPU's kernels do not take
    auto = not config.enable_sync_bn and not half_norms and norm_relu_cpu.has_compiler()
    if not wants_own_layers(config, "fuse_norm_relu", device, auto=auto):
        return []
    if device.type == "cpu" and norm_relu_cpu.has_compiler():
        failure = failure_to_build(norm_relu_cpu.build, config.fuse_norm_relu)
        if failure:
            return [failure]
    fused = _fuse(model)
    if not fused and config.fuse_norm_relu is True:
        raise ConfigError(
            "fuse_norm_relu true: the network has no BatchNorm2d and ReLU, or SiLU, that can be one; use false"
        )
    missing = "BatchNorm in float32" if half_norms else missing_compiler(device)
    if fused and device.type == "cpu" and missing:
        return [f"fuse_norm_relu: PyTorch's operations, without gain; kernels would need {missing}"]
    return []


def _fuse(model: nn.Module) -> int:
    """Does so; returns how many there are."""
    fused = 0
    for module in list(model.modules()):
        if isinstance(module, BasicBlock | Bottleneck | ResNet) and type(module.relu) is not nn.ReLU:
            continue  # another activation in its place
        if type(module) is BasicBlock:
            fused += _become(module, FusedBasicBlock, module.bn1, module.bn2)
        elif type(module) is Bottleneck:
            fused += _become(module, FusedBottleneck, module.bn1, module.bn2, module.bn3)
        elif type(module) is ResNet and _become(module, ResNet, module.bn1):
            module.relu, fused = nn.Identity(), fused + 1
        elif type(module) is nn.Sequential:
            for place in range(len(module) - 1):
                kind = ACTIVATIONS.get(type(module[place + 1]))
                if kind and _become(module, nn.Sequential, module[place], kind=kind):
                    module[place + 1], fused = nn.Identity(), fused + 1
    return fused


def check_fusion(config: SpeedConfig, device: torch.device) -> None:
    """`ConfigError` where a step asks for `fuse_norm_relu` and cannot have it."""
    if config.fuse_norm_relu is not True:
        return
    if compiles(config, device):
        raise ConfigError(
            f"fuse_norm_relu is for eager steps, and enable_compile {str(config.enable_compile).lower()} compiles "
            "here, which fuses by itself; set one of them to false"
        )
    missing = "Triton; pip install triton" if find_spec("triton") is None else missing_compiler(device)
    if device.type == "cuda" and missing:
        raise ConfigError(f"fuse_norm_relu needs {missing}, or set fuse_norm_relu to false")


def _become(module: nn.Module, own: type[nn.Module], *norms: Any, kind: type[nn.Module] = NormReLU) -> bool:
    """Make an `own` of the module and a `kind` of its norms, unless one is no usual BatchNorm2d."""
    usual = [
        type(norm) is nn.BatchNorm2d and norm.affine and norm.track_running_stats and norm.momentum is not None
        for norm in norms
    ]
    if not all(usual):
        return False
    module.__class__ = own
    for norm in norms:
        norm.__class__ = kind
    return True
