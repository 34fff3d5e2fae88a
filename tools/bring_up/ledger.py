"""What has been done of a bring-up: DIR/state.json, written whole at every change, so any call may be killed."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tools.shared.output import write_json
from utils.errors import ConfigError

SAME = ("device", "torch", "cuda", "cudnn", "torchvision", "python")  # of the machines whose figures stand together
SETTLED = ("done", "failed")


@dataclass
class Entry:
    """One part's progress."""

    state: str = "waiting"  # running, cut off, done, failed, left out
    seconds: float = 0.0  # of all calls together
    calls: int = 0
    cut_offs: int = 0  # by the end of a call's time
    note: str = ""
    command: list[str] = field(default_factory=list)
    host: str = ""

    @property
    def settled(self) -> bool:
        return self.state in SETTLED


@dataclass
class Ledger:
    """The file, and what is in it."""

    path: Path
    machine: dict[str, Any] = field(default_factory=dict)
    small: bool = False
    settings: list[str] = field(default_factory=list)
    parts: dict[str, Entry] = field(default_factory=dict)

    def entry(self, name: str) -> Entry:
        return self.parts.setdefault(name, Entry())

    def write(self) -> None:
        write_json(self.path, {key: value for key, value in asdict(self).items() if key != "path"})


def read_ledger(folder: Path) -> Ledger:
    """What DIR holds; an empty one where it holds none. A part that was running when its call was killed is cut off.

    `ConfigError` where the file is damaged."""
    path = folder / "state.json"
    try:
        content = json.loads(path.read_text("utf-8"))
        parts = {name: Entry(**entry) for name, entry in content.pop("parts").items()}
        ledger = Ledger(path, parts=parts, **content)
    except FileNotFoundError:
        return Ledger(path)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path}: is no state of a bring-up: {error!r}; give another --out") from None
    for entry in ledger.parts.values():
        if entry.state == "running":
            entry.state, entry.note = "cut off", "its call was killed"
    return ledger


def check_same(ledger: Ledger, machine: dict[str, Any], small: bool, settings: list[str]) -> None:
    """`ConfigError` where DIR holds figures that cannot stand beside those of this call."""
    before = ledger.machine
    different = [key for key in SAME if before and before.get(key) != machine.get(key)]
    if different:
        was = ", ".join(f"{key} {before.get(key)} -> {machine.get(key)}" for key in different)
        raise ConfigError(f"{ledger.path.parent}: was begun elsewhere: {was}\ngive another --out; --baseline compares")
    if before and (ledger.small, ledger.settings) != (small, settings):
        was = " ".join(["--small"] * ledger.small + [f"--set {text}" for text in ledger.settings]) or "none of these"
        raise ConfigError(f"{ledger.path.parent}: was begun with other --small or --set: {was}; give them, or --out")


def read_object(path: Path) -> dict[str, Any]:
    """What a bench wrote; empty where there is nothing whole."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
