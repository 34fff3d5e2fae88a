"""Start train.py as a process of its own and read what it writes, epoch by epoch."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from utils.errors import ConfigError, ExpectedError
from utils.keys import as_yaml

ROOT = Path(__file__).resolve().parent.parent
POLL_SECONDS = 0.05


class FollowedRun:
    """train.py in a process; iterating yields the record of each epoch as soon as it is written, until the end.

    Leaving the `with` block ends a run that goes on, by the signal on which it saves and stops.
    """

    def __init__(self, yaml_config: Path, name: str, settings: Sequence[str], folder: Path) -> None:
        """Starts `name` of `yaml_config` with `settings` (KEY=VALUE) anew in `folder`."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(ROOT / "train.py"), f"--yaml_config={yaml_config.resolve()}", f"--config={name}"]
        command += [f"--run-dir={folder.resolve()}", "--resume=never", *(f"--set={setting}" for setting in settings)]
        # an environment variable of another launcher must not make this a rank of its run
        environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        self.started = time.perf_counter()
        self._errors = (folder / ".errors").open("w+", encoding="utf-8")
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=self._errors)

    def __enter__(self) -> "FollowedRun":
        return self

    def __iter__(self) -> Iterator[dict[str, Any]]:
        path, seen = self.folder / "metrics.jsonl", 0
        while True:
            ended = self.process.poll() is not None
            records = read_records(path, "epoch") if path.exists() else []
            yield from records[seen:]
            seen = len(records)
            if ended:
                return
            time.sleep(POLL_SECONDS)

    def wait(self) -> float:
        """Seconds from the start of the command to its end; `ExpectedError` with its own words where it failed."""
        status = self.process.wait()
        seconds = time.perf_counter() - self.started
        if status != 0:
            self._errors.seek(0)
            words = self._errors.read().strip().splitlines() or [f"status {status}"]
            raise ExpectedError(f"train.py in {self.folder} failed: {words[-1].removeprefix('error: ')}")
        return seconds

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait()
        self._errors.close()
        (self.folder / ".errors").unlink(missing_ok=True)


def read_records(path: Path, kind: str) -> list[dict[str, Any]]:
    """The records of one kind in a metrics.jsonl; a last line that is still being written is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def add_config_arguments(parser: argparse.ArgumentParser, *, config: str) -> None:
    """The options that choose a configuration, as train.py has them."""
    parser.add_argument("--config", default=config, metavar="NAME", help=f"configuration block (default: {config})")
    parser.add_argument(
        "--yaml_config", type=Path, default=Path("config/cifar100.yaml"), metavar="PATH",
        help="file of configuration blocks (default: config/cifar100.yaml)",
    )  # fmt: skip
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one key of the block; repeatable"
    )


def as_settings(values: Mapping[str, Any]) -> list[str]:
    """KEY=VALUE for each."""
    return [f"{key}={as_yaml(value)}" for key, value in values.items()]


def read_counts(option: str, text: str) -> list[int]:
    """What an option takes that wants whole numbers above 0 with commas between."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"{option} {text}: expected whole numbers of at least 1, such as 1,2,4")
    return [int(part) for part in parts]


def check_writable(option: str, path: Path | None) -> None:
    """`ConfigError` where the file that an option names cannot be written; it is left as it is."""
    if path is None:
        return
    existed = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror}") from None
    if not existed:
        path.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Create a folder for results; `ConfigError` where that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot hold results: {error.strerror}; choose another with --out") from None
