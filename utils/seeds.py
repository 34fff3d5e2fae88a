"""Random generators: seeding them, and saving and restoring their states."""

import random
from typing import Any, cast

import numpy as np
import torch


def seed_random_state(seed: int) -> None:
    """Start every random generator of this process from `seed`."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_of(seed: int, rank: int, step: int) -> int:
    """A seed of its own for what a rank draws from `step` on (dropout), so that ranks do not draw the same."""
    return int(np.random.SeedSequence([seed, rank, step]).generate_state(1)[0])


def random_state() -> dict[str, Any]:
    """The states of this process's random generators as plain values and tensors."""
    name, keys, position, has_gauss, cached = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        # asking where CUDA is unused would start it, in a process that trains on the CPU of a machine with a GPU
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def explain_misfit(state: dict[str, Any]) -> str | None:
    """What keeps `restore_random_state` from taking `state`, found out on generators of its own; None where nothing
    does. That of CUDA is looked at where it is used."""
    try:
        random.Random().setstate(state["python"])
        np.random.RandomState().set_state(_numpy_state(state))
        torch.Generator().set_state(state["torch"])
        if not isinstance(state["cuda"], torch.Tensor | None):
            raise TypeError("cuda is neither a tensor nor nothing")
    except Exception as error:  # three libraries, each with errors of its own
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def restore_random_state(state: dict[str, Any]) -> None:
    """Undo of `random_state`; the CUDA generator only where both sides use one."""
    random.setstate(state["python"])
    np.random.set_state(_numpy_state(state))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])


def _numpy_state(state: dict[str, Any]) -> tuple[Any, ...]:
    name, keys, position, has_gauss, cached = state["numpy"]
    return name, keys.numpy().astype(np.uint32), position, has_gauss, cached
