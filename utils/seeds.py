"""Seed random generators, and save and restore their states."""

import random
from typing import Any, cast

import numpy as np
import torch


def seed_random_state(seed: int) -> None:
    """Seed every random generator of this process."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def seed_of(seed: int, rank: int, step: int) -> int:
    """Return the seed of a rank's random numbers from `step` on (dropout), which differ between ranks."""
    return int(np.random.SeedSequence([seed, rank, step]).generate_state(1)[0])


def random_state() -> dict[str, Any]:
    """Return the states of this process's random generators as plain values and tensors."""
    name, keys, position, has_gauss, cached = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        # without this check, a process that trains on the CPU of a GPU machine would initialise CUDA
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore what `random_state` returned; the CUDA generator only if both processes use one."""
    random.setstate(state["python"])
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
