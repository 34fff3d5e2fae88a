"""Validation over several ranks, each image once.

`DistributedSampler` gives every rank equally many images: where the number does not divide, it repeats some. With
10,000 test images on 6 ranks two images count twice, and the accuracy depends on the number of GPUs. It also must not
be the mean of the ranks' accuracies, since their numbers of images differ.

Write `validation_indices` and `accuracy`.

    python -m pytest -n 0 docs/course/exercises/sampling.py
"""

from collections.abc import Sequence

import pytest
import torch
from torch.utils.data import DistributedSampler


def validation_indices(num_images: int, rank: int, world_size: int) -> list[int]:
    """Return the images that this rank validates: over all ranks each one exactly once, as evenly as possible."""
    raise NotImplementedError


def accuracy(correct: Sequence[int], counted: Sequence[int]) -> float:
    """Return the accuracy over all images, from each rank's number of correct and of counted images."""
    raise NotImplementedError


@pytest.mark.parametrize(("num_images", "world_size"), [(10, 1), (10, 2), (10, 3), (10_000, 6), (3, 4)])
def test_each_image_once_and_evenly(num_images: int, world_size: int) -> None:
    parts = [validation_indices(num_images, rank, world_size) for rank in range(world_size)]
    assert sorted(index for part in parts for index in part) == list(range(num_images))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_accuracy_does_not_depend_on_the_number_of_ranks() -> None:
    torch.manual_seed(0)
    right = torch.rand(10) < 0.5
    for world_size in (1, 2, 3, 4):
        parts = [right[validation_indices(10, rank, world_size)] for rank in range(world_size)]
        assert accuracy([int(part.sum()) for part in parts], [len(part) for part in parts]) == right.float().mean()


def test_the_library_sampler_counts_some_twice() -> None:
    """Nothing to write here: why the exercise exists."""
    samplers = [DistributedSampler(range(10), 3, rank, shuffle=False) for rank in range(3)]  # type: ignore[arg-type]
    assert sum(len(list(sampler)) for sampler in samplers) == 12
