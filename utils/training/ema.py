"""The exponential moving average of the weights (EMA)."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from utils.training.config import RecipeConfig


class Ema:
    """The exponential moving average of a network's weights and BatchNorm statistics, `network`.

    Computes what torch.optim.swa_utils.AveragedModel does, which on a GPU makes the host wait in every step. Each rank
    averages its own: weights are the same on all of them, statistics are averaged before validation.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.network, self.decay = copy.deepcopy(model), decay
        self.updates = 0
        mine, theirs = (list(network.state_dict().values()) for network in (self.network, model))
        self._averaged = _where(mine, floating=True), _where(theirs, floating=True)
        self._counted = _where(mine, floating=False), _where(theirs, floating=False)  # BatchNorm's batches

    @torch.no_grad()
    def update(self) -> None:
        """After a step of the network; the first one starts the average."""
        torch._foreach_lerp_(*self._averaged, 1 - self.decay if self.updates else 1.0)
        if self._counted[0]:
            torch._foreach_copy_(*self._counted)
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        """The average and how often it was updated."""
        return {"module": self.network.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved average."""
        self.network.load_state_dict(state["module"])
        self.updates = state["updates"]


def _where(tensors: list[Tensor], *, floating: bool) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.is_floating_point() == floating]


def build_ema(config: RecipeConfig, model: nn.Module) -> Ema | None:
    """The average that `ema_decay` asks for."""
    return None if config.ema_decay is None else Ema(model, config.ema_decay)
