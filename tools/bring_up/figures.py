"""What the parts measured, read from what they wrote: one list of figures, each with its spread and its share of the
ceilings that `limits` measured. No torch."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bring_up.ledger import Entry, read_object
from tools.bring_up.parts import PARTS, passed_tests
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


def read_figures(out: Path, parts: Mapping[str, Entry]) -> list[Figure]:
    """All figures of a bring-up's folder, in the order of the parts."""
    reports = {part.name: read_object(out / "parts" / part.name / "report.json").get("results", {}) for part in PARTS}
    ceiling = _Ceiling(reports)
    figures: list[Figure] = []
    for part in PARTS:
        folder, results = out / "parts" / part.name, reports[part.name]
        if "pytest" in part.command and folder.exists():
            figures += _tests(part.name, folder)
        elif part.epochs and (folder / "run" / "metrics.jsonl").exists():
            entry = parts.get(part.name)
            figures += _training(part.name, folder / "run", ceiling, done=entry is not None and entry.state == "done")
        elif part.name in ("compile", "ladder"):
            figures += _rungs(part.name, results)
        elif part.name == "limits":
            figures += _limits(part.name, results)
        elif part.name == "layers":
            figures += _layers(part.name, results)
        else:
            figures += _rates(part.name, results, ceiling)
    return figures


def _sample(part: str, name: str, unit: str, sample: Mapping[str, float], **more: Any) -> Figure:
    return Figure(part, name, sample["median"], sample["min"], sample["max"], unit, **more)


class _Ceiling:
    """The share of the measured arithmetic that training at some images/s is."""

    def __init__(self, reports: Mapping[str, Mapping[str, Any]]) -> None:
        rungs = [*reports["ladder"].get("rungs", {}).values(), *reports["compile"].get("rungs", {}).values()]
        # the network is the same in all parts, so that any rung tells what an image costs
        self.per_image = next((rung["tflops"] / rung["full"]["median"] for rung in rungs if "tflops" in rung), None)
        limits = reports["limits"] or reports["ladder"].get("limits", {})
        kinds = re.compile(r"(product|convolution) (bf16|fp16)")
        half = [value["median"] for name, value in limits.items() if kinds.match(name)]
        self.half = max(half, default=None)

    def of(self, images_per_sec: float) -> dict[str, Any]:
        if self.per_image is None or self.half is None:
            return {}
        return {"share": images_per_sec * self.per_image / self.half, "of": "half-precision arithmetic"}


def _tests(part: str, folder: Path) -> list[Figure]:
    """The tests that passed in any call, and those that failed in the last one."""
    logs = sorted(folder.glob("log-*.txt"), key=lambda path: int(path.stem.removeprefix("log-")))
    last = logs[-1].read_text("utf-8", "replace") if logs else ""
    counts = {
        "passed": (len(set(passed_tests(folder))), "higher"),
        "failed": (len(re.findall(r"^tests/\S+::.* (?:FAILED|ERROR)", last, re.MULTILINE)), "lower"),
    }
    return [Figure(part, name, count, count, count, "tests", better) for name, (count, better) in counts.items()]


def _rungs(part: str, results: Mapping[str, Any]) -> Iterator[Figure]:
    for name, rung in results.get("rungs", {}).items():
        share = {"share": rung.get("arithmetic_share"), "of": "arithmetic in its number format"}
        yield _sample(part, name, "images/s", rung["full"], **share)
        share = {"share": rung.get("memory_share"), "of": "memory"}
        yield _sample(part, f"{name}, step alone", "images/s", rung["compute"], **share)


def _limits(part: str, results: Mapping[str, Any]) -> Iterator[Figure]:
    for label, sample in results.items():
        name, _, unit = label.rpartition(", ")
        yield _sample(part, name, unit, sample)


def _layers(part: str, results: Mapping[str, Any]) -> Iterator[Figure]:
    for name, layer in results.get("layers", {}).items():
        yield _sample(part, name, "ms", layer["milliseconds"], better="lower", share=layer["share"], of=layer["bound"])


def _rates(part: str, results: Mapping[str, Any], ceiling: _Ceiling) -> Iterator[Figure]:
    """Loaders and peers."""
    for name, values in results.items():
        for quantity, unit in ({"full": "images/s"} | BATCH_UNITS).items():
            if quantity in values:
                share = {} if quantity == "images_per_sec" else ceiling.of(values[quantity]["median"])
                yield _sample(part, name, unit, values[quantity], **share)


def _training(part: str, folder: Path, ceiling: _Ceiling, *, done: bool) -> Iterator[Figure]:
    run = read_run_folder(folder)
    best, reached, rate = run.best(), run.reached(GOAL), run.last("images_per_sec")

    def single(name: str, value: float, unit: str, **more: Any) -> Figure:
        return Figure(part, name, value, value, value, unit, **more)

    if best and done:
        yield single("best accuracy", 100 * best[0], "%")
    if reached:
        yield single(f"time to {GOAL:.0%}", reached[1], "s", better="lower")
    if rate:
        yield single("training", rate, "images/s", **ceiling.of(rate))
