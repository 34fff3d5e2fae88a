"""A run's TensorBoard folder: scalars by step, epoch and second, pictures, texts, and its row in the HParams tab.

    tb_logs/            by epoch: the tutorial's five tags, loss scale; texts, pictures, hparams, the custom layout
    tb_logs/by_step/    by optimizer step: loss, learning rate, images/s, data wait, memory, ...
    tb_logs/by_second/  by second of training: accuracy

One folder for each unit of the horizontal axis, since a resumed run marks all later points of a folder as outdated.
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
from utils.training.metrics import worst_classes

EPOCH_TAGS = ("loss/train", "loss/valid", "acc1/train", "acc1/valid", "learning_rate")
SCALING_TAGS = ("loss_scale", "skipped_steps")  # only where the loss is scaled
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
    """A folder is opened when there is something to write; a resumed run goes on after `epoch`, `step`, `seconds`."""

    def __init__(self, folder: Path, *, epoch: int, step: int, seconds: float) -> None:
        self.folder = folder
        self._starts = {"": epoch + 1, "by_step": step + 1, "by_second": round(seconds) + 1}
        self._writers: dict[str, Any] = {}

    def _writer(self, axis: str = "") -> Any:
        if axis not in self._writers:
            from torch.utils.tensorboard import SummaryWriter

            threading.excepthook = _leave_full_disks_to_the_log
            self._writers[axis] = SummaryWriter(str(self.folder / axis), purge_step=self._starts[axis])
            if not axis:
                self._writers[axis].add_custom_scalars(LAYOUT)
        return self._writers[axis]

    def add_step(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer("by_step").add_scalar(f"step/{name}", value, step)

    def add_epoch(self, epoch: int, values: Mapping[str, float]) -> None:
        """The tutorial's tags by epoch, and accuracy and loss by the second of training at which the epoch ended."""
        for tag in (*EPOCH_TAGS, *SCALING_TAGS):
            if tag in values:
                self._writer().add_scalar(tag, values[tag], epoch)
        for name, tag in SECOND_TAGS.items():
            self._writer("by_second").add_scalar(tag, values[name], round(values["seconds"]))
        for writer in self._writers.values():
            writer.flush()

    def describe(self, keys: Keys, config_name: str, environment: Mapping[str, Any]) -> None:
        writer, step = self._writer(), self._starts[""]
        writer.add_text("run/config", f"`{config_name}`\n\n{indent(render(keys), CODE)}", step)
        writer.add_text("run/environment", indent(json.dumps(environment, indent=1), CODE), step)

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
        self._writer().add_image("augmented batch", grid, self._starts[""])

    def add_classes(self, counts: Tensor, names: Sequence[str], epoch: int) -> None:
        """The confusion matrix as a picture, rows true classes, and the worst classes as a table."""
        self._writer().add_image("confusion matrix", draw_matrix(counts), epoch, dataformats="HWC")
        rows = ["| class | accuracy | most often taken for | share |", "|---|---|---|---|"]
        for name, accuracy, other, share in worst_classes(counts, names):
            rows.append(f"| {name} | {accuracy:.1%} | {other} | {share:.1%} |")
        self._writer().add_text("run/worst classes", "\n".join(rows), epoch)

    def add_result(self, keys: Keys, results: Mapping[str, float]) -> None:
        """The run's row in the HParams tab."""
        values = keys.model_dump(mode="json", exclude=set(keys.with_fact(Fact.NO_HYPERPARAMETER)))
        for key, value in values.items():
            # booleans as words, which the tab filters by; it would show them as 0.0000 and 1.0000
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                values[key] = json.dumps(value)
        metrics = {f"result/{name}": value for name, value in results.items()}
        self._writer().add_hparams(values, metrics, run_name=".")  # ".": in this run instead of a new one

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


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
