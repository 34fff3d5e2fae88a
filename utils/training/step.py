"""The update of a training step: the code that runs for every batch, so it must not make the host wait for the device,
except for a scaled loss without the fused optimizer (`LossScaler`).

Eager, compiled (`enable_compile`) or captured as a CUDA graph (`enable_cuda_graphs`): all compute the same values.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from utils.training.averages import RunningStatistics
from utils.training.config import TrainingConfig
from utils.training.metrics.sums import MetricSums
from utils.training.plan import GRAPH_WARMUP_STEPS, Plan
from utils.training.precision import LossScaler, Weights
from utils.training.profiler import Profiler

CompileTimer = Callable[[], AbstractContextManager[None]]


def compile_for_shapes(function: Any, number: int) -> Any:
    """COMPILE: return a function or module compiled at its first call with each of `number` shapes of images.

    Dynamo runs further shapes eagerly once a function's code has been compiled `recompile_limit` times, 8 by default,
    which all learners of the process share. So the limit is raised by as many as will be needed.
    """
    torch._dynamo.config.recompile_limit += number
    return torch.compile(function, dynamic=False)


@dataclass(eq=False)
class Update:
    """zero_grad, forward, loss, backward over the micro-batches, optimizer step, on this rank's part of a global batch.
    Adds loss and correct predictions to `sums`. `distributed` is the network as `distribute` returns it."""

    config: TrainingConfig
    plan: Plan
    distributed: nn.Module
    weights: Weights
    criterion: nn.Module
    optimizer: torch.optim.Optimizer
    loss_scaler: LossScaler
    sums: MetricSums
    profiler: Profiler
    compile_timer: CompileTimer

    def __post_init__(self) -> None:
        self.accumulation = self.plan.global_batch.accumulation
        self.statistics = RunningStatistics(self.distributed) if self.accumulation > 1 else None
        self.forward, self.compiled_shapes = self._forward, set[torch.Size]()

    def compile(self) -> None:
        """COMPILE: compile forward and loss, and with them their backward, once for each shape of images. The names in
        the model's state and its validation do not change."""
        shapes = len(dict(self.config.progressive_image_sizes)) + 1
        if isinstance(self.distributed, DistributedDataParallel):
            # inside DDP, whose own code would break the graph and be compiled again for steps without communication;
            # Dynamo still splits the network at the borders of DDP's buckets, so that all-reduces overlap backward
            self.distributed.module = compile_for_shapes(self.distributed.module, shapes)
            self.criterion = compile_for_shapes(self.criterion, shapes)
        else:
            self.forward = compile_for_shapes(self._forward, shapes)

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        with self.profiler.range("zero_grad"):
            # EXTRA: dropping the gradients saves writing zeros and adding to them
            self.optimizer.zero_grad(set_to_none=self.config.extra_opt("zero_grad_set_to_none"))

        with self.profiler.range("forward/loss/backward"):
            micro_batches = list(zip(images.chunk(self.accumulation), labels.chunk(self.accumulation), strict=True))
            if self.statistics is not None:
                self.statistics.start()  # of BatchNorm, over several micro-batches
            for number, (micro_images, micro_labels) in enumerate(micro_batches, start=1):
                last = number == len(micro_batches)
                with self._reduce_gradients(last), self._time_compilation(micro_images.shape):
                    loss, outputs = self.forward(micro_images, micro_labels)
                    # AMP: scale the loss so that fp16 gradients do not underflow
                    self.loss_scaler.scale(loss / self.accumulation if self.accumulation > 1 else loss).backward()
                if self.statistics is not None:
                    self.statistics.collect(last)
                self.sums.add(loss.detach(), outputs.detach(), micro_labels)

        with self.profiler.range("optimizer.step"):
            self.weights.move_gradients_to_masters()  # AMP: O2 only, else nothing
            if self.config.clip_grad_norm is not None:
                self.loss_scaler.unscale_(self.optimizer)  # clip by the norm of the unscaled gradient
                nn.utils.clip_grad_norm_(self.weights.parameters(), self.config.clip_grad_norm)
            # optimizer.step(); AMP: with unscaled gradients, skipped if they overflowed
            self.loss_scaler.step(self.optimizer)
            self.loss_scaler.update()
            self.weights.copy_masters_to_model()  # AMP: O2 only, else nothing

    def _forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return (loss, float32 logits [N, classes])."""
        outputs = self.plan.precision.forward(self.distributed, images)
        return self.criterion(outputs, labels), outputs

    def _time_compilation(self, shape: torch.Size) -> AbstractContextManager[None]:
        """COMPILE: time the first pass of each shape, whose forward and backward compile."""
        if not self.plan.compiled or shape in self.compiled_shapes:
            return nullcontext()
        self.compiled_shapes.add(shape)
        return self.compile_timer()

    def _reduce_gradients(self, last: bool) -> AbstractContextManager[None]:
        """DDP: average gradients over the ranks once per step, with the last micro-batch."""
        communicates = last and self.config.parallel != "no_communication"
        if isinstance(self.distributed, DistributedDataParallel) and not communicates:
            return self.distributed.no_sync()
        return nullcontext()


class GraphedUpdate:
    """GRAPHS: the whole update captured as one CUDA graph, so the host makes one launch instead of thousands.

    The first updates of each image size run eagerly on a side stream, as PyTorch requires; they train like all others.
    The graph reads its batch from fixed buffers, and learning rate and loss scale from tensors.
    """

    def __init__(self, update: Update, device: torch.device) -> None:
        self.update, self.device = update, device
        self.shape: torch.Size | None = None
        self.eager_updates, self.captured = 0, False

    def replays(self, images: Tensor) -> bool:
        """Whether an update with these images will replay the graph."""
        return self.captured and images.shape == self.shape

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        if images.shape != self.shape:
            self.shape, self.eager_updates, self.captured = images.shape, 0, False
            self.graph = torch.cuda.CUDAGraph()
        if self.eager_updates < GRAPH_WARMUP_STEPS:
            self.eager_updates += 1
            with on_capture_stream(self.device, graphed=True):
                self.update(images, labels)
            return
        if not self.captured:
            self.captured, self.images, self.labels = True, images.clone(), labels.clone()
            # thread_local: NCCL's watchdog and the loader's pin-memory thread may use CUDA meanwhile
            graph = torch.cuda.graph(self.graph, stream=capture_stream(self.device), capture_error_mode="thread_local")
            with self.update.compile_timer(), graph:
                self.update(self.images, self.labels)
        with self.update.profiler.range("graph replay"):
            self.images.copy_(images)
            self.labels.copy_(labels)
            self.graph.replay()


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """GRAPHS: the side stream that captures steps."""
    return torch.cuda.Stream(device)


@contextmanager
def on_capture_stream(device: torch.device, *, graphed: bool) -> Iterator[None]:
    """GRAPHS: run the `with` block on the capture stream, in order with the work before and after. DDP must be built
    there, since it accumulates gradients on the stream that it was built on."""
    if not graphed:
        yield
        return
    stream = capture_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)
