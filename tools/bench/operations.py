"""What a network computes: its convolutions, products, normalisations and so on, each with its shapes, heard in one
forward pass of the network itself. So no network is known here by name."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from utils.training import conv_products, conv_winograd
from utils.training.learner import Learner
from utils.training.norm_relu import NormReLU

CONVOLUTION, LINEAR, NORM, RELU, ADDITION, POOLING, FUSED = (
    "convolution", "linear", "BatchNorm", "ReLU", "addition", "pooling", "BatchNorm and ReLU",
)  # fmt: skip
# by the names of PyTorch's functions, which layers, torch.nn.functional and tensors call
KINDS = {
    "conv2d": CONVOLUTION,
    "linear": LINEAR,
    "batch_norm": NORM,
    **dict.fromkeys(("relu", "relu_"), RELU),
    **dict.fromkeys(("add", "add_"), ADDITION),
    **dict.fromkeys(
        ("max_pool2d", "avg_pool2d", "adaptive_max_pool2d", "adaptive_avg_pool2d", "amax", "mean"), POOLING
    ),
}
WITH_WEIGHTS = (CONVOLUTION, LINEAR, NORM)  # whose first tensor alone comes from the images
ARITHMETIC = (CONVOLUTION, LINEAR)  # autocast computes these in half precision
# layers that compute a convolution in a way of their own
CONVOLVERS: dict[type[nn.Module], Callable[..., Tensor]] = {
    conv_products.ProductConv2d: conv_products.convolve,
    conv_winograd.WinogradConv2d: conv_winograd.convolve,
    conv_winograd.PooledWinogradConv2d: conv_winograd.convolve,  # its pool is noted as an operation behind it
}


@dataclass(frozen=True)
class Spec:
    """A tensor that an operation takes."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_feature: bool  # made of the images: a feature map, with the batch as its first dimension


@dataclass(frozen=True)
class Operation:
    """A call of `function`, with `Spec` in place of tensors, and how often a step has one like it."""

    kind: str
    name: str
    function: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    count: int = 1
    of_backward: bool = False  # computed in the backward pass

    @property
    def tensors(self) -> list[Spec]:
        """All, in the order of the call."""
        return [value for value in (*self.arguments, *self.keywords.values()) if isinstance(value, Spec)]

    @property
    def feature(self) -> Spec:
        """The first tensor."""
        return self.tensors[0]

    @property
    def weight(self) -> Spec:
        """Of a convolution or a linear layer."""
        return self.tensors[1]

    def option(self, name: str, place: int, default: Any) -> Any:
        """What the call says of an option that may stand at a place or by its name."""
        return self.arguments[place] if place < len(self.arguments) else self.keywords.get(name, default)


def hear(learner: Learner, images: Tensor) -> list[Operation]:
    """The distinct operations of a forward pass in training, in its order; operations of one name count once."""
    ear = _Ear()
    hooks = []
    for module in learner.model.modules():
        if isinstance(module, (NormReLU, *CONVOLVERS)):
            hooks += [module.register_forward_pre_hook(ear.enter), module.register_forward_hook(ear.leave)]
    keep_nothing = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing)
    try:
        with ear, keep_nothing:  # gradients are not computed, only which tensors would have them
            learner.precision.forward(learner.model, images)
    finally:
        for hook in hooks:
            hook.remove()
    return list(ear.heard.values())


class _Ear(TorchFunctionMode):
    """Notes each call of a function of KINDS; and as one, whatever they call, NormReLU and layers of CONVOLVERS."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: dict[str, Operation] = {}
        self.inside = 0
        self.uses = WeakTensorKeyDictionary()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = KINDS.get(getattr(function, "__name__", ""))
        if kind and not self.inside:
            self._note(kind, function, args, kwargs or {})
        return function(*args, **(kwargs or {}))

    def enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Before a NormReLU or a layer of CONVOLVERS."""
        if convolve := CONVOLVERS.get(type(module)):
            known = (*inputs, module.weight, module.bias, module.stride, module.padding)
            self._note(CONVOLUTION, convolve, known, {})
        else:
            self._note(FUSED, type(module).forward, (module, *inputs), {})
        self.inside += 1

    def leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """After it."""
        self.inside -= 1
        if type(module) is conv_winograd.PooledWinogradConv2d:
            features = output.new_empty(len(output), module.out_channels, *inputs[0].shape[2:])
            self._note(POOLING, functional.max_pool2d, (features.requires_grad_(output.requires_grad), 2), {})

    def _note(self, kind: str, function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if not tensors or tensors[0].ndim < 2 or not tensors[0].is_floating_point():
            return
        if kind == ADDITION and (len(tensors) != 2 or tensors[0].shape != tensors[1].shape):
            return
        features = tensors[:1] if kind in WITH_WEIGHTS else tensors

        def spec(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            is_feature = any(value is feature for feature in features)
            return Spec(tuple(value.shape), value.dtype, value.requires_grad, is_feature)

        arguments, keywords = tuple(map(spec, args)), {name: spec(value) for name, value in kwargs.items()}
        operation = Operation(kind, "", function, arguments, keywords)
        self._count(replace(operation, name=describe(operation)))
        self._note_forks(features)

    def _note_forks(self, features: Iterable[Tensor]) -> None:
        """Where a feature map is used once more, backward adds one more gradient to its others."""
        for feature in features:
            if not feature.requires_grad:
                continue
            # what works in place makes another one of it
            uses = self.uses.setdefault(feature, {})
            uses[feature._version] = uses.get(feature._version, 0) + 1
            if uses[feature._version] > 1:
                one = Spec(tuple(feature.shape), feature.dtype, False, True)
                name = f"addition of gradients, {_sizes(one)}"
                self._count(Operation(ADDITION, name, Tensor.add_, (one, one), {}, of_backward=True))

    def _count(self, operation: Operation) -> None:
        before = self.heard.get(operation.name)
        self.heard[operation.name] = operation if before is None else replace(before, count=before.count + 1)


def describe(operation: Operation) -> str:
    """A name that operations of equal work share."""
    sizes = _sizes(operation.feature)
    if operation.kind == CONVOLUTION:
        out_channels, _, height, width = operation.weight.sizes
        stride, dilation = (_first(operation.option(*which, 1)) for which in (("stride", 3), ("dilation", 5)))
        groups = operation.option("groups", 6, 1)
        words = [f"convolution {height}x{width}"]
        words += [f"/ {stride}"] if stride > 1 else []
        words += [f"dilated by {dilation}"] if dilation > 1 else []
        words += [f"in {groups} groups"] if groups > 1 else []
        return f"{' '.join(words)}, {sizes} to {out_channels}"
    if operation.kind == LINEAR:
        return f"linear, {sizes} to {operation.weight.sizes[0]}"
    if operation.kind == POOLING:
        kernel = (
            operation.option("kernel_size", 1, "") if operation.function.__name__.startswith(("max", "avg")) else ""
        )
        return f"{operation.function.__name__}{f' {_first(kernel)}' if kernel else ''}, {sizes}"
    if operation.kind == FUSED:
        activation = "SiLU" if operation.arguments[0].silu else "ReLU"
        return f"BatchNorm{', addition' if len(operation.tensors) > 1 else ''} and {activation}, {sizes}"
    return f"{operation.kind}, {sizes}"


def _sizes(spec: Spec) -> str:
    return "x".join(map(str, spec.sizes[1:]))


def _first(value: Any) -> int:
    return int(value[0] if isinstance(value, tuple | list) else value)
