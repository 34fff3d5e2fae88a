"""In how many ways a machine can compute an operation: number formats, layouts, and kernels where there are several."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tools.bench.operations import ARITHMETIC, CONVOLUTION, FUSED, NORM, Operation
from utils.config import Config
from utils.training import conv_products, conv_winograd
from utils.training.compilers import has_compiler
from utils.training.flops import number_format
from utils.training.precision import NAMES, choose_precision, has_bf16_kernels
from utils.training.step import wants_graphs

FORWARD, BY_INPUT, BY_WEIGHT, BACKWARD = "forward", "by input", "by weight", "backward"  # passes
PRODUCTS, WINOGRAD = "weights by products", "Winograd"
OWN_KERNELS = {conv_products.convolve: PRODUCTS, conv_winograd.convolve: WINOGRAD}
Backend = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Way:
    """How an operation is computed."""

    name: str
    dtype: torch.dtype
    channels_last: bool
    backend: Backend = nullcontext
    function: Callable[..., Tensor] | None = None  # in place of the operation's own
    only: str = ""  # pass, where it differs from other ways in that one alone


class Machine:
    """What the configuration chooses on this device."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.device = device
        self.precision = choose_precision(config, device)
        self.format = number_format(self.precision, config)
        self.channels_last = config.enable_nhwc
        self.graphed = wants_graphs(config, device)
        has_half = self.precision.level != "O0" or device.type == "cuda" or has_bf16_kernels()
        self.dtypes = [torch.float32, *([self.precision.half] if has_half else [])]

    def own_way(self, operation: Operation) -> Way:
        """As a step computes the operation."""
        kernel = OWN_KERNELS.get(operation.function, "")
        in_half = self.precision.level == "O1" and operation.kind in ARITHMETIC  # AMP: autocast's choice
        dtype = self.precision.half if in_half else operation.feature.dtype
        if kernel == WINOGRAD and not _winograd_takes(operation, dtype):  # a layer is direct for some sizes of images
            kernel = ""
        return self.way(operation, dtype, self.channels_last, kernel)

    def way(self, operation: Operation, dtype: torch.dtype, channels_last: bool, kernel: str = "", **more: Any) -> Way:
        """With the name that the table shows."""
        name = self.format if dtype == torch.float32 and operation.kind in ARITHMETIC and self.format == "tf32" else ""
        name = name or NAMES.get(dtype, "float32")
        if len(operation.feature.sizes) == 4:
            name += " NHWC" if channels_last else " NCHW"
        return Way(f"{name}{f', {kernel}' if kernel else ''}", dtype, channels_last, **more)

    def ways(self, operation: Operation) -> list[Way]:
        """The configuration's own, then the others that this device has."""
        own, dtypes = self.own_way(operation), list(self.dtypes)
        on_gpu = self.device.type == "cuda"
        if operation.kind == NORM and on_gpu and torch.float16 not in dtypes:
            dtypes.append(torch.float16)  # the half format for which PyTorch has cuDNN's
        # the fused kernels walk NHWC
        choose_layout = len(operation.feature.sizes) == 4 and operation.kind != FUSED
        layouts = (False, True) if choose_layout else (own.channels_last,)
        plainly: dict[str, Any] = {"function": functional.conv2d} if operation.function in OWN_KERNELS else {}
        plain = [self.way(operation, dtype, layout, **plainly) for dtype in dtypes for layout in layouts]
        ways = [own, *(way for way in plain if way.name != own.name)]
        if operation.kind == NORM and on_gpu:
            for way in tuple(ways):  # PyTorch chooses between these by format and layout
                make = (operation, way.dtype, way.channels_last)
                ways.append(self.way(*make, "native", backend=lambda: torch.backends.cudnn.flags(enabled=False)))
                if way.dtype != torch.bfloat16:
                    ways.append(self.way(*make, "cuDNN", function=_cudnn_batch_norm))
        if operation.kind == CONVOLUTION and _is_a_product(operation):
            # pixels by channels, without a name for the layout, which only NHWC gives without a copy
            ways += [
                Way(f"{NAMES.get(dtype, 'float32')} product", dtype, True, function=_product) for dtype in self.dtypes
            ]
        elif operation.kind == CONVOLUTION and self.device.type == "cpu" and _can_be_convolved(operation):
            kernels = [
                self.way(operation, dtype, True, PRODUCTS, function=_weights_by_products, only=BY_WEIGHT)
                for dtype in self.dtypes
            ]
            kernels += [
                self.way(operation, dtype, True, WINOGRAD, function=_by_winograd)
                for dtype in self.dtypes
                if _winograd_takes(operation, dtype)
            ]
            ways += [way for way in kernels if way.name != own.name]
        if operation.kind == CONVOLUTION and self.device.type == "cpu" and _nnpack_takes(operation):
            kernel = "NNPACK's Winograd" if operation.weight.sizes[2:] == (3, 3) else "NNPACK"
            # backward without oneDNN is no kernel of NNPACK, and slow
            ways.append(Way(kernel, torch.float32, False, backend=_without_onednn, only=FORWARD))
        return ways


def _cudnn_batch_norm(
    images: Tensor, mean: Tensor | None, variance: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """`batch_norm` by cuDNN, also where PyTorch would not choose it."""
    if weight is None:
        raise RuntimeError("cuDNN has no BatchNorm without weights")
    return torch.cudnn_batch_norm(images, weight, bias, mean, variance, training, momentum, eps)[0]


def _is_a_product(operation: Operation) -> bool:
    sides, padding = operation.weight.sizes[2:], operation.option("padding", 4, 0)
    return sides == (1, 1) and padding in (0, (0, 0), "valid") and operation.option("groups", 6, 1) == 1


def _can_be_convolved(operation: Operation) -> bool:
    plain = operation.option("groups", 6, 1) == 1 and _pair(operation.option("dilation", 5, 1)) == (1, 1)
    return plain and not isinstance(operation.option("padding", 4, 0), str)


def _weights_by_products(
    images: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, *_: Any, **__: Any
) -> Tensor:
    """`conv2d` whose weights' gradient is made of products."""
    return conv_products.convolve(images, weight, bias, _pair(stride), _pair(padding))


def _by_winograd(
    images: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, *_: Any, **__: Any
) -> Tensor:
    """`conv2d` by Winograd's method."""
    return conv_winograd.convolve(images, weight, bias, _pair(stride), _pair(padding))


def _winograd_takes(operation: Operation, dtype: torch.dtype) -> bool:
    images, weight = (torch.empty(each.sizes, dtype=dtype) for each in (operation.feature, operation.weight))
    stride, padding = _pair(operation.option("stride", 3, 1)), _pair(operation.option("padding", 4, 0))
    return has_compiler() and conv_winograd.choose_side(images, weight, stride, padding) is not None


def _product(images: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, *_: Any, **__: Any) -> Tensor:
    """`conv2d` 1x1 as a product of matrices."""
    rows, columns = _pair(stride)
    pixels = images.permute(0, 2, 3, 1)[:, ::rows, ::columns]
    return functional.linear(pixels, weight.flatten(1), bias).permute(0, 3, 1, 2)


@contextmanager
def _without_onednn() -> Iterator[None]:
    # not torch.backends.mkldnn.flags, which warns of TF32 on Intel's GPUs
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before  # type: ignore[assignment]


def _nnpack_takes(operation: Operation) -> bool:
    """Whether PyTorch would give the convolution in float32 to NNPACK, if it were not for oneDNN."""
    padding = operation.option("padding", 4, 0)
    if isinstance(padding, str):
        return False
    images, weight = torch.empty(operation.feature.sizes), torch.empty(operation.weight.sizes)
    stride, dilation = (_pair(operation.option(*which, 1)) for which in (("stride", 3), ("dilation", 5)))
    options = (stride, _pair(padding), dilation, False, [0, 0], operation.option("groups", 6, 1))
    with _without_onednn():
        return "Nnpack" in str(torch._C._select_conv_backend(images, weight, None, *options))  # type: ignore[attr-defined]


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)
