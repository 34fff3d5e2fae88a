"""Runs train.py in its own process and reads its records, epoch by epoch."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.shared.read_runs import read_records
from utils.config import find_file
from utils.errors import ExpectedError
from utils.program import CODE

TRAIN = CODE / "train.py"
POLL_SECONDS = 0.05


class FailedRun(ExpectedError):
    """A run that failed, with its message and exit status; 1 if a signal ended it."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.exit_status = max(status, 1)


class FollowedRun:
    """train.py in its own process. Iterating yields the record of each epoch as soon as it is written.

    Leaving the `with` block sends SIGTERM to a running training, which then saves and stops.
    """

    def __init__(self, yaml_config: Path, name: str, settings: Sequence[str], folder: Path) -> None:
        """Start `name` of `yaml_config` with `settings` (KEY=VALUE) in `folder`, from the beginning."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(TRAIN), f"--yaml_config={find_file(yaml_config).resolve()}", f"--config={name}"]
        command += [f"--run-dir={folder.resolve()}", "--resume=never", *(f"--set={setting}" for setting in settings)]
        # another launcher's environment variables must not make this a rank of its run
        environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        self.started = time.perf_counter()
        self._errors = (folder / ".errors").open("w+", encoding="utf-8")
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=self._errors)

    def __enter__(self) -> "FollowedRun":
        return self

    def __iter__(self) -> Iterator[dict[str, Any]]:
        seen, ended = 0, False
        while not ended:
            ended = self.process.poll() is not None  # before reading, so that the last record is not missed
            epochs = read_records(self.folder / "metrics.jsonl", "epoch")
            yield from epochs[seen:]
            seen = len(epochs)
            if not ended:
                time.sleep(POLL_SECONDS)

    def wait(self) -> float:
        """Wait for the end and return the seconds since the start. Raises `FailedRun` if the run failed."""
        status = self.process.wait()
        seconds = time.perf_counter() - self.started
        if status != 0:
            self._errors.seek(0)
            lines = self._errors.read().strip().splitlines() or [f"status {status}"]
            begin = next((number for number, line in enumerate(lines) if line.startswith("error: ")), -1)
            message = "\n".join(lines[begin:]).removeprefix("error: ")
            raise FailedRun(f"train.py in {self.folder} failed: {message}", status)
        return seconds

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait()
        self._errors.close()
        (self.folder / ".errors").unlink(missing_ok=True)
