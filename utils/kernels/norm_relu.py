"""FUSE: BatchNorm in training, the addition of a shortcut, and ReLU as one function.

Separately they make 13 passes over a feature map in forward and backward, 16 with a shortcut; fused, 8 and 11: the
output is written once, and backward needs no pass for ReLU's mask. It recomputes the mask from what BatchNorm saves
anyway; with a shortcut it reads the mask off the output, which the next convolution saves anyway.

The layers stay what they are. Only the method that calls them one after the other is replaced, and it looks at each
call whether the kernels can take the layers' place. So a layer that is called separately, shared or observed by a hook
computes what it always did. On a GPU the kernels are in triton_kernels.py, on a CPU in norm_relu.cpp.
"""

from itertools import pairwise
from types import MethodType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.module import _has_any_global_hook
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from utils.errors import ConfigError
from utils.kernels.build import build, in_nhwc, name_of, run


@torch.library.custom_op("resnet50_at_scale::norm_relu", mutates_args=("running_mean", "running_var"))
def norm_relu(
    x: Tensor, shortcut: Tensor | None, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor,
    momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (relu(batch_norm(x) + shortcut), mean [C], 1 / deviation [C]), the last two in float32, of x [N, C, H, W]
    and update the running statistics. On a CPU, x is float32 or bf16 in NHWC memory, the others float32."""
    out, mean, invstd = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    name, added = ("forward", None) if shortcut is None else ("forward_added", in_nhwc(shortcut))
    tensors = x, added, weight, bias, running_mean, running_var, mean, invstd, out
    run("norm_relu", f"{name}_{name_of(x.dtype)}", *tensors, x.numel() // x.shape[1], x.shape[1], momentum, eps)
    return out, mean, invstd


@torch.library.custom_op("resnet50_at_scale::norm_relu_backward", mutates_args=())
def norm_relu_backward(
    gradient: Tensor, x: Tensor, out: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, shortcut, weight and bias. Without a shortcut `out` is None and its gradient empty."""
    gradients = (
        torch.empty_like(x), x.new_empty(0) if out is None else torch.empty_like(x),
        torch.empty_like(weight), torch.empty_like(weight),
    )  # fmt: skip
    name, known = ("backward", x) if out is None else ("backward_added", out)
    tensors = in_nhwc(gradient), x, known, weight, bias, mean, invstd, *gradients
    run("norm_relu", f"{name}_{name_of(x.dtype)}", *tensors, x.numel() // x.shape[1], x.shape[1])
    return gradients


@norm_relu.register_kernel("cuda")
def _(x: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    from utils.kernels import triton_kernels

    with torch.cuda.device(x.device):
        return triton_kernels.forward(x, *others)


@norm_relu_backward.register_kernel("cuda")
def _(gradient: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from utils.kernels import triton_kernels

    with torch.cuda.device(gradient.device):
        return triton_kernels.backward(gradient, *others)


class _NormReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shortcut: Tensor | None, weight: Tensor, bias: Tensor, *others: Any) -> Tensor:
        out, mean, invstd = norm_relu(x, shortcut, weight, bias, *others)
        ctx.save_for_backward(x, None if shortcut is None else out, weight, bias, mean, invstd)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grad_x, grad_shortcut, grad_weight, grad_bias = norm_relu_backward(gradient, *saved)
        return grad_x, None if saved[1] is None else grad_shortcut, grad_weight, grad_bias, None, None, None, None


def normalise(norm: nn.Module, activation: nn.Module, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
    """Return activation(norm(x) + shortcut) of features [N, C, H, W] and a shortcut of their shape."""
    if _can_fuse(norm, activation) and norm.training and _fits(norm, x, shortcut):
        usual: Any = norm  # with buffers and momentum
        usual.num_batches_tracked.add_(1)
        inputs = x, shortcut, norm.weight, norm.bias, norm.running_mean, norm.running_var, usual.momentum, norm.eps
        return _NormReLU.apply(*inputs)  # type: ignore[no-any-return]
    out = norm(x)
    return activation(out if shortcut is None else out + shortcut)  # type: ignore[no-any-return]


def _can_fuse(norm: nn.Module, activation: nn.Module) -> TypeGuard[nn.BatchNorm2d]:
    """Whether these are PyTorch's own layers with the usual settings, and nobody observes or replaces their calls."""
    if type(norm) is not nn.BatchNorm2d or type(activation) is not nn.ReLU or _has_any_global_hook():
        return False
    calls = [
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        for module in (norm, activation)
    ]
    parts = norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.momentum
    usual = (type(norm).forward, type(activation).forward) == FORWARD and all(part is not None for part in parts)
    return usual and not any(calls) and "forward" not in vars(norm) and "forward" not in vars(activation)


def _fits(norm: nn.BatchNorm2d, x: Tensor, shortcut: Tensor | None) -> bool:
    """Whether the kernels take this input; where they do not, PyTorch's layers compute or report what is wrong."""
    if x.dim() != 4 or x.shape[1] != norm.num_features or x.numel() <= x.shape[1]:  # one value has no deviation
        return False
    if shortcut is not None and (shortcut.shape, shortcut.dtype) != (x.shape, x.dtype):
        return False
    if x.is_cuda:
        return x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    channels: Any = norm.weight, norm.bias, norm.running_mean, norm.running_var
    plain = all(value.dtype == torch.float32 and value.is_contiguous() for value in channels)
    nhwc = x.is_cpu and x.is_contiguous(memory_format=torch.channels_last)
    return plain and nhwc and x.dtype in (torch.float32, torch.bfloat16)


def _sequential(self: Any, x: Tensor) -> Tensor:
    layers = iter(self)
    for layer in layers:
        activation = next(layers, None) if type(layer) is nn.BatchNorm2d else None
        x = layer(x) if activation is None else normalise(layer, activation, x)
    return x


def _basic_block(self: Any, x: Tensor) -> Tensor:
    shortcut = x if self.downsample is None else self.downsample(x)
    out = normalise(self.bn1, self.relu, self.conv1(x))
    return normalise(self.bn2, self.relu, self.conv2(out), shortcut)


def _bottleneck(self: Any, x: Tensor) -> Tensor:
    shortcut = x if self.downsample is None else self.downsample(x)
    out = normalise(self.bn1, self.relu, self.conv1(x))
    out = normalise(self.bn2, self.relu, self.conv2(out))
    return normalise(self.bn3, self.relu, self.conv3(out), shortcut)


def _resnet(self: Any, x: Tensor) -> Tensor:
    x = self.maxpool(normalise(self.bn1, self.relu, self.conv1(x)))
    x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
    return self.fc(self.avgpool(x).flatten(1))  # type: ignore[no-any-return]


# The method by which each class calls its layers, as PyTorch and torchvision have it, and its fused form. Only
# instances get the latter: their class stays, since a network may ask for it.
FUSED: dict[type[nn.Module], tuple[Any, Any]] = {
    nn.Sequential: (nn.Sequential.forward, _sequential), BasicBlock: (BasicBlock.forward, _basic_block),
    Bottleneck: (Bottleneck.forward, _bottleneck), ResNet: (ResNet._forward_impl, _resnet),
}  # fmt: skip
FORWARD = nn.BatchNorm2d.forward, nn.ReLU.forward


def fuse_norms(model: nn.Module, device: torch.device) -> None:
    """Fuse layers of Sequentials, torchvision's residual blocks and its ResNets' stems; `ConfigError` if none can."""
    found = []
    for module in model.modules():
        usual, fused = FUSED.get(type(module), (None, None))
        if usual is None or getattr(type(module), usual.__name__) is not usual or usual.__name__ in vars(module):
            continue
        pairs: Any = pairwise(module) if isinstance(module, nn.Sequential) else [(module.bn1, module.relu)]
        if any(_can_fuse(*pair) for pair in pairs):
            found.append((module, usual.__name__, fused))
    if not found:
        raise ConfigError("fuse_norm_relu: the network has no BatchNorm2d before ReLU that can be fused; use false")
    if device.type == "cpu":
        build("norm_relu")
    for module, name, fused in found:
        setattr(module, name, MethodType(fused, module))
