"""Export a run's best weights for use without this project's code.

    python -m tools.export expts/cifar100-cpu

model.safetensors  weights and buffers in float32, named as in models/; the metadata holds configuration and data (class
                   names, image shape and normalisation) as JSON
model.pt2          the whole network with normalisation as a torch.export program: uint8 pixels [N, 3, H, W], any N ->
                   float32 logits [N, classes]; checked against the trained network, with the layers of the training

    logits = torch.export.load("model.pt2").module()(pixels)
"""

import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tools.common import make_folder, new_parser, path_argument
from tools.trained import load_classifier, open_trained
from utils.errors import CheckpointError, ExpectedError, exit_in_a_line
from utils.user_code import user_code_errors

if TYPE_CHECKING:
    from torch import Tensor, nn

CHECKED_BATCHES = (1, 5)  # batch sizes; tracing uses another
TOLERANCE = 1e-3  # relative to the largest logit: all compute in float32, but in a different order


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    """Write both files; return the exit status."""
    parser = new_parser("export", __doc__, "0 written; 2 usage; 4 no usable checkpoint; 1 anything else.")
    parser.add_argument("run", type=path_argument, metavar="RUN_DIR", help="a run's folder, such as expts/cifar100-cpu")
    parser.add_argument("--out", type=path_argument, metavar="DIR", help="where to write (default: RUN_DIR/export)")
    options = parser.parse_args(argv)
    if not (best := options.run / "checkpoints" / "best.pt").is_file():
        raise CheckpointError(f"{options.run}: has no checkpoints/best.pt; give a run's folder, such as expts/NAME")
    print("\n".join(export(best, options.out or options.run / "export")))
    return 0


def export(path: Path, folder: Path) -> list[str]:
    """Export the checkpoint `path` into `folder`; return lines that describe the files."""
    import torch
    from safetensors.torch import save

    from models import build_model
    from utils.data.augment import Normalise
    from utils.distributed.world import World
    from utils.files import strict_json, write_atomically

    trained = open_trained(path, ["device=cpu"])
    state, config, shape = trained.state, trained.config, trained.image_shape
    float32 = {"enable_amp": False, "opt_level": None, "loss_scale": None, "test_time_views": 1}
    as_trained = replace(trained, config=config.model_copy(update=float32))
    classifier = load_classifier(as_trained, World(0, 0, 1, torch.device("cpu")))
    model, saved = build_model(config, shape[-1]), state["average"]["module"] if state["average"] else state["model"]
    model.load_state_dict(saved)  # in float32, whatever opt_level trained in
    normalise = Normalise(state["data"]["mean"], state["data"]["std"], torch.device("cpu"), torch.contiguous_format)

    class Network(torch.nn.Module):
        """uint8 pixels [N, 3, H, W] -> float32 logits [N, classes]."""

        scale: "Tensor"
        shift: "Tensor"

        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.register_buffer("scale", normalise.scale)
            self.register_buffer("shift", normalise.shift)

        def forward(self, pixels: "Tensor") -> "Tensor":
            return self.model(pixels.float() * self.scale + self.shift)

    classifier.validated.eval()
    program, difference = export_program(Network().eval(), lambda pixels: classifier.predict(normalise(pixels)), shape)
    keys = ("config_name", "config", "data", "best", "versions")
    metadata = {"format": "pt"} | {key: strict_json(state[key]) for key in keys}  # safetensors allows only strings
    weights = {name: weight.contiguous().clone() for name, weight in model.state_dict().items()}
    make_folder(folder)
    write_atomically(folder / "model.safetensors", save(weights, metadata))
    write_atomically(folder / "model.pt2", program)
    best, views, source = (
        state["best"],
        config.test_time_views,
        "the moving average" if state["average"] else "the model",
    )
    accuracy = f"best acc1 {100 * best['acc1']:.2f} % in epoch {best['epoch']:.0f}"
    with_views = f", validated with {views} views of each image; the program uses one" if views > 1 else ""
    compared = f"logits differ from the trained network's by at most {difference:.1e} of the largest logit"
    return [
        f"{folder / 'model.safetensors'}: {len(weights)} tensors of {source}",
        f"{folder / 'model.pt2'}: {compared}",
        f"{config.model}, {len(trained.class_names)} classes, {accuracy}{with_views}",
    ]


def export_program(
    network: "nn.Module", trained: Callable[["Tensor"], "Tensor"], image_shape: Sequence[int]
) -> tuple[bytes, float]:
    """Return the serialised program of `network` and its largest difference from `trained`, the function that was
    trained, relative to the largest logit. Both: uint8 pixels -> logits. `ExpectedError` if it exceeds TOLERANCE."""
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
            expected, found = trained(pixels), reloaded(pixels)
            differences.append((expected - found).abs().max() / expected.abs().max())
    difference = torch.stack(differences).max().item()  # Python's max would ignore a NaN
    if not difference <= TOLERANCE:
        found = f"differs from the trained network by {difference:.1e} of the largest logit, more than {TOLERANCE:.0e}"
        raise ExpectedError(f"the exported program {found}; nothing was written")
    return buffer.getvalue(), difference


if __name__ == "__main__":
    sys.exit(main())
