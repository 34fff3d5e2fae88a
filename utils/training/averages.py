"""Averages: of the weights over the steps (EMA), and of the buffers over a step's micro-batches; BatchNorm's counters,
incremented together."""

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn

from utils.errors import ConfigError
from utils.training.config import RecipeConfig

STATISTICS = ("running_mean", "running_var")
COUNTER = "num_batches_tracked"
COUNT_BY_ADD = (nn.modules.batchnorm._BatchNorm.forward, nn.SyncBatchNorm.forward)


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
        computed = [value for value in attributes if isinstance(value, torch.Tensor) and not value.is_leaf]
        try:
            self.network = copy.deepcopy(model, {id(value): value.detach().clone() for value in computed})
        except RuntimeError as error:
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
        shared = {id(owner[name]): (owner, name) for owner, name in buffer_places(model)}  # a shared tensor counts once
        for owner, name in [place for place in shared.values() if place[0][place[1]] is not None]:
            kind = "others" if cast(Tensor, owner[name]).is_floating_point() else "counters"
            self.places.setdefault("statistics" if name in STATISTICS else kind, []).append((owner, name))
        self.buffers = self._find()
        self.before = {kind: list(map(torch.empty_like, buffers)) for kind, buffers in self.buffers.items()}
        self.means = {kind: list(map(torch.empty_like, buffers)) for kind, buffers in self.buffers.items()}
        self.collected = 0

    def _find(self) -> dict[str, list[Tensor]]:
        return {kind: [owner[name] for owner, name in places] for kind, places in self.places.items()}

    @torch.no_grad()
    def start(self) -> None:
        """Begin a step."""
        self.buffers, self.collected = self._find(), 0
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
            if kind == "statistics":
                (torch._foreach_add_ if self.collected > 1 else torch._foreach_copy_)(means, buffers)
                if last:
                    torch._foreach_div_(means, self.collected)
            for mean, buffer in zip(means, buffers, strict=True) if kind == "others" else ():
                mixed = torch.where(mean == buffer, mean, mean.lerp(buffer, 1 / self.collected))
                mean.copy_(mixed if self.collected > 1 else buffer)  # the first may replace -inf
            if kind != "counters" or not last:
                torch._foreach_copy_(buffers, means if last else self.before[kind])


class _PassCounter:
    """Replaces a layer's counter during a forward pass."""

    def __init__(self) -> None:
        self.count = 0

    def add_(self, number: int) -> None:
        self.count += number


def defer_batch_counters(model: nn.Module) -> None:
    """Increment all BatchNorm layers' `num_batches_tracked` together after each forward pass of `model`, with the same
    result: on a GPU one kernel instead of one per layer."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    # a user's own class may not count by add_
    layers = [layer for layer in layers if type(layer).forward in COUNT_BY_ADD]
    # without momentum a layer computes with its counter
    layers = [layer for layer in layers if layer.momentum is not None and layer.num_batches_tracked is not None]
    counters: list[Any] = []

    def start(model: nn.Module, inputs: Any) -> None:
        counters[:] = [layer._buffers[COUNTER] for layer in layers]
        for layer in layers:
            layer._buffers[COUNTER] = _PassCounter()  # type: ignore[assignment]

    @torch.no_grad()
    def finish(model: nn.Module, inputs: Any, outputs: Any) -> None:
        passes: list[Any] = [layer._buffers[COUNTER] for layer in layers]
        for layer, counter in zip(layers, counters, strict=True):
            layer._buffers[COUNTER] = counter
        counted = [(counter, one.count) for counter, one in zip(counters, passes, strict=True) if one.count]
        if counted:
            torch._foreach_add_([counter for counter, _ in counted], [count for _, count in counted])

    model.register_forward_pre_hook(start)
    model.register_forward_hook(finish, always_call=True)
