"""A run is its configuration: a start never goes on by itself with a run that was trained with other values.

Keys that change no result (`KeyFlag.FREE_ON_RESUME`: logging, workers, timeouts, checkpoints) may differ.
"""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils.base_config import BaseConfig, KeyFlag, as_yaml
from utils.errors import ConfigError
from utils.run.checkpoint.io import config_digest

SHOWN_KEYS = 6
NAME_LENGTH = 40  # of what is added to a folder's name


def check_same_run(folder: Path, saved: Mapping[str, Any], config: BaseConfig, *, nothing_left: bool) -> None:
    """`ConfigError` where the run in `folder`, with the configuration `saved`, is another one than that of `keys`.

    `nothing_left`: going on from its last checkpoint would train nothing, and so is no way on."""
    current, free = config.model_dump(mode="json"), config.keys_with(KeyFlag.FREE_ON_RESUME)
    different = [key for key, value in current.items() if key not in free and saved[key] != value]
    if not different:
        return
    shown = ", ".join(f"{key}={as_yaml(saved[key])} -> {as_yaml(current[key])}" for key in different[:SHOWN_KEYS])
    more = f" and {len(different) - SHOWN_KEYS} more" if len(different) > SHOWN_KEYS else ""
    beside = name_beside(folder, {key: current[key] for key in different})
    ways = [f"--run-dir {shlex.quote(str(beside))} for a run of its own"]
    if not nothing_left and not set(different) & set(config.keys_with(KeyFlag.FIXED_ON_RESUME)):
        ways.append(f"--resume {shlex.quote(str(folder))} to go on from its last checkpoint with the new values")
    ways.append("--resume never to move it aside and begin anew")
    raise ConfigError(
        f"{folder}: holds a run with other values, which goes on with them only: {shown}{more}\n"
        f"add to the command: {'; or '.join(ways)}"
    )


def name_beside(folder: Path, changes: Mapping[str, Any]) -> Path:
    """A folder for the run that differs from that in `folder` by `changes`: expts/bs256 -> expts/bs256-lr0.3."""
    added = "-".join(_in_a_name(key, value) for key, value in changes.items())
    if len(added) > NAME_LENGTH:
        added = config_digest(dict(changes))[:8]
    return folder.with_name(f"{folder.name}-{added}")


def _in_a_name(key: str, value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    text = "-".join(re.findall(r"[\w.]+", as_yaml(value))) or "none"
    return f"{key}{text}" if number else f"{key}-{text}"
