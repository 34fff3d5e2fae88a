"""BatchNorm's batch counters, incremented together."""

from typing import Any

import torch
from torch import nn

COUNTER = "num_batches_tracked"
COUNT_BY_ADD = (nn.modules.batchnorm._BatchNorm.forward, nn.SyncBatchNorm.forward)


class _PassCounter:
    """Replaces a layer's counter during a forward pass."""

    def __init__(self) -> None:
        self.count = 0

    def add_(self, number: int) -> None:
        self.count += number


def defer_batch_counters(model: nn.Module) -> None:
    """Increment all BatchNorm layers' `num_batches_tracked` together after each forward pass of `model`, with the same
    result: on a GPU one kernel instead of one per layer."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    # a user's own class may not count by add_
    layers = [layer for layer in layers if type(layer).forward in COUNT_BY_ADD]
    # without momentum a layer computes with its counter
    layers = [layer for layer in layers if layer.momentum is not None and layer.num_batches_tracked is not None]
    counters: list[Any] = []

    def start(model: nn.Module, inputs: Any) -> None:
        counters[:] = [layer._buffers[COUNTER] for layer in layers]
        for layer in layers:
            layer._buffers[COUNTER] = _PassCounter()  # type: ignore[assignment]

    @torch.no_grad()
    def finish(model: nn.Module, inputs: Any, outputs: Any) -> None:
        passes: list[Any] = [layer._buffers[COUNTER] for layer in layers]
        for layer, counter in zip(layers, counters, strict=True):
            layer._buffers[COUNTER] = counter
        counted = [(counter, one.count) for counter, one in zip(counters, passes, strict=True) if one.count]
        if counted:
            torch._foreach_add_([counter for counter, _ in counted], [count for _, count in counted])

    # on the network itself, not on its DDP wrapper, which broadcasts the buffers before the network's hooks run
    model.register_forward_pre_hook(start)
    model.register_forward_hook(finish, always_call=True)
