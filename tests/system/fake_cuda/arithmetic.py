"""Arithmetic for the fake CUDA runtime, whose kernels do nothing: PyTorch's CPU kernels compute instead.

Operations captured in a graph are repeated at the same addresses whenever it is replayed, so a stale address shows as a
wrong number. Half precision convolutions, matrix products, batch normalisations and SGD are computed in float32 and
rounded, as on a GPU.
"""

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tests.system.fake_cuda import runtime, sync_batch_norm
from utils.kernels.norm_relu import norm_relu, norm_relu_backward

aten = torch.ops.aten
NORM_RELU, NORM_RELU_BACKWARD = (kernel._opoverload for kernel in (norm_relu, norm_relu_backward))
HALVES = (torch.float16, torch.bfloat16)
IGNORED_NAMESPACES = ("c10d", "profiler", "prim")
# Operations that allocate or describe memory and compute nothing.
NO_ARITHMETIC = {
    "record_stream", "_local_scalar_dense", "is_pinned", "pin_memory", "_pin_memory", "empty", "empty_like", "detach",
    "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_", "is_same_size",
}  # fmt: skip

# Operations that change BatchNorm's statistics in place and also return new tensors.
NEW_RESULTS = {"native_batch_norm", "cudnn_batch_norm", "norm_relu"}


def on_cpu(value):
    """Return a CPU tensor over the memory of a CUDA tensor, and anything else unchanged."""
    if not isinstance(value, Tensor) or value.device.type != "cuda":
        return value
    storage = value.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=value.dtype).set_(whole, value.storage_offset(), value.shape, value.stride())


def _batch_norm(x, weight, bias, mean, var, *options):
    """cuDNN's batch normalisation, which also returns memory for its backward pass."""
    return *aten.native_batch_norm(x, weight, bias, mean, var, *options), torch.empty(0, dtype=torch.uint8)


def _batch_norm_backward(x, gradient, weight, mean, var, saved_mean, saved_var, epsilon, _):
    wanted = [True, True, True]
    return aten.native_batch_norm_backward(gradient, x, weight, mean, var, saved_mean, saved_var, True, epsilon, wanted)


def _in_float32(kernel, changes_arguments=False):
    """Return `kernel` computing half precision in float32; arguments that it changes in place are rounded back."""

    def run(*arguments, **options):
        narrows, structure = tree_flatten(arguments)
        wide = [value.float() if isinstance(value, Tensor) and value.dtype in HALVES else value for value in narrows]
        result = kernel(*tree_unflatten(wide, structure), **options)
        if changes_arguments:
            for narrow, widened in zip(narrows, wide, strict=True):
                if widened is not narrow:
                    narrow.copy_(widened)
        return result

    return run


REPLACED: dict[Any, Callable[..., Any]] = {
    aten.convolution.default: _in_float32(aten.convolution.default),
    aten.convolution_backward.default: _in_float32(aten.convolution_backward.default),
    aten.addmm.default: _in_float32(aten.addmm.default),
    aten.mm.default: _in_float32(aten.mm.default),
    aten.native_batch_norm.default: _in_float32(aten.native_batch_norm.default, changes_arguments=True),
    aten.native_batch_norm_backward.default: _in_float32(aten.native_batch_norm_backward.default),
    aten.cudnn_batch_norm.default: _in_float32(_batch_norm, changes_arguments=True),
    aten.cudnn_batch_norm_backward.default: _in_float32(_batch_norm_backward),
    NORM_RELU: _in_float32(NORM_RELU, changes_arguments=True),
    NORM_RELU_BACKWARD: _in_float32(NORM_RELU_BACKWARD),
    # the CPU's kernels update half-precision weights wrongly before torch 2.14
    aten._fused_sgd_.default: _in_float32(aten._fused_sgd_.default, changes_arguments=True),
    aten._fused_sgd_.tensor_lr: _in_float32(aten._fused_sgd_.tensor_lr, changes_arguments=True),
    **{operation: _in_float32(kernel) for operation, kernel in sync_batch_norm.KERNELS.items()},
}


def _only_views(operation):
    """Whether all results are views of arguments."""
    returns = operation._schema.returns
    return bool(returns) and all(value.alias_info is not None and not value.alias_info.is_write for value in returns)


class Arithmetic(TorchDispatchMode):
    """While it is entered, CUDA tensors hold what the CPU computes."""

    captured: list[Callable[[], None]] | None = None  # operations of the current capture
    listener: Any = None  # kept alive because C++ calls it

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operation is aten.equal.default:  # returns a host value
            return operation(*tree_map(on_cpu, args))
        if operation is aten.index.Tensor:
            args = (args[0], [_as_indices(index) for index in args[1]])
        out = operation(*args, **kwargs)
        name = operation._schema.name.split("::")[1]
        tensors = [value for value in tree_flatten((args, kwargs, out))[0] if isinstance(value, Tensor)]
        if (
            operation.namespace in IGNORED_NAMESPACES
            or name in NO_ARITHMETIC
            or _only_views(operation)
            or not any(tensor.device.type == "cuda" for tensor in tensors)
        ):
            return out
        compute = self._repeat(operation, name, args, kwargs, out)
        if self.captured is not None and torch.cuda.is_current_stream_capturing():
            self.captured.append(compute)
        else:
            with torch.no_grad():
                compute()
        return out

    def _repeat(self, operation, name, args, kwargs, out):
        """Return a function that runs the operation on the same memory by a CPU kernel."""
        if self.captured is not None:
            args, kwargs = tree_map(_as_captured, (args, kwargs))
        args, kwargs, out = tree_map(on_cpu, (args, kwargs, out))
        if kwargs.get("device") is not None and name != "copy_":
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        in_place = operation._schema.is_mutable and name not in NEW_RESULTS
        kernel = REPLACED.get(operation, operation)

        def compute():
            result = kernel(*args, **kwargs)
            if not in_place:
                for target, source in zip(tree_flatten(out)[0], tree_flatten(result)[0], strict=False):
                    # a GPU's unused results are empty here, such as BatchNorm's statistics in evaluation
                    if isinstance(target, Tensor) and isinstance(source, Tensor) and target.numel() and source.numel():
                        target.copy_(source)

        return compute


def _as_indices(index):
    """Return a mask [N] as indices, whose number determines the shape of the result."""
    if index is None or index.dtype is not torch.bool or index.device.type != "cuda" or index.dim() != 1:
        return index
    return on_cpu(index).nonzero().squeeze(1).to(index.device)


def _as_captured(value):
    """Copy a host scalar, whose value is fixed at capture; device memory is read at replay."""
    return value.clone() if isinstance(value, Tensor) and value.device.type == "cpu" and value.dim() == 0 else value


def start():
    """Compute from now on in this process."""
    if Arithmetic.listener is not None:
        return
    graph = torch.cuda.CUDAGraph
    begin, end, replay = graph.capture_begin, graph.capture_end, graph.replay

    def capture_begin(self, *arguments, **options):
        begin(self, *arguments, **options)
        Arithmetic.captured = []

    def capture_end(self):
        self.computations = Arithmetic.captured or []  # live as long as the graph
        Arithmetic.captured = None
        end(self)

    def replay_and_compute(self):
        replay(self)
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            for compute in self.computations:
                compute()

    def repeat_collective(number):
        """Add an NCCL call to the capture; any thread may make it."""
        if Arithmetic.captured is not None:
            Arithmetic.captured.append(partial(library.fake_cuda_repeat_collective, number))

    def print_as_on_cpu(tensor, **options):
        """PyTorch prints without dispatch modes and would read memory that nothing was written to."""
        return as_text(on_cpu(tensor), **options)

    def run_and_compute(thread):
        """A mode belongs to one thread; DataParallel has one per device."""
        with Arithmetic():
            run(thread)

    run, threading.Thread.run = threading.Thread.run, run_and_compute
    as_text, torch._tensor_str._str = torch._tensor_str._str, print_as_on_cpu
    library = runtime.load_library()
    Arithmetic.listener = ctypes.CFUNCTYPE(None, ctypes.c_size_t)(repeat_collective)
    library.fake_cuda_on_captured_collective(Arithmetic.listener)
    graph.capture_begin, graph.capture_end, graph.replay = capture_begin, capture_end, replay_and_compute
    Arithmetic().__enter__()
