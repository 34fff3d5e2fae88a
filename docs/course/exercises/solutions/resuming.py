"""A solution of exercises/resuming.py."""

from pathlib import Path

import torch
from torch import nn


def save(path: Path, network: nn.Module, optimizer: torch.optim.Optimizer, epoch: int, batch: int) -> None:
    state = {
        "network": network.state_dict(),
        "optimizer": optimizer.state_dict(),
        "generator": torch.get_rng_state(),
        "position": (epoch, batch),
    }
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def load(path: Path, network: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    state = torch.load(path, weights_only=True)
    network.load_state_dict(state["network"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["generator"])
    epoch, batch = state["position"]
    return epoch, batch
