"""Whether a saved run fits the present configuration, network and data; errors name what differs and the remedy."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from utils.base_config import BaseConfig, KeyFlag, as_yaml
from utils.errors import CheckpointError, ConfigError
from utils.training.optimizers.build import state_after_a_step

SHOWN_KEYS = 6
NEVER_NEGATIVE = re.compile(r"running_var$|num_batches_tracked$|^optimizer\.\d+\.(step|exp_avg_sq|square)$")


def check_same_run(folder: Path, saved: Mapping[str, Any], config: BaseConfig, *, epochs_left: bool) -> None:
    """Raise `ConfigError` if the run in `folder` was trained with other training settings than `config`.

    `epochs_left`: resuming it would train something. The message suggests resuming only then.
    """
    free = set(config.keys_with(KeyFlag.FREE_ON_RESUME))
    changes = _changed_settings(_with_defaults(saved, config), config.model_dump(mode="json", exclude=free))
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
    different = _changed_settings(_with_defaults(saved, config), config.model_dump(mode="json"))
    fixed = config.keys_with(KeyFlag.FIXED_ON_RESUME)
    refused = [f"{key} {_show(old)} -> {_show(new)}" for key, (old, new) in different.items() if key in fixed]
    if refused:
        raise CheckpointError(
            f"{path}: does not fit this configuration: {', '.join(refused)}\n"
            "resume with the saved values, or start a new run with --resume never or another --run-dir"
        )
    return [f"Resuming with another {key}: {_show(old)} -> {_show(new)}" for key, (old, new) in different.items()]


def check_data_fits(path: Path, saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise `CheckpointError` if the data changed, so that a position in the data or a class means something else."""
    different = [f"{key} {_show(old)} -> {_show(new)}" for key, (old, new) in _changed_settings(saved, current).items()]
    if different:
        raise CheckpointError(
            f"{path}: was trained on other data, or with epochs of another length: {', '.join(different)}\n"
            "resume with the same data and limits, or start a new run with --resume never or another --run-dir"
        )


def _changed_settings(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{key: (saved value or None, current value)} of each current key whose value changed."""
    pairs = {key: (saved.get(key), value) for key, value in current.items()}
    return {key: (old, new) for key, (old, new) in pairs.items() if old != new}


def _with_defaults(saved: Mapping[str, Any], config: BaseConfig) -> dict[str, Any]:
    """Return the saved settings, with the defaults of those that this version has added since."""
    return type(config)().model_dump(mode="json") | dict(saved)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_tensors_fit(
    path: Path, state: dict[str, Any], network: Mapping[str, Tensor], optimizer: Optimizer | None = None
) -> None:
    """Raise `CheckpointError` unless `state` holds the tensors that would be saved for the state dict `network` and for
    `optimizer`: the same names, shapes and types, and only values that training can reach."""
    parts: list[tuple[str, Any, Any]] = [("", state["model"], network)]
    if state["average"]:
        parts.append(("average.", state["average"]["module"], network))
    buffers = state["ranks"][0]["buffers"]
    local = {name: network.get(name, network.get(name.removeprefix("average."))) for name in buffers}
    local["metric_sums"] = torch.zeros(4, dtype=torch.float64)
    for number, rank in enumerate(state["ranks"]):
        parts.append((f"ranks.{number}.", rank["buffers"] | {"metric_sums": rank["metric_sums"]}, local))
    if optimizer is not None:
        saved, expected = state["optimizer"], state_after_a_step(optimizer)
        groups = [
            {f"{n} {group['params']}": 0 for n, group in enumerate(one["param_groups"])} for one in (saved, expected)
        ]
        parts.append(("optimizer group ", groups[0], groups[1]))
        for number, own in saved["state"].items():  # empty, or missing, if no step has updated the parameter
            parts.append((f"optimizer.{number}.", own, expected["state"].get(number, {}) if own else {}))
    if problems := tensor_problems(parts):
        raise CheckpointError(
            f"{path}: its tensors do not fit this network: {shorten_list(problems)}\n"
            "the network's code has changed, or the file; use the earlier code, another checkpoint, or --resume never"
        )


def tensor_problems(parts: list[tuple[str, Any, Any]]) -> list[str]:
    """Describe the tensors of parts (prefix, saved, expected) whose type or shape differs; if there are none, those
    with impossible values."""
    pairs = {f"{part}{name}": (old.get(name), new.get(name)) for part, old, new in parts for name in {**new, **old}}
    kinds = {name: (_kind(old), _kind(new)) for name, (old, new) in pairs.items()}
    return [f"{_show(name)} {old} -> {new}" for name, (old, new) in kinds.items() if old != new] or [
        f"{_show(name)} holds impossible numbers" for name, (old, _) in pairs.items() if not _is_possible(name, old)
    ]


def _kind(value: Any) -> str:
    """Describe shape and type; float16 and bfloat16 count as float32, as `opt_level` may change on resume."""
    if not isinstance(value, Tensor):
        return "missing" if value is None else type(value).__name__
    dense = value.layout is torch.strided and not value.is_nested
    if not dense or value.numel() > 1 + sum(
        (n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True)
    ):
        return "not dense"  # or elements share memory
    dtype = torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else value.dtype
    return f"{dtype} {list(value.shape)}".removeprefix("torch.")


def _is_possible(name: str, number: Any) -> bool:
    value = torch.as_tensor(number)
    possible = not value.is_meta and bool(value.isfinite().all())
    return possible and not (NEVER_NEGATIVE.search(name) and bool((value < 0).any()))


def shorten_list(names: Sequence[str]) -> str:
    """Join the first three names, and count the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
