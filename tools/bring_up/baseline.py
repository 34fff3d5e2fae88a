"""This bring-up against an earlier one, also of other versions: what became slower by more than chance explains."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bring_up.figures import Figure
from tools.bring_up.progress import PartProgress
from utils.errors import ConfigError

TOLERANCE = 0.05  # a median may be worse by this share: machines of one kind differ by some percent
SINGLE_SECONDS = 0.25  # of a single run, whose spread is not known
ACCURACY_POINTS = 1.0  # by which seeds may differ
VERSIONS = ("device", "torch", "cuda", "cudnn", "torchvision", "dali", "python", "commit", "host")


@dataclass(frozen=True)
class Change:
    """One figure before and now."""

    before: Figure
    now: Figure

    @property
    def percent(self) -> float:
        return 100 * (self.now.median / self.before.median - 1) if self.before.median else 0.0

    @property
    def regressed(self) -> bool:
        """Worse by more than the tolerance, and each trial worse than every earlier one where there are several."""
        before, now, higher = self.before, self.now, self.before.better == "higher"
        if now.unit == "tests":  # fewer pass, or any more fail
            return now.median < before.median if higher else now.median > before.median
        if before.unit == "%":
            return now.median < before.median - ACCURACY_POINTS
        loss = 1 - now.median / before.median if higher else now.median / before.median - 1
        apart = now.high < before.low if higher else now.low > before.high
        return apart and loss > (SINGLE_SECONDS if before.unit == "s" else TOLERANCE)

    def __str__(self) -> str:
        return f"{self.now.key}: {self.before.text()} -> {self.now.text()}, {self.percent:+.1f} %"


@dataclass(frozen=True)
class Baseline:
    """What an earlier bring-up wrote."""

    machine: Mapping[str, Any]
    states: Mapping[str, str]  # of its parts
    figures: Sequence[Figure]

    def versions(self, now: Mapping[str, Any]) -> list[str]:
        """What differs between the two, to stand beside the verdict."""
        pairs = ((key, self.machine.get(key), now.get(key)) for key in VERSIONS)
        return [f"{key} {before} -> {after}" for key, before, after in pairs if before != after]

    def changes(self, now: Sequence[Figure]) -> list[Change]:
        """Each figure that both have, in this order."""
        earlier = {figure.key: figure for figure in self.figures}
        return [Change(earlier[figure.key], figure) for figure in now if figure.key in earlier]

    def missing(self, now: Sequence[Figure], parts: Mapping[str, PartProgress]) -> list[str]:
        """Figures that a finished part had before and has not now: a regression too."""
        seen = {figure.key for figure in now}
        done = {name for name, entry in parts.items() if entry.settled and self.states.get(name) == "done"}
        return [figure.key for figure in self.figures if figure.part in done and figure.key not in seen]


def read_baseline(folder: Path, machine: Mapping[str, Any], *, small: bool) -> Baseline:
    """An earlier bring-up. `ConfigError` where there is none, or it is of another size or device."""
    try:
        content = json.loads((folder / "packed/bring_up.json").read_text("utf-8"))
        states = {name: entry["state"] for name, entry in content["parts"].items()}
        found = Baseline(content["machine"], states, [Figure(**figure) for figure in content["figures"]])
        was_small = content["rehearsal"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--baseline {folder}: holds no bring-up: {error!r}") from None
    if was_small != small:
        raise ConfigError(f"--baseline {folder}: only one of the two is a rehearsal (--small)")
    was, is_now = found.machine.get("device"), machine.get("device")
    if was != is_now:
        raise ConfigError(f"--baseline {folder}: was another device: {was}, this is {is_now}")
    return found
