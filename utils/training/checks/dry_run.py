"""Describe a run without training: `train.py --dry-run`."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from utils.training.config import TrainingConfig
from utils.training.learner import Learner
from utils.training.precision import Precision, Weights

PROBE_IMAGES = 4


def describe(learner: Learner, image_shape: tuple[int, int, int], *, network: str, dataset: str) -> str:
    """Return a text on parameters, steps, estimated memory, and the learning rate where its course changes."""
    config, plan, schedule = learner.config, learner.plan, learner.schedule
    parameters = sum(parameter.numel() for parameter in learner.model.parameters())
    steps = schedule.total_steps // config.max_epochs
    states = state_bytes(config, learner.weights)
    per_image = activation_bytes_per_image(learner.model, learner.criterion, plan.precision, image_shape)
    activations = per_image * plan.global_batch.micro_batch_size
    total = f"{(states + activations) / 1e9:.2f} GB"
    schedule_name = config.lr_schedule if isinstance(config.lr_schedule, str) else list(config.lr_schedule)
    lines = [
        f"model            {network}, {parameters:,} parameters, {plan.precision}",
        f"training images  {dataset}, {steps * config.batch_size:,} in {steps} steps per epoch",
        f"plan             {plan}",
        f"epochs           {config.max_epochs}, {schedule.total_steps:,} steps",
        f"memory estimate  {total} per rank, without libraries and workspaces:",
        f"  weights, gradients and optimizer {states / 1e9:.2f} GB, activations {activations / 1e9:.2f} GB",
        f"learning rate    schedule {schedule_name}",
    ]
    turns = (0, schedule.warmup_steps, *schedule.milestone_steps, schedule.total_steps)
    steps_shown = sorted({step for turn in turns for step in (turn - 1, turn) if 0 <= step < schedule.total_steps})
    lines += [f"  step {step:>8,}  {config.peak_lr * schedule.factor(step):.6g}" for step in steps_shown]
    if config.schedule_kind == "plateau":
        patience = config.plateau_patience + 1
        lines.append(f"  then x {config.lr_decay_factor:g} after {patience} epochs without a better validation loss")
    return "\n".join(lines)


def state_bytes(config: TrainingConfig, weights: Weights) -> int:
    """Return the bytes kept from step to step: weights, gradients, the optimizer's moments, the moving average."""

    def count(tensors: Iterable[Tensor]) -> int:
        return sum(tensor.nbytes for tensor in tensors)

    # half-precision weights and master weights have gradients at the same time
    gradients = count({*weights.model.parameters(), *weights.parameters()})
    # AdamW keeps mean and square of the gradients; Muon too except for convolutions, so 2 is its upper bound
    moments = int(config.momentum > 0) if config.optimizer == "sgd" else 2
    average = count(weights.model.state_dict().values()) if config.ema_decay is not None else 0
    return 2 * gradients + moments * count(weights.parameters()) + average


def activation_bytes_per_image(
    model: nn.Module, criterion: nn.Module, precision: Precision, image_shape: tuple[int, int, int]
) -> int:
    """Return the bytes that autograd keeps for the backward pass of one image [C, H, W]: the difference between two
    batch sizes, since autocast keeps half-precision weights once per batch."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    device, totals = next(model.parameters()).device, []
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train()
    for number in (PROBE_IMAGES, 2 * PROBE_IMAGES):
        labels = torch.zeros(number, dtype=torch.int64, device=device)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = criterion(precision.forward(model, torch.zeros(number, *image_shape, device=device)), labels)
        totals.append(sum(size for storage, size in kept.items() if storage not in weights))
        del loss
        kept.clear()
    model.load_state_dict(buffers, strict=False)
    return (totals[1] - totals[0]) // PROBE_IMAGES
