"""What a bring-up's figures are held against: published ones (docs/sources.md), and this project's goals."""

import re
import statistics
from collections.abc import Mapping
from typing import NamedTuple

from tools.bring_up.figures import Figure


class Published(NamedTuple):
    """A figure of docs/sources.md, and the key of ours that it stands beside."""

    what: str
    device: str
    value: float
    key: str


SC20 = "1 V100 (SC20 tutorial)"
PUBLISHED = (
    Published("float32", SC20, 680, "ladder: bs256, images/s"),
    Published("mixed precision", SC20, 1795, "ladder: bs256-amp, images/s"),
    Published("and channels last", SC20, 2180, "ladder: bs256-amp-nhwc, images/s"),
    Published("and the other optimisations", SC20, 2530, "ladder: bs256-amp-nhwc-extra-opts, images/s"),
    Published("and all switches of this project", SC20, 2530, "ladder: fastest, images/s"),
    Published("75 % by the tutorial's recipe, s", SC20, 1867, "bs128-opt: time to 75%, s"),
    Published("75 % as early as possible, s", SC20, 1867, "record-75: time to 75%, s"),
    Published("75 % with 2,048 images a step, s", "16 V100 (SC20 tutorial)", 228, "record-75-bs2048: time to 75%, s"),
    Published("best accuracy, all epochs, %", SC20, 75.87, "bs128-opt-all-epochs: best accuracy, %"),
    Published("large batches without a warm-up, %", "16 V100 (SC20 tutorial)", 71.17, "bs2048-opt: best accuracy, %"),
    Published("and with it, %", "16 V100 (SC20 tutorial)", 75.48, "bs2048-warmup-opt: best accuracy, %"),
)
H200 = "H200"  # the device that the goals in seconds and images/s are for


class Verdict(NamedTuple):
    """A goal, what was measured, and whether it is met; None: not measured."""

    goal: str
    here: str
    met: bool | None

    @property
    def word(self) -> str:
        return {None: "not measured", True: "yes", False: "NO"}[self.met]


def verdicts(figures: Mapping[str, Figure], device: str) -> list[Verdict]:
    """The tests, which hold on any GPU, then the goals in speed and accuracy."""
    found = [_tests("everything that only a GPU can show", figures, "gpu-tests"),
             _tests("each switch trains like float32", figures, "switches"), _compile(figures)]  # fmt: skip
    rungs = {key: figure.median for key, figure in figures.items() if _is_rung(figure)}
    start, best = rungs.get("ladder: bs256, images/s"), max(rungs.values(), default=None)
    gain = best / start if best and start else None
    found.append(_at_least("ladder: 10 x its float32 start", gain, 10, "{:.1f} x"))
    seeds = [figure for key, figure in figures.items() if re.match(r"record-75(-seed-\d)?: time", key)]
    seconds = [figure.median for figure in seeds]
    mean = statistics.mean(seconds) if seconds else None
    if H200 in device:
        found.append(_at_least("ladder: 22,000 images/s", best, 22_000, "{:,.0f}"))
        for wanted in (60, 30):
            text = f"{{:.1f}} s, mean of {len(seconds)} seed(s)"
            met = _at_least(f"75 % within {wanted} s", mean, 0, text)
            found.append(met._replace(met=None if mean is None else mean <= wanted))
    for name, goal in (("bs128-opt-all-epochs", 75.9), ("accuracy", 80.0), ("accuracy", 85.0)):
        accuracy = figures.get(f"{name}: best accuracy, %")
        found.append(_at_least(f"{name}: {goal:g} %", accuracy.median if accuracy else None, goal, "{:.2f} %"))
    return found


def _is_rung(figure: Figure) -> bool:
    return figure.part == "ladder" and figure.unit == "images/s" and "step alone" not in figure.name


def _at_least(goal: str, value: float | None, least: float, text: str) -> Verdict:
    return Verdict(goal, "" if value is None else text.format(value), None if value is None else value >= least)


def _tests(goal: str, figures: Mapping[str, Figure], part: str) -> Verdict:
    passed, failed = (figures.get(f"{part}: {word}, tests") for word in ("passed", "failed"))
    if passed is None or failed is None:
        return Verdict(goal, "", None)
    return Verdict(goal, f"{passed.median:.0f} passed, {failed.median:.0f} failed", failed.median == 0 < passed.median)


def _compile(figures: Mapping[str, Figure]) -> Verdict:
    """Whether compilation wins, under CUDA graphs where these run."""
    goal = "torch.compile is not slower than eager"
    for pair in (("eager-graphs", "compiled-graphs"), ("eager", "compiled")):
        eager, compiled = (figures.get(f"compile: {name}, images/s") for name in pair)
        if eager and compiled:
            text = f"{compiled.text()} against {eager.text()} images/s ({pair[1]}, {pair[0]})"
            return Verdict(goal, text, compiled.median >= eager.median)
    return Verdict(goal, "", None)
