"""What has been done of a bring-up: DIR/state.json, written whole at every change, so any call may be killed."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from tools.shared.output import write_json
from utils.errors import ConfigError

SAME = ("device", "torch", "cuda", "cudnn", "torchvision", "python")  # of the machines whose figures stand together


class PartProgress(BaseModel):
    """One part's progress."""

    state: str = "waiting"  # running, cut off, done, failed, left out
    seconds: float = 0.0  # of all calls together
    calls: int = 0
    cut_offs: int = 0  # by the end of a call's time
    note: str = ""
    command: list[str] = []
    host: str = ""

    @property
    def settled(self) -> bool:
        return self.state in ("done", "failed")


class BringUpProgress(BaseModel):
    """The file, and what is in it."""

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
    """What DIR holds; nothing done where it holds none. A part that was running when its call was killed is cut off.

    `ConfigError` where the file is damaged."""
    path = folder / "state.json"
    if not path.exists():
        return BringUpProgress(path=path)
    try:
        progress = BringUpProgress.model_validate({**json.loads(path.read_text("utf-8")), "path": path})
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: is no state of a bring-up: {error!r}; give another --out") from None
    for entry in progress.parts.values():
        if entry.state == "running":
            entry.state, entry.note = "cut off", "its call was killed"
    return progress


def check_same(progress: BringUpProgress, machine: dict[str, Any], small: bool, settings: list[str]) -> None:
    """`ConfigError` where DIR holds figures that cannot stand beside those of this call."""
    before, folder = progress.machine, progress.path.parent
    different = [
        f"{key} {before.get(key)} -> {machine.get(key)}" for key in SAME if before.get(key) != machine.get(key)
    ]
    if before and different:
        raise ConfigError(
            f"{folder}: was begun elsewhere: {', '.join(different)}\ngive another --out; --baseline compares"
        )
    if before and (progress.small, progress.settings) != (small, settings):
        was = (
            " ".join(["--small"] * progress.small + [f"--set {text}" for text in progress.settings]) or "none of these"
        )
        raise ConfigError(f"{folder}: was begun with other --small or --set: {was}; give them, or --out")


def read_results(out: Path, part: str) -> dict[str, Any]:
    """The results that a bench wrote; empty where there is nothing whole."""
    try:
        return dict(json.loads((out / "parts" / part / "report.json").read_text("utf-8"))["results"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}
