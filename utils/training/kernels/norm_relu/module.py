"""FUSE: training-mode BatchNorm, the addition of a shortcut, and ReLU as one function; without a shortcut also SiLU.

Separately they make 13 passes over a feature map in forward and backward, 16 with a shortcut; fused, 8 and 11: the
output is written once, and backward needs no pass for ReLU's mask. It recomputes the mask from what BatchNorm saves
anyway; with a shortcut it reads the mask off the output, which the next convolution saves anyway. Fused, SiLU does not
save its input.

On a GPU the kernels are in triton_kernels.py, on a CPU with a compiler and NHWC memory in cpu.cpp. Otherwise PyTorch's
operations run one after the other: a reference without speed-up.
"""

from collections import Counter
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from utils.errors import ConfigError
from utils.training.config import SpeedConfig
from utils.training.kernels.build import compiles, missing_compiler, use_layers
from utils.training.kernels.norm_relu import cpu as norm_relu_cpu
from utils.training.precision import choose_precision

aten = torch.ops.aten


@torch.library.custom_op("resnet50_at_scale::norm_relu", mutates_args=("running_mean", "running_var"))
def norm_relu(
    x: Tensor, shortcut: Tensor | None, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor,
    momentum: float, eps: float, silu: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (relu(batch_norm(x) + shortcut), mean [C], 1 / deviation [C]) of x [N, C, H, W] and update the running
    statistics. `silu`, without a shortcut: SiLU instead of ReLU. Mean and deviation are at least float32."""
    if norm_relu_cpu.fits(x, weight, bias, running_mean, running_var):
        return norm_relu_cpu.forward(x, shortcut, weight, bias, running_mean, running_var, momentum, eps, silu)
    out, mean, invstd = aten.native_batch_norm(x, weight, bias, running_mean, running_var, True, momentum, eps)
    if shortcut is not None:
        out += shortcut
    # half-precision weights give half-precision statistics
    at_least_float32 = torch.promote_types(mean.dtype, torch.float32)
    return _activate(out, silu), mean.to(at_least_float32), invstd.to(at_least_float32)


@torch.library.custom_op("resnet50_at_scale::norm_relu_backward", mutates_args=())
def norm_relu_backward(
    gradient: Tensor, x: Tensor, out: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor,
    eps: float, silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of x, shortcut, weight and bias. Without a shortcut `out` is None and its gradient empty."""
    if norm_relu_cpu.fits(x, weight, bias, mean, invstd):
        return norm_relu_cpu.backward(gradient, x, out, weight, bias, mean, invstd, silu)
    if out is None:
        centre, scale, shift = (value.view(1, -1, 1, 1) for value in (mean, invstd * weight, bias))
        z = (x - centre) * scale + shift
    else:
        z = out
    passed = aten.silu_backward(gradient, z.to(gradient.dtype)) if silu else torch.where(z > 0, gradient, 0)
    # PyTorch's CPU kernel needs weights and statistics of one type; it does not read running statistics in training
    statistics = weight, None, None, mean.to(weight.dtype), invstd.to(weight.dtype)
    gradients = aten.native_batch_norm_backward(passed, x, *statistics, True, eps, [True] * 3)
    return gradients[0], x.new_empty(0) if out is None else passed, gradients[1], gradients[2]


@norm_relu.register_kernel("cuda")
def _(x: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    from utils.training.kernels.norm_relu import triton_kernels

    with torch.cuda.device(x.device):
        return triton_kernels.forward(x, *others)


@norm_relu_backward.register_kernel("cuda")
def _(gradient: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from utils.training.kernels.norm_relu import triton_kernels

    with torch.cuda.device(gradient.device):
        return triton_kernels.backward(gradient, *others[:-2], *others[-1:])  # without eps


@norm_relu.register_fake
def _(x: Tensor, shortcut: Tensor | None, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    channels = x.new_empty(x.shape[1], dtype=torch.float32)
    return torch.empty_like(x), channels, torch.empty_like(channels)


@norm_relu_backward.register_fake
def _(
    gradient: Tensor, x: Tensor, out: Tensor | None, weight: Tensor, bias: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shortcut_gradient = x.new_empty(0) if out is None else torch.empty_like(x)
    return torch.empty_like(x), shortcut_gradient, torch.empty_like(weight), torch.empty_like(bias)


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
        saved = ctx.saved_tensors
        grad_x, grad_shortcut, grad_weight, grad_bias = norm_relu_backward(gradient, *saved, *ctx.numbers)
        return grad_x, None if saved[1] is None else grad_shortcut, grad_weight, grad_bias, None, None, None, None, None


def _activate(z: Tensor, silu: bool) -> Tensor:
    """Apply the activation in place."""
    return nn.functional.silu(z, inplace=True) if silu else z.relu_()


class NormReLU(nn.BatchNorm2d):
    """BatchNorm2d followed by ReLU; a shortcut is added between them."""

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
        inputs = x, shortcut, self.weight, self.bias, *buffers[1:], self.momentum, self.eps, self.silu
        return _NormReLUFunction.apply(*inputs)  # type: ignore[no-any-return]


class NormSiLU(NormReLU):
    """BatchNorm2d followed by SiLU, without a shortcut: the output does not determine SiLU's derivative."""

    silu = True


ACTIVATIONS = {nn.ReLU: NormReLU, nn.SiLU: NormSiLU}


class FusedBasicBlock(BasicBlock):
    """torchvision's block with `NormReLU`."""

    def forward(self, x: Tensor) -> Tensor:
        """Features [N, C, H, W] -> [N, channels, H / stride, W / stride]."""
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.bn2(self.conv2(self.bn1(self.conv1(x))), shortcut)


class FusedBottleneck(Bottleneck):
    """torchvision's block with `NormReLU`."""

    def forward(self, x: Tensor) -> Tensor:
        """Features [N, C, H, W] -> [N, 4 x channels, H / stride, W / stride]."""
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.bn3(self.conv3(self.bn2(self.conv2(self.bn1(self.conv1(x))))), shortcut)


def fuse_norm_relu(config: SpeedConfig, model: nn.Module, device: torch.device) -> list[str]:
    """Fuse BatchNorm2d and ReLU in `model`'s Sequentials, torchvision's blocks and its ResNets' stems, and BatchNorm2d
    and SiLU in Sequentials, as the setting `fuse_norm_relu` asks; names and parameters stay. Return notes for the log.
    `ConfigError` if the setting is true and nothing can be fused."""
    precision = choose_precision(config, device)
    half_norms = precision.casts_weights and not precision.keep_batchnorm_fp32  # not supported by the CPU kernels
    missing = "" if device.type != "cpu" else "BatchNorm in float32" if half_norms else missing_compiler(device)

    def replace() -> None:
        if device.type == "cpu" and not missing:
            norm_relu_cpu.build()
        if not _fuse(model):
            raise ConfigError(
                "fuse_norm_relu: the network has no BatchNorm2d before ReLU or SiLU that can be fused; use false"
            )

    if config.fuse_norm_relu == "auto" and (config.enable_sync_bn or missing):
        return []
    notes = use_layers(config.fuse_norm_relu, config, device, replace)
    if config.fuse_norm_relu and missing:
        notes.append(f"fuse_norm_relu: uses PyTorch's operations, without speed-up; its kernels need {missing}")
    return notes


def _fuse(model: nn.Module) -> int:
    """Fuse what can be fused; return the number of fused modules."""
    uses = Counter(child for parent in model.modules() for child in parent._modules.values())
    fused = 0
    for module in list(model.modules()):
        if isinstance(module, BasicBlock | Bottleneck | ResNet) and type(module.relu) is not nn.ReLU:
            continue  # the activation was replaced
        if type(module) is BasicBlock:
            fused += _convert(module, FusedBasicBlock, module.bn1, module.bn2)
        elif type(module) is Bottleneck:
            fused += _convert(module, FusedBottleneck, module.bn1, module.bn2, module.bn3)
        elif type(module) is ResNet and _convert(module, ResNet, module.bn1):
            module.relu, fused = nn.Identity(), fused + 1
        elif type(module) is nn.Sequential:
            for place in range(len(module) - 1):
                kind = ACTIVATIONS.get(type(module[place + 1]))
                # elsewhere the same layer may come before another activation
                if kind and uses[module[place]] == 1 and _convert(module, nn.Sequential, module[place], kind=kind):
                    module[place + 1], fused = nn.Identity(), fused + 1
    return fused


def check_fusion(config: SpeedConfig, device: torch.device) -> None:
    """Raise `ConfigError` if `fuse_norm_relu` is true and cannot work here."""
    if config.fuse_norm_relu is not True:
        return
    if compiles(config, device):
        raise ConfigError(
            f"fuse_norm_relu is for eager steps, and enable_compile {str(config.enable_compile).lower()} compiles "
            "here, which also fuses; set one of them to false"
        )
    missing = "Triton; pip install triton" if find_spec("triton") is None else missing_compiler(device)
    if device.type == "cuda" and missing:
        raise ConfigError(f"fuse_norm_relu needs {missing}; else set fuse_norm_relu to false")


def _convert(module: nn.Module, own: type[nn.Module], *norms: Any, kind: type[nn.Module] = NormReLU) -> bool:
    """If all norms are usual BatchNorm2d, make the module an `own` and the norms `kind`s; return whether they are."""
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
