"""Predict classes with a trained network: a table of probabilities, and a page of the worst mistakes.

    python -m tools.predict expts/cifar100-cpu holiday.jpg photos/ --out predictions
    python -m tools.predict expts/flowers /data/flowers/test
    python -m tools.predict expts/cifar100-cpu

An IMAGE is a file of any format that Pillow reads, a folder of images, or a folder with a folder for each class, whose
names are then the true classes. Without any, the images are those of the run's own validation set. They are resized,
cut and normalised, and computed with, as in validation.

predictions.csv  a line for each image: its name (in an array its number), predicted class, probability, true class
                 where it is known, and the probability of each class
worst.html       pictures of the worst mistakes, those with the least probability of the true class first; where no
                 true class is known, of the least certain predictions
unreadable.csv   files that cannot be read, and why; only where there are such
"""

import argparse
import base64
import csv
import io
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.shared.command_line import add_count, new_parser
from tools.shared.output import make_folder, printable, say, write_file
from tools.shared.trained import Trained, add_arguments, build_loader, find_split, load_classifier, run_trained
from utils.errors import DataError, exit_in_a_line

if TYPE_CHECKING:
    import numpy as np

    from utils.data.datasets.dataset import Split
    from utils.distributed.world import World

PAGE = Path(__file__).parent / "shared/pages/predict.html"
CHANGES = {"limit_valid_batches": None}  # every image that can be read


@dataclass(frozen=True)
class Predictions:
    """The images of `split` that could be read, in its order."""

    split: "Split"  # its labels are -1 where the true class is not known
    indices: "np.ndarray"  # int64 [N]
    probabilities: "np.ndarray"  # float64 [N, classes]
    unreadable: dict[str, str]  # name: reason

    @property
    def labels(self) -> "np.ndarray":
        """True classes, int64 [N]."""
        return self.split.labels[self.indices]

    @property
    def predicted(self) -> "np.ndarray":
        """int64 [N]."""
        return self.probabilities.argmax(1)


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    """Predict and write; returns the exit status."""
    options = parser().parse_intermixed_args(argv)

    def action(trained: Trained, world: "World") -> None:
        world.main_only(lambda: make_folder(options.out))
        predictions, lines = predict(trained, options.images, world)
        if world.is_main:
            lines += write(options.out, trained, predictions, options.pictures)
            say("\n".join(lines))

    return run_trained(options, action, CHANGES)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    statuses = (
        "0 predicted; 2 usage; 3 no image can be read, or other classes; 4 no usable checkpoint; 1 anything else."
    )
    parser = new_parser("predict", __doc__, statuses)
    add_arguments(parser)
    parser.add_argument(
        "images", nargs="*", type=Path, metavar="IMAGE",
        help="files, folders of images, folders of class folders (default: the run's own validation set)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("predictions"), metavar="DIR", help="default: predictions")
    add_count(parser, "--pictures", 60, "pictures on the page, at most")
    return parser


def predict(trained: Trained, paths: list[Path], world: "World") -> tuple[Predictions, list[str]]:
    """Collective: the predictions over all ranks, and lines that describe how they came about."""
    from dataclasses import replace

    import numpy as np
    import torch

    from utils.data.datasets.image_files import describe_unreadable
    from utils.data.loader import gather_unreadable
    from utils.training.validation import classify

    split = find_split(trained, paths, world)
    # the loader's labels are the images' numbers, so that each output has its image's
    loader, notes = build_loader(trained, replace(split, labels=np.arange(len(split.labels))), world)
    classifier = load_classifier(trained, world)
    found = [(numbers.cpu(), outputs.cpu()) for outputs, numbers in classify(classifier, loader)]
    parts = [part for rank in world.gather(found) for part in rank if len(part[0])]
    unreadable = {os.path.normpath(name): reason for name, reason in gather_unreadable(world, loader).items()}
    if not parts:
        raise DataError(f"not one of {len(split.labels)} images can be read: {describe_unreadable(unreadable)}")
    numbers, outputs = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    order = numbers.argsort()
    probabilities = outputs[order].double().softmax(1)
    lines = [*trained.notes, *notes, *classifier.notes, trained.describe(classifier, world)]
    return Predictions(split, numbers[order].numpy(), probabilities.numpy(), unreadable), lines


def write(folder: Path, trained: Trained, predictions: Predictions, pictures: int) -> list[str]:
    """Write the files into `folder`; returns lines that describe them."""
    known, right = predictions.labels >= 0, predictions.labels == predictions.predicted
    images = f"{len(known):,} images"
    if known.any():
        images += f", acc1 {right.sum() / known.sum():.2%} of {known.sum():,} whose true class is known"
    shown, heading = worst(predictions, pictures)
    page = render(trained, predictions, shown, [images, f"Shown are {heading}."])
    write_file(folder / "predictions.csv", as_csv(*prediction_rows(predictions, trained.class_names)))
    write_file(folder / "worst.html", page)
    lines = [f"{folder / 'predictions.csv'}: {images}", f"{folder / 'worst.html'}: {len(shown)} pictures, {heading}"]
    path = folder / "unreadable.csv"
    path.unlink(missing_ok=True)  # of an earlier call
    if predictions.unreadable:
        write_file(path, as_csv(("image", "reason"), sorted(predictions.unreadable.items())))
        lines.append(
            f"{path}: {len(predictions.unreadable)} files cannot be read, the first {min(predictions.unreadable)}"
        )
    return lines


def prediction_rows(predictions: Predictions, names: Sequence[str]) -> tuple[Sequence[str], Iterable[Sequence[Any]]]:
    """Header and rows of predictions.csv."""
    header = ("image", "predicted", "probability", "true", *(f"p({name})" for name in names))
    rows = (
        (
            image_name(predictions.split, index), names[predicted], digits(row[predicted]),
            names[label] if label >= 0 else "", *map(digits, row.tolist()),
        )
        for index, label, predicted, row in zip(
            predictions.indices, predictions.labels, predictions.predicted, predictions.probabilities, strict=True
        )
    )  # fmt: skip
    return header, rows


def digits(probability: float) -> float:
    """As many as mean something."""
    return float(f"{probability:.6g}")


def image_name(split: "Split", index: int) -> str:
    """The file as it was named, or the number of an image in an array."""
    from utils.data.datasets.image_files import EncodedImages

    return os.path.normpath(split.path(index)) if isinstance(split, EncodedImages) else str(index)


def as_csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    """File names that are no UTF-8 keep their bytes. All text is in quotes: before Python 3.13, csv leaves a name
    without them whose only fault is a carriage return, which then ends the line."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue().encode("utf-8", "surrogateescape")


def worst(predictions: Predictions, limit: int) -> tuple["np.ndarray", str]:
    """(rows of the predictions to be shown, the worst first; what they are)."""
    import numpy as np

    known, rows = predictions.labels >= 0, np.arange(len(predictions.labels))
    if not known.any():
        return predictions.probabilities.max(1).argsort(kind="stable")[:limit], "the least certain predictions"
    mistakes = rows[known & (predictions.labels != predictions.predicted)]
    of_truth = predictions.probabilities[mistakes, predictions.labels[mistakes]]
    kept = mistakes[of_truth.argsort(kind="stable")[:limit]]
    return kept, f"the worst of {len(mistakes):,} mistakes" if len(mistakes) > limit else "all mistakes"


def render(trained: Trained, predictions: Predictions, rows: "np.ndarray", lines: Sequence[str]) -> bytes:
    """The page: no script, no outside file."""
    from jinja2 import Environment, StrictUndefined

    names, items = trained.class_names, []
    for row in rows.tolist():
        index, label = int(predictions.indices[row]), int(predictions.labels[row])
        probabilities, predicted = predictions.probabilities[row], int(predictions.predicted[row])
        items.append({
            "picture": picture(predictions.split, index),
            "name": printable(image_name(predictions.split, index)),
            "predicted": names[predicted], "probability": f"{probabilities[predicted]:.2%}",
            "true": names[label] if label >= 0 else None,
            "of_truth": f"{probabilities[label]:.2%}" if label >= 0 else None,
        })  # fmt: skip
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(PAGE.read_text(encoding="utf-8"))
    return template.render(run=printable(str(trained.path)), lines=lines, items=items).encode()


def picture(split: "Split", index: int) -> str:
    """The image as the network sees it, as a data URI."""
    import numpy as np
    from PIL import Image

    pixels = split.read(np.array([index]), None, replace=False).images[0]  # uint8 [3, H, W]
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0))).save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


if __name__ == "__main__":
    sys.exit(main())
