"""The training step of a configuration, as the Trainer builds it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models import build_model
from utils.backends import prepare_backends
from utils.config import Config
from utils.distributed import Distributed, split_batch
from utils.metrics import MetricSums
from utils.optim import build_optimizer
from utils.parallel import distribute
from utils.precision import MasterWeights, Precision, choose_precision
from utils.profiling import Profiler
from utils.step import Step, TrainStep, capture_stream, choose_step, wants_graphs


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
    config: Config, place: Distributed, wrap: Callable[[Config, nn.Module, Distributed], nn.Module] = distribute
) -> Training:
    """Collective: what `config` trains with, its network spread over the ranks by `wrap`. Sets PyTorch's process-wide
    switches too: rungs that take turns set them each time."""
    prepare_backends(config, place.device)
    torch.manual_seed(config.seed)
    model = build_model(config).to(place.device)
    if config.enable_nhwc:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    precision, profiler = choose_precision(config, place.device), Profiler(place.device)
    weights = MasterWeights(model, precision)
    graphed = wants_graphs(config, place.device)
    optimizer = build_optimizer(config, weights.parameters(), graphed=graphed)
    # GRAPHS: DDP must be built on the stream that the graph is captured on
    with torch.cuda.stream(capture_stream(place.device) if graphed else None):
        wrapped = wrap(config, model, place)
    step = TrainStep(
        model=wrapped,
        weights=weights,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(label_smoothing=config.label_smoothing),
        precision=precision,
        loss_scaler=precision.loss_scaler(),
        accumulation=split_batch(config.batch_size, place.world_size, config.micro_batch_size).accumulation,
        set_to_none=config.extra_opt("zero_grad_set_to_none"),
        profiler=profiler,
        communicate=config.parallel != "no_communication",
    )
    chosen, _ = choose_step(config, step, place.device)
    return Training(model, weights, optimizer, precision, chosen, MetricSums(place.device), profiler)
