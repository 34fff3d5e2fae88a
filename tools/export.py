"""Export a run's best weights, for programs without this project's code.

    python -m tools.export expts/cifar100-cpu

model.safetensors  weights and buffers in float32, named as in models/; its metadata holds configuration and data
                   (class names, shape and normalisation of images), each as JSON
model.pt2          the whole network as a torch.export program: uint8 pixels [N, 3, H, W] of any N -> float32 logits
                   [N, classes]; normalises by itself, and is checked against the network that it was made from

    logits = torch.export.load("model.pt2").module()(pixels)
"""

import argparse
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.shared.command_line import new_parser
from tools.shared.output import make_folder
from tools.shared.trained import read_config
from utils.config.command_line import not_empty
from utils.errors import CheckpointError, ExpectedError, exit_in_a_line
from utils.user_code import user_code_errors

if TYPE_CHECKING:
    from torch import Tensor, nn

CHECKED_BATCHES = (1, 5)  # images; the program is traced with another number
TOLERANCE = 1e-4  # relative to the largest logit: both sides compute in float32, but in another order


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    """Writes both files; returns the exit status."""
    options = parser().parse_args(argv)
    folder = Path(options.out) if options.out else options.run / "export"
    if not (options.run / "checkpoints").is_dir():
        raise CheckpointError(f"{options.run}: holds no checkpoints; give a run's folder, such as expts/NAME")
    for line in export(options.run / "checkpoints" / "best.pt", folder):
        print(line)
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    statuses = "0 written; 2 usage; 4 no usable checkpoint; 1 anything else."
    parser = new_parser("export", __doc__, statuses)
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="a run's folder, such as expts/cifar100-cpu")
    parser.add_argument("--out", type=not_empty, metavar="DIR", help="where to write (default: RUN_DIR/export)")
    return parser


def export(path: Path, folder: Path) -> list[str]:
    """Write both files of the checkpoint `path` into `folder`; returns lines that describe them."""
    from safetensors.torch import save

    from utils.files import write_atomically
    from utils.run.checkpoint.io import read_checkpoint

    state = read_checkpoint(path)
    network, weights = best_network(path, state)
    program, difference = export_program(network, state["data"]["shape"])
    make_folder(folder)
    write_atomically(folder / "model.safetensors", save(weights, metadata(state)))
    write_atomically(folder / "model.pt2", program)
    config, best, classes = state["config"], state["best"], len(state["data"]["class_names"])
    whose = "the moving average" if state["average"] else "the model"
    views = {"mirror images (test_time_flip)": "test_time_flip", "shifted ones (test_time_shift)": "test_time_shift"}
    others = [view for view, key in views.items() if config.get(key)]  # a checkpoint may be older than a key
    return [
        f"{folder / 'model.safetensors'}: {len(weights)} tensors of {whose}",
        f"{folder / 'model.pt2'}: equal to the eager network within {difference:.1e} of the largest logit",
        f"{config['model']}, {classes} classes, best acc1 {100 * best['acc1']:.2f} % in epoch {best['epoch']:.0f}"
        + (f", validated together with {' and '.join(others)}" if others else ""),
    ]


def best_network(path: Path, state: dict[str, Any]) -> tuple["nn.Module", dict[str, "Tensor"]]:
    """(uint8 pixels -> logits, its weights by name) with the weights that were validated."""
    import torch

    from models import build_model
    from utils.data.transforms.augment import Normalise
    from utils.run.checkpoint.io import check_weights_fit

    config = read_config(path, state)
    model = build_model(config, state["data"]["shape"][-1]).eval()
    saved = state["average"]["module"] if state["average"] else state["model"]
    check_weights_fit(path, saved, model.state_dict())
    model.load_state_dict(saved)  # in float32, whatever opt_level trained in

    class Classifier(torch.nn.Module):
        scale: "Tensor"
        shift: "Tensor"

        def __init__(self) -> None:
            super().__init__()
            self.model = model
            data, cpu = state["data"], torch.device("cpu")
            normalise = Normalise(data["mean"], data["std"], cpu, torch.contiguous_format)
            self.register_buffer("scale", normalise.scale)
            self.register_buffer("shift", normalise.shift)

        def forward(self, pixels: "Tensor") -> "Tensor":
            return self.model(pixels.float() * self.scale + self.shift)

    weights = {name: weight.contiguous().clone() for name, weight in model.state_dict().items()}
    return Classifier().eval(), weights


def export_program(network: "nn.Module", image_shape: Sequence[int]) -> tuple[bytes, float]:
    """(the program as written, its largest difference from `network` as a share of the largest logit).

    `ExpectedError` where that exceeds TOLERANCE."""
    import torch

    def draw(images: int) -> torch.Tensor:
        return torch.randint(256, (images, *image_shape), dtype=torch.uint8, generator=generator)

    generator = torch.Generator().manual_seed(0)
    batch = torch.export.Dim("batch", min=1)
    with user_code_errors("torch.export cannot follow the network; nothing was written", ExpectedError):
        exported = torch.export.export(network, (draw(3),), dynamic_shapes=({0: batch},))
    buffer = io.BytesIO()
    torch.export.save(exported, buffer)
    buffer.seek(0)
    reloaded = torch.export.load(buffer).module()
    differences = []
    with torch.no_grad():
        for images in CHECKED_BATCHES:
            pixels = draw(images)
            expected, found = network(pixels), reloaded(pixels)
            differences.append((expected - found).abs().max() / expected.abs().max())
    difference = torch.stack(differences).max().item()  # not Python's max, which would pass over a NaN
    if not difference <= TOLERANCE:
        found = f"differs from the network by {difference:.1e} of the largest logit, more than {TOLERANCE:.0e}"
        raise ExpectedError(f"the exported program {found}; nothing was written")
    return buffer.getvalue(), difference


def metadata(state: dict[str, Any]) -> dict[str, str]:
    """The safetensors file's description of itself; the format allows text only."""
    described = ("config_name", "config", "data", "best", "versions")
    return {"format": "pt"} | {key: json.dumps(state[key]) for key in described}


if __name__ == "__main__":
    sys.exit(main())
