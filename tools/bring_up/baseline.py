"""This bring-up against an earlier one, also of other versions: what became slower by more than chance explains."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bring_up.figures import Figure, read_figures
from tools.bring_up.ledger import Entry, Ledger, read_ledger
from utils.errors import ConfigError

TOLERANCE = 0.05  # a median may be worse by this share: machines of one kind differ by some percent
NOT_COMPARED = {"doctor"}
# single runs: their spread is not known, and an accuracy differs from seed to seed
SINGLE = {"%": 0.01, "s": 0.25}


@dataclass(frozen=True)
class Change:
    """One figure before and now."""

    before: Figure
    now: Figure
    regressed: bool

    @property
    def percent(self) -> float:
        return 100 * (self.now.median / self.before.median - 1) if self.before.median else 0.0


def read_baseline(folder: Path, machine: Mapping[str, Any], *, small: bool, other_device: bool) -> Ledger:
    """The ledger of an earlier bring-up. `ConfigError` where there is none, it is of another size, or of another device
    and that was not allowed."""
    ledger = read_ledger(folder)
    if not ledger.machine:
        raise ConfigError(f"--baseline {folder}: holds no bring-up (no state.json)")
    if ledger.small != small:
        raise ConfigError(f"--baseline {folder}: only one of the two is a rehearsal (--small)")
    was, is_now = ledger.machine.get("device"), machine.get("device")
    if was != is_now and not other_device:
        raise ConfigError(f"--baseline {folder}: was another device: {was}, this is {is_now}; to compare all the same: "
                          "--other-device")  # fmt: skip
    return ledger


def versions(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between the two, to stand beside the verdict."""
    keys = ("device", "torch", "cuda", "cudnn", "torchvision", "dali", "python", "commit", "host")
    return [f"{key} {before.get(key)} -> {now.get(key)}" for key in keys if before.get(key) != now.get(key)]


def compare(before: Sequence[Figure], now: Sequence[Figure]) -> list[Change]:
    """Each figure that both have, in this order."""
    earlier = {figure.key: figure for figure in before}
    return [
        Change(earlier[figure.key], figure, _regressed(earlier[figure.key], figure))
        for figure in now
        if figure.key in earlier and figure.part not in NOT_COMPARED
    ]


def _regressed(before: Figure, now: Figure) -> bool:
    """Worse by more than the tolerance, and each trial worse than every earlier one where there are several."""
    higher = before.better == "higher"
    if now.unit == "tests":  # fewer pass, or any more fail
        return now.median < before.median if higher else now.median > before.median
    if before.unit == "%":
        return now.median < before.median - 100 * SINGLE["%"]
    loss = 1 - now.median / before.median if higher else now.median / before.median - 1
    apart = now.high < before.low if higher else now.low > before.high
    return apart and loss > SINGLE.get(before.unit, TOLERANCE)


def missing(before: Ledger, now: Mapping[str, Entry], figures: Sequence[Figure], old: Sequence[Figure]) -> list[str]:
    """Rungs that a finished part had measured before and has not now: a regression too."""
    seen = {figure.key for figure in figures}
    done = {name for name, entry in now.items() if entry.settled}
    was = {name for name, entry in before.parts.items() if entry.state == "done"}
    return [figure.key for figure in old if figure.part in done & was and figure.key not in seen]


def regressions(baseline: Path, ledger: Ledger, out: Path, old: Ledger) -> tuple[list[Change], list[str]]:
    """(all changes, a line for each regression)."""
    earlier, now = read_figures(baseline, old.parts), read_figures(out, ledger.parts)
    changes = compare(earlier, now)
    lines = [
        f"{change.now.key}: {change.before.text()} -> {change.now.text()}, {change.percent:+.1f} %"
        for change in changes
        if change.regressed
    ]
    return changes, lines + [f"{key}: in the baseline, not here" for key in missing(old, ledger.parts, now, earlier)]
