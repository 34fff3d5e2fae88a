"""The update of a training step: the code that runs for every batch, so it must not make the host wait for the device,
except for a scaled loss without the fused optimizer (`LossScaler`).

Eager, compiled (`enable_compile`) or captured as a CUDA graph (`enable_cuda_graphs`): all compute the same values.
"""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from utils.training.averages import RunningStatistics
from utils.training.plan import GRAPH_WARMUP_STEPS

if TYPE_CHECKING:
    from utils.training.learner import Learner


def compile_for_shapes(function: Any, number: int) -> Any:
    """COMPILE: return a function or module compiled at its first call with each of `number` shapes of images.

    Dynamo runs further shapes eagerly once a function's code has been compiled `recompile_limit` times, 8 by default,
    which all learners of the process share. So the limit is raised by as many as will be needed.
    """
    torch._dynamo.config.recompile_limit += number
    return torch.compile(function, dynamic=False)


@contextmanager
def mark(name: str) -> Iterator[None]:
    """PROF: mark a `with` block as a range: NVTX's on a GPU, and torch.profiler's; microseconds while none records."""
    nvtx = torch.cuda.nvtx.range(name) if torch.cuda.is_initialized() else nullcontext()
    with nvtx, torch.profiler.record_function(name):
        yield


class Update:
    """zero_grad, forward, loss, backward over the micro-batches, optimizer step, on this rank's part of a global batch.
    Adds loss and correct predictions to the learner's sums. `distributed`: the network as `distribute` returns it."""

    def __init__(self, learner: "Learner", distributed: nn.Module) -> None:
        # no second reference: a captured graph must be freed with the learner, before NCCL ends, which waits for it
        self.learner: Learner = weakref.proxy(learner)
        self.distributed, self.precision = distributed, learner.plan.precision
        self.criterion, self.accumulation = learner.criterion, learner.plan.global_batch.accumulation
        self.statistics = RunningStatistics(distributed) if self.accumulation > 1 else None
        self.loss_of, self.compiled_shapes = self._loss_of, set[torch.Size]()

    def compile(self) -> None:
        """COMPILE: compile forward and loss, and with them their backward, once for each shape of images. The names in
        the model's state and its validation do not change."""
        shapes = len(dict(self.learner.config.progressive_image_sizes)) + 1
        if isinstance(self.distributed, DistributedDataParallel):
            # inside DDP, whose own code would break the graph and be compiled again for steps without communication;
            # Dynamo still splits the network at the borders of DDP's buckets, so that all-reduces overlap backward
            self.distributed.module = compile_for_shapes(self.distributed.module, shapes)
            self.criterion = compile_for_shapes(self.criterion, shapes)
        else:
            self.loss_of = compile_for_shapes(self._loss_of, shapes)

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        learner, config, weights = self.learner, self.learner.config, self.learner.weights
        with mark("zero_grad"):
            # EXTRA: dropping the gradients saves writing zeros and adding to them
            learner.optimizer.zero_grad(set_to_none=config.extra_opt("zero_grad_set_to_none"))

        with mark("forward/loss/backward"):
            micro_batches = list(zip(images.chunk(self.accumulation), labels.chunk(self.accumulation), strict=True))
            if self.statistics is not None:
                self.statistics.start()  # of BatchNorm, over several micro-batches
            for number, (micro_images, micro_labels) in enumerate(micro_batches, start=1):
                last = number == len(micro_batches)
                with self._reduce_gradients(last), self._time_compilation(micro_images.shape):
                    loss, outputs = self.loss_of(micro_images, micro_labels)
                    # AMP: scale the loss so that fp16 gradients do not underflow
                    learner.loss_scaler.scale(loss / self.accumulation if self.accumulation > 1 else loss).backward()
                if self.statistics is not None:
                    self.statistics.collect(last)
                learner.sums.add(loss.detach(), outputs.detach(), micro_labels)

        with mark("optimizer.step"):
            weights.move_gradients_to_masters()  # AMP: O2 only, else nothing
            if config.clip_grad_norm is not None:
                learner.loss_scaler.unscale_(learner.optimizer)  # clip by the norm of the unscaled gradient
                nn.utils.clip_grad_norm_(weights.parameters(), config.clip_grad_norm)
            # optimizer.step(); AMP: with unscaled gradients, skipped if they overflowed
            learner.loss_scaler.step(learner.optimizer)
            learner.loss_scaler.update()
            weights.copy_masters_to_model()  # AMP: O2 only, else nothing

    def _loss_of(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return (loss, float32 logits [N, classes])."""
        outputs = self.precision.forward(self.distributed, images)
        return self.criterion(outputs, labels), outputs

    def _time_compilation(self, shape: torch.Size) -> AbstractContextManager[None]:
        """COMPILE: time the first pass of each shape, whose forward and backward compile."""
        if not self.learner.plan.compiled or shape in self.compiled_shapes:
            return nullcontext()
        self.compiled_shapes.add(shape)
        return self.learner.compile_timer()

    def _reduce_gradients(self, last: bool) -> AbstractContextManager[None]:
        """DDP: average gradients over the ranks once per step, with the last micro-batch."""
        communicates = last and self.learner.config.parallel != "no_communication"
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
            stream = side_stream(self.device, "capture")
            graph = torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local")
            with self.update.learner.compile_timer(), graph:
                self.update(self.images, self.labels)
        with mark("graph replay"):
            self.images.copy_(images)
            self.labels.copy_(labels)
            self.graph.replay()


@cache
def side_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """One stream for each purpose in a process (GRAPHS: PREFETCH:): memory that a stream frees is reused only on it."""
    return torch.cuda.Stream(device)


@contextmanager
def on_capture_stream(device: torch.device, *, graphed: bool) -> Iterator[None]:
    """GRAPHS: run the `with` block on the capture stream, in order with the work before and after. DDP must be built
    there, since it accumulates gradients on the stream that it was built on."""
    if not graphed:
        yield
        return
    stream = side_stream(device, "capture")
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)
