"""Whether a saved run fits the present configuration, network and data; errors name what differs and the remedy."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from utils.base_config import BaseConfig, KeyFlag
from utils.errors import CheckpointError, ConfigError

ELEMENTWISE = ("momentum_buffer", "exp_avg", "exp_avg_sq")  # state of optimizers with the parameter's shape
NEW_RUN = "start a new run with --resume never or another --run-dir"


def check_settings(path: Path, saved: Mapping[str, Any], config: BaseConfig, *, automatic: bool) -> list[str]:
    """Return "KEY OLD -> NEW" of each setting that has changed since the checkpoint `path` was written.

    Raises `CheckpointError` if one changed that is fixed on resume. `automatic`: the user has not named what to resume;
    raises `ConfigError` if any training setting changed."""
    saved = type(config)().model_dump(mode="json") | dict(saved)  # with the defaults of settings added since
    changes = changed(saved, config.model_dump(mode="json"))
    fixed = [text for key, text in changes.items() if key in config.keys_with(KeyFlag.FIXED_ON_RESUME)]
    training = [text for key, text in changes.items() if key not in config.keys_with(KeyFlag.FREE_ON_RESUME)]
    if training and automatic:
        folder = path.parent.parent
        resume = f"--resume {shlex.quote(str(folder))} to continue from its last checkpoint with the new values; or "
        raise ConfigError(
            f"{folder}: holds a run with other settings: {shorten(training)}\nadd to the command: --run-dir DIR for a "
            f"separate run; or {'' if fixed else resume}--resume never to move it aside and start again"
        )
    if fixed:
        raise CheckpointError(
            f"{path}: does not fit this configuration: {shorten(fixed)}\nresume with the saved values, or {NEW_RUN}"
        )
    return [*changes.values()]


def check_tensors_fit(
    path: Path, state: dict[str, Any], network: Mapping[str, Tensor], optimizer: Optimizer | None = None
) -> None:
    """Raise `CheckpointError` unless the tensors in `state` have the names, shapes and types of the state dict
    `network`, and the optimizer's state belongs to the parameters of `optimizer`."""
    problems = tensor_problems(state["model"], network)
    if state["average"]:
        problems += tensor_problems(state["average"]["module"], network, "average.")
    if optimizer is not None:
        saved, expected = state["optimizer"], optimizer.state_dict()["param_groups"]
        if [group["params"] for group in saved["param_groups"]] != [group["params"] for group in expected]:
            problems.append("the optimizer's groups of parameters")
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            own = {name: value for name, value in saved["state"].get(number, {}).items() if name in ELEMENTWISE}
            problems += tensor_problems(own, dict.fromkeys(own, parameter), f"optimizer.{number}.")
    if problems:
        raise CheckpointError(
            f"{path}: its tensors do not fit this network: {shorten(problems)}\n"
            "the network's code has changed, or the file; use the earlier code, another checkpoint, or --resume never"
        )


def tensor_problems(saved: Mapping[str, Any], expected: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Describe the tensors whose type or shape differs, or that only one side has."""
    kinds = {name: (_kind(saved.get(name)), _kind(expected.get(name))) for name in {**expected, **saved}}
    return [f"{prefix + name!r} {old} -> {new}" for name, (old, new) in kinds.items() if old != new]


def _kind(value: Any) -> str:
    """Describe type and shape; float16 and bfloat16 count as float32, as `opt_level` may change on resume."""
    if not isinstance(value, Tensor):
        return "missing" if value is None else type(value).__name__
    dtype = torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else value.dtype
    return f"{dtype} {list(value.shape)}".removeprefix("torch.")


def changed(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, str]:
    """Return {key: "KEY OLD -> NEW"} of each current key whose value changed."""
    pairs = {key: (saved.get(key), value) for key, value in current.items()}
    return {key: f"{key} {old!r:.60} -> {new!r:.60}" for key, (old, new) in pairs.items() if old != new}


def shorten(names: Sequence[str]) -> str:
    """Join the first six names, and count the others."""
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
