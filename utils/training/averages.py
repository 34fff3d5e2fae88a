"""Averages: of the weights over the steps (EMA), and of the buffers over a step's micro-batches."""

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn

from utils.errors import ConfigError
from utils.training.config import RecipeConfig
from utils.user_code import user_code_errors

BATCH_NORM = ("running_mean", "running_var")


class Ema:
    """`network`: the exponential moving average of a network's weights and BatchNorm statistics.

    After n updates, the weights of k updates ago count decay**k / (1 + decay + ... + decay**(n-1)): the sum of these
    factors is 1 from the first update on, as in Adam's bias correction (arXiv:1412.6980), so that a run shorter than
    1/(1-decay) steps averages all its steps alike and the random first weights count no more than others. Each rank
    averages its own copy: weights are equal on all ranks, statistics are averaged over the ranks before validation.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.updates, self._model = decay, 0, model
        # deepcopy refuses tensors computed from parameters, such as the weight of the old torch.nn.utils.weight_norm
        attributes = [value for layer in model.modules() for value in vars(layer).values()]
        computed = [value for value in attributes if isinstance(value, Tensor) and not value.is_leaf]
        with user_code_errors(f"ema_decay {decay:g}: the network cannot be copied", ConfigError):
            self.network = copy.deepcopy(model, {id(value): value.detach().clone() for value in computed})

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
        for counter, value in [pair for pair in pairs if not pair[0].is_floating_point()]:  # BatchNorm's batches
            counter.copy_(value)
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        return {"module": self.network.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["module"])
        self.updates = state["updates"]


def build_ema(config: RecipeConfig, model: nn.Module) -> Ema | None:
    return None if config.ema_decay is None else Ema(model, config.ema_decay)


def buffer_places(*networks: nn.Module) -> list[tuple[dict[str, Tensor | None], str]]:
    """Return where buffers are, (a layer's buffers, name): a network may assign a new tensor to a buffer."""
    return [(layer._buffers, name) for network in networks for layer in network.modules() for name in layer._buffers]


class RunningStatistics:
    """Set a step's buffers to the mean over its micro-batches, so that one rank with K micro-batches equals K ranks.

    Each of K ranks updates its own buffers once per step, and validation averages them. So each micro-batch starts
    from the buffers before the step, and counters count a step once. BatchNorm's update is linear: averaging in every
    step equals averaging once before validation. Numbers that no micro-batch changes stay to the bit, also -inf."""

    def __init__(self, model: nn.Module) -> None:
        self.places: dict[str, list[Any]] = {}  # by kind: statistics, others, counters
        # a buffer may be None, and a tensor that layers share counts once
        places = {id(owner[name]): (owner, name) for owner, name in buffer_places(model) if owner[name] is not None}
        for owner, name in places.values():
            kind = "others" if cast(Tensor, owner[name]).is_floating_point() else "counters"
            self.places.setdefault("statistics" if name in BATCH_NORM else kind, []).append((owner, name))
        buffers = self._find()
        self.before = {kind: list(map(torch.empty_like, tensors)) for kind, tensors in buffers.items()}
        self.means = {kind: list(map(torch.empty_like, tensors)) for kind, tensors in buffers.items()}

    def _find(self) -> dict[str, list[Tensor]]:
        return {kind: [owner[name] for owner, name in places] for kind, places in self.places.items()}

    @torch.no_grad()
    def start(self) -> None:
        self.buffers, self.collected = self._find(), 0  # tensors and number of micro-batches of this step
        for kind, buffers in self.buffers.items():
            torch._foreach_copy_(self.before[kind], buffers)

    @torch.no_grad()
    def collect(self, last: bool) -> None:
        """Add a micro-batch's buffers to the mean and restore them; after the last, set them to the mean."""
        self.collected += 1
        for kind, buffers in self.buffers.items():
            means = self.means[kind]
            for buffer, (owner, name) in zip(buffers, self.places[kind], strict=True):
                if owner[name] is not buffer:  # a new tensor was assigned
                    buffer.copy_(owner[name])
                    owner[name] = buffer
            if kind == "counters":
                if not last:
                    torch._foreach_copy_(buffers, self.before[kind])
                continue
            if self.collected == 1:
                torch._foreach_copy_(means, buffers)
            elif kind == "statistics":
                torch._foreach_add_(means, buffers)
            else:  # equal numbers stay to the bit, and between two of -inf there is no number
                for mean, buffer in zip(means, buffers, strict=True):
                    mean.copy_(torch.where(mean == buffer, mean, mean.lerp(buffer, 1 / self.collected)))
            if kind == "statistics" and last:
                torch._foreach_div_(means, self.collected)
            torch._foreach_copy_(buffers, means if last else self.before[kind])
