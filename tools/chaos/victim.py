"""train.py with faults in it: what tools.chaos starts in its place, with the faults in the environment."""

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tools.chaos.faults import KINDS, Fault, decode
from tools.follow import TRAIN


def arm(faults: list[Fault], rank: int) -> None:
    """Let the faults of this rank strike: some at once, the others after their steps."""
    from utils.training.learner import Learner

    mine = [fault for fault in faults if fault.rank == rank]
    train: Callable[..., None] = Learner.train

    def train_and_strike(self: Learner, *batch: object) -> None:
        train(self, *batch)
        for fault in mine:
            if fault.step == self.steps and not KINDS[fault.kind].before:
                print(fault.mark, flush=True)
                KINDS[fault.kind].strike()

    Learner.train = train_and_strike  # type: ignore[method-assign, assignment]
    for fault in mine:
        if KINDS[fault.kind].before:
            print(fault.mark, flush=True)
            KINDS[fault.kind].strike()


if __name__ == "__main__":
    arm(decode(os.environ), int(os.environ.get("RANK", "0")))
    runpy.run_path(str(TRAIN), run_name="__main__")
