"""The weights that a new run begins with, from a file: the key `pretrained`.

Read are safetensors, as tools.export writes them too; a checkpoint of this program, of which it takes the weights that
were validated; and a state dict that torch.save wrote, such as torchvision's .pth files. Every name of the network must
be in the file and no other. Only a head for another number of classes stays as it is, freshly initialised.
"""

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from utils.errors import CheckpointError
from utils.files import open_regular
from utils.run.checkpoint import io as checkpoint

COUNTERS = "num_batches_tracked"  # of BatchNorm, not in files that PyTorch before 0.4.1 wrote, such as torchvision's


@dataclass(frozen=True)
class Pretrained:
    """The network's whole state to begin with, and what the log says of it, with the file's SHA-256."""

    weights: dict[str, Tensor]
    note: str


def read_pretrained(name: str | None, network: Mapping[str, Tensor], num_classes: int) -> Pretrained | None:
    """The weights of the file `name` in the place of those of `network`; None for no name.

    For the main process: the other ranks get what it read, so that all begin with the same. `CheckpointError` where the
    file cannot be read, or has other names and shapes.
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
    missing = [name for name in network if name not in saved and not name.endswith(COUNTERS)]
    problems = {
        "not in the file": missing,
        "only in the file": [name for name in saved if name not in network],
        "of another shape": [
            f"{name} {tuple(saved[name].shape)} -> {tuple(network[name].shape)}"
            for name in network
            if name in saved and name not in head and saved[name].shape != network[name].shape
        ],
    }
    if any(problems.values()):
        told = "; ".join(f"{kind}: {_list(names)}" for kind, names in problems.items() if names)
        raise CheckpointError(
            f"pretrained {path}: does not fit this network: {told}\n"
            "choose the network that it is of (model, stem, width), or rename its tensors; only a head for another "
            "number of classes is replaced"
        )
    weights = {name: saved[name] for name in network if name in saved and name not in head}
    bad = [name for name, weight in weights.items() if not weight.float().isfinite().all()]
    if bad:
        raise CheckpointError(
            f"pretrained {path}: holds numbers that are not finite: {_list(bad)}\n"
            "it is damaged, or of a training that broke down; name another file of weights"
        )
    replaced = f"; {', '.join(head)} begin anew, for {num_classes} classes instead of {classes}" if head else ""
    note = f"Beginning with {len(weights)} tensors of {path} (SHA-256 {sha256}){replaced}"
    return Pretrained({name: weight.cpu() for name, weight in {**network, **weights}.items()}, note)


def _decode(path: Path, content: bytes) -> dict[str, Tensor]:
    kinds = "expected safetensors (NAME.safetensors), a checkpoint of this program, or a state dict by torch.save"
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load

            return load(content)
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a file of another kind leads the two readers to
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"pretrained {path}: cannot be read: {reason[:100]}\n{kinds}") from None
    if isinstance(state, dict) and state.keys() >= checkpoint.KEYS:
        state = checkpoint.read_checkpoint(path)  # compares its digest
        state = state["average"]["module"] if state["average"] else state["model"]
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"pretrained {path}: does not hold tensors by name and nothing else\n{kinds}")
    return state


def _find_head(
    saved: Mapping[str, Tensor], network: Mapping[str, Tensor], num_classes: int
) -> tuple[list[str], int | None]:
    """(names, number of classes in the file) of what has `num_classes` rows here and another number there; ([], None)
    where anything else differs in shape."""
    differing = [name for name in network if name in saved and saved[name].shape != network[name].shape]
    rows = {saved[name].shape[:1] for name in differing}
    other_rows_only = all(
        saved[name].ndim and network[name].shape == (num_classes, *saved[name].shape[1:]) for name in differing
    )
    return (differing, next(iter(rows))[0]) if len(rows) == 1 and other_rows_only else ([], None)


def _list(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
