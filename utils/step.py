"""One training step: the only code that runs for every batch, and so the code where a host synchronisation hurts."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from utils.metrics import MetricSums
from utils.precision import Precision
from utils.profiling import Profiler


class TrainStep:
    """zero_grad, forward, loss, backward over the micro-batches, optimizer step."""

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        criterion: nn.Module,
        precision: Precision,
        accumulation: int,
        set_to_none: bool,
        profiler: Profiler,
    ) -> None:
        self.model, self.optimizer, self.criterion = model, optimizer, criterion
        self.precision, self.grad_scaler = precision, precision.grad_scaler()
        self.accumulation, self.set_to_none, self.profiler = accumulation, set_to_none, profiler

    def __call__(self, images: Tensor, labels: Tensor, sums: MetricSums) -> None:
        """One optimizer step on this rank's share of a global batch; adds loss and hits to `sums` on the device."""
        with self.profiler.range("zero_grad"):
            # EXTRA: dropping the gradients saves writing zeros and adding to them
            self.optimizer.zero_grad(set_to_none=self.set_to_none)

        with self.profiler.range("forward/loss/backward"):
            micro_batches = list(zip(images.chunk(self.accumulation), labels.chunk(self.accumulation), strict=True))
            for number, (micro_images, micro_labels) in enumerate(micro_batches, start=1):
                last = number == len(micro_batches)
                with self._reduce_gradients(last):
                    # AMP: forward pass and loss under autocast
                    with self.precision.autocast():
                        outputs = self.model(micro_images)
                        loss = self.criterion(outputs, micro_labels)
                    # AMP: scale the loss so that fp16 gradients do not underflow
                    self.grad_scaler.scale(loss / self.accumulation).backward()
                sums.add(loss.detach(), outputs.detach(), micro_labels)

        with self.profiler.range("optimizer.step"):
            # AMP: unscales the gradients, and skips the step where they overflowed
            self.grad_scaler.step(self.optimizer)
            self.grad_scaler.update()

    def _reduce_gradients(self, last: bool) -> AbstractContextManager[None]:
        """DDP: gradients cross the ranks once a step, with the last micro-batch."""
        if isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        return nullcontext()
