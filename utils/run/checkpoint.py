"""Checkpoints: written atomically, read and verified, and compared with the present configuration and network.

They hold only tensors and plain values, read with `weights_only=True`. The file is what torch.save writes and, behind
it, the SHA-256 of this: PyTorch itself does not notice a flipped bit. The loaders' only state is (epoch, batch): order
and augmentation are functions of seed, epoch and sample index.
"""

import hashlib
import io
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from utils.base_config import BaseConfig, KeyFlag, as_yaml
from utils.errors import CheckpointError, ConfigError, ExpectedError
from utils.files import PAUSES, write_atomically

FORMAT = 1
CONTENT: Mapping[str, type | tuple[type, ...]] = {
    "format": int,  # version of this table
    "config": dict,  # the resolved configuration, plain values
    "config_name": str,  # of its block
    "data": dict,  # images, steps of an epoch, names of the classes, shape, mean and std of the pixels in [0, 1]
    "epoch": int,  # finished epochs
    "batch": int,  # batches trained in the next epoch; if all, its validation is still to be done
    "step": int,  # optimizer steps in total
    "model": dict,  # weights and buffers, keys without `module.`
    "average": (dict, type(None)),  # moving average of the weights, if there is one: it is validated
    "optimizer": dict,  # the learning rate is a function of step and plateau
    "grad_scaler": dict,  # empty without loss scaling
    "plateau": dict,
    "logged_sums": list,  # the epoch's sums over all ranks at the last log point
    "best": dict,  # the best validation so far: accuracy, epoch, its number of images and what it measured
    "seconds": float,  # training time so far, over all interruptions
    "timing": list,  # training time when the epoch began; images and seconds from which images/s is computed
    "ranks": list,  # of each rank: random states, sums of the epoch so far, BatchNorm's buffers if they differ
    "versions": dict,  # what the bits of a result depend on: torch, threads, instruction set, device
}
NO_BEST = {"acc1": -1.0, "epoch": 0, "images": 0}  # before the first validation
ELEMENTWISE = ("momentum_buffer", "exp_avg", "exp_avg_sq")  # state of optimizers with the parameter's shape
NOT_SAVED = "nothing was saved since the last checkpoint"
REMEDIES = "a lower lr, a warm-up (lr_warmup_epochs), clip_grad_norm or amp_dtype=bf16 are the usual remedies"
NEW_RUN = "start a new run with --resume never or another --run-dir"
DIGEST_BYTES = len("sha256:") + 64


class DamagedError(CheckpointError):
    """The file is not what was written; an older checkpoint may be intact."""


def encode(state: dict[str, Any]) -> bytes:
    """Return torch.save's bytes and their digest, which readers of zip archives skip."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.write(_digest(buffer.getbuffer()))
    return buffer.getvalue()


def _digest(content: memoryview) -> bytes:
    return b"sha256:" + hashlib.sha256(content).hexdigest().encode()


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint file, on the CPU; raise `CheckpointError` if it cannot be used."""
    for pause in (*PAUSES, None):
        try:
            content = path.read_bytes()
            break
        except OSError as error:
            if pause is None or not path.is_file():
                raise DamagedError(f"{path}: the checkpoint cannot be read: {error.strerror}") from None
            time.sleep(pause)  # the disk or its server may answer again
    if content[-DIGEST_BYTES:] != _digest(memoryview(content)[:-DIGEST_BYTES]):
        raise DamagedError(f"{path}: is damaged or not a checkpoint of this program ({len(content)} bytes)")
    state = decode(str(path), content)
    known = isinstance(state, dict) and all(isinstance(state.get(key, ...), kind) for key, kind in CONTENT.items())
    if known and state["format"] == FORMAT:
        return state
    remedy = "use the one that wrote it, or --resume never"
    raise CheckpointError(f"{path}: is not a checkpoint of this version (format {FORMAT}); {remedy}")


def decode(name: str, content: bytes) -> Any:
    """Return what torch.save wrote into the file `name`, on the CPU; raise `CheckpointError` for any other content."""
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch may raise anything; its message recommends weights_only=False, which runs code
        kind = type(error).__name__
        raise CheckpointError(f"{name}: is no file of torch.save with only tensors and plain values ({kind})") from None


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:09d}.pt"


def save_checkpoint(folder: Path, state: dict[str, Any], keep: int, *, is_best: bool) -> None:
    """Write `state` as the last checkpoint and, if `is_best`, as the best one too; keep the `keep` newest.

    The best one is written first: a run killed between the two resumes from the checkpoint before and writes both
    again. Raises `ExpectedError` if a weight is not finite, so that no such state replaces a good one."""
    weights: dict[str, Tensor] = state["model"]
    bad = [name for name, weight in weights.items() if weight.is_floating_point() and not weight.isfinite().all()]
    if bad:
        found = f"{len(bad)} of the network's {len(weights)} tensors hold numbers that are not finite, first {bad[0]}"
        raise ExpectedError(f"after step {state['step']}, {found}; {NOT_SAVED}\n{REMEDIES}")
    content = encode(state)
    if is_best:
        write_atomically(folder / "best.pt", content)
    write_atomically(step_path(folder, state["step"]), content)
    for old in list_checkpoints(folder)[keep:]:
        with suppress(OSError):
            old.unlink()


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the step checkpoints of a folder, newest first."""
    return sorted(folder.glob(f"step-{9 * '[0-9]'}.pt"), reverse=True)


def newest_good(named: Path) -> tuple[Path | None, dict[str, Any] | None, list[str]]:
    """Return (path, state, complaints): a checkpoint file, or the newest intact checkpoint of a run's folder or of its
    checkpoints, and what was wrong with damaged newer ones. An intact one of another version raises its error."""
    if named.is_file():
        return named, read_checkpoint(named), []
    complaints = list[str]()
    for path in list_checkpoints(named / "checkpoints" if (named / "checkpoints").is_dir() else named):
        try:
            return path, read_checkpoint(path), complaints
        except DamagedError as error:
            complaints.append(str(error))
    return None, None, complaints


def check_settings(path: Path, saved: Mapping[str, Any], config: BaseConfig, *, must_equal: bool) -> list[str]:
    """Return "KEY OLD -> NEW" of each setting that has changed since the checkpoint `path` was written.

    Raises `CheckpointError` if one changed that is fixed on resume. `must_equal`: the user has not named what to
    resume; raises `ConfigError` if any training setting changed."""
    saved = type(config)().model_dump(mode="json") | dict(saved)  # with the defaults of settings added since
    changes = changed(saved, config.model_dump(mode="json"))
    fixed = [text for key, text in changes.items() if key in config.keys_with(KeyFlag.FIXED_ON_RESUME)]
    training = [text for key, text in changes.items() if key not in config.keys_with(KeyFlag.FREE_ON_RESUME)]
    if training and must_equal:
        folder = path.parent.parent
        resume = f"--resume {shlex.quote(str(folder))} to continue from its last checkpoint with the new values; or "
        found = f"{folder}: holds a run with other settings: {shorten(training)}"
        options = f"--run-dir DIR for a separate run; or {'' if fixed else resume}--resume never"
        raise ConfigError(f"{found}\nadd to the command: {options} to move it aside and start again")
    if fixed:
        remedy = f"resume with the saved values, or {NEW_RUN}"
        raise CheckpointError(f"{path}: does not fit this configuration: {shorten(fixed)}\n{remedy}")
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
        remedy = "use the earlier code, another checkpoint, or --resume never"
        why = f"the network's code has changed, or the file; {remedy}"
        raise CheckpointError(f"{path}: its tensors do not fit this network: {shorten(problems)}\n{why}")


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
    return {key: f"{key} {as_yaml(old):.60} -> {as_yaml(new):.60}" for key, (old, new) in pairs.items() if old != new}


def shorten(names: Sequence[str]) -> str:
    """Join the first six names, and count the others."""
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
