"""Export a run's best weights for use without this project's code.

    python -m tools.export expts/cifar100-cpu

model.safetensors  weights and buffers in float32, named as in models/; the metadata holds configuration and data (class
                   names, image shape and normalisation) as JSON
model.pt2          the whole network with normalisation as a torch.export program: uint8 pixels [N, 3, H, W], any N ->
                   float32 logits [N, classes]; checked against the network in PyTorch

    logits = torch.export.load("model.pt2").module()(pixels)
"""

import argparse
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.shared.command_line import new_parser, path_argument
from tools.shared.output import make_folder, say
from tools.shared.trained import read_config
from utils.config.command_line import not_empty
from utils.errors import CheckpointError, ExpectedError, exit_in_a_line
from utils.user_code import user_code_errors

if TYPE_CHECKING:
    from torch import Tensor, nn

CHECKED_BATCHES = (1, 5)  # batch sizes; tracing uses another
TOLERANCE = 1e-4  # relative to the largest logit: both compute in float32, but may sum in a different order


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    """Write both files; return the exit status."""
    options = parser().parse_args(argv)
    folder = Path(options.out) if options.out else options.run / "export"
    if not (options.run / "checkpoints").is_dir():
        raise CheckpointError(f"{options.run}: holds no checkpoints; give a run's folder, such as expts/NAME")
    for line in export(options.run / "checkpoints" / "best.pt", folder):
        say(line)
    return 0


def parser() -> argparse.ArgumentParser:
    statuses = "0 written; 2 usage; 4 no usable checkpoint; 1 anything else."
    parser = new_parser("export", __doc__, statuses)
    parser.add_argument("run", type=path_argument, metavar="RUN_DIR", help="a run's folder, such as expts/cifar100-cpu")
    parser.add_argument("--out", type=not_empty, metavar="DIR", help="where to write (default: RUN_DIR/export)")
    return parser


def export(path: Path, folder: Path) -> list[str]:
    """Export the checkpoint `path` into `folder`; return lines that describe the files."""
    from safetensors.torch import save

    from utils.files import write_atomically
    from utils.run.checkpoint.io import read_checkpoint

    state = read_checkpoint(path)
    network, weights = best_network(path, state)
    program, difference = export_program(network, state["data"]["shape"])
    keys = ("config_name", "config", "data", "best", "versions")
    metadata = {"format": "pt"} | {key: json.dumps(state[key]) for key in keys}  # safetensors allows only strings
    make_folder(folder)
    write_atomically(folder / "model.safetensors", save(weights, metadata))
    write_atomically(folder / "model.pt2", program)
    config, best, classes = read_config(path, state), state["best"], len(state["data"]["class_names"])
    source, views = "the moving average" if state["average"] else "the model", config.test_time_views
    return [
        f"{folder / 'model.safetensors'}: {len(weights)} tensors of {source}",
        f"{folder / 'model.pt2'}: logits differ from the network's by at most {difference:.1e} of the largest logit",
        f"{config.model}, {classes} classes, best acc1 {100 * best['acc1']:.2f} % in epoch {best['epoch']:.0f}"
        + (f", validated with {views} views of each image; the program uses one" if views > 1 else ""),
    ]


def best_network(path: Path, state: dict[str, Any]) -> tuple["nn.Module", dict[str, "Tensor"]]:
    """Return the network (uint8 pixels -> logits) with the validated weights, and {name: weight}."""
    import torch

    from models import build_model
    from utils.data.transforms.augment import Normalise
    from utils.run.checkpoint.fit import check_tensors_fit

    config = read_config(path, state)
    model = build_model(config, state["data"]["shape"][-1]).eval()
    saved = state["average"]["module"] if state["average"] else state["model"]
    check_tensors_fit(path, state, model.state_dict())
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
    """Return the serialised program and its largest difference from `network`, relative to the largest logit.

    Raises `ExpectedError` if the difference exceeds TOLERANCE.
    """
    import torch

    def random_pixels(images: int) -> torch.Tensor:
        return torch.randint(256, (images, *image_shape), dtype=torch.uint8, generator=generator)

    generator = torch.Generator().manual_seed(0)
    batch = torch.export.Dim("batch", min=1)
    with user_code_errors("torch.export cannot follow the network; nothing was written", ExpectedError):
        exported = torch.export.export(network, (random_pixels(3),), dynamic_shapes=({0: batch},))
    buffer = io.BytesIO()
    torch.export.save(exported, buffer)
    buffer.seek(0)
    reloaded = torch.export.load(buffer).module()
    differences = []
    with torch.no_grad():
        for images in CHECKED_BATCHES:
            pixels = random_pixels(images)
            expected, found = network(pixels), reloaded(pixels)
            differences.append((expected - found).abs().max() / expected.abs().max())
    difference = torch.stack(differences).max().item()  # Python's max would ignore a NaN
    if not difference <= TOLERANCE:
        found = f"differs from the network by {difference:.1e} of the largest logit, more than {TOLERANCE:.0e}"
        raise ExpectedError(f"the exported program {found}; nothing was written")
    return buffer.getvalue(), difference


if __name__ == "__main__":
    sys.exit(main())
