"""Checkpoints: what they hold, atomic writing, checked reading, choosing.

| key | holds |
|---|---|
| format | version of this table |
| config, config_name | the resolved configuration, plain values, and its block's name |
| epoch, batch, step | position: finished epochs, batches trained in the next one, optimizer steps in all |
| model | weights and buffers, keys without `module.` |
| optimizer, grad_scaler, plateau | their states; the learning rate is a function of step and plateau |
| metric_sums | loss, correct and images of the epoch so far, over all ranks |
| best | {"acc1", "epoch"} of the best validation so far |
| seconds | training time so far, over all interruptions |
| ranks | per rank: states of the random generators, and BatchNorm's buffers, which differ in mid-epoch |
| versions | Python and torch that wrote it |

Only tensors and plain values, read with `weights_only=True`. The file is what torch.save writes, with the SHA-256 of
its content as the comment of the zip archive: PyTorch itself does not notice a flipped bit.
"""

import hashlib
import io
import os
import random
import re
import struct
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from utils.errors import CheckpointError

FORMAT = 1
# keys of the configuration that decide what the saved tensors and the position in the data mean
FITTING_KEYS = ("dataset", "num_classes", "model", "stem", "batch_size", "seed", "limit_train_batches")

_DIGEST = b"sha256:"
_COMMENT_BYTES = len(_DIGEST) + 64
_STEP_FILE = re.compile(r"step-(\d{9})\.pt")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that at any moment either the old or the whole new one is there, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"{path}: cannot be written: {error.strerror}; what was there before is untouched"
        ) from None
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def encode(state: dict[str, Any]) -> bytes:
    """torch.save's bytes with their SHA-256 as the archive's comment."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getbuffer()
    # the last two bytes of a zip archive without a comment are the comment's length
    head = bytes(content[:-2]) + struct.pack("<H", _COMMENT_BYTES)
    return head + _DIGEST + hashlib.sha256(head).hexdigest().encode()


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The state in a checkpoint file, on the CPU; `CheckpointError` naming the file where it is not whole."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    head, comment = content[:-_COMMENT_BYTES], content[-_COMMENT_BYTES:]
    if comment != _DIGEST + hashlib.sha256(head).hexdigest().encode():
        raise CheckpointError(
            f"{path}: is damaged or no checkpoint of this program ({len(content)} bytes, digest differs)"
        )
    state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if state["format"] != FORMAT:
        raise CheckpointError(
            f"{path}: has format {state['format']}, this program reads {FORMAT}; use the version that wrote it"
        )
    return state


def save_last(folder: Path, content: bytes, step: int, keep: int) -> Path:
    """Write the checkpoint of `step` and remove all but the `keep` newest; returns its path."""
    path = folder / f"step-{step:09d}.pt"
    write_atomically(path, content)
    for old in list_checkpoints(folder)[keep:]:
        old.unlink(missing_ok=True)
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """The step checkpoints of a folder, newest first."""
    return sorted((path for path in folder.glob("step-*.pt") if _STEP_FILE.fullmatch(path.name)), reverse=True)


def newest_good(folder: Path) -> tuple[Path | None, dict[str, Any] | None, list[str]]:
    """(path, state, complaints): the newest checkpoint that is whole, and what was wrong with newer ones."""
    complaints: list[str] = []
    for path in list_checkpoints(folder):
        try:
            return path, read_checkpoint(path), complaints
        except CheckpointError as error:
            complaints.append(str(error))
    return None, None, complaints


def check_fit(path: Path, saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """The keys whose change is allowed on resuming; `CheckpointError` where one differs that must not."""
    different = [key for key in current if saved.get(key) != current[key]]
    refused = [f"{key} {saved.get(key)!r} -> {current[key]!r}" for key in different if key in FITTING_KEYS]
    if refused:
        raise CheckpointError(
            f"{path}: does not fit this configuration: {', '.join(refused)}\n"
            "go on with the saved values, or start anew with --resume never or another --run-dir"
        )
    return different


def random_state() -> dict[str, Any]:
    """The states of this process's random generators as plain values and tensors."""
    name, keys, position, has_gauss, cached = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Undo of `random_state`; the CUDA generator only where both sides have one."""
    random.setstate(state["python"])
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def versions() -> dict[str, str]:
    """What wrote a checkpoint."""
    return {"python": sys.version.split()[0], "torch": str(torch.__version__)}
