"""BatchNorm's buffers during a step: running statistics under gradient accumulation, and the counts of batches."""

from typing import Any

import torch
from torch import Tensor, nn

from utils.training.norm_relu import NormReLU

COUNT_BY_ADD = (nn.modules.batchnorm._BatchNorm.forward, nn.SyncBatchNorm.forward, NormReLU.forward)


class RunningStatistics:
    """Over one step, the mean of what each micro-batch alone makes of the running statistics: one rank with K
    micro-batches equals K ranks.

    Left to itself, BatchNorm moves them once per micro-batch and forgets K times as fast as on K ranks, of which each
    moves its own once, and whose mean validation takes. The update is linear, so that the mean of every step and the
    mean once before validation are the same.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
        buffers = [(layer.running_mean, layer.running_var) for layer in layers]
        self.buffers: list[Tensor] = [buffer for pair in buffers for buffer in pair if buffer is not None]
        self.before = [torch.empty_like(buffer) for buffer in self.buffers]
        self.total = [torch.empty_like(buffer) for buffer in self.buffers]
        self.collected = 0

    @torch.no_grad()
    def start(self) -> None:
        """Begin a step."""
        if self.buffers:
            torch._foreach_copy_(self.before, self.buffers)
            torch._foreach_zero_(self.total)
        self.collected = 0

    @torch.no_grad()
    def collect(self, last: bool) -> None:
        """After a micro-batch: keep its statistics and go back for the next; after the last, set their mean."""
        self.collected += 1
        if not self.buffers:
            return
        torch._foreach_add_(self.total, self.buffers)
        torch._foreach_copy_(self.buffers, self.before)
        if last:
            torch._foreach_copy_(self.buffers, self.total)
            torch._foreach_div_(self.buffers, self.collected)


class Tally:
    """Stands in a layer's counter's place during a forward pass."""

    def __init__(self) -> None:
        self.count = 0

    def add_(self, number: int) -> None:
        self.count += number


class Counters:
    """Raises the counts of batches, `num_batches_tracked`, of all BatchNorm layers at once behind each forward pass of
    `model`, to the values that the layers themselves give them: on a GPU one kernel in place of one a layer."""

    NAME = "num_batches_tracked"

    def __init__(self, model: nn.Module) -> None:
        layers = [layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
        # a class of the user's own may count otherwise than by add_
        layers = [layer for layer in layers if type(layer).forward in COUNT_BY_ADD]
        # without momentum a layer computes with its count
        self.layers = [
            layer for layer in layers if layer.momentum is not None and layer.num_batches_tracked is not None
        ]
        self.waiting: list[tuple[Tensor, Tally]] = []
        # on the network itself, not on what spreads it over ranks: DDP broadcasts its buffers before
        model.register_forward_pre_hook(self._start)
        model.register_forward_hook(self._finish, always_call=True)

    def _start(self, model: nn.Module, inputs: Any) -> None:
        self.waiting = [(layer._buffers[self.NAME], Tally()) for layer in self.layers]  # type: ignore[misc]
        for layer, (_, tally) in zip(self.layers, self.waiting, strict=True):
            layer._buffers[self.NAME] = tally  # type: ignore[assignment]

    @torch.no_grad()
    def _finish(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        for layer, (counter, _) in zip(self.layers, self.waiting, strict=True):
            layer._buffers[self.NAME] = counter
        counted = [(counter, tally.count) for counter, tally in self.waiting if tally.count]
        self.waiting = []
        if counted:
            counters, counts = zip(*counted, strict=True)
            torch._foreach_add_(counters, counts)
