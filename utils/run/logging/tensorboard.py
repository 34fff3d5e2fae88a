"""A run's TensorBoard folder: scalars by step, epoch and second, pictures, texts, and its row in the HParams tab.

    loss/train, ...     by epoch: the tutorial's five tags; loss scale
    step/...            by optimizer step: loss, learning rate, images/s, data wait, memory, ...
    by_second/...       by second of training: accuracy, loss
    result/...          at the end: the metrics of the HParams tab

All in one folder, so that a run is one row with one colour. A resumed run cuts from the files what it trains again, as
it does from metrics.jsonl.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np
from torch import Tensor

from utils.base_config import BaseConfig, KeyFlag, render
from utils.run.logging.event_files import cut_back
from utils.run.logging.trackers import POSITIONS, Record, numbers
from utils.training.metrics.confusion import worst_classes

EPOCH_TAGS = ("loss/train", "loss/valid", "acc1/train", "acc1/valid", "learning_rate")
SCALING_TAGS = ("loss_scale", "skipped_steps")  # only where the loss is scaled
STEP_TAGS = "step/"
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
        "model TFLOP/s": ["Multiline", ["step/model_tflops"]],
        "MFU, share of the peak": ["Multiline", ["step/mfu"]],
    },
    "GPU of the main process, by step": {
        "power, W": ["Multiline", ["step/gpu_power_w"]],
        "temperature, °C": ["Multiline", ["step/gpu_temperature_c"]],
        "clock, MHz": ["Multiline", ["step/gpu_clock_mhz"]],
        "memory in use, GB": ["Multiline", ["step/gpu_memory_gb"]],
    },
}
# columns with which the HParams tab opens: what differs from `default`, by its name the first of them, and four keys
CHANGES = "also changed"
ALWAYS_SHOWN = ("batch_size", "lr", "max_epochs", "model")
RESULTS = (
    "best_acc1", "best_epoch", "last_acc1", "last_loss", "seconds", "images_per_sec", "test_acc1", "test_loss",
)  # fmt: skip
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

    def record(self, record: Record) -> None:
        """The numbers of a log point by step; of an epoch by epoch, the tutorial's tags, and by the second of training
        at which it ended; of the end as the metrics of the run's row in the HParams tab."""
        values = numbers(record)
        if record["kind"] == "step":
            self._add_scalars(values, record["step"])
        elif record["kind"] == "epoch":
            by_epoch = {tag: values[tag] for tag in (*EPOCH_TAGS, *SCALING_TAGS) if tag in values}
            self._add_scalars(by_epoch, record["epoch"])
            by_second = {tag: values[name] for name, tag in SECOND_TAGS.items() if name in values}
            self._add_scalars(by_second, round(record["seconds"]))
            self._writer.flush()
        elif record["kind"] == "end":
            self._add_scalars(values, record["epoch"])
            self._writer.file_writer.add_summary(self._hparams({})[2])

    def _add_scalars(self, values: Mapping[str, float], position: int) -> None:
        for tag, value in values.items():
            if tag not in POSITIONS:
                self._writer.add_scalar(tag, value, position)

    def describe(self, config: BaseConfig, config_name: str, environment: Mapping[str, Any]) -> None:
        writer, step = self._writer, self._epoch + 1
        writer.add_text("run/config", f"`{config_name}`\n\n{indent(render(config), CODE)}", step)
        writer.add_text("run/environment", indent(json.dumps(environment, indent=1), CODE), step)
        for summary in self._hparams(compared(config))[:2]:
            writer.file_writer.add_summary(summary)

    def _hparams(self, row: dict[str, float | str]) -> tuple[Any, Any, Any]:
        """The columns of the HParams tab, and the start and the end of this run's row, which has succeeded.

        SummaryWriter.add_hparams writes the three at once, in a folder of its own, so that a run has no row before its
        end; and the tab would open with the first five columns by name, as nothing marks others."""
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
        from torch.utils.tensorboard.summary import hparams

        columns, start, end = hparams(row, dict.fromkeys(f"result/{name}" for name in RESULTS))
        plugin = columns.value[0].metadata.plugin_data
        data = HParamsPluginData.FromString(plugin.content)
        for info in data.experiment.hparam_infos:
            info.differs = info.name in (CHANGES, *ALWAYS_SHOWN)
        plugin.content = data.SerializeToString()
        return columns, start, end

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

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()


def _leave_full_disks_to_the_log(raised: threading.ExceptHookArgs) -> None:
    """TensorBoard's threads end with a traceback where they cannot write; the run's own log says so in a line."""
    if not (isinstance(raised.exc_value, OSError) and type(raised.thread).__module__.startswith("tensorboard")):
        threading.__excepthook__(raised)


def compared(config: BaseConfig) -> dict[str, float | str]:
    """The run's row in the HParams tab. TensorBoard takes the columns from any one run for all: so every run has the
    same ones, a column of text for each key that can change a result but the four."""
    values, defaults = config.model_dump(mode="json"), type(config)().model_dump(mode="json")
    words = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    silent = {*config.keys_with(KeyFlag.FREE_ON_RESUME), *ALWAYS_SHOWN}
    others = {key: word for key, word in words.items() if key not in silent}
    changed = ", ".join(f"{key}={word}" for key, word in others.items() if values[key] != defaults[key])
    return {CHANGES: changed} | {key: values[key] for key in ALWAYS_SHOWN} | others


def draw_matrix(counts: Tensor) -> np.ndarray:
    """A confusion matrix [true, predicted] as an image, uint8 [H, W, 3]: white 0 %, dark blue 100 % of the true class.

    The shade follows the square root of the share, so that rare confusions can be seen beside the diagonal.
    """
    shares = (counts / counts.sum(1, keepdim=True).clamp(min=1)).sqrt().numpy()
    white, blue = np.array([255.0, 255.0, 255.0]), np.array([8.0, 48.0, 107.0])
    image = (white + shares[..., None] * (blue - white)).round().astype(np.uint8)
    scale = max(1, MATRIX_PIXELS // len(shares))
    return image.repeat(scale, 0).repeat(scale, 1)
