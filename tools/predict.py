"""Predict classes with a trained network; write a table of probabilities and a page of the worst mistakes.

    python -m tools.predict expts/cifar100-cpu holiday.jpg photos/ --out predictions
    python -m tools.predict expts/flowers /data/flowers/test
    python -m tools.predict expts/cifar100-cpu

An IMAGE is a file of any format that Pillow reads, a folder of images, or a folder of class folders, whose names are
the true classes. By default the images are the run's own validation set. Images are resized, cropped, normalised and
classified as in validation.

predictions.csv  a line for each image: its name (or its number in an array), predicted class, probability, true class
                 if known, and the probability of each class
worst.html       pictures of the worst mistakes, lowest probability of the true class first; without true classes, of
                 the least certain predictions
unreadable.csv   files that cannot be read, and why; written only if there are any
"""

import argparse
import base64
import csv
import io
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.shared.command_line import add_count, new_parser, path_argument
from tools.shared.output import make_folder, printable, say, write_file
from tools.shared.trained import (
    Trained,
    add_arguments,
    build_loader,
    check_reads_images,
    find_split,
    load_classifier,
    run_trained,
)
from utils.errors import DataError, exit_in_a_line

if TYPE_CHECKING:
    import numpy as np

    from utils.data.datasets.dataset import Split
    from utils.distributed.world import World

PAGE = Path(__file__).parent / "shared/pages/predict.html"
CHANGES = {"limit_valid_batches": None}  # classify every image


@dataclass(frozen=True)
class Predictions:
    """Predictions for the readable images of `split`, in its order."""

    split: "Split"  # its labels are -1 if the true class is unknown
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
    """Predict, write, return the exit status."""
    options = parser().parse_intermixed_args(argv)

    def action(trained: Trained, world: "World") -> None:
        world.main_only(lambda: make_folder(options.out))
        predictions, lines = predict(trained, options.images, world)
        if world.is_main:
            lines += write(options.out, trained, predictions, options.pictures)
            say("\n".join(lines))

    return run_trained(options, action, CHANGES)


def parser() -> argparse.ArgumentParser:
    statuses = "0 predicted; 2 usage; 3 no readable image, or other classes; 4 no usable checkpoint; 1 anything else."
    parser = new_parser("predict", __doc__, statuses)
    add_arguments(parser)
    parser.add_argument(
        "images", nargs="*", type=path_argument, metavar="IMAGE",
        help="files, folders of images, folders of class folders (default: the run's own validation set)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=path_argument, default=Path("predictions"), metavar="DIR", help="default: predictions"
    )
    add_count(parser, "--pictures", 60, "maximum number of pictures on the page")
    return parser


def predict(trained: Trained, paths: list[Path], world: "World") -> tuple[Predictions, list[str]]:
    """Collective: return the predictions of all ranks, and lines that describe the network and the data."""
    import numpy as np
    import torch

    from utils.data.datasets.image_files import describe_unreadable
    from utils.data.loader import gather_unreadable
    from utils.training.validation import classify

    check_reads_images(trained.config)
    split = find_split(trained, paths, world)
    # the loader's labels are replaced by the images' indices, to match outputs to images
    loader, notes = build_loader(trained, replace(split, labels=np.arange(len(split.labels))), world)
    classifier = load_classifier(trained, world)
    found = [(numbers.cpu(), outputs.cpu()) for outputs, numbers in classify(classifier, loader)]
    parts = [part for rank in world.all_gather(found) for part in rank if len(part[0])]
    unreadable = {os.path.normpath(name): reason for name, reason in gather_unreadable(world, loader).items()}
    if not parts:
        raise DataError(f"not one of {len(split.labels)} images can be read: {describe_unreadable(unreadable)}")
    numbers, outputs = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    order = numbers.argsort()
    probabilities = outputs[order].double().softmax(1)
    lines = [*trained.notes, *notes, *classifier.notes, trained.describe(classifier, world)]
    return Predictions(split, numbers[order].numpy(), probabilities.numpy(), unreadable), lines


def write(folder: Path, trained: Trained, predictions: Predictions, pictures: int) -> list[str]:
    """Write the files into `folder`; return lines that describe them."""
    known, right = predictions.labels >= 0, predictions.labels == predictions.predicted
    images = f"{len(known):,} images"
    if known.any():
        images += f", acc1 {right.sum() / known.sum():.2%} of {known.sum():,} whose true class is known"
    shown, heading = worst(predictions, pictures)
    page = render(trained, predictions, shown, [images, f"Shown: {heading}."])
    write_file(folder / "predictions.csv", as_csv(*prediction_rows(predictions, trained.class_names)))
    write_file(folder / "worst.html", page)
    lines = [f"{folder / 'predictions.csv'}: {images}", f"{folder / 'worst.html'}: {len(shown)} pictures, {heading}"]
    path = folder / "unreadable.csv"
    path.unlink(missing_ok=True)  # from an earlier call
    if predictions.unreadable:
        write_file(path, as_csv(("image", "reason"), sorted(predictions.unreadable.items())))
        count, first = len(predictions.unreadable), min(predictions.unreadable)
        lines.append(f"{path}: {count} files cannot be read, the first {first}")
    return lines


def prediction_rows(predictions: Predictions, names: Sequence[str]) -> tuple[Sequence[str], Iterable[Sequence[Any]]]:
    """Return header and rows of predictions.csv."""
    header = ("image", "predicted", "probability", "true", *(f"p({name})" for name in names))
    rows = (
        (
            image_name(predictions.split, index), names[predicted], rounded(row[predicted]),
            names[label] if label >= 0 else "", *map(rounded, row.tolist()),
        )
        for index, label, predicted, row in zip(
            predictions.indices, predictions.labels, predictions.predicted, predictions.probabilities, strict=True
        )
    )  # fmt: skip
    return header, rows


def rounded(probability: float) -> float:
    """Round to six significant digits."""
    return float(f"{probability:.6g}")


def image_name(split: "Split", index: int) -> str:
    """Return the path of an image file, or the index of an image in an array."""
    from utils.data.datasets.image_files import EncodedImages

    return os.path.normpath(split.path(index)) if isinstance(split, EncodedImages) else str(index)


def as_csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    """Encode as CSV; file names that are not UTF-8 keep their bytes. Quote all text: before Python 3.13, csv does not
    quote a name because of a carriage return, which then ends the line."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue().encode("utf-8", "surrogateescape")


def worst(predictions: Predictions, limit: int) -> tuple["np.ndarray", str]:
    """Return the rows of the predictions to show, worst first, and a description of them."""
    import numpy as np

    known, rows = predictions.labels >= 0, np.arange(len(predictions.labels))
    if not known.any():
        return predictions.probabilities.max(1).argsort(kind="stable")[:limit], "the least certain predictions"
    mistakes = rows[known & (predictions.labels != predictions.predicted)]
    true_probability = predictions.probabilities[mistakes, predictions.labels[mistakes]]
    kept = mistakes[true_probability.argsort(kind="stable")[:limit]]
    return kept, f"the worst of {len(mistakes):,} mistakes" if len(mistakes) > limit else "all mistakes"


def render(trained: Trained, predictions: Predictions, rows: "np.ndarray", lines: Sequence[str]) -> bytes:
    """Render the page, without scripts or external files."""
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
    """Return the image, resized and cropped for the network, as a data URI."""
    import numpy as np
    from PIL import Image

    pixels = split.read(np.array([index]), None, replace=False).samples[0]  # uint8 [3, H, W]
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0))).save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


if __name__ == "__main__":
    sys.exit(main())
