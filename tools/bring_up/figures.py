"""What the parts measured, read from what they wrote: one list of figures, each with its spread and, where the bench
knows it, its share of a measured ceiling. No torch."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bring_up.parts import PARTS, passed_tests
from tools.bring_up.progress import PartProgress, read_results
from tools.shared.read_runs import read_run_folder

GOAL = 0.75
BATCH_UNITS = {"images_per_sec": "images/s alone", "training_images_per_sec": "images/s feeding a step"}


@dataclass(frozen=True)
class Figure:
    """One measured number."""

    part: str
    name: str
    median: float
    low: float
    high: float
    unit: str
    better: str = "higher"  # or lower
    share: float | None = None  # of the measured ceiling that `of` names
    of: str = ""

    @property
    def key(self) -> str:
        return f"{self.part}: {self.name}, {self.unit}"

    def text(self) -> str:
        """Median and spread, in the digits that mean something."""
        size = abs(self.median)
        digits = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 1 or size == 0 else 4
        if self.low == self.high:
            return f"{self.median:,.{digits}f}"
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f}-{self.high:,.{digits}f})"


def read_figures(out: Path, parts: Mapping[str, PartProgress]) -> list[Figure]:
    """All figures of a bring-up's folder, in the order of the parts."""
    figures: list[Figure] = []
    for part in PARTS:
        folder = out / "parts" / part.name
        if "pytest" in part.command and folder.exists():
            figures += _tests(part.name, folder)
        elif part.epochs and (folder / "run" / "metrics.jsonl").exists():
            done = part.name in parts and parts[part.name].state == "done"
            figures += _training(part.name, folder / "run", done=done)
        else:
            figures += _bench(part.name, read_results(out, part.name))
    return figures


def _tests(part: str, folder: Path) -> list[Figure]:
    """The tests that passed in any call, and those that failed in the last one."""
    logs = sorted(folder.glob("log-*.txt"), key=lambda path: int(path.stem.removeprefix("log-")))
    last = logs[-1].read_text("utf-8", "replace") if logs else ""
    passed, failed = len(set(passed_tests(folder))), len(re.findall(r"^tests/\S+::.* (?:FAILED|ERROR)", last, re.M))
    return [
        Figure(part, "passed", passed, passed, passed, "tests"),
        Figure(part, "failed", failed, failed, failed, "tests", "lower"),
    ]


def _bench(part: str, results: Mapping[str, Any]) -> Iterator[Figure]:
    """Of a report of tools.bench: ladders, limits, layers, loaders, peers."""

    def figure(name: str, unit: str, sample: Mapping[str, float], **more: Any) -> Figure:
        return Figure(part, name, sample["median"], sample["min"], sample["max"], unit, **more)

    for name, rung in results.get("rungs", {}).items():
        arithmetic = {"share": rung.get("arithmetic_share"), "of": "arithmetic in its number format"}
        yield figure(name, "images/s", rung["full"], **arithmetic)
        yield figure(f"{name}, step alone", "images/s", rung["compute"], share=rung.get("memory_share"), of="memory")
    for name, layer in results.get("layers", {}).items():
        yield figure(name, "ms", layer["milliseconds"], better="lower", share=layer["share"], of=layer["bound"])
    for name, values in results.items():
        if part == "limits":
            what, _, unit = name.rpartition(", ")
            yield figure(what, unit, values)
        for quantity, unit in ({"full": "images/s"} | BATCH_UNITS).items() if part in ("loaders", "peers") else ():
            if quantity in values:
                yield figure(name, unit, values[quantity])


def _training(part: str, folder: Path, *, done: bool) -> Iterator[Figure]:
    run = read_run_folder(folder)
    best, reached, rate = run.best(), run.reached(GOAL), run.last("images_per_sec")

    def single(name: str, value: float, unit: str, **more: Any) -> Figure:
        return Figure(part, name, value, value, value, unit, **more)

    if best and done:
        yield single("best accuracy", 100 * best[0], "%")
    if reached:
        yield single(f"time to {GOAL:.0%}", reached[1], "s", better="lower")
    if rate:
        yield single("training", rate, "images/s")
