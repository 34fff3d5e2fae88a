"""The exponential moving average of the weights (EMA)."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from utils.training.config import RecipeConfig


class Ema:
    """`network`: the exponential moving average of a network's weights and BatchNorm statistics.

    Equals torch.optim.swa_utils.AveragedModel with `get_ema_multi_avg_fn(decay)` and `use_buffers=True`, which on a GPU
    makes the host wait in every step. Each rank averages its own copy: weights are equal on all ranks, statistics are
    averaged over the ranks before validation.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.network, self.decay = copy.deepcopy(model), decay
        self.updates = 0
        ours, theirs = map(_tensors, (self.network, model))
        self._averaged = _select(ours, floating=True), _select(theirs, floating=True)
        self._counters = _select(ours, floating=False), _select(theirs, floating=False)  # BatchNorm's batches

    @torch.no_grad()
    def update(self) -> None:
        """Update the average after a step of the network; the first call starts it."""
        torch._foreach_lerp_(*self._averaged, 1 - self.decay if self.updates else 1.0)
        if self._counters[0]:
            torch._foreach_copy_(*self._counters)
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        return {"module": self.network.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["module"])
        self.updates = state["updates"]


def _tensors(network: nn.Module) -> list[Tensor]:
    """Return the parameters and saved buffers; one that the network has under several names, once."""
    return list({id(tensor): tensor for tensor in network.state_dict(keep_vars=True).values()}.values())


def _select(tensors: list[Tensor], *, floating: bool) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.is_floating_point() == floating]


def build_ema(config: RecipeConfig, model: nn.Module) -> Ema | None:
    return None if config.ema_decay is None else Ema(model, config.ema_decay)
