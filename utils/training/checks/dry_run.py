"""Describe a run without training: `train.py --dry-run`."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from utils.training.checks.fingerprints import WORKING_BYTES
from utils.training.config import TrainingConfig
from utils.training.learner import Learner
from utils.training.optimizers.schedule import Schedule
from utils.training.precision import MasterWeights, Precision

PROBE_IMAGES = 4


def describe(learner: Learner, image_shape: tuple[int, int, int], *, network: str, dataset: str) -> str:
    """Return a text on parameters, steps, estimated memory, and the learning rate where its course changes."""
    config, schedule = learner.config, learner.schedule
    parameters = sum(parameter.numel() for parameter in learner.model.parameters())
    steps = schedule.total_steps // config.max_epochs
    states = state_bytes(config, learner.weights)
    per_image = activation_bytes_per_image(learner.model, learner.criterion, learner.precision, image_shape)
    activations = per_image * learner.batch.micro_batch_size
    snapshot = snapshot_bytes(config, learner.weights, learner.batch.rank_batch_size, image_shape)
    lines = [
        f"model            {network}, {parameters:,} parameters, {learner.precision}",
        f"training images  {dataset}, {steps * config.batch_size:,} in {steps} steps per epoch",
        f"batch            {learner.batch}",
        f"epochs           {config.max_epochs}, {schedule.total_steps:,} steps",
        f"memory estimate  {_gigabytes(states + activations + snapshot)} per rank, without libraries and workspaces:",
        f"  weights, gradients and optimizer {_gigabytes(states)}, activations {_gigabytes(activations)}",
        *([f"  snapshot for verify_every_steps {_gigabytes(snapshot)}"] if snapshot else []),
        f"learning rate    schedule {config.lr_schedule}",
    ]
    lines += [f"  step {step:>8,}  {config.peak_lr * schedule.factor(step):.6g}" for step in _turning_points(schedule)]
    if config.lr_schedule == "plateau":
        patience = config.lr_plateau_patience + 1
        lines.append(f"  then x {config.lr_decay_factor:g} after {patience} epochs without a better validation loss")
    return "\n".join(lines)


def state_bytes(config: TrainingConfig, weights: MasterWeights) -> int:
    """Bytes kept from step to step: weights, gradients, the optimizer's moments, the moving average."""
    # half-precision weights and master weights have gradients at the same time
    return _updated_bytes(config, weights) + _bytes({*weights.model.parameters(), *weights.parameters()})


def snapshot_bytes(
    config: TrainingConfig, weights: MasterWeights, rank_batch_size: int, image_shape: tuple[int, int, int]
) -> int:
    """Bytes that `verify_every_steps` takes on the device for the state before the step, the batch and fingerprints; 0
    if it is null."""
    if config.verify_every_steps is None:
        return 0
    batch = rank_batch_size * (math.prod(image_shape) * 4 + 8)  # float32 images, int64 labels
    return _updated_bytes(config, weights) + _bytes(weights.model.buffers()) + batch + WORKING_BYTES


def _updated_bytes(config: TrainingConfig, weights: MasterWeights) -> int:
    """Bytes of weights, the optimizer's moments and the moving average."""
    # AdamW and LAMB keep mean and square of the gradients; Muon too except for convolutions, so 2 is its upper bound.
    # LARS keeps a momentum, SGD only if momentum is not 0.
    moments = {"adamw": 2, "lamb": 2, "lars": 1, "muon": 2}.get(config.optimizer, int(config.momentum > 0))
    updated = weights.parameters()
    average = _bytes(weights.model.state_dict().values()) if config.ema_decay is not None else 0
    return _bytes({*weights.model.parameters(), *updated}) + moments * _bytes(updated) + average


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _turning_points(schedule: Schedule) -> list[int]:
    """Steps at which the learning rate starts, turns and ends."""
    points = {0, schedule.warmup_steps - 1, schedule.warmup_steps, schedule.total_steps - 1}
    turns = [*schedule.milestone_steps]
    if 1 < schedule.warmup_stride < schedule.warmup_steps:
        turns.append(schedule.warmup_stride)
    points |= {step - before for step in turns for before in (0, 1)}
    return sorted(step for step in points if 0 <= step < schedule.total_steps)


def activation_bytes_per_image(
    model: nn.Module, criterion: nn.Module, precision: Precision, image_shape: tuple[int, int, int]
) -> int:
    """Bytes that autograd keeps for the backward pass of one image: the difference between two batch sizes, since
    autocast keeps half-precision weights once per batch."""
    small, large = (
        _activation_bytes(model, criterion, precision, (num_images, *image_shape))
        for num_images in (PROBE_IMAGES, 2 * PROBE_IMAGES)
    )
    return (large - small) // PROBE_IMAGES


def _activation_bytes(
    model: nn.Module, criterion: nn.Module, precision: Precision, shape: tuple[int, int, int, int]
) -> int:
    """Bytes that autograd keeps for the backward pass of a batch of images [N, C, H, W]."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    device = next(model.parameters()).device
    images = torch.zeros(shape, device=device)
    labels = torch.zeros(shape[0], dtype=torch.int64, device=device)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train()
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        loss = criterion(precision.forward(model, images), labels)
    del loss
    model.load_state_dict(buffers, strict=False)
    return sum(kept.values())


def _gigabytes(number: float) -> str:
    return f"{number / 1e9:.2f} GB"
