"""Evaluate a trained network: accuracy, loss, classes, confusions and calibration.

    python -m tools.evaluate expts/cifar100-cpu
    python -m tools.evaluate expts/cifar100-cpu/checkpoints/best.pt --json best.json
    python -m tools.evaluate expts/flowers --data /data/flowers/test
    torchrun --nproc_per_node=8 -m tools.evaluate expts/resnet50

Without --data it validates as training did, with the same images, batches, precision and weights. So a run's last
checkpoint gives the run's last figures. FOLDER holds a folder for each class (FOLDER/CLASS/IMAGE); its images are
resized, cropped and normalised as in validation.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.common import check_writable, new_parser, path_argument, print_table, write_json
from tools.trained import Trained, add_arguments, find_split, open_split, run_trained
from utils.data.datasets.image_files import describe_unreadable
from utils.data.loader import gather_unreadable
from utils.distributed.world import World
from utils.errors import DataError, exit_in_a_line
from utils.run.logger import read_records
from utils.training.metrics.confusion import Confusion, rank_classes
from utils.training.validation import validate

SHOWN_CLASSES = 20  # on the terminal; --json writes all
MISTAKES = 10  # the most frequent pairs of classes
TOP = 5  # report top-5 accuracy if there are more than five classes
MATRIX_CLASSES = 1000  # a matrix of more classes, mostly zeros, is not written
NUM_BINS = 15  # of the calibration, as in Guo et al. 2017
Row = dict[str, Any]


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    statuses = "0 evaluated; 2 usage; 3 data missing or with other classes; 4 no usable checkpoint; 1 anything else."
    parser = new_parser("evaluate", __doc__, statuses)
    add_arguments(parser)
    images, own = parser.add_mutually_exclusive_group(), "images in class folders (default: the run's validation set)"
    images.add_argument("--data", type=path_argument, metavar="FOLDER", help=own)
    images.add_argument("--test", action="store_true", help="use the test images; for a run with holdout_images")
    parser.add_argument("--json", type=path_argument, metavar="FILE", help="write all figures and the confusion matrix")
    options = parser.parse_args(argv)
    check_writable("--json", options.json)

    def action(trained: Trained, world: World) -> None:
        results = evaluate(trained, options.data, world, test=options.test)
        if world.is_main:
            show(results)
            if options.json is not None:
                write_json(options.json, results)

    changes = {"limit_valid_batches": None} if options.data or options.test else {}  # of these, every image
    return run_trained(options, action, changes)


def evaluate(trained: Trained, folder: Path | None, world: World, *, test: bool = False) -> Row:
    """Collective: evaluate on the validation images, the test images, or `folder`; return plain values, fractions in
    [0, 1]. Raises `ExpectedError` if an output is not finite."""
    split = find_split(trained, [folder] if folder else [], world, test=test)
    if (split.labels < 0).any():
        raise DataError(f"{folder}: has images outside class folders; expected {folder}/CLASS/IMAGE")
    classifier, loader, notes = open_split(trained, split, world)
    names = trained.class_names
    confusion, calibration = Confusion(len(names), world.device), Calibration(world.device)
    top = TopCounts(min(TOP, len(names)), world.device)
    sums = validate(classifier, loader, world, [confusion.add, calibration.add, top.add])
    if len(unreadable := gather_unreadable(world, loader)) == len(split.labels):
        raise DataError(f"not one of {len(unreadable)} images can be read: {describe_unreadable(unreadable)}")
    figures, counts, bins = sums.average(world), confusion.collect(world), calibration.collect(world)
    top_accuracy = top.collect(world) / figures["images"]
    images, predicted, right = counts.sum(1).tolist(), counts.sum(0).tolist(), counts.diagonal().tolist()
    classes = [
        {"class": names[label], "images": images[label], "accuracy": right[label] / images[label],
         "precision": right[label] / predicted[label] if predicted[label] else None}
        for label, *_ in rank_classes(counts)
    ]  # fmt: skip
    wrong = [(int(counts[true, other]), true, other) for true, other in counts.nonzero().tolist() if true != other]
    mistakes = [
        {"class": names[true], "taken_for": names[other], "images": number}
        for number, true, other in sorted(wrong, key=lambda pair: -pair[0])[:MISTAKES]
    ]
    return {
        "network": trained.describe(classifier, world), "checkpoint": str(trained.path),
        **{key: trained.state[key] for key in ("config_name", "epoch", "step")},
        "data": str(folder) if folder else f"{'test' if test else 'validation'} images of {trained.config.dataset}",
        "images": int(figures["images"]), "acc1": figures["acc1"],
        **({f"acc{TOP}": top_accuracy} if len(names) > TOP else {}),
        "loss": figures["loss"], "calibration_error": expected_calibration_error(bins),
        "recorded": recorded(trained, test=test) if folder is None else None, "unreadable": unreadable, "notes": notes,
        "bins": bins, "classes": classes, "mistakes": mistakes, "class_names": names,
        "confusion": counts.tolist() if len(names) <= MATRIX_CLASSES else None,
    }  # fmt: skip


def recorded(trained: Trained, *, test: bool = False) -> dict[str, float] | None:
    """Return the "acc1" and "loss" that training recorded when it validated (or tested) these weights, or None."""
    if trained.state["batch"] or trained.path.parent.name != "checkpoints":
        return None
    kind, names = ("end", ("test_acc1", "test_loss")) if test else ("epoch", ("acc1/valid", "loss/valid"))
    for record in reversed(read_records(trained.path.parent.parent, kind)):
        if record.get("epoch") == trained.state["epoch"] and names[0] in record:
            return {"acc1": record[names[0]], "loss": record.get(names[1])}
    return None


def show(results: Row) -> None:
    print(*results["notes"], sep="\n", end="\n" if results["notes"] else "", file=sys.stderr)
    print(f"{results['network']}\n{results['images']:,} images: {results['data']}")
    if unreadable := results["unreadable"]:
        print(f"{len(unreadable)} files cannot be read and are skipped, the first {min(unreadable)}")
    for name in ("acc1", f"acc{TOP}", "loss", "calibration_error"):
        if name in results:
            print(f"{name:17}  {results[name]!r}")
    if record := results["recorded"]:
        equal = all(results[name] == value for name, value in record.items())
        words = ", ".join(f"{name} {value!r}" for name, value in record.items())
        print("as recorded in training: equal to the last digit" if equal else f"training recorded {words}")
    classes, title = results["classes"], "Classes, worst first"
    rows = [
        (row["class"], f"{row['images']:,}", f"{row['accuracy']:.2%}",
         "-" if row["precision"] is None else f"{row['precision']:.2%}")
        for row in classes[:SHOWN_CLASSES]
    ]  # fmt: skip
    title += f": {SHOWN_CLASSES} of {len(classes)}" if len(classes) > SHOWN_CLASSES else ""
    print_table(title, ("class", "images", "accuracy", "precision"), rows)
    pairs = [(f"{row['class']}, {row['taken_for']}", f"{row['images']:,}") for row in results["mistakes"]]
    print_table("Most frequent mistakes", ("class, taken for", "images"), pairs)
    title = f"Calibration: error {results['calibration_error']:.2%} over {len(results['bins'])} bins"
    bins = [
        (f"{part['low']:.3f}", f"{part['images']:,}", f"{part['confidence']:.2%}", f"{part['accuracy']:.2%}")
        for part in results["bins"]
        if part["images"]
    ]
    print_table(title, ("confidence above", "images", "mean confidence", "accuracy"), bins)


class TopCounts:
    """Counts images whose true class is among the `k` largest outputs."""

    def __init__(self, k: int, device: torch.device) -> None:
        self.k, self.count = k, torch.zeros((), dtype=torch.int64, device=device)

    def add(self, outputs: Tensor, labels: Tensor) -> None:
        """Add outputs [N, classes] and labels [N] of one batch."""
        self.count += (outputs.topk(self.k, 1).indices == labels[:, None]).any(1).sum()

    def collect(self, world: World) -> int:
        """Collective: return the count over all ranks."""
        return int(world.all_reduce(self.count.clone()))


class Calibration:
    """Counts images by the predicted class's probability, in equal bins (Guo et al. 2017, arXiv:1706.04599)."""

    def __init__(self, device: torch.device, num_bins: int = NUM_BINS) -> None:
        # per bin: images, correct predictions, summed confidence
        self.sums = torch.zeros(num_bins, 3, dtype=torch.float64, device=device)

    def add(self, outputs: Tensor, labels: Tensor) -> None:
        """Add outputs [N, classes] and labels [N] of one batch."""
        confidence, predicted = outputs.double().softmax(1).max(1)
        bins = (confidence * len(self.sums)).ceil().long().clamp(1, len(self.sums)) - 1
        counted = torch.stack([torch.ones_like(confidence), (predicted == labels).double(), confidence], dim=1)
        self.sums.index_add_(0, bins, counted)

    def collect(self, world: World) -> list[Row]:
        """Collective: return the bins (low, high] over all ranks: {"low", "high", "images", "confidence": its mean,
        "accuracy"}; without images the last two are 0."""
        sums = world.all_reduce(self.sums.clone()).tolist()
        return [
            {"low": number / len(sums), "high": (number + 1) / len(sums), "images": int(images),
             "confidence": confidence / max(images, 1), "accuracy": correct / max(images, 1)}
            for number, (images, correct, confidence) in enumerate(sums)
        ]  # fmt: skip


def expected_calibration_error(bins: Sequence[Row]) -> float:
    """Mean over all images of the difference between accuracy and confidence of their bin, in [0, 1]."""
    total = sum(part["images"] for part in bins)
    return sum(part["images"] * abs(part["accuracy"] - part["confidence"]) for part in bins) / total


if __name__ == "__main__":
    sys.exit(main())
