"""Learning rates for large batches.

A batch of 2,048 takes 16 times fewer steps per epoch than one of 128, so each step must go further. The SC20 tutorial
multiplies the rate by the square root of the ratio: 0.1 x sqrt(2048 / 128) = 0.4. (The linear rule would give 1.6.)
Such a rate is too high for fresh weights: without warm-up the tutorial's losses are at 4.6, the loss of guessing, up
to epoch 11. So the rate grows linearly over the first epochs.

Write `scaled_rate` and `warmed_up_rate`.

    python -m pytest -n 0 docs/course/exercises/warmup.py
"""

import itertools
import math

import pytest


def scaled_rate(rate: float, reference_batch_size: int, batch_size: int) -> float:
    """Return the rate for `batch_size` by the square-root rule; `rate` is right for `reference_batch_size`."""
    raise NotImplementedError


def warmed_up_rate(step: int, rate: float, steps_per_epoch: int, warmup_epochs: float) -> float:
    """Return the rate of optimizer step `step`, counted from 0.

    The rate grows by the same amount at each step. The last step of the warm-up is the first with the full rate.
    """
    raise NotImplementedError


# The learning rates at the end of epochs 1 to 17 of the tutorial's published run bs2048-warmup-opt.
PUBLISHED = [0.025 * epoch for epoch in range(1, 17)] + [0.4]


def test_the_square_root_rule_gives_the_published_rates() -> None:
    assert scaled_rate(0.1, 128, 128) == pytest.approx(0.1)
    assert scaled_rate(0.1, 128, 512) == pytest.approx(0.2)
    assert scaled_rate(0.1, 128, 2048) == pytest.approx(0.4)


def test_epochs_end_with_the_published_rates() -> None:
    steps = 50_000 // 2048
    rates = [warmed_up_rate(steps * epoch - 1, 0.4, steps, 16) for epoch in range(1, 18)]
    assert rates == pytest.approx(PUBLISHED)


def test_the_rate_grows_at_every_step_and_never_starts_at_zero() -> None:
    rates = [warmed_up_rate(step, 0.4, 10, 2.5) for step in range(40)]
    assert rates[0] == pytest.approx(0.4 / 25)
    assert all(math.isclose(after - before, 0.4 / 25) for before, after in itertools.pairwise(rates[:25]))
    assert rates[24:] == pytest.approx([0.4] * 16)


def test_without_warm_up_the_rate_is_full_at_once() -> None:
    assert warmed_up_rate(0, 0.4, 10, 0) == 0.4
