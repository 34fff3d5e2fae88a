"""The learner: everything that a training step reads and changes; and the classifier, the part of it that predicts.

The Trainer and the benches of a step build a `Learner`, the evaluation of a checkpoint only a `Classifier`.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from utils import seeds
from utils.distributed.ddp import distribute, synchronise_batch_norm
from utils.distributed.world import World
from utils.kernels.use import use_kernels
from utils.training.averages import build_ema
from utils.training.config import TrainingConfig
from utils.training.metrics.sums import MetricSums
from utils.training.optimizers.build import build_optimizer, load_optimizer, set_learning_rate
from utils.training.optimizers.schedule import Schedule
from utils.training.plan import Plan
from utils.training.precision import LossScaler, Weights
from utils.training.step import GraphedUpdate, Update, compile_for_shapes, on_capture_stream

SomeConfig = TypeVar("SomeConfig", bound=TrainingConfig)
# parameters of glibc's mallopt (malloc.h): M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
KEEP_MEMORY = ((-4, 0), (-1, 2**31 - 1), (-2, 2**28))


def prepare_backends(config: TrainingConfig, plan: Plan) -> None:
    """Set the process-wide switches of PyTorch, and for ALLOC the C library's."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with it
    torch.use_deterministic_algorithms(config.deterministic)
    torch.backends.cudnn.deterministic = config.deterministic
    # EXTRA: cuDNN times its algorithms on the first batch and keeps the fastest
    torch.backends.cudnn.benchmark = config.extra_opt("cudnn_benchmark") and not config.deterministic
    torch.backends.cudnn.benchmark_limit = config.cudnn_candidates
    # AMP: TF32; PyTorch's default is on for convolutions and off for matrix products
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = config.enable_tf32
    if "keep_memory" in plan.kernels:
        # ALLOC: keep freed memory in the process. By default glibc returns every large block to the kernel, which
        # clears and maps the same pages again in the next step: 600,000 page faults per step of ResNet50 with 128
        # images, an eighth of the step's time.
        for parameter, value in KEEP_MEMORY:
            ctypes.CDLL(None).mallopt(parameter, value)


class Classifier:
    """A network in the precision and memory format of training, with its moving average.

    The network is built by `build_model`, with weights from `seed`. That seeds the random generators and sets PyTorch's
    process-wide switches: learners that take turns in one process must call `prepare_backends` again. `self.plan` is
    the given plan with only the kernels that this network can use."""

    def __init__(
        self, config: SomeConfig, plan: Plan, build_model: Callable[[SomeConfig], nn.Module], world: World
    ) -> None:
        self.config: TrainingConfig = config
        prepare_backends(config, plan)
        seeds.seed_random_state(config.seed)
        model = build_model(config)
        # STEM: FUSE: CONV: our own layers
        skipped = use_kernels(model, plan.kernels, config.stem_channels, plan.precision.dtype, world.device)
        used = {name: demanded for name, demanded in plan.kernels.items() if name not in skipped}
        notes = (*plan.notes, *(f"skipped: {reason}" for reason in skipped.values()))
        self.plan = replace(plan, kernels=used, notes=notes)
        model = synchronise_batch_norm(config, model, world).to(world.device)
        # NHWC: weights in the memory format of the images
        self.model: nn.Module = model.to(memory_format=plan.memory_format)  # type: ignore[call-overload]
        masters = plan.precision.cast_weights(self.model)  # AMP: O2 and O3 change the network's weights
        self.weights, self.ema = Weights(self.model, masters), build_ema(config, self.model)
        self.compiled_size = 0  # images in the batches that `compiled_forward` predicts; 0: none
        self.compiled_forward = plan.precision.forward

    @property
    def validated(self) -> nn.Module:
        """The network that is validated: the moving average if there is one."""
        return self.model if self.ema is None else self.ema.network

    def compile_prediction(self, batch_size: int) -> None:
        """COMPILE: compile the prediction of batches of `batch_size` images. Others stay eager: a validation has at
        most one shorter batch, which would not pay for a second compilation. Names of weights do not change."""
        self.compiled_size, self.compiled_forward = batch_size, compile_for_shapes(self.plan.precision.forward, 1)

    def predict(self, images: Tensor) -> Tensor:
        """Images [N, 3, H, W] -> float32 logits [N, classes] of the validated network, averaged over test-time
        augmentation. AMP: computed in the precision of training."""
        forward = self.compiled_forward if len(images) == self.compiled_size else self.plan.precision.forward
        outputs = [forward(self.validated, view) for view in views(images, self.config.test_time_views)]
        return reduce(torch.add, outputs) / len(outputs)

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_buffers()
        if self.ema is not None:
            yield from self.ema.network.named_buffers(prefix="average")

    def load_network(self, state: dict[str, Any]) -> None:
        """Load weights and moving average from the entries `model` and `average` of a checkpoint."""
        self.weights.load_state_dict(state["model"])
        self.ema = build_ema(self.config, self.model)  # if none was saved, it starts from these weights
        if self.ema is not None and state["average"] is not None:
            self.ema.load_state_dict(state["average"])


def views(images: Tensor, number: int) -> Iterator[Tensor]:
    """Yield the `test_time_views` of images [N, 3, H, W], in the same memory format."""
    yield images
    if number > 1:
        yield images.flip(-1)
    if number > 2:
        height, width = images.shape[-2:]
        padded = nn.functional.pad(images, [1] * 4, mode="replicate")
        for first in (0, 2):
            # a copy, as convolutions make one anyway and a compiled prediction is for one memory format
            shifted = torch.empty_like(images).copy_(padded[..., first : first + height, first : first + width])
            yield shifted
            yield shifted.flip(-1)


class Learner(Classifier):
    """A network and everything that trains it. `steps` counts the optimizer steps so far. Building it is collective."""

    def __init__(
        self, config: SomeConfig, plan: Plan, build_model: Callable[[SomeConfig], nn.Module], world: World,
        steps_per_epoch: int,
    ) -> None:  # fmt: skip
        super().__init__(config, plan, build_model, world)
        seeds.seed_random_state(seeds.seed_of(config.seed, world.rank, step=0))
        plan, weights = self.plan, self.weights  # the plan without kernels that the network cannot use
        self.optimizer = build_optimizer(
            config, weights.parameters(), weights.of_convolutions(), fused=plan.fused_optimizer, graphed=plan.graphed
        )
        self.loss_scaler = LossScaler(plan.precision.device_type, plan.precision.loss_scale)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)
        self.schedule, self.steps = Schedule(config, steps_per_epoch), 0
        self.sums = MetricSums(world.device)
        with on_capture_stream(world.device, graphed=plan.graphed):
            distributed = distribute(config, self.model, world)
        # replaced by the Trainer's clock; updates are compiled and captured, when first called, within it
        self.compile_timer: Callable[[], AbstractContextManager[None]] = nullcontext
        update = Update(self, distributed)
        if plan.compiled:
            update.compile()
        self.update = GraphedUpdate(update, world.device) if plan.graphed else update

    def train_step(self, images: Tensor, labels: Tensor) -> None:
        """Train one optimizer step on this rank's part of a global batch."""
        set_learning_rate(self.optimizer, self.schedule.factor(self.steps))
        self.update(images, labels)
        if self.ema is not None:
            self.ema.update()
        self.steps += 1

    def average_buffers(self, world: World) -> None:
        """Collective. DDP: set each rank's BatchNorm statistics to the mean over all ranks."""
        world.average([buffer for _, buffer in self.named_buffers() if buffer.is_floating_point()])

    @property
    def learning_rate(self) -> float:
        """Learning rate of the last step, of the first group; waits for the device if it is stored there."""
        return float(self.optimizer.param_groups[0]["lr"])

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.steps, "model": self.weights.state_dict(), "optimizer": self.optimizer.state_dict(),
            "average": None if self.ema is None else self.ema.state_dict(),
            "grad_scaler": self.loss_scaler.state_dict(), "plateau": self.schedule.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.load_network(state)
        load_optimizer(self.optimizer, state["optimizer"])
        if state["grad_scaler"]:
            self.loss_scaler.load_state_dict(state["grad_scaler"])
        self.schedule.load_state_dict(state["plateau"])
        self.steps = state["step"]
        if self.steps:  # so that the epoch's record has it if only the validation remains
            set_learning_rate(self.optimizer, self.schedule.factor(self.steps - 1))
