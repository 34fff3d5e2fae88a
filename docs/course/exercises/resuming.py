"""A checkpoint that loses nothing.

A job that is stopped in mid-epoch and resumed should end with the same weights as one that was never stopped, to the
last bit. The weights do not suffice: SGD's momentum, the position in the epoch and the random generator (dropout) all
decide what the next step does. The order of the images needs no state here, since it follows from the seed and the
epoch.

Write `save` and `load`.

    python -m pytest -n 0 docs/course/exercises/resuming.py
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

EPOCHS, BATCHES, BATCH_SIZE, SEED = 3, 4, 8, 7


def save(path: Path, network: nn.Module, optimizer: torch.optim.Optimizer, epoch: int, batch: int) -> None:
    """Write everything that training needs to continue before batch `batch` of epoch `epoch`.

    If the process is killed meanwhile, the earlier file must still be whole: write another file, then rename it.
    """
    raise NotImplementedError


def load(path: Path, network: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Restore what `save` wrote; return (epoch, batch). Use `torch.load(..., weights_only=True)`."""
    raise NotImplementedError


def train(folder: Path, stop_before: tuple[int, int] | None = None, resume: bool = False) -> list[torch.Tensor]:
    """Train from the start or from the checkpoint; return the weights."""
    torch.manual_seed(SEED)
    images, labels = torch.randn(BATCHES * BATCH_SIZE, 6), torch.randint(3, (BATCHES * BATCH_SIZE,))
    network = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    first_epoch, first_batch = load(folder / "checkpoint.pt", network, optimizer) if resume else (0, 0)
    for epoch in range(first_epoch, EPOCHS):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED + epoch)).split(BATCH_SIZE)
        for batch in range(first_batch if epoch == first_epoch else 0, BATCHES):
            if (epoch, batch) == stop_before:
                save(folder / "checkpoint.pt", network, optimizer, epoch, batch)
                torch.manual_seed(0)  # the next process starts with another state of the generator
                return []
            optimizer.zero_grad()
            functional.cross_entropy(network(images[order[batch]]), labels[order[batch]]).backward()
            optimizer.step()
    return list(network.state_dict().values())


@pytest.mark.parametrize("stop_before", [(0, 1), (1, 0), (2, 3)])
def test_a_resumed_run_ends_with_the_same_bits(stop_before: tuple[int, int], tmp_path: Path) -> None:
    whole = train(tmp_path)
    train(tmp_path, stop_before)
    resumed = train(tmp_path, resume=True)
    for expected, found in zip(whole, resumed, strict=True):
        assert torch.equal(expected, found)


def test_the_earlier_file_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process can be killed while it writes: write to another file, then rename."""
    train(tmp_path, (1, 0))
    checkpoint, earlier = tmp_path / "checkpoint.pt", tmp_path / "earlier.pt"
    earlier.hardlink_to(checkpoint)  # a second name of the same file, which shows whether it is written into
    good, torch_save = earlier.read_bytes(), torch.save

    def look_after(*arguments: Any, **options: Any) -> None:
        torch_save(*arguments, **options)
        assert checkpoint.exists(), "a kill here would leave no checkpoint"

    monkeypatch.setattr(torch, "save", look_after)
    train(tmp_path, (2, 0))
    assert earlier.read_bytes() == good
    assert checkpoint.read_bytes() != good
