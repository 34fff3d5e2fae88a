"""A solution of exercises/warmup.py."""

import math


def scaled_rate(rate: float, reference_batch_size: int, batch_size: int) -> float:
    return rate * math.sqrt(batch_size / reference_batch_size)


def warmed_up_rate(step: int, rate: float, steps_per_epoch: int, warmup_epochs: float) -> float:
    warmup_steps = warmup_epochs * steps_per_epoch
    if step + 1 >= warmup_steps:
        return rate
    return rate * (step + 1) / warmup_steps
