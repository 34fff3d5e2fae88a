"""The figures that the parts measured; published figures, goals and an earlier bring-up to compare with. No torch."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tools.bring_up.parts import PARTS, passed_tests
from tools.bring_up.progress import MUST_MATCH, PartProgress, read_results
from tools.shared.read_runs import read_run_folder
from utils.errors import ConfigError

TARGET_ACCURACY = 0.75
RATE_UNITS = {
    "full": "images/s", "images_per_sec": "images/s alone", "training_images_per_sec": "images/s feeding a step",
}  # fmt: skip


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
    share: float | None = None  # fraction of the measured ceiling `of`
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


def single(part: str, name: str, value: float, unit: str, better: str = "higher") -> Figure:
    """A figure without a spread."""
    return Figure(part, name, value, value, value, unit, better)


def read_figures(out: Path, parts: Mapping[str, PartProgress]) -> list[Figure]:
    """Return all figures of a bring-up's folder, in the order of the parts."""
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
    """Count the tests that passed in any call, and those that failed in the last one."""
    logs = sorted(folder.glob("log-*.txt"), key=lambda path: int(path.stem.removeprefix("log-")))
    last = logs[-1].read_text("utf-8", "replace") if logs else ""
    passed, failed = set(passed_tests(folder)), re.findall(r"^tests/\S+::.* (?:FAILED|ERROR)", last, re.M)
    return [single(part, "passed", len(passed), "tests"), single(part, "failed", len(failed), "tests", "lower")]


def _bench(part: str, results: Mapping[str, Any]) -> Iterator[Figure]:
    """Yield the figures of a report of tools.bench: ladders, limits, layers, loaders, peers."""

    def figure(name: str, unit: str, sample: Mapping[str, float], **more: Any) -> Figure:
        return Figure(part, name, sample["median"], sample["min"], sample["max"], unit, **more)

    for name, rung in results.get("rungs", {}).items():
        arithmetic = "arithmetic in its number format"
        yield figure(name, "images/s", rung["full"], share=rung.get("arithmetic_share"), of=arithmetic)
        yield figure(f"{name}, step alone", "images/s", rung["compute"], share=rung.get("memory_share"), of="memory")
    for name, layer in results.get("layers", {}).items():
        yield figure(name, "ms", layer["milliseconds"], better="lower", share=layer["share"], of=layer["bound"])
    for name, values in results.items():
        if part == "limits":
            what, _, unit = name.rpartition(", ")
            yield figure(what, unit, values)
        for quantity, unit in RATE_UNITS.items() if part in ("loaders", "peers") else ():
            if quantity in values:
                yield figure(name, unit, values[quantity])


def _training(part: str, folder: Path, *, done: bool) -> Iterator[Figure]:
    run = read_run_folder(folder)
    best, reached, rate = run.best(), run.reached(TARGET_ACCURACY), run.last("images_per_sec")
    if best and done:
        yield single(part, "best accuracy", 100 * best[0], "%")
    if reached:
        yield single(part, f"time to {TARGET_ACCURACY:.0%}", reached[1], "s", "lower")
    if rate:
        yield single(part, "training", rate, "images/s")


# ---- published figures (results/reference/README.md) and this project's goals


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


V100, V100S = "1 V100 (SC20 tutorial)", "16 V100 (SC20 tutorial)"
GOAL, GOAL_H200 = "goal", "goal for an H200"
PUBLISHED = (
    Published("float32", V100, 680, "ladder: bs256, images/s"),
    Published("mixed precision", V100, 1795, "ladder: bs256-amp, images/s"),
    Published("with channels last", V100, 2180, "ladder: bs256-amp-nhwc, images/s"),
    Published("with the other optimisations", V100, 2530, "ladder: bs256-amp-nhwc-extra-opts, images/s"),
    Published("with all switches of this project", V100, 2530, "ladder: fastest, images/s"),
    Published("75 % with the tutorial's recipe, s", V100, 1867, "bs128-opt: time to 75%, s"),
    Published("75 % as early as possible, s", V100, 1867, "record-75: time to 75%, s"),
    Published("75 % with 2,048 images per step, s", V100S, 228, "record-75-bs2048: time to 75%, s"),
    Published("best accuracy, all epochs, %", V100, 75.87, "bs128-opt-all-epochs: best accuracy, %"),
    Published("large batches without warm-up, %", V100S, 71.17, "bs2048-opt: best accuracy, %"),
    Published("large batches with warm-up, %", V100S, 75.48, "bs2048-warmup-opt: best accuracy, %"),
    Published("failed tests that need a GPU", GOAL, 0, "gpu-tests: failed, tests"),
    Published("failed tests: each switch trains like float32", GOAL, 0, "switches: failed, tests"),
    Published("good: the FLOP/s of NVIDIA's example", "1 H200 (Lambda)", 9_725, "ladder: fastest, images/s"),
    Published("the goal: the FLOP/s of MLPerf 3.1", "1 of 8 H100 (Dell)", 22_281, "ladder: fastest, images/s"),
    Published("75 % within 60 s", GOAL_H200, 60, "record-75: time to 75%, s"),
    Published("75 % within 30 s", GOAL_H200, 30, "record-75: time to 75%, s"),
    Published("the tutorial's accuracy, %", GOAL, 75.9, "bs128-opt-all-epochs: best accuracy, %"),
    Published("a high accuracy, %", GOAL, 80, "accuracy: best accuracy, %"),
    Published("the highest accuracy, %", GOAL, 85, "accuracy: best accuracy, %"),
)


# ---- an earlier bring-up, also of other versions

VERSIONS = (*MUST_MATCH, "dali", "commit", "host")
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


@dataclass(frozen=True)
class Baseline:
    """The content of an earlier bring-up."""

    machine: Mapping[str, Any]
    states: Mapping[str, str]  # of its parts
    figures: Sequence[Figure]

    def versions(self, now: Mapping[str, Any]) -> list[str]:
        """Return a line for each version that differs."""
        return [
            f"{key} {self.machine.get(key)} -> {now.get(key)}"
            for key in VERSIONS
            if self.machine.get(key) != now.get(key)
        ]

    def changes(self, now: Sequence[Figure]) -> list[Change]:
        """Return the figures that both have, in the order of `now`."""
        earlier = {figure.key: figure for figure in self.figures}
        return [Change(earlier[figure.key], figure) for figure in now if figure.key in earlier]

    def missing(self, now: Sequence[Figure], parts: Mapping[str, PartProgress]) -> list[str]:
        """Return the figures that a finished part had before and lacks now: regressions too."""
        seen = {figure.key for figure in now}
        done = {name for name, entry in parts.items() if entry.settled and self.states.get(name) == "done"}
        return [figure.key for figure in self.figures if figure.part in done and figure.key not in seen]


def read_baseline(folder: Path, machine: Mapping[str, Any], *, small: bool) -> Baseline:
    """Read an earlier bring-up. Raises `ConfigError` if there is none, or it is of another size or device."""
    try:
        content = json.loads((folder / "packed/bring_up.json").read_text("utf-8"))
        states = {name: entry["state"] for name, entry in content["parts"].items()}
        found = Baseline(content["machine"], states, [Figure(**figure) for figure in content["figures"]])
        was_small = content["rehearsal"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--baseline {folder}: holds no bring-up; expected the --out of one: {error!r}") from None
    if was_small != small:
        raise ConfigError(f"--baseline {folder}: only one of the two is a rehearsal; give --small to both or none")
    device_before, device = found.machine.get("device"), machine.get("device")
    if device_before != device:
        raise ConfigError(f"--baseline {folder}: was measured on {device_before}; expected {device}, as here")
    return found
