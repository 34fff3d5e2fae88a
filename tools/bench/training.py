"""The training step of a configuration, as the Trainer builds it."""

import itertools
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models import build_model
from tools.bench.common import synchronize
from utils.config import Config
from utils.data.build import Loader, build_loaders, open_dataset
from utils.distributed.ddp import distribute, synchronise_batch_norm
from utils.distributed.world import World, choose_device
from utils.profiling.profiler import Profiler
from utils.training.backends import prepare_backends
from utils.training.batches import Batch, prefetch
from utils.training.metrics import MetricSums
from utils.training.optimizer import build_optimizer
from utils.training.precision import MasterWeights, Precision, choose_precision
from utils.training.step import GRAPH_WARMUP_STEPS, Step, build_step, wants_graphs


@dataclass
class Training:
    """A fresh network with its optimizer; calling it trains one step."""

    model: nn.Module
    weights: MasterWeights
    optimizer: torch.optim.Optimizer
    precision: Precision
    step: Step
    sums: MetricSums
    profiler: Profiler

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        self.step(images, labels, self.sums)


def build_training(
    config: Config, world: World, wrap: Callable[[Config, nn.Module, World], nn.Module] = distribute
) -> Training:
    """Collective: what `config` trains with, its network spread over the ranks by `wrap`. Sets PyTorch's process-wide
    switches too: rungs that take turns set them each time."""
    prepare_backends(config, world.device)
    torch.manual_seed(config.seed)
    model = synchronise_batch_norm(config, build_model(config), world).to(world.device)
    if config.enable_nhwc:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    precision, profiler = choose_precision(config, world.device), Profiler(world.device)
    weights = MasterWeights(model, precision)
    optimizer = build_optimizer(config, weights.parameters(), graphed=wants_graphs(config, world.device))
    step, _ = build_step(
        config,
        world,
        weights=weights,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(label_smoothing=config.label_smoothing),
        precision=precision,
        loss_scaler=precision.loss_scaler(),
        profiler=profiler,
        wrap=wrap,
    )
    return Training(model, weights, optimizer, precision, step, MetricSums(world.device), profiler)


def capture_steps(config: Config, device: torch.device) -> int:
    """Steps up to and with the one that captures a graph, all slower than what follows; 0 without graphs."""
    return GRAPH_WARMUP_STEPS + 1 if wants_graphs(config, device) else 0


class Rung:
    """A configuration's training step, and its loader alone and together with it; a trial tells images per second."""

    def __init__(self, config: Config) -> None:
        self.world = alone(config)
        self.training = build_training(config, self.world)
        self.training.model.train()
        self.config, self.images = config, config.batch_size
        self.loader = build_loaders(config, open_dataset(config, self.world), self.world).train
        self.batch = next(iter(self.loader))
        for _ in range(capture_steps(config, self.world.device)):
            self.training(*self.batch)

    def __call__(self, warmup: int, iters: int) -> dict[str, float]:
        """{"compute", "io", "full": images/s, "seconds": of the whole trial, "memory": bytes at most}."""
        started = time.perf_counter()
        compute = self._time(itertools.repeat(self.batch), warmup, iters, self.training)
        io = self._time(endless(self.loader), warmup, iters, lambda images, labels: None)
        full = self._full(warmup, iters)
        values = {"compute": compute, "io": io, "full": full, "memory": peak_memory(self.world.device)}
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()  # for the other rungs; the next warm-up takes it again
        return values | {"seconds": time.perf_counter() - started}

    def _full(self, warmup: int, iters: int) -> float:
        """Images per second of loader and step together."""
        batches = prefetch(self.config, endless(self.loader), self.world.device)
        return self._time(batches, warmup, iters, self.training)

    def _time(
        self, batches: Iterator[Batch], warmup: int, iters: int, consume: Callable[[Tensor, Tensor], None]
    ) -> float:
        for images, labels in itertools.islice(batches, warmup):
            consume(images, labels)
        synchronize(self.world.device)
        started = time.perf_counter()
        for images, labels in itertools.islice(batches, iters):
            consume(images, labels)
        synchronize(self.world.device)
        return iters * self.images / (time.perf_counter() - started)


def alone(config: Config) -> World:
    """The place of a single process on the configuration's device."""
    return World(rank=0, local_rank=0, world_size=1, device=choose_device(config.device, 0))


def endless(loader: Loader) -> Iterator[Batch]:
    """The batches of one epoch after the other."""
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        yield from loader


def peak_memory(device: torch.device) -> float:
    """Bytes that this process held at most: of the GPU, or of the machine."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_reserved(device))
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux counts in KiB


def training_flops_per_image(config: Config, image_shape: tuple[int, int, int]) -> float:
    """Floating-point operations of forward and backward pass for one image, a multiply-add counted as two."""
    from torch.utils.flop_counter import FlopCounterMode

    model = build_model(config)
    images = torch.zeros(2, *image_shape)
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    return counter.get_total_flops() / 2
