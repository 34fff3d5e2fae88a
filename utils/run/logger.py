"""Write a run's log, progress bar, metrics.jsonl and TensorBoard."""

import os
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor

from utils.distributed.launch import OPEN_MPI
from utils.errors import LOST_RANK, ExpectedError, Stopped, explain, print_text
from utils.files import name_file_in_error, read_json_lines, strict_json
from utils.run.clock import Clock
from utils.run.tensorboard import TensorBoardWriter
from utils.run.trackers import Tracker
from utils.training.metrics.confusion import worst_classes

LOG, METRICS = "train.log", "metrics.jsonl"
REDRAW_SECONDS, BAR_WIDTH, CLEAR_LINE = 0.1, 30, "\x1b[K"


class RunLogger(AbstractContextManager["RunLogger"]):
    """Records the run in the main process. On other ranks it is not `enabled` and does nothing.

    A terminal shows a progress bar and one line per epoch; a file or pipe gets the tutorial's plain lines; train.log
    gets all lines in either case. Each record gets the times of `clock`. A `with` block closes what `open` opened.
    """

    def __init__(self, folder: Path, *, enabled: bool, to_screen: bool, clock: Clock | None = None) -> None:
        self.folder, self.enabled, self.to_screen, self.clock = folder, enabled, to_screen, clock or Clock()
        self.waiting: list[str] = []  # lines said before `open`
        self.trackers: list[Tracker] = []
        self.board: TensorBoardWriter | None = None
        self.has_bar = False
        self._loop, self._info, self._left, self._drawn = ("", 0), "", "", 0.0  # of the progress bar
        self._files: dict[str, TextIO] = {}  # by name, while they are open

    def open(self) -> "RunLogger":
        if self.enabled:
            with self._errors_named():
                for name in (LOG, METRICS):  # a file's name may have bytes that are no text
                    self._files[name] = (self.folder / name).open("a", encoding="utf-8", errors="backslashreplace")
            # Open MPI gives each rank a pseudo-terminal, so a bar could flood a pipe or a file
            terminal = getattr(sys.stdout, "isatty", bool)() and OPEN_MPI.world_size not in os.environ
            self.has_bar = self.to_screen and terminal
            while self.waiting:
                self.say(self.waiting.pop(0))
        return self

    def say(self, message: str, *, above_bar: bool = True) -> None:
        """Write a line to train.log and the screen. A progress bar omits its time, or the line unless `above_bar`."""
        if not self._files:
            self.waiting += [message] if self.enabled else []
            return
        line = self._log(message, "INFO")
        if self.has_bar and above_bar:
            print_text(f"\r{CLEAR_LINE}{message}\n", sys.stdout)
        elif self.to_screen and not self.has_bar:
            print_text(line, sys.stdout)

    def start_bar(self, description: str, total: int, done: int = 0) -> None:
        """Reuse the progress bar for the next loop over `total` batches."""
        self._loop, self._info, self._drawn = (description, total), "", 0.0
        self.advance_bar(done)

    def advance_bar(self, done: int) -> None:
        if self.has_bar and time.monotonic() - self._drawn > REDRAW_SECONDS:
            description, total = self._loop
            bar = "#" * (BAR_WIDTH * done // max(1, total))
            line = f"{description} [{bar:.<{BAR_WIDTH}}] {done}/{total}{self._left}{self._info}"
            print_text(f"\r{CLEAR_LINE}{line[: shutil.get_terminal_size().columns - 1]}", sys.stdout)
            self._drawn = time.monotonic()

    def _log(self, message: str, level: str) -> str:
        """Write a line with time and level to train.log and return it."""
        line = f"{datetime.now():%Y-%m-%d %H:%M:%S,%f}"[:-3] + f" - {level} - {message}\n"
        self._write(LOG, line)
        return line

    def _write(self, name: str, line: str) -> None:
        with self._errors_named():
            self._files[name].write(line)
            self._files[name].flush()

    def _errors_named(self) -> AbstractContextManager[None]:
        return name_file_in_error(self.folder, "the run's log cannot be written")

    def log_start(
        self, config: Any, name: str, environment: dict[str, Any], resumed_from: Path | None, **position: int
    ) -> None:
        """Start TensorBoard and the trackers, and record a start or resume at this position: epoch, batch, step."""
        if config.log_to_tensorboard:
            with self._errors_named():
                self.board = TensorBoardWriter(self.folder / "tb_logs", read_records(self.folder))
                self.board.describe(config, name, environment, position["epoch"] + 1)
        settings = config.model_dump(mode="json")
        self.trackers = [Tracker(tracker, self.folder, settings, self.say) for tracker in config.log_to]
        kind, source = ("start", {}) if resumed_from is None else ("resume", {"from": str(resumed_from)})
        place = {"host": socket.gethostname(), "world_size": environment["world_size"]}
        self._record(kind, **position, time=time.time(), **place, **source)

    def log_step(
        self, epoch: int, iteration: int, step: int, values: dict[str, float], left: float | None, images: Tensor
    ) -> None:
        """Record a log point, with the tutorial's line. `left`: seconds to the end of the run, if known."""
        self._left = time_left(left)
        rate, learning_rate = significant(values["images_per_sec"]), significant(values["learning_rate"])
        self.say(f"Epoch: {epoch}, Iteration: {iteration}, Avg img/sec: {rate}", above_bar=False)
        self.say(f"step {step}  loss {values['loss']:.4f}  lr {learning_rate}{self._left}", above_bar=False)
        self._info = f"  loss {values['loss']:.3f}  {rate} images/s"
        self._record("step", epoch=epoch, step=step, **values)
        self.show(lambda board: board.add_images(images, epoch))

    def log_epoch(self, epoch: int, step: int, values: dict[str, float], left: float | None = None) -> None:
        """Record the end of an epoch. `values` has loss/valid and acc1/valid only if it was validated."""
        self._left = time_left(left)
        parts = [part for part in ("train", "valid") if f"acc1/{part}" in values]
        self.say(f"Time taken for epoch {epoch} is {significant(values['epoch_seconds'])} sec", above_bar=False)
        self.say(", ".join(f"{part} acc1={values[f'acc1/{part}']:.4f}" for part in parts), above_bar=False)
        shown = [f"{part} loss {values[f'loss/{part}']:.4f} acc1 {values[f'acc1/{part}']:6.2%}" for part in parts]
        names = ("learning_rate", "images_per_sec", "epoch_seconds")
        rate, speed, seconds = (significant(values[name], 3) for name in names)
        self.say("  ".join([f"epoch {epoch:3}", *shown, f"lr {rate}", f"{speed} images/s", f"{seconds} s{self._left}"]))
        self._record("epoch", epoch=epoch, step=step, **values)

    def log_end(
        self, epoch: int, step: int, results: dict[str, float], counts: Tensor, class_names: Sequence[str]
    ) -> None:
        """Record the end of the training: its results, and the worst classes of the confusion matrix `counts`."""
        if "test_acc1" in results:
            accuracy, loss, images = (results[f"test_{name}"] for name in ("acc1", "loss", "images"))
            self.say(f"test acc1 {accuracy:.2%}, loss {loss:.4f}: {images:.0f} images never used for model selection")
        columns = ("class", "accuracy", "taken_for", "share")
        worst = [dict(zip(columns, row, strict=True)) for row in worst_classes(counts, class_names)]
        self._record("end", epoch=epoch, step=step, **results, worst_classes=worst)

    def sync(self) -> None:
        """Sync metrics.jsonl to the disk, so that a checkpoint written next is never newer than its records."""
        if self._files:
            with self._errors_named():
                os.fsync(self._files[METRICS].fileno())

    def _record(self, kind: str, **values: Any) -> None:
        """Write a record to metrics.jsonl, TensorBoard and the trackers."""
        seconds = {name: round(spent, 3) for name, spent in self.clock.by_activity().items()}  # of this start
        record = {"kind": kind, **values, "clock_seconds": seconds}
        if self._files:
            self._write(METRICS, strict_json(record) + "\n")
        self.show(lambda board: board.record(record))
        for tracker in self.trackers:
            tracker.record(record)

    def show(self, add: Callable[[TensorBoardWriter], None]) -> None:
        if self.board is not None:
            with self._errors_named():
                add(self.board)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.has_bar:
            print_text(f"\r{CLEAR_LINE}", sys.stdout)
        with suppress(ExpectedError):  # raised by the write that failed
            if error is not None and self._files:
                self._log_error(error)
        for tracker in self.trackers:
            tracker.close(failed=error is not None)
        for close in [file.close for file in self._files.values()] + ([self.board.close] if self.board else []):
            with suppress(OSError):
                close()
        self._files, self.board = {}, None

    def _log_error(self, error: BaseException) -> None:
        """Write to train.log only, as main() prints the error: how the run ended, with a traceback if unexpected."""
        if isinstance(error, RuntimeError) and LOST_RANK.search(str(error)):  # of a collective: no bug of this rank
            error = explain(error) or error
        status = getattr(error, "exit_status", 130 if isinstance(error, KeyboardInterrupt) else 1)
        reason = f"{type(error).__name__}: {error}"
        known = isinstance(error, ExpectedError | KeyboardInterrupt)
        trace = "" if known else "\n" + "".join(traceback.format_exception(error)).rstrip()
        self._log(f"ended by {reason}{trace}", "INFO" if isinstance(error, Stopped) else "ERROR")
        self._record("stop", step=self.clock.step, time=time.time(), status=status, reason=reason)


def read_records(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """Return a run's records, of these kinds or all, without lines that a kill has damaged; [] without the file."""
    records, _ = read_json_lines(folder / METRICS, "kind")
    return [record for record in records if not kinds or record["kind"] in kinds]


def significant(number: float, digits: int = 4) -> str:
    """Round a number to significant digits; large numbers are printed without an exponent."""
    return f"{float(f'{number:.{digits}g}'):.10g}"


def time_left(seconds: float | None) -> str:
    """Format hours, minutes and seconds left as the end of a line; empty if unknown or zero."""
    return f"  {timedelta(seconds=round(seconds))} left" if seconds else ""
