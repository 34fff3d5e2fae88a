"""Load the weights that a new run starts with from a file (`pretrained`).

Formats: safetensors, as tools.export writes; a checkpoint of this program, of which the validated weights are used; a
state dict written by torch.save, such as torchvision's .pth files. The file must hold exactly the network's tensors.
Only a head for another number of classes is not loaded and stays freshly initialised.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from utils.errors import CheckpointError
from utils.files import open_regular
from utils.run.checkpoint import io as checkpoint
from utils.run.checkpoint.fit import shorten_list, tensor_problems

COUNTERS = "num_batches_tracked"  # BatchNorm's; missing from files of PyTorch before 0.4.1, such as torchvision's


@dataclass(frozen=True)
class Pretrained:
    """The network's whole initial state, and a line for the log with the file's SHA-256."""

    weights: dict[str, Tensor]
    note: str


def read_pretrained(name: str | None, network: Mapping[str, Tensor], num_classes: int) -> Pretrained | None:
    """Return the state of `network` with the weights of the file `name`; None for no name.

    Called by the main process only, which then sends the weights to the other ranks. Raises `CheckpointError` if the
    file cannot be read or has other names or shapes.
    """
    if name is None:
        return None
    path = Path(name)
    try:
        with open_regular(path) as file:
            content = file.read()
    except OSError as error:
        raise CheckpointError(f"pretrained {path}: cannot be read: {error.strerror}; name a file of weights") from None
    saved, sha256 = _decode(path, content), hashlib.sha256(content).hexdigest()
    head, classes = _find_head(saved, network, num_classes)
    weights = {name: weight for name, weight in saved.items() if name not in head}
    names = [name for name in network if name not in head and (name in saved or not name.endswith(COUNTERS))]
    if problems := tensor_problems([("", weights, {name: network[name] for name in names})]):
        raise CheckpointError(
            f"pretrained {path}: does not fit this network: {shorten_list(problems)}\n"
            "choose the network that it was saved from (model, stem, width), or another file; only a head for another "
            "number of classes is replaced"
        )
    replaced = f"; {', '.join(head)} newly initialised, for {num_classes} classes instead of {classes}" if head else ""
    note = f"Starting from {len(weights)} tensors of {path} (SHA-256 {sha256}){replaced}"
    return Pretrained({name: weight.cpu() for name, weight in {**network, **weights}.items()}, note)


def _decode(path: Path, content: bytes) -> dict[str, Tensor]:
    kinds = "expected safetensors (NAME.safetensors), a checkpoint of this program, or a state dict by torch.save"
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load

            return load(content)
        state = checkpoint.decode(content)
    except Exception as error:  # the readers may raise anything for a file of another kind
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"pretrained {path}: cannot be read: {reason[:100]}\n{kinds}") from None
    if isinstance(state, dict) and state.keys() >= checkpoint.KEYS:
        state = checkpoint.read_checkpoint(path)  # compares its digest
        state = state["average"]["module"] if state["average"] else state["model"]
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"pretrained {path}: does not hold a table of named tensors only\n{kinds}")
    return state


def _find_head(
    saved: Mapping[str, Tensor], network: Mapping[str, Tensor], num_classes: int
) -> tuple[list[str], int | None]:
    """Return the names of the tensors whose shape differs only in the number of rows, which is `num_classes` in this
    network, and their number of rows in the file; ([], None) if any other shape differs."""
    differing = [name for name in network if name in saved and saved[name].shape != network[name].shape]
    rows = {saved[name].shape[:1] for name in differing}
    other_rows_only = all(
        saved[name].ndim and network[name].shape == (num_classes, *saved[name].shape[1:]) for name in differing
    )
    return (differing, next(iter(rows))[0]) if len(rows) == 1 and other_rows_only else ([], None)
