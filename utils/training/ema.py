"""The exponential moving average of the weights (EMA)."""

import copy
from typing import Any

import torch
from torch import nn

from utils.errors import ConfigError
from utils.training.config import RecipeConfig


class Ema:
    """`network`: the exponential moving average of a network's weights and BatchNorm statistics.

    After n updates, the weights of k updates ago count decay**k / (1 + decay + ... + decay**(n-1)): the sum of these
    factors is 1 from the first update on, as in Adam's bias correction (arXiv:1412.6980), so that a run shorter than
    1/(1-decay) steps averages all its steps alike and the random first weights count no more than others. Each rank
    averages its own copy: weights are equal on all ranks, statistics are averaged over the ranks before validation.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.updates, self._model = decay, 0, model
        try:
            self.network = copy.deepcopy(model)
        except RuntimeError as error:  # an attribute computed from parameters, as by the old torch.nn.utils.weight_norm
            raise ConfigError(f"ema_decay {decay:g}: the network cannot be copied: {error}; use null") from None

    @torch.no_grad()
    def update(self) -> None:
        """Update the average after a step of the network; the first call starts it."""
        # by name, since a network may assign a new tensor to a buffer; a tensor with several names counts once
        theirs = self._model.state_dict(keep_vars=True)
        ours = self.network.state_dict(keep_vars=True)
        pairs = list({id(average): (average, theirs[name]) for name, average in ours.items()}.values())
        averages, values = zip(*[pair for pair in pairs if pair[0].is_floating_point()], strict=True)
        weight = (1 - self.decay) / (1 - self.decay ** (self.updates + 1))
        torch._foreach_lerp_(averages, values, weight)
        for counter, value in pairs:
            if not counter.is_floating_point():  # BatchNorm's batches
                counter.copy_(value)
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        return {"module": self.network.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["module"])
        self.updates = state["updates"]


def build_ema(config: RecipeConfig, model: nn.Module) -> Ema | None:
    return None if config.ema_decay is None else Ema(model, config.ema_decay)
