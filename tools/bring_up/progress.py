"""The progress of a bring-up: DIR/state.json, written whole at every change, so that any call may be killed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from tools.bench.reports import VERSIONS, differences, read_report
from tools.shared.output import write_json
from utils.errors import ConfigError, DataError


class PartProgress(BaseModel):
    """One part's progress."""

    state: str = "waiting"  # running, cut off, no data, done, failed, left out
    seconds: float = 0.0  # all calls together
    calls: int = 0
    cut_offs: int = 0  # calls that ended before the part did
    note: str = ""
    command: list[str] = []

    @property
    def settled(self) -> bool:
        return self.state in ("done", "failed")


class BringUpProgress(BaseModel):
    """The content of state.json."""

    path: Path = Field(exclude=True)
    machine: dict[str, Any] = {}
    small: bool = False
    settings: list[str] = []
    parts: dict[str, PartProgress] = {}

    def of(self, name: str) -> PartProgress:
        return self.parts.setdefault(name, PartProgress())

    def write(self) -> None:
        write_json(self.path, self.model_dump())


def read_progress(folder: Path) -> BringUpProgress:
    """Read DIR/state.json; empty if there is none. Raises `ConfigError` if it is damaged."""
    path = folder / "state.json"
    if not path.exists():
        return BringUpProgress(path=path)
    try:
        progress = BringUpProgress.model_validate({**json.loads(path.read_text("utf-8")), "path": path})
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: not the state of a bring-up: {error}; give another --out") from None
    for entry in progress.parts.values():
        if entry.state == "running":
            entry.state, entry.note = "cut off", "its call was killed"
    return progress


def check_same(progress: BringUpProgress, machine: Mapping[str, Any], small: bool, settings: list[str]) -> None:
    """Raise `ConfigError` if DIR holds figures of another machine, size or settings."""
    before = progress.machine | {"--small": progress.small, "--set": progress.settings}
    different = differences(before, {**machine, "--small": small, "--set": settings}, (*VERSIONS, "--small", "--set"))
    if progress.machine and different:
        begun = f"{progress.path.parent}: was begun differently: {', '.join(different)}"
        raise ConfigError(f"{begun}\ngive another --out; --baseline compares")


def read_results(out: Path, part: str) -> dict[str, Any]:
    """Return the results of a bench; empty if there is no complete report."""
    try:
        return read_report(out / "parts" / part / "report.json").results
    except DataError:
        return {}
