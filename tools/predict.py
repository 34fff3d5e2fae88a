"""Predict classes with a trained network; write a table of probabilities and a page of the worst mistakes.

    python -m tools.predict expts/cifar100-cpu holiday.jpg photos/ --out predictions
    python -m tools.predict expts/flowers /data/flowers/test
    python -m tools.predict expts/cifar100-cpu

An IMAGE is a file of any format that Pillow reads, a folder of images, or a folder of class folders, whose names are
the true classes. Images are resized, cropped, normalised and classified as in validation.

predictions.csv  of each image: name (number in an array), predicted class, probability, true class, all probabilities
worst.html       pictures of the worst mistakes; without true classes, of the least certain predictions
unreadable.csv   files that cannot be read, and why; written only if there are any
"""

import base64
import csv
import io
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, StrictUndefined
from PIL import Image

from tools.common import add_count, make_folder, new_parser, path_argument, write_file
from tools.trained import Trained, add_arguments, find_split, open_split, run_trained
from utils.data.datasets.dataset import Split
from utils.data.datasets.image_files import ImageFiles, describe_unreadable
from utils.data.loader import gather_unreadable
from utils.distributed.world import World
from utils.errors import DataError, exit_in_a_line
from utils.training.validation import classify

PAGE = Path(__file__).with_suffix(".html")  # a Jinja2 template
# A split; of its readable images, in its order: the indices, int64 [N], and probabilities, float64 [N, classes]; and
# {name: reason} of the unreadable ones
Predictions = tuple[Split, np.ndarray, np.ndarray, dict[str, str]]


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    statuses = "0 predicted; 2 usage; 3 no readable image, or other classes; 4 no usable checkpoint; 1 anything else."
    parser = new_parser("predict", __doc__, statuses)
    add_arguments(parser)
    what = "files, folders of images, folders of class folders (default: the run's own validation set)"
    parser.add_argument("images", nargs="*", type=path_argument, metavar="IMAGE", help=what)
    parser.add_argument("--out", type=path_argument, default="predictions", metavar="DIR", help="default: %(default)s")
    add_count(parser, "--pictures", 60, "maximum number of pictures on the page")
    options = parser.parse_intermixed_args(argv)

    def action(trained: Trained, world: World) -> None:
        world.main_only(lambda: make_folder(options.out))
        predictions, lines = predict(trained, options.images, world)
        if world.is_main:
            print("\n".join(lines + write(options.out, trained, predictions, options.pictures)))

    return run_trained(options, action, {"limit_valid_batches": None})  # classify every image


def predict(trained: Trained, paths: list[Path], world: World) -> tuple[Predictions, list[str]]:
    """Collective: return the predictions of all ranks, and lines that describe the network and the data."""
    split = find_split(trained, paths, world, read=True)
    # the loader's labels are replaced by the images' indices, to match outputs to images
    classifier, loader, notes = open_split(trained, replace(split, labels=np.arange(len(split.labels))), world)
    found = [(indices.cpu(), outputs.cpu()) for outputs, indices in classify(classifier, loader)]
    parts = [part for rank in world.all_gather(found) for part in rank if len(part[0])]
    unreadable = {os.path.normpath(name): reason for name, reason in gather_unreadable(world, loader).items()}
    if not parts:
        raise DataError(f"not one of {len(split.labels)} images can be read: {describe_unreadable(unreadable)}")
    indices, outputs = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    order = indices.argsort()
    chosen, probabilities = indices[order].numpy(), outputs[order].double().softmax(1).numpy()
    return (split, chosen, probabilities, unreadable), [*notes, trained.describe(classifier, world)]


def write(folder: Path, trained: Trained, predictions: Predictions, pictures: int) -> list[str]:
    """Write the files into `folder`; return lines that describe them."""
    split, indices, probabilities, unreadable = predictions
    names, predicted, labels = trained.class_names, probabilities.argmax(1), split.labels[indices]
    known = labels >= 0  # -1: the true class is unknown

    def name(row: int) -> str:
        """Return the path of an image file, or the number of an image in an array."""
        index = int(indices[row])
        return os.path.normpath(split.path(index)) if isinstance(split, ImageFiles) else str(index)

    rows = (
        (name(row), names[best], f"{values[best]:.6g}", names[label] if label >= 0 else "",
         *(f"{value:.6g}" for value in values.tolist()))
        for row, (best, label, values) in enumerate(zip(predicted, labels, probabilities, strict=True))
    )  # fmt: skip
    header = ("image", "predicted", "probability", "true", *(f"p({name})" for name in names))
    write_file(folder / "predictions.csv", as_csv(header, rows))
    images = f"{len(known):,} images"
    if known.any():
        right = (labels == predicted).sum() / known.sum()
        images += f", acc1 {right:.2%} of {known.sum():,} whose true class is known"
        (wrong,) = (known & (labels != predicted)).nonzero()
        ordered = wrong[probabilities[wrong, labels[wrong]].argsort(kind="stable")]
        heading = f"the worst of {len(wrong):,} mistakes" if len(wrong) > pictures else "all mistakes"
    else:
        ordered, heading = probabilities.max(1).argsort(kind="stable"), "the least certain predictions"
    items = []
    for row in ordered[:pictures].tolist():
        labelled = {"true": labels[row], "predicted": predicted[row]}
        classes = [(word, names[n], f"{probabilities[row, n]:.2%}") for word, n in labelled.items() if n >= 0]
        items.append({"picture": picture(split, int(indices[row])), "name": name(row), "classes": classes})
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(PAGE.read_text(encoding="utf-8"))
    page = template.render(run=trained.path, lines=[images, f"Shown: {heading}."], items=items)
    write_file(folder / "worst.html", page.encode("utf-8", "backslashreplace"))
    lines = [f"{folder / 'predictions.csv'}: {images}", f"{folder / 'worst.html'}: {len(items)} pictures, {heading}"]
    path = folder / "unreadable.csv"
    path.unlink(missing_ok=True)  # from an earlier call
    if unreadable:
        write_file(path, as_csv(("image", "reason"), sorted(unreadable.items())))
        lines.append(f"{path}: {len(unreadable)} files cannot be read, the first {min(unreadable)}")
    return lines


def as_csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    """Encode as CSV; file names that are not UTF-8 keep their bytes. Quote all fields: before Python 3.13, csv does not
    quote a name because of a carriage return, which then ends the line."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL).writerows([header, *rows])
    return text.getvalue().encode("utf-8", "surrogateescape")


def picture(split: Split, index: int) -> str:
    """Return the image, resized and cropped for the network, as a data URI."""
    pixels = split.read(np.array([index]), None, replace=False).samples[0]  # uint8 [3, H, W]
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0))).save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


if __name__ == "__main__":
    sys.exit(main())
