"""Export a run's best weights for use without this project's code.

    python -m tools.export expts/cifar100-cpu

model.safetensors  weights and buffers in float32, named as in models/; the metadata holds configuration and data (class
                   names, image shape and normalisation) as JSON
model.pt2          the whole network with normalisation as a torch.export program: uint8 pixels [N, 3, H, W], any N ->
                   float32 logits [N, classes]; checked against the trained network, with the layers of the training
MODEL_CARD.md      data, classes, input, accuracy and origin, for people

    logits = torch.export.load("model.pt2").module()(pixels)
"""

import io
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from safetensors.torch import save
from torch import Tensor, nn

from models import build_model
from tools.common import make_folder, new_parser, path_argument
from tools.runs import read_run_folder
from tools.trained import Trained, load_classifier, normalisation, open_trained
from utils.distributed.world import World
from utils.errors import ExpectedError, exit_in_a_line
from utils.files import strict_json, write_atomically
from utils.user_code import user_code_errors

TOLERANCE = 1e-3  # relative to the largest logit: all compute in float32, but in a different order
CARD = """\
# {config.model} trained on {config.dataset}
| | |
|---|---|
| data | {config.dataset}, `{config.data_path}` |
| classes | {classes}: {names} |
| input of model.pt2 | RGB images resized and cropped to uint8 pixels [N, {shape}] |
| normalisation | within model.pt2, not in model.safetensors: (pixels / 255 - {mean}) / {std} |
| accuracy | {accuracy}, on {images:,.0f} validation images{with_views} |
| weights | {source} of {path}, step {step} |
| origin | version {version}, commit {commit}, torch {torch}: `{command}` |
"""


class Network(nn.Module):
    """A trained network with its normalisation: uint8 pixels [N, 3, H, W] -> float32 logits [N, classes]."""

    def __init__(self, trained: Trained, model: nn.Module) -> None:
        super().__init__()
        self.model, normalise = model, normalisation(trained)
        self.scale, self.shift = nn.Buffer(normalise.scale), nn.Buffer(normalise.shift)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model(pixels.float() * self.scale + self.shift)


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser("export", __doc__, "0 written; 2 usage; 4 no usable checkpoint; 1 anything else.")
    parser.add_argument("run", type=path_argument, metavar="RUN_DIR", help="a run's folder, such as expts/cifar100-cpu")
    parser.add_argument("--out", type=path_argument, metavar="DIR", help="where to write (default: RUN_DIR/export)")
    options = parser.parse_args(argv)
    run, folder = options.run, options.out or options.run / "export"
    trained = open_trained(run / "checkpoints/best.pt", ["device=cpu"])
    state, config = trained.state, trained.config
    float32 = {"enable_amp": False, "opt_level": None, "loss_scale": None, "test_time_views": 1}
    as_trained = replace(trained, config=config.model_copy(update=float32))
    classifier, normalise = load_classifier(as_trained, World(0, 0, 1, torch.device("cpu"))), normalisation(trained)
    classifier.validated.eval()
    model = build_model(config, trained.image_shape[-1])  # in float32, whatever opt_level trained in
    model.load_state_dict(state["average"]["module"] if state["average"] else state["model"])
    network = Network(trained, model).eval()
    program, difference = export_program(network, lambda x: classifier.predict(normalise(x)), trained.image_shape)
    keys = ("config_name", "config", "data", "best", "versions")
    metadata = {"format": "pt"} | {key: strict_json(state[key]) for key in keys}  # safetensors allows only strings
    weights = {name: weight.contiguous().clone() for name, weight in model.state_dict().items()}
    best, views, classes = state["best"], config.test_time_views, len(trained.class_names)
    source = "the moving average" if state["average"] else "the model"
    accuracy = f"best acc1 {100 * best['acc1']:.2f} % in epoch {best['epoch']:.0f}"
    with_views = f", validated with {views} views of each image; the program uses one" if views > 1 else ""
    environment = {"version": None, "commit": None, "torch": None, "command": []} | read_run_folder(run).environment
    card = CARD.format(**state["data"] | environment | {
        "config": config, "classes": classes, "names": ", ".join(trained.class_names), "accuracy": accuracy,
        "shape": ", ".join(map(str, trained.image_shape)), "images": best["images"], "with_views": with_views,
        "source": source, "path": trained.path, "step": state["step"], "command": shlex.join(environment["command"]),
    })  # fmt: skip
    make_folder(folder)
    write_atomically(folder / "model.safetensors", save(weights, metadata))
    write_atomically(folder / "model.pt2", program)
    write_atomically(folder / "MODEL_CARD.md", card.encode("utf-8", "backslashreplace"))
    compared = f"logits differ from the trained network's by at most {difference:.1e} of the largest logit"
    print(f"{folder / 'model.safetensors'}: {len(weights)} tensors of {source}\n{folder / 'model.pt2'}: {compared}")
    print(f"{config.model}, {classes} classes, {accuracy}{with_views}")
    return 0


def export_program(
    network: nn.Module, trained: Callable[[Tensor], Tensor], shape: Sequence[int]
) -> tuple[bytes, float]:
    """Return the serialised program of `network` and its largest difference from `trained`, the function that was
    trained, relative to the largest logit. Both: uint8 pixels -> logits. `ExpectedError` if it exceeds TOLERANCE."""
    generator, batch = torch.Generator().manual_seed(0), torch.export.Dim("batch", min=1)
    pixels = torch.randint(256, (4, *shape), dtype=torch.uint8, generator=generator)
    with user_code_errors("torch.export cannot follow the network; nothing was written", ExpectedError):
        exported = torch.export.export(network, (pixels[1:],), dynamic_shapes=({0: batch},))
    buffer = io.BytesIO()
    torch.export.save(exported, buffer)
    buffer.seek(0)
    reloaded = torch.export.load(buffer).module()
    with torch.no_grad():  # for one image, a number of images that was not traced
        expected, found = trained(pixels[:1]), reloaded(pixels[:1])
    difference = ((expected - found).abs().max() / expected.abs().max()).item()
    if not difference <= TOLERANCE:
        differs = f"differs from the trained network by {difference:.1e} of the largest logit, over {TOLERANCE:.0e}"
        raise ExpectedError(f"the exported program {differs}; nothing was written")
    return buffer.getvalue(), difference


if __name__ == "__main__":
    sys.exit(main())
