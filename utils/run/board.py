"""A run's TensorBoard folder: scalars by step, epoch and second, pictures, texts, and its row in the HParams tab.

    loss/train, ...     by epoch: the tutorial's five tags; loss scale
    step/...            by optimizer step: loss, learning rate, images/s, data wait, memory, ...
    by_second/...       by second of training: accuracy, loss
    result/...          at the end: the metrics of the HParams tab

All in one folder, so that a run is one row with one colour. A resumed run cuts from the files what it trains again, as
it does from metrics.jsonl. TensorBoard's own way, to mark all points behind a step as outdated, knows no unit of steps.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np
from torch import Tensor

from utils.keys import Fact, Keys, render
from utils.run.event_files import cut_back
from utils.training.metrics import worst_classes

EPOCH_TAGS = ("loss/train", "loss/valid", "acc1/train", "acc1/valid", "learning_rate")
SCALING_TAGS = ("loss_scale", "skipped_steps")  # only where the loss is scaled
STEP_TAGS = "step/"
ALWAYS_SHOWN = ("lr", "batch_size", "model", "max_epochs")  # in HParams
SECOND_TAGS = {"acc1/valid": "by_second/acc1_valid", "loss/valid": "by_second/loss_valid"}
LAYOUT = {
    "Training": {
        "accuracy by epoch": ["Multiline", ["acc1/train", "acc1/valid"]],
        "loss by epoch": ["Multiline", ["loss/train", "loss/valid"]],
        "accuracy by second": ["Multiline", ["by_second/acc1_valid"]],
        "learning rate by epoch": ["Multiline", ["learning_rate"]],
    },
    "Speed, by step": {
        "images per second": ["Multiline", ["step/images_per_sec"]],
        "share of the time waiting for input": ["Multiline", ["step/data_wait"]],
        "memory, GB": ["Multiline", ["step/memory_gb"]],
    },
}
MATRIX_PIXELS = 600
CODE = " " * 4  # before each line of a Markdown code block, which TensorBoard shows as it stands


class Board:
    """Its folder is opened when there is something to write; a resumed run goes on after `epoch` and `step`."""

    def __init__(self, folder: Path, *, epoch: int, step: int) -> None:
        self.folder, self._epoch, self._step = folder, epoch, step
        self._opened: Any = None

    @property
    def _writer(self) -> Any:
        if self._opened is None:
            from torch.utils.tensorboard import SummaryWriter

            threading.excepthook = _leave_full_disks_to_the_log
            cut_back(self.folder, self._is_outdated)
            self._opened = SummaryWriter(str(self.folder))
            self._opened.add_custom_scalars(LAYOUT)
        return self._opened

    def _is_outdated(self, tag: str, step: int) -> bool:
        """Whether a point is of what this run trains again."""
        if tag.startswith(STEP_TAGS):
            return step > self._step
        return tag in (*EPOCH_TAGS, *SCALING_TAGS) and step > self._epoch

    def add_step(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"{STEP_TAGS}{name}", value, step)

    def add_epoch(self, epoch: int, values: Mapping[str, float]) -> None:
        """The tutorial's tags by epoch, and accuracy and loss by the second of training at which the epoch ended."""
        for tag in (*EPOCH_TAGS, *SCALING_TAGS):
            if tag in values:
                self._writer.add_scalar(tag, values[tag], epoch)
        for name, tag in SECOND_TAGS.items():
            self._writer.add_scalar(tag, values[name], round(values["seconds"]))
        self._writer.flush()

    def describe(self, keys: Keys, config_name: str, environment: Mapping[str, Any]) -> None:
        writer, step = self._writer, self._epoch + 1
        writer.add_text("run/config", f"`{config_name}`\n\n{indent(render(keys), CODE)}", step)
        writer.add_text("run/environment", indent(json.dumps(environment, indent=1), CODE), step)
        self._add_to_hparams(compared(keys))

    def add_images(self, images: Tensor) -> None:
        """A grid of an augmented batch, normalised [N, 3, H, W].

        Each channel is stretched to [0, 1]. Since the black of padded borders and some white are in nearly every batch,
        that undoes the normalisation without knowing mean and deviation.
        """
        from torchvision.utils import make_grid

        images = images.float().cpu()
        low, high = images.amin((0, 2, 3), keepdim=True), images.amax((0, 2, 3), keepdim=True)
        grid = make_grid((images - low) / (high - low).clamp(min=1e-6), nrow=8, padding=1, pad_value=1.0)
        grid = grid.repeat_interleave(3, 1).repeat_interleave(3, 2)  # TensorBoard blurs small pictures
        self._writer.add_image("augmented batch", grid, self._epoch + 1)

    def add_classes(self, counts: Tensor, names: Sequence[str], epoch: int) -> None:
        """The confusion matrix as a picture, rows true classes, and the worst classes as a table."""
        self._writer.add_image("confusion matrix", draw_matrix(counts), epoch, dataformats="HWC")
        rows = ["| class | accuracy | most often taken for | share |", "|---|---|---|---|"]
        for name, accuracy, other, share in worst_classes(counts, names):
            rows.append(f"| {name} | {accuracy:.1%} | {other} | {share:.1%} |")
        self._writer.add_text("run/worst classes", "\n".join(rows), epoch)

    def add_results(self, results: Mapping[str, float], epoch: int) -> None:
        """The metrics of the run's row in the HParams tab."""
        for name, value in results.items():
            self._writer.add_scalar(f"result/{name}", value, epoch)
        self._add_to_hparams(None)

    def _add_to_hparams(self, values: Mapping[str, Any] | None) -> None:
        """The start of the run's row with its values, or, with None, its end. PyTorch's own function also writes a list
        of columns, which TensorBoard would take from one run for all."""
        from torch.utils.tensorboard.summary import hparams

        _, start, end = hparams(dict(values or {}), {})
        self._writer.file_writer.add_summary(end if values is None else start)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()


def compared(keys: Keys) -> dict[str, Any]:
    """The columns of the HParams tab: the keys of every comparison, and those with another value than in `default`."""
    values, defaults = keys.model_dump(mode="json"), type(keys)().model_dump(mode="json")
    silent = keys.with_fact(Fact.NO_HYPERPARAMETER)
    columns = [key for key in values if key in ALWAYS_SHOWN or (values[key] != defaults[key] and key not in silent)]
    # booleans as words, which the tab filters by; it would show them as 0.0000 and 1.0000
    plain = {key for key in columns if isinstance(values[key], int | float | str) and not isinstance(values[key], bool)}
    return {key: values[key] if key in plain else json.dumps(values[key]) for key in columns}


def _leave_full_disks_to_the_log(raised: threading.ExceptHookArgs) -> None:
    """TensorBoard's threads end with a traceback where they cannot write; the run's own log says so in a line."""
    if not (isinstance(raised.exc_value, OSError) and type(raised.thread).__module__.startswith("tensorboard")):
        threading.__excepthook__(raised)


def draw_matrix(counts: Tensor) -> np.ndarray:
    """A confusion matrix [true, predicted] as an image, uint8 [H, W, 3]: white 0 %, dark blue 100 % of the true class.

    The shade follows the square root of the share, so that rare confusions can be seen beside the diagonal.
    """
    shares = (counts / counts.sum(1, keepdim=True).clamp(min=1)).sqrt().numpy()
    white, blue = np.array([255.0, 255.0, 255.0]), np.array([8.0, 48.0, 107.0])
    image = (white + shares[..., None] * (blue - white)).round().astype(np.uint8)
    scale = max(1, MATRIX_PIXELS // len(shares))
    return image.repeat(scale, 0).repeat(scale, 1)
