"""A run's TensorBoard folder: scalars by step, epoch and second, pictures, texts, and its row in the HParams tab.

    loss/train, ...     by epoch: the tutorial's five tags; loss scale
    step/...            by optimizer step: loss, learning rate, images/s, data wait, memory, ...
    by_second/...       by second of training: accuracy, loss
    result/...          at the end: the metrics of the HParams tab

All is in one folder, so that a run is one row with one colour. A resumed run writes the events of its earlier starts
again, from metrics.jsonl, without the events of steps that it trains again.
"""

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

from torch import Tensor

from utils.base_config import BaseConfig, KeyFlag, render
from utils.training.metrics.confusion import worst_classes

Record = Mapping[str, Any]  # of metrics.jsonl
# the tutorial's, and two more if the loss is scaled
EPOCH_TAGS = ("loss/train", "loss/valid", "acc1/train", "acc1/valid", "learning_rate", "loss_scale", "skipped_steps")
SECOND_TAGS = {"acc1/valid": "by_second/acc1_valid", "loss/valid": "by_second/loss_valid"}
TAG_PREFIX = {"step": "step/", "epoch": "", "end": "result/"}  # by the kind of record
# the columns of the HParams tab: four settings, and as one text all others that differ from `default`
CHANGES = "also changed"
ALWAYS_SHOWN = ("batch_size", "lr", "max_epochs", "model")
RESULTS = (
    "best_acc1", "best_epoch", "last_acc1", "last_loss", "seconds", "images_per_sec", "test_acc1", "test_loss",
)  # fmt: skip
MATRIX_PIXELS, MATRIX_CLASSES = 600, 300
PICTURE_IMAGES = 64
CODE = " " * 4  # indents a Markdown code block, which TensorBoard shows verbatim


class TensorBoardWriter:
    """Writes a run's events. The `records` of metrics.jsonl from earlier starts replace the event files of these."""

    def __init__(self, folder: Path, records: Iterable[Record] = ()) -> None:
        from torch.utils.tensorboard import SummaryWriter

        earlier, self._has_images, began = [*folder.glob("events.out.tfevents.*")], False, 0.0
        threading.excepthook = _hide_write_errors
        self._writer: Any = SummaryWriter(str(folder))
        for record in records:
            elapsed = sum(record["clock_seconds"].values())
            began = record["time"] - elapsed if "time" in record else began
            self.record(record, began + elapsed)
        self._writer.flush()
        for path in earlier:
            path.unlink()

    def record(self, record: Record, now: float | None = None) -> None:
        """Write a log point by step; an epoch by epoch, under the tutorial's tags, and by the second of training at
        which it ended; the end of the run as the metrics of its row in the HParams tab. `now`: time; None: the present.
        """
        kind = record["kind"]
        for tag, value in numbers(record).items():
            if kind != "epoch" or tag in EPOCH_TAGS:
                self._writer.add_scalar(tag, value, record["step" if kind == "step" else "epoch"], now)
            if kind == "epoch" and tag in SECOND_TAGS:
                self._writer.add_scalar(SECOND_TAGS[tag], value, round(record["seconds"]), now)
        if kind == "epoch":
            self._writer.flush()
        elif kind == "end":
            self._writer.file_writer.add_summary(_hparams({})[2])

    def describe(self, config: BaseConfig, config_name: str, environment: Mapping[str, Any], epoch: int) -> None:
        self._writer.add_text("run/config", f"`{config_name}`\n\n{indent(render(config), CODE)}", epoch)
        self._writer.add_text("run/environment", indent(json.dumps(environment, indent=1), CODE), epoch)
        for summary in _hparams(compared(config))[:2]:
            self._writer.file_writer.add_summary(summary)

    def add_images(self, images: Tensor, epoch: int) -> None:
        """Write a grid of the first batch of this process, as it was trained: normalised [N, 3, H, W]. Stretching each
        channel to [0, 1] undoes the normalisation, as nearly every batch has black borders and some white."""
        if self._has_images:
            return
        from torchvision.utils import make_grid

        images = images[:PICTURE_IMAGES].float().cpu()
        low, high = images.amin((0, 2, 3), keepdim=True), images.amax((0, 2, 3), keepdim=True)
        large = ((images - low) / (high - low).clamp(min=1e-6)).repeat_interleave(3, 2).repeat_interleave(3, 3)
        grid = make_grid(large, nrow=8, padding=3, pad_value=1.0)  # large, as TensorBoard blurs small pictures
        self._writer.add_image("augmented batch", grid, epoch)
        self._has_images = True

    def add_classes(self, counts: Tensor, names: Sequence[str], epoch: int) -> None:
        """Write the worst classes as a table, and a picture of the confusion matrix `counts` [true, predicted]."""
        if len(counts) <= MATRIX_CLASSES:
            self._writer.add_image("confusion matrix", draw_matrix(counts), epoch, dataformats="HW")
        # no Markdown, no HTML
        names = [re.sub(r"[^\w ]|_", lambda match: f"&#{ord(match[0])};", name) for name in names]
        rows = ["| class | accuracy | most often confused with | fraction |", "|---|---|---|---|"]
        for name, accuracy, other, fraction in worst_classes(counts, names):
            rows.append(f"| {name} | {accuracy:.1%} | {other} | {fraction:.1%} |")
        self._writer.add_text("run/worst classes", "\n".join(rows), epoch)

    def close(self) -> None:
        self._writer.close()


def numbers(record: Record) -> dict[str, float]:
    """Return the numbers of a log point, an epoch or the end by their tags; {} of other records."""
    prefix = TAG_PREFIX.get(record["kind"])
    tagged = {} if prefix is None else {key: value for key, value in record.items() if key not in ("step", "epoch")}
    return {f"{prefix}{key}": value for key, value in tagged.items() if isinstance(value, int | float)}


def compared(config: BaseConfig) -> dict[str, float | str]:
    """Return the run's row in the HParams tab. TensorBoard takes the columns of one run for all runs, so every run has
    the same ones: `ALWAYS_SHOWN`, and `CHANGES` for the other settings that can change a result."""
    values, defaults = config.model_dump(mode="json"), type(config)().model_dump(mode="json")
    silent = {*config.keys_with(KeyFlag.FREE_ON_RESUME), *ALWAYS_SHOWN}
    changed = {key: value for key, value in values.items() if key not in silent and value != defaults[key]}
    words = (f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changed.items())
    return {CHANGES: ", ".join(words)} | {key: values[key] for key in ALWAYS_SHOWN}


def _hparams(row: dict[str, float | str]) -> tuple[Any, Any, Any]:
    """Return the columns of the HParams tab, and the start and the (successful) end of this run's row. With
    SummaryWriter.add_hparams, which writes all three at the end, a running run would have no row."""
    from torch.utils.tensorboard.summary import hparams

    return hparams(row, dict.fromkeys(f"result/{name}" for name in RESULTS))  # type: ignore[no-untyped-call]


def draw_matrix(counts: Tensor) -> Tensor:
    """Draw a confusion matrix [true, predicted] in grey, [H, W] in [0, 1]: white 0 %, black 100 % of the true class;
    the shade follows the square root of the fraction, so that rare confusions can be seen, too."""
    shades = 1 - (counts / counts.sum(1, keepdim=True).clamp(min=1)).sqrt()
    scale = max(1, MATRIX_PIXELS // len(shades))
    return shades.repeat_interleave(scale, 0).repeat_interleave(scale, 1)


def _hide_write_errors(raised: threading.ExceptHookArgs) -> None:
    """Suppress the tracebacks of TensorBoard's threads that cannot write: the run's log reports the error in a line."""
    if not (isinstance(raised.exc_value, OSError) and type(raised.thread).__module__.startswith("tensorboard")):
        threading.__excepthook__(raised)
