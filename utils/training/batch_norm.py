"""BatchNorm's running statistics under gradient accumulation: one rank with K micro-batches equals K ranks."""

import torch
from torch import Tensor, nn


class RunningStatistics:
    """Over one step, the mean of what each micro-batch alone makes of the running statistics.

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
