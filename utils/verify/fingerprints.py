"""Fingerprints of tensors, computed on the device: tensors that differ in a bit have different fingerprints.

A fingerprint is a multilinear hash over the integers mod 2^64 (Lemire and Kaser 2014, "Strongly universal string
hashing is fast"): each word of at most 32 bits is multiplied by an odd factor of its position, and the products are
summed. An odd factor has an inverse, so a change of one word always changes the fingerprint. Changes of several words,
swaps included, cancel by chance only, with a probability of at most about 2^-32.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache, partial

import torch
from torch import Tensor, nn

CHUNK = 2**20  # numbers at once; bounds the memory of factors and products
CHUNK_FACTOR = 0x1E3779B97F4A7C15  # odd
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # by bytes of a number


@cache
def factors(device: torch.device) -> Tensor:
    """Odd factors of `CHUNK` positions, int64, the same in every process; torch's global generator is not used."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**63), 2**63 - 1, (CHUNK,), generator=generator) | 1).to(device)


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """Hash all bits of a tensor in the order of its indices, in any memory format: a scalar int64 on its device."""
    bits, odd = tensor.detach().reshape(-1).view(WORDS[tensor.element_size()]), factors(tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in bits.split(CHUNK):
        total = total * CHUNK_FACTOR + (chunk * odd[: len(chunk)]).sum()
    return total


def take_fingerprints(tensors: Mapping[str, Tensor], taken: Mapping[str, Tensor] | None = None) -> dict[str, int]:
    """Return the fingerprint of each tensor, then those `taken` before; waits for the device once."""
    scalars = {name: fingerprint(tensor) for name, tensor in tensors.items()} | dict(taken or {})
    device = next(iter(scalars.values())).device  # of the first: AdamW may count its steps on the host
    values = torch.stack([scalar.to(device) for scalar in scalars.values()]).tolist()
    return dict(zip(scalars, values, strict=True))


class GradientRecorder:
    """Fingerprints of this rank's gradients before the all-reduce, the last parameter's first, taken inside a step.

    Hooks take them, which exist in recorded steps only. A CUDA graph runs no Python when it is replayed, so they must
    exist in its capture: with `graphed` they always do.
    """

    def __init__(self, model: nn.Module, *, graphed: bool) -> None:
        self.parameters = {f"gradient {name}": value for name, value in model.named_parameters() if value.requires_grad}
        names, device = list(self.parameters)[::-1], next(model.parameters()).device
        self.gradients = {name: torch.zeros((), dtype=torch.int64, device=device) for name in names}
        factors(device)  # before a capture, whose allocations do not outlive it
        self.permanent = self._watch() if graphed else None

    def recorded(self) -> ExitStack:
        """Record the step in the `with` block."""
        return self._watch() if self.permanent is None else ExitStack()

    def _watch(self) -> ExitStack:
        hooks = ExitStack()
        for name, bits in self.gradients.items():
            hook = partial(_record_gradient, bits)
            hooks.enter_context(self.parameters[name].register_post_accumulate_grad_hook(hook))
        return hooks


def _record_gradient(bits: Tensor, parameter: Tensor) -> None:
    """Called with the gradient summed over the micro-batches so far, before DDP averages it over the ranks."""
    if parameter.grad is not None:
        bits.copy_(fingerprint(parameter.grad))
