"""Load the weights that a new run starts with from a file (`pretrained`).

Formats: safetensors, as tools.export writes; a checkpoint of this program, of which the validated weights are used; a
state dict of torch.save, such as torchvision's. Only a head for another number of classes stays freshly initialised.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from utils.errors import CheckpointError
from utils.files import name_file_in_error
from utils.run import checkpoint
from utils.run.checkpoint import shorten, tensor_problems

COUNTERS = "num_batches_tracked"  # BatchNorm's; missing from files of PyTorch before 0.4.1, such as torchvision's
Pretrained = tuple[dict[str, Tensor], str]  # the network's whole initial state, and a line for the log


def read_pretrained(name: str | None, network: Mapping[str, Tensor], class_names: Sequence[str]) -> Pretrained | None:
    """Return the state of `network` with the weights of the file `name`; None for no name. Raises `CheckpointError` if
    the file cannot be read, has other names or shapes, or a head for classes other than `class_names`."""
    if name is None:
        return None
    path = Path(name)
    with name_file_in_error(path, "weights cannot be read", "; name a file of weights", CheckpointError):
        content = path.read_bytes()
    (saved, names), num_classes = _decode(path, content), len(class_names)
    head = _find_head(saved, network, num_classes)
    weights = {name: weight for name, weight in saved.items() if name not in head}
    optional = {*head, *(name for name in network if name.endswith(COUNTERS) and name not in saved)}
    expected = {name: weight for name, weight in network.items() if name not in optional}
    if problems := tensor_problems(weights, expected):
        remedy = "choose the network that it was saved from (model, stem, width); only a head of another size is new"
        raise CheckpointError(f"pretrained {path}: does not fit this network: {shorten(problems)}\n{remedy}")
    if not head and names and names != list(class_names):
        found = "its head is for other classes than the data's, or for these in another order or Unicode form"
        remedy = f"give the data's classes the names {shorten(names)}, in this order, or a file without class names"
        raise CheckpointError(f"pretrained {path}: {found}\n{remedy}")
    note = f"Starting from {len(weights)} tensors of {path} (SHA-256 {hashlib.sha256(content).hexdigest()})"
    if head:
        note += f"; {', '.join(head)} newly initialised, for {num_classes} classes instead of {len(saved[head[0]])}"
    return {name: weight.cpu() for name, weight in {**network, **weights}.items()}, note


def _decode(path: Path, content: bytes) -> tuple[dict[str, Tensor], list[str]]:
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open
        from safetensors.torch import load

        try:
            about = safe_open(path, framework="pt").metadata() or {}
            return load(content), [*map(str, json.loads(about.get("data", "{}")).get("class_names", []))]
        except (SafetensorError, ValueError, AttributeError) as error:
            raise CheckpointError(f"pretrained {path}: cannot be read: {error}") from None
    state, names = checkpoint.decode(f"pretrained {path}", content), list[str]()
    if isinstance(state, dict) and state.keys() >= checkpoint.CONTENT.keys():
        state = checkpoint.read_checkpoint(path)  # compares its digest
        names = state["data"]["class_names"]
        state = state["average"]["module"] if state["average"] else state["model"]
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"pretrained {path}: does not hold a table of named tensors only")
    return state, names


def _find_head(saved: Mapping[str, Tensor], network: Mapping[str, Tensor], num_classes: int) -> list[str]:
    """Return the names of the tensors whose shape differs only in the number of rows, which is `num_classes` in this
    network; [] if any other shape differs."""
    differing = [name for name in network if name in saved and saved[name].shape != network[name].shape]
    rows = {saved[name].shape[:1] for name in differing}
    is_head = all(network[name].shape == (num_classes, *saved[name].shape[1:]) for name in differing)
    return differing if len(rows) == 1 and all(rows) and is_head else []
