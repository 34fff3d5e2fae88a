"""A step by kinds of operations: what each takes of it, and what the step would take if each ran at its best."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tools.bench.common import Sample
from tools.bench.layer_parts import Row, Work, rate
from tools.bench.layer_ways import BACKWARD, BY_INPUT, BY_WEIGHT, FORWARD
from tools.bench.operations import ADDITION, CONVOLUTION, FUSED, LINEAR, NORM, POOLING, RELU
from tools.shared.output import print_table
from utils.config import Config

UPDATE, MEMORY, REST, STEP = "update of the weights", "memory management", "everything else", "whole step"
ORDER = (CONVOLUTION, NORM, FUSED, RELU, ADDITION, POOLING, LINEAR)
PASSES = (FORWARD, BY_INPUT, BY_WEIGHT, BACKWARD)


@dataclass(frozen=True)
class Kind:
    """Some operations of a step together, in milliseconds of one step. None where there is no rate."""

    milliseconds: float
    best: float  # if each ran in its best way
    share: float  # of the step
    work: Work | None = None
    best_work: Work | None = None

    def rates(self) -> tuple[float, float, str] | None:
        """(achieved, of the best ways, unit)."""
        if self.work is None or self.best_work is None:
            return None
        achieved, unit = rate(self.work, self.milliseconds)
        return achieved, rate(self.best_work, self.best)[0], unit


def summarise(
    rows: Sequence[Row], whole: Mapping[str, Sample], accumulation: int, update_bytes: float
) -> dict[str, Kind]:
    """{kind: it}, with what is no operation, and at last the whole step. `whole`: as `layers.WholeStep` gives it."""
    step = whole["step"].median
    kinds: dict[str, Kind] = {}
    for name in sorted({kind_of(row) for row in rows}, key=lambda name: _place(name, rows)):
        own, best = (
            [
                (row.operation.count * accumulation, row.milliseconds[way].median, row.work[way])
                for row in rows
                if kind_of(row) == name
                for way in [row.own if choice == "own" else row.best]
            ]
            for choice in ("own", "best")
        )
        took, at_best = (sum(count * milliseconds for count, milliseconds, _ in chosen) for chosen in (own, best))
        kinds[name] = Kind(took, at_best, took / step, _total(own), _total(best))
    update, work = whole["update"].median, Work(0.0, update_bytes)
    kinds[UPDATE] = Kind(update, update, update / step, work, work)
    if (memory := memory_management(rows, whole, accumulation)) is not None:
        kinds[MEMORY] = Kind(memory, memory, memory / step)
    rest = step - sum(kind.milliseconds for kind in kinds.values())
    kinds[REST] = Kind(rest, rest, rest / step)
    return kinds | {STEP: Kind(step, sum(kind.best for kind in kinds.values()), 1.0)}


def kind_of(row: Row) -> str:
    """Convolutions by size and pass, else the operation's kind."""
    operation = row.operation
    if operation.kind != CONVOLUTION:
        return operation.kind
    height, width = operation.weight.sizes[2:]
    size = f"{height}x{width}" if height == width and height in (1, 3) else "other"
    return f"{CONVOLUTION} {size}, {row.which}"


def _place(name: str, rows: Sequence[Row]) -> tuple[int, int, str]:
    row = next(row for row in rows if kind_of(row) == name)
    return ORDER.index(row.operation.kind), PASSES.index(row.which) if row.operation.kind == CONVOLUTION else 0, name


def _total(chosen: Sequence[tuple[int, float, Work]]) -> Work:
    return Work(*(sum(count * getattr(work, what) for count, _, work in chosen) for what in ("flops", "bytes")))


def memory_management(rows: Sequence[Row], whole: Mapping[str, Sample], accumulation: int) -> float | None:
    """Milliseconds of a step in the kernel of the system, which are nearly all page faults, beyond those of the rows;
    the process's time over its threads, as all of them write to new memory. None on a GPU."""
    if "system" not in whole:
        return None
    in_rows = accumulation * sum(row.operation.count * row.system for row in rows)
    return max(0.0, whole["system"].median - in_rows) / torch.get_num_threads()


def as_results(kinds: Mapping[str, Kind]) -> dict[str, dict[str, float | str | None]]:
    """For the report."""
    found: dict[str, dict[str, float | str | None]] = {}
    for name, kind in kinds.items():
        achieved, best_rate, unit = kind.rates() or (None, None, None)
        found[name] = {"milliseconds": kind.milliseconds, "share": kind.share, "rate": achieved, "unit": unit,
                       "best_rate": best_rate, "at_best": kind.best}  # fmt: skip
    return found


def show_summary(config: Config, kinds: Mapping[str, Kind], whole: Mapping[str, Sample]) -> None:
    """The table."""
    lines = []
    for name, kind in kinds.items():
        achieved, best_rate, unit = kind.rates() or (None, None, None)
        rates = ("-", "-") if achieved is None else (f"{achieved:.3g} {unit}", f"{best_rate:.3g}")
        digits = ".1f" if whole["step"].median >= 100 else ".3f"
        took = f"{whole['step']:{digits}}" if name == STEP else f"{kind.milliseconds:{digits}}"
        lines.append((name, took, f"{kind.share:.1%}", *rates, f"{kind.best:{digits}}"))
    if MEMORY not in kinds:
        lines.insert(-2, (MEMORY, *"-----"))
    else:
        place = list(kinds).index(MEMORY)
        lines[place] = (f"{MEMORY} (page faults: {whole['faults'].median:,.0f})", *lines[place][1:])
    columns = ("a step by kinds", "ms", "share", "rate", "rate of the best alone", "each at its best, ms")
    print_table(f"{config.model}, batch {config.batch_size}: where the step's time goes", columns, lines)
