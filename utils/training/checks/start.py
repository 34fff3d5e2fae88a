"""The check of a network before the run's folder is made."""

from collections.abc import Iterable

import torch

from utils import seeds
from utils.errors import ConfigError
from utils.training.averages import buffer_places
from utils.training.learner import Learner
from utils.user_code import user_code_errors


def check_network(learner: Learner, name: str, image_shape: tuple[int, int, int], valid_batches: Iterable[int]) -> None:
    """Collective: raise `ConfigError` unless the network can do what the run will ask of it, on one or two black
    images: map them to logits [N, num_classes] in validation and in training, in the run's memory format and image
    sizes, with backward passes. `valid_batches`: numbers of images. Restores buffers and random generators."""
    model, config, batch = learner.model, learner.config, learner.plan.global_batch
    random, was_training = seeds.random_state(), model.training
    buffers = [(owner, key, owner[key]) for owner, key in buffer_places(model)]
    values = [None if before is None else before.detach().clone() for _, _, before in buffers]
    saved = {id(value) for value in model.state_dict(keep_vars=True).values()}
    few = min(2, batch.micro_batch_size)
    for number in {min(2, size) for size in valid_batches}:
        _try(learner, name, (number, *image_shape), training=False)
    sides = [(few, 3, side, side) for side in dict(config.progressive_image_sizes)]
    for shape in (*sides, (few, *image_shape), (few, *image_shape)):  # twice, for a graph that is not built again
        _try(learner, name, shape, training=True)
    for (owner, key, before), value in zip(buffers, values, strict=True):
        now = owner[key]
        owner[key] = before
        first_shape, last_shape = (None if buffer is None else list(buffer.shape) for buffer in (before, now))
        if first_shape != last_shape:
            why = f"is {first_shape} at first and {last_shape} after training; give it its final shape"
            raise ConfigError(f"model {name}: its buffer {key} {why}")
        if before is not None and now is not None and value is not None:
            if id(before) not in saved and not torch.allclose(now, value, rtol=0, atol=0, equal_nan=True):
                raise ConfigError(f"model {name}: its buffer {key} is not saved, but changes; use no persistent=False")
            before.copy_(value)
    unused = [key for key, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None]
    if unused and batch.world_size > 1:
        remedy = "remove it, or set requires_grad_(False)"
        raise ConfigError(f"model {name}: its outputs do not depend on {unused[0]}; with several ranks, {remedy}")
    for parameter in model.parameters():
        parameter.grad = None
    model.train(was_training)
    seeds.restore_random_state(random)


def _try(learner: Learner, name: str, shape: tuple[int, ...], *, training: bool) -> None:
    """Predict black images [N, 3, H, W], and with `training` compute gradients."""
    model, plan = learner.model.train(training), learner.plan
    what = f"images {list(shape)}{' in training' if training else ''}"
    images = torch.zeros(shape, device=next(model.parameters()).device).to(memory_format=plan.memory_format)
    with user_code_errors(f"model {name} returns no logits for {what}", ConfigError), torch.set_grad_enabled(training):
        outputs = plan.precision.forward(model, images)
    if list(outputs.shape) != (expected := [shape[0], learner.config.num_classes]):
        raise ConfigError(f"model {name}: turns {what} into {list(outputs.shape)}; expected logits {expected}")
    if training and not outputs.requires_grad:
        raise ConfigError(f"model {name}: its outputs depend on no trained parameter; set requires_grad of one")
    if training:
        labels = torch.zeros(shape[0], dtype=torch.int64, device=images.device)
        with user_code_errors(f"model {name} cannot be trained on {what}", ConfigError):
            learner.criterion(outputs, labels).backward()
