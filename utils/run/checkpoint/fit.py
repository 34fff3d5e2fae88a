"""Whether a saved run fits the present configuration, network and data; errors name what differs and the remedy."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from torch import Tensor

from utils.base_config import BaseConfig, KeyFlag, as_yaml
from utils.errors import CheckpointError, ConfigError

SHOWN_KEYS = 6


def check_same_run(folder: Path, saved: Mapping[str, Any], config: BaseConfig, *, epochs_left: bool) -> None:
    """Raise `ConfigError` if the run in `folder` was trained with other training settings than `config`.

    `epochs_left`: resuming it would train something. The message suggests resuming only then.
    """
    changes = _differences(saved, config.model_dump(mode="json", exclude=set(config.keys_with(KeyFlag.FREE_ON_RESUME))))
    if not changes:
        return
    shown = ", ".join(f"{key}={as_yaml(old)} -> {as_yaml(new)}" for key, (old, new) in [*changes.items()][:SHOWN_KEYS])
    more = f" and {len(changes) - SHOWN_KEYS} more" if len(changes) > SHOWN_KEYS else ""
    remedies = ["--run-dir DIR for a separate run"]
    if epochs_left and not set(changes) & set(config.keys_with(KeyFlag.FIXED_ON_RESUME)):
        remedies.append(f"--resume {shlex.quote(str(folder))} to continue from its last checkpoint with the new values")
    remedies.append("--resume never to move it aside and start again")
    raise ConfigError(
        f"{folder}: holds a run with other settings: {shown}{more}\nadd to the command: {'; or '.join(remedies)}"
    )


def check_config_fits(path: Path, saved: Mapping[str, Any], config: BaseConfig) -> list[str]:
    """Return a note for each changed setting; raise `CheckpointError` if one changed that is fixed on resume."""
    different, fixed = _differences(saved, config.model_dump(mode="json")), config.keys_with(KeyFlag.FIXED_ON_RESUME)
    refused = [f"{key} {old!r} -> {new!r}" for key, (old, new) in different.items() if key in fixed]
    if refused:
        raise CheckpointError(
            f"{path}: does not fit this configuration: {', '.join(refused)}\n"
            "resume with the saved values, or start a new run with --resume never or another --run-dir"
        )
    return [f"Resuming with another {key}: {old} -> {new}" for key, (old, new) in different.items()]


def check_data_fits(path: Path, saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise `CheckpointError` if the data changed, so that a position in the data or a class means something else."""
    different = [
        f"{key} {shorten(str(old), 60)} -> {shorten(str(new), 60)}"
        for key, (old, new) in _differences(saved, current).items()
    ]
    if different:
        raise CheckpointError(
            f"{path}: was trained on other data, or with epochs of another length: {', '.join(different)}\n"
            "resume with the same data and limits, or start a new run with --resume never or another --run-dir"
        )


def _differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{key: (saved value or None, current value)} of each current key whose value changed."""
    pairs = {key: (saved.get(key), value) for key, value in current.items()}
    return {key: (old, new) for key, (old, new) in pairs.items() if old != new}


def check_weights_fit(path: Path, saved: dict[str, Tensor], current: dict[str, Tensor]) -> None:
    """Raise `CheckpointError` naming the tensors that only one side has or whose shapes differ."""
    different = [f"{name} (only in the checkpoint)" for name in saved if name not in current]
    for name, weight in current.items():
        if name not in saved:
            different.append(f"{name} (not in the checkpoint)")
        elif saved[name].shape != weight.shape:
            different.append(f"{name} {tuple(saved[name].shape)} -> {tuple(weight.shape)}")
    if different:
        raise CheckpointError(
            f"{path}: its weights do not fit this network: {shorten_list(different)}\n"
            "the network's code has changed since; use the earlier code, or start a new run with --resume never"
        )


def shorten_list(names: Sequence[str]) -> str:
    """Join the first three names, and count the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
