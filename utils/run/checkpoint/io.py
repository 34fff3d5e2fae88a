"""Write checkpoints atomically, read and verify them, choose the newest good one. schema.py lists their content.

They hold only tensors and plain values, read with `weights_only=True`. The file is what torch.save writes, with the
SHA-256 of its content as the comment of the zip archive: PyTorch itself does not notice a flipped bit.
"""

import hashlib
import io
import os
import pickle
import re
import struct
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils.errors import CheckpointError, ExpectedError
from utils.files import open_regular, write_atomically
from utils.run.checkpoint.schema import CheckpointSchema, check_content

FORMAT = 1
STATISTICS = ("running_mean", "running_var")  # not used by the forward pass in training
REMEDIES = "a lower lr, a warm-up (lr_warmup_epochs), clip_grad_norm or amp_dtype=bf16 are the usual remedies"
NO_BEST = {"acc1": -1.0, "epoch": 0}  # before the first validation
KEYS = frozenset(CheckpointSchema.model_fields)

_DIGEST = b"sha256:"
_COMMENT_BYTES = len(_DIGEST) + 64
_STEP_FILE = re.compile(r"step-(\d{9})\.pt")


class DamagedError(CheckpointError):
    """The file is not what was written; an older checkpoint may be intact."""


def encode(state: dict[str, Any]) -> bytes:
    """Return torch.save's bytes with their SHA-256 as the archive's comment."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    # the last two bytes of a zip archive without a comment are the comment's length
    buffer.seek(-2, os.SEEK_END)
    buffer.write(struct.pack("<H", _COMMENT_BYTES))
    digest = hashlib.sha256(buffer.getbuffer()).hexdigest()
    buffer.write(_DIGEST + digest.encode())
    return buffer.getvalue()


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint file, on the CPU; raise `CheckpointError` if it cannot be used."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _COMMENT_BYTES))
            content = file.read()
            if content.startswith(_DIGEST):  # otherwise it may be larger than memory
                file.seek(0)
                content = file.read()
    except (OSError, MemoryError) as error:
        reason = getattr(error, "strerror", "larger than memory")
        raise DamagedError(f"{path}: the checkpoint cannot be read: {reason}") from None
    head, comment = memoryview(content)[:-_COMMENT_BYTES], content[-_COMMENT_BYTES:]
    if comment != _DIGEST + hashlib.sha256(head).hexdigest().encode():
        raise DamagedError(f"{path}: is damaged or not a checkpoint of this program ({size} bytes, wrong digest)")
    try:
        state = decode(content)
        if not isinstance(state, dict) or state.get("format", FORMAT) == FORMAT:
            return check_content(state)
    except ValueError as error:  # the digest is right, so somebody forged the file
        raise CheckpointError(f"{path}: is not a checkpoint of this program: {error}") from None
    raise CheckpointError(
        f"{path}: has format {state['format']}, this program reads {FORMAT}; use the version that wrote it, or "
        "start a new run with --resume never or another --run-dir"
    )


def decode(content: bytes) -> Any:
    """Return what torch.save wrote, on the CPU; raise `ValueError` for anything else."""
    try:
        entries = zipfile.ZipFile(io.BytesIO(content)).infolist() if content.startswith(b"PK") else []
        compressed = any(one.compress_type for one in entries) or sum(one.file_size for one in entries) > len(content)
        if compressed or b"\nbytearray\n" in content:  # a few bytes of either could fill the memory
            raise pickle.UnpicklingError
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # its message recommends weights_only=False, which runs code
        raise ValueError("it holds more than uncompressed tensors and plain values") from None
    except Exception as error:  # torch may raise anything
        raise ValueError(ascii(error)[:100]) from None


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:09d}.pt"


def save_checkpoint(folder: Path, state: dict[str, Any], keep: int, *, is_best: bool) -> None:
    """Write `state` as the last checkpoint and, if `is_best`, as the best one too; keep the `keep` newest.

    The best one is written first: a run killed between the two resumes from the checkpoint before and writes both
    again."""
    check_finite(state)
    content = encode(state)
    if is_best:
        write_atomically(folder / "best.pt", content)
    write_atomically(step_path(folder, state["step"]), content)
    for old in list_checkpoints(folder)[keep:]:
        with suppress(OSError):
            old.unlink()


def check_finite(state: dict[str, Any]) -> None:
    """Raise `ExpectedError` if a weight is not finite, so that no such state replaces a good one.

    Every save follows a check that the loss is finite, so the last update caused it, or in BatchNorm's
    statistics the last activations.
    """
    weights: dict[str, Tensor] = state["model"]
    bad = [name for name, weight in weights.items() if weight.is_floating_point() and not weight.isfinite().all()]
    if not bad:
        return
    only_statistics = all(name.endswith(STATISTICS) for name in bad)
    cause = (
        "all are BatchNorm's statistics, so activations grew too large" if only_statistics else "the update caused it"
    )
    raise ExpectedError(
        f"after step {state['step']}, {len(bad)} of the network's {len(weights)} tensors hold numbers that are not "
        f"finite, first {bad[0]}; nothing was saved since the last checkpoint\n"
        f"the loss of that step was finite: {cause}, at learning rate "
        f"{float(state['optimizer']['param_groups'][0]['lr']):.4g}; {REMEDIES}"
    )


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the step checkpoints of a folder, newest first."""
    return sorted((path for path in folder.glob("step-*.pt") if _STEP_FILE.fullmatch(path.name)), reverse=True)


def newest_good(folder: Path) -> tuple[Path | None, dict[str, Any] | None, list[str]]:
    """Return (path, state, complaints): the newest intact checkpoint, and what was wrong with newer ones.

    Only damaged ones are skipped. An intact one of another version of this program raises its `CheckpointError`.
    """
    complaints: list[str] = []
    for path in list_checkpoints(folder):
        try:
            return path, read_checkpoint(path), complaints
        except DamagedError as error:
            complaints.append(str(error))
    return None, None, complaints
