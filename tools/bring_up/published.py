"""What a bring-up's figures stand beside: published ones (results/reference/README.md), and this project's goals."""

from collections.abc import Mapping
from typing import NamedTuple

from tools.bring_up.figures import Figure


class Published(NamedTuple):
    """A published figure or a goal, and the key of ours that stands beside it."""

    what: str
    where: str
    value: float
    key: str


SC20 = "1 V100 (SC20 tutorial)"
GOAL, GOAL_H200 = "goal", "goal for an H200"
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
    Published("everything that only a GPU can show", GOAL, 0, "gpu-tests: failed, tests"),
    Published("each switch trains like float32", GOAL, 0, "switches: failed, tests"),
    Published("22,000 images/s", GOAL_H200, 22_000, "ladder: fastest, images/s"),
    Published("75 % within 60 s", GOAL_H200, 60, "record-75: time to 75%, s"),
    Published("75 % within 30 s", GOAL_H200, 30, "record-75: time to 75%, s"),
    Published("the tutorial's accuracy, %", GOAL, 75.9, "bs128-opt-all-epochs: best accuracy, %"),
    Published("a high accuracy, %", GOAL, 80, "accuracy: best accuracy, %"),
    Published("the highest accuracy, %", GOAL, 85, "accuracy: best accuracy, %"),
)


class Standing(NamedTuple):
    """One of our figures beside a published one; `met`: at least as good, None where it is not measured."""

    what: str
    where: str
    there: float
    here: Figure | None
    met: bool | None

    @property
    def better_by(self) -> str:
        """As a factor, or in points or numbers where a factor says nothing."""
        if self.here is None:
            return "-"
        if self.here.unit in ("%", "tests"):
            return f"{self.here.median - self.there:+.2f}"
        higher = self.here.better == "higher"
        return f"{self.here.median / self.there if higher else self.there / self.here.median:.2f} x"


def stand_beside(figures: Mapping[str, Figure]) -> list[Standing]:
    """All published figures and goals."""
    found = []
    for what, where, value, key in PUBLISHED:
        here = figures.get(key)
        met = None
        if here is not None:
            met = here.median >= value if here.better == "higher" else here.median <= value
        found.append(Standing(what, where, value, here, met))
    return found
