"""The figures that the parts measured; published figures, goals and an earlier bring-up to compare with. No torch."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from tools.bring_up.parts import PARTS, passed_tests
from tools.bring_up.progress import PartProgress, read_results
from tools.shared.read_runs import read_run_folder
from utils.errors import ConfigError
from utils.program import CODE

PUBLISHED = CODE / "results/reference/published_rates.json"
TARGET_ACCURACY = 0.75
RATES = {"full": "images/s", "images_per_sec": "images/s alone", "training_images_per_sec": "images/s feeding a step"}


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
    share: float | None = None  # fraction of the measured limit `of`
    of: str = ""

    @property
    def key(self) -> str:
        return f"{self.part}: {self.name}, {self.unit}"

    def text(self) -> str:
        """Return median and spread, rounded to significant digits."""
        size = abs(self.median)
        digits = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 1 or size == 0 else 4
        spread = "" if self.low == self.high else f" ({self.low:,.{digits}f}-{self.high:,.{digits}f})"
        return f"{self.median:,.{digits}f}{spread}"


def measured_figure(part: str, name: str, unit: str, sample: Mapping[str, float] | float, **more: Any) -> Figure:
    """Return the figure of some trials, or of a single value."""
    trials = sample if isinstance(sample, Mapping) else dict.fromkeys(("median", "min", "max"), sample)
    return Figure(part, name, trials["median"], trials["min"], trials["max"], unit, **more)


def read_figures(out: Path, parts: Mapping[str, PartProgress]) -> list[Figure]:
    """Return all figures of a bring-up's folder, in the order of the parts."""
    figures: list[Figure] = []
    for part in PARTS:
        folder = out / "parts" / part.name
        if "pytest" in part.command and folder.exists():
            figures += _tests(part.name, folder)
        elif part.epochs and (folder / "run" / "metrics.jsonl").exists():
            figures += _training(part.name, folder / "run", done=parts.get(part.name, PartProgress()).state == "done")
        else:
            figures += _bench(part.name, read_results(out, part.name))
    return figures


def _tests(part: str, folder: Path) -> list[Figure]:
    """Count the tests that passed in any call, and those that failed in the last one."""
    logs = sorted(folder.glob("log-*.txt"), key=lambda path: int(path.stem.removeprefix("log-")))
    last = logs[-1].read_text("utf-8", "replace") if logs else ""
    passed, failed = set(passed_tests(folder)), re.findall(r"^\[gw\d+\] .*\] (?:FAILED|ERROR) tests/", last, re.M)
    counts = (("passed", len(passed), "higher"), ("failed", len(failed), "lower"))
    return [measured_figure(part, name, "tests", count, better=better) for name, count, better in counts]


def _bench(part: str, results: Mapping[str, Any]) -> Iterator[Figure]:
    """Yield the figures of a report of tools.bench: ladders, limits, layers, loaders, peers."""
    figure = partial(measured_figure, part)
    for name, rung in results.get("rungs", {}).items():
        yield figure(name, "images/s", rung["full"], share=rung.get("arithmetic_share"), of="arithmetic")
        share, step_alone = rung.get("memory_share"), rung["compute"]["median"] / rung["full"]["median"]
        share = None if share is None else share * step_alone  # the ladder's share is of the step that the loader feeds
        yield figure(f"{name}, step alone", "images/s", rung["compute"], share=share, of="memory")
    for name, layer in results.get("layers", {}).items():
        yield figure(name, "ms", layer["milliseconds"], better="lower", share=layer["share"], of=layer["bound"])
    for name, values in results.items() if part in ("limits", "loaders", "peers") else ():
        if part == "limits":
            what, _, unit = name.rpartition(", ")
            yield figure(what, unit, values)
        yield from (figure(name, unit, values[key]) for key, unit in RATES.items() if key in values)


def _training(part: str, folder: Path, *, done: bool) -> Iterator[Figure]:
    run = read_run_folder(folder)
    best, reached, rate = run.best(), run.reached(TARGET_ACCURACY), run.rate()
    if best and done:
        yield measured_figure(part, "best accuracy", "%", 100 * best[0])
    if reached:
        yield measured_figure(part, f"time to {TARGET_ACCURACY:.0%}", "s", reached[1], better="lower")
    if rate:
        yield measured_figure(part, "training", "images/s", rate)


class Published(NamedTuple):
    """A published figure or a goal, and the key of the figure to compare with it."""

    what: str
    where: str
    value: float
    key: str

    def is_met(self, figure: Figure) -> bool:
        return figure.median >= self.value if figure.better == "higher" else figure.median <= self.value

    def relative(self, figure: Figure) -> str:
        """Return how much better `figure` is: a factor, or points or tests, for which a factor means nothing."""
        if figure.unit in ("%", "tests"):
            return f"{figure.median - self.value:+.2f}"
        return f"{figure.median / self.value if figure.better == 'higher' else self.value / figure.median:.2f} x"


def read_published() -> list[Published]:
    """Return the published figures and goals, in the order of the page; none without the folder results/."""
    rows = json.loads(PUBLISHED.read_text("utf-8"))["rows"] if PUBLISHED.exists() else []
    return [Published(**row) for row in rows]


TOLERANCE = 0.05  # machines of one kind differ by some percent
SINGLE_RUN_TOLERANCE = 0.25  # for the seconds of a single run, whose spread is not known
ACCURACY_POINTS = 1.0  # by which seeds may differ


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
        """True if the median is worse by more than the tolerance and each trial is worse than every earlier one."""
        before, now, sign = self.before, self.now, 1 if self.before.better == "higher" else -1
        gain = sign * (now.median - before.median)
        if now.unit in ("tests", "%"):
            return gain < (-ACCURACY_POINTS if now.unit == "%" else 0)
        all_worse = now.high < before.low if sign > 0 else now.low > before.high
        return all_worse and -gain / before.median > (SINGLE_RUN_TOLERANCE if now.unit == "s" else TOLERANCE)

    def __str__(self) -> str:
        return f"{self.now.key}: {self.before.text()} -> {self.now.text()}, {self.percent:+.1f} %"


class Baseline(BaseModel):
    """The content of an earlier bring-up's bring_up.json."""

    machine: dict[str, Any]
    parts: dict[str, PartProgress]
    figures: list[Figure]
    rehearsal: bool = False

    def changes(self, now: Sequence[Figure]) -> list[Change]:
        """Return the figures that both have, in the order of `now`."""
        earlier = {figure.key: figure for figure in self.figures}
        return [Change(earlier[figure.key], figure) for figure in now if figure.key in earlier]

    def missing(self, now: Sequence[Figure], parts: Mapping[str, PartProgress]) -> list[str]:
        """Return the figures that a finished part had before and lacks now: regressions too."""
        seen = {figure.key for figure in now}
        done = {name for name, entry in parts.items() if entry.settled} & self.seconds().keys()
        return [figure.key for figure in self.figures if figure.part in done and figure.key not in seen]

    def seconds(self) -> dict[str, float]:
        """Return how long each of its finished parts took."""
        return {name: entry.seconds for name, entry in self.parts.items() if entry.state == "done"}


def read_baseline(folder: Path, machine: Mapping[str, Any], *, small: bool) -> Baseline:
    """Read an earlier bring-up. Raises `ConfigError` if there is none, or of another size or device."""
    try:
        found = Baseline.model_validate_json((folder / "packed/bring_up.json").read_bytes())
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--baseline {folder}: holds no bring-up; expected the --out of one: {reason}") from None
    if found.rehearsal != small:
        raise ConfigError(f"--baseline {folder}: only one of the two is a rehearsal; give --small to both or none")
    if machine and (before := found.machine.get("device")) != machine.get("device"):
        raise ConfigError(f"--baseline {folder}: was measured on {before}; expected {machine['device']}, as here")
    return found
