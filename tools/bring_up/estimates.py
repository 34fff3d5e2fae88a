"""How long a part will take: by what this folder or the baseline measured on this device, else by the table's guess."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.bring_up.ledger import Entry, Ledger, read_object
from tools.bring_up.parts import SMALL_SECONDS, Part, Setting
from tools.shared.read_runs import read_run_folder

START = 25.0  # seconds of a run of train.py: Python, imports, data, graphs
VALIDATION = 50_000 + 10_000 / 3  # images of an epoch, where one of validation costs a third of one of training
COMPILING = 60.0


@dataclass(frozen=True)
class Known:
    """Where figures of this device may be: this folder, and an earlier one where it is of the same device."""

    out: Path
    before: Mapping[str, Entry] = field(default_factory=dict)  # the baseline's parts

    def report(self, part: str) -> dict[str, Any]:
        """The results of a bench; empty where it has written none."""
        return read_object(self.out / "parts" / part / "report.json").get("results", {})

    def rate(self, part: str, rung: str) -> float | None:
        """Images/s of a rung of one of the two ladders."""
        return self.report(part).get("rungs", {}).get(rung, {}).get("full", {}).get("median")

    def eager_wins(self) -> bool:
        """Whether compilation makes the step slower here, under CUDA graphs where these run."""
        for pair in (("eager-graphs", "compiled-graphs"), ("eager", "compiled")):
            eager, compiled = (self.rate("compile", rung) for rung in pair)
            if eager and compiled:
                return eager > compiled
        return False


def baseline_parts(ledger: Ledger | None, machine: Mapping[str, Any]) -> Mapping[str, Entry]:
    """An earlier bring-up's parts, where it was on the same device."""
    return ledger.parts if ledger is not None and ledger.machine.get("device") == machine.get("device") else {}


def seconds_of(part: Part, setting: Setting, entry: Entry, known: Known) -> float:
    """Seconds until the part is done, of what is not done yet."""
    if setting.small:
        return SMALL_SECONDS
    if part.epochs:
        rest = _training(part, setting, known)
        if rest is not None:
            return rest
    earlier = known.before.get(part.name)
    whole = earlier.seconds if earlier is not None and earlier.state == "done" else part.seconds
    if part.goes_on:
        return max(whole - entry.seconds, whole / 10)
    # it begins again, and has shown how long it takes at least
    return max(whole, 1.5 * entry.seconds / max(1, entry.calls)) if entry.cut_offs else whole


def _training(part: Part, setting: Setting, known: Known) -> float | None:
    """By the epochs that are done, else by the ladder."""
    run = setting.folder(part) / "run"
    epochs = read_run_folder(run).epochs if (run / "metrics.jsonl").exists() else []
    if epochs:
        return START + (part.epochs - len(epochs)) * epochs[-1]["seconds"] / len(epochs)
    rate = known.rate("ladder", part.rung)
    compiling = COMPILING if part.name == "accuracy" and not setting.eager_wins else 0.0
    return START + compiling + part.epochs * VALIDATION / rate if rate else None
