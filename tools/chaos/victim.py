"""train.py with faults in it: what tools.chaos starts in its place, with the faults in the environment."""

import os
import runpy
import sys
import threading
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tools.chaos.faults import KINDS, Fault, decode
from tools.follow import TRAIN


def arm(faults: list[Fault], rank: int) -> None:
    """Let the faults of this rank strike: some at once, the others after their steps."""
    from utils.training.learner import Learner

    mine = [fault for fault in faults if fault.rank == rank]
    train: Callable[..., None] = Learner.train_step

    def train_and_strike(self: Learner, *batch: object) -> None:
        train(self, *batch)
        for fault in mine:
            if fault.step == self.steps and not KINDS[fault.kind].before:
                if fault.delay:
                    timer = threading.Timer(fault.delay, strike, [fault])
                    timer.daemon = True
                    timer.start()
                else:
                    strike(fault)

    Learner.train_step = train_and_strike  # type: ignore[method-assign, assignment]
    for fault in mine:
        if KINDS[fault.kind].before:
            strike(fault)


def strike(fault: Fault) -> None:
    """One write for the whole line, which another thread's words may not divide."""
    os.write(1, f"{fault.mark}\n".encode())
    KINDS[fault.kind].strike()


def main() -> None:
    """This process becomes the rank of train.py that its environment says."""
    from utils.data import datasets

    datasets.NUM_SHAPES_TRAIN, datasets.NUM_SHAPES_VALID = 200, 100  # to draw all takes a second
    arm(decode(os.environ), int(os.environ.get("RANK", "0")))
    runpy.run_path(str(TRAIN), run_name="__main__")


if __name__ == "__main__":
    main()
