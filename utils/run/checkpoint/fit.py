"""Whether a saved run fits the present configuration, network and data; errors name what differs and the remedy."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from torch import Tensor

from utils.base_config import BaseConfig, KeyFlag, as_yaml
from utils.errors import CheckpointError, ConfigError
from utils.run.checkpoint.io import config_digest

SHOWN_KEYS = 6
MAX_SUFFIX_LENGTH = 40  # characters added to a folder's name


def check_same_run(folder: Path, saved: Mapping[str, Any], config: BaseConfig, *, epochs_left: bool) -> None:
    """Raise `ConfigError` if the run in `folder` was trained with other training settings than `config`.

    `epochs_left`: resuming it would train something. The message suggests resuming only then.
    """
    changes = _differences(saved, config.model_dump(mode="json", exclude=set(config.keys_with(KeyFlag.FREE_ON_RESUME))))
    if not changes:
        return
    shown = ", ".join(f"{key}={as_yaml(old)} -> {as_yaml(new)}" for key, (old, new) in [*changes.items()][:SHOWN_KEYS])
    more = f" and {len(changes) - SHOWN_KEYS} more" if len(changes) > SHOWN_KEYS else ""
    suggested = suggest_folder(folder, {key: new for key, (_, new) in changes.items()})
    remedies = [f"--run-dir {shlex.quote(str(suggested))} for a separate run"]
    if epochs_left and not set(changes) & set(config.keys_with(KeyFlag.FIXED_ON_RESUME)):
        remedies.append(f"--resume {shlex.quote(str(folder))} to continue from its last checkpoint with the new values")
    remedies.append("--resume never to move it aside and start again")
    raise ConfigError(
        f"{folder}: holds a run with other settings: {shown}{more}\nadd to the command: {'; or '.join(remedies)}"
    )


def suggest_folder(folder: Path, changes: Mapping[str, Any]) -> Path:
    """Name a folder for a run that differs from the run in `folder` by `changes`: expts/bs256 -> expts/bs256-lr0.3."""
    suffix = "-".join(_as_name(key, value) for key, value in changes.items())
    if len(suffix) > MAX_SUFFIX_LENGTH:
        suffix = config_digest(dict(changes))[:8]
    return folder.with_name(f"{folder.name}-{suffix}")


def _as_name(key: str, value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    text = "-".join(re.findall(r"[\w.]+", as_yaml(value))) or "none"
    return f"{key}{text}" if number else f"{key}-{text}"


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
