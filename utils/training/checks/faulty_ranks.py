"""Find the ranks that computed wrong from what each rank observed in a repeated step."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from utils.program import command


@dataclass(frozen=True)
class Evidence:
    """Observations of one rank; lists are names of tensors."""

    device: str  # host and device of the rank
    changed_at_rest: list[str]  # changed between the end of the previous step and the start of this one
    not_restored: list[str]  # differed from before when they had been restored
    own: list[str]  # tensors of this rank that differ between two repetitions
    result: list[str]  # tensors common to all ranks that differ between two repetitions
    outlier: str  # which of three repetitions differs, on this rank
    state: dict[str, int]  # fingerprints of what must be equal on all ranks
    layers: bool  # whether the outputs of the network's layers are among `own`


@dataclass(frozen=True)
class Fault:
    """The faulty ranks, or all ranks if none can be told from the others; and the tensors that show it."""

    ranks: list[int]
    tensors: list[str]
    how: str
    remedy: str = "start the same command again"


def find_fault(ranks: Sequence[Evidence]) -> Fault | None:
    """Find the faulty ranks; None if nothing is wrong. Causes are checked before their effects: a changed weight
    changes its rank's gradients, and by the all-reduce the result on all ranks."""
    differs = "differs between two repetitions of the step"
    for field, what in (
        ("changed_at_rest", "changed in memory since the step before"),
        ("not_restored", "changed in memory during the step"),
        ("own", differs),
        ("result", differs),
    ):
        faulty = [rank for rank, seen in enumerate(ranks) if getattr(seen, field)]
        if not faulty:
            continue
        first, how = ranks[faulty[0]], what
        if field == "result" and 1 < len(faulty) == len(ranks):
            how += " though no rank's own gradients do: the sum over the ranks went wrong"
        elif what == differs:
            how += _place(first)
        if first.outlier:
            how += f" ({first.outlier})"
        return Fault(faulty, getattr(first, field), how)
    outliers, tensors = outlier_ranks([seen.state for seen in ranks])
    if not outliers:
        return None
    how = "differs from the other ranks, since this step or an earlier one"
    # their gradients have entered the sums of all ranks since then
    return Fault(outliers, tensors, how, "resume with --resume from a checkpoint before the last checked step")


def _place(seen: Evidence) -> str:
    """Say where in the step the difference begins, after the first tensor that differs has been named."""
    if not seen.layers:
        return "; in which layer is unknown: the step is compiled or captured, or layers return no tensor"
    outputs = [name.startswith("output ") for name in seen.own]
    if not any(outputs):
        return " though the outputs of all layers agree: the loss, the gradients, the update or a buffer went wrong"
    return ", and no earlier layer's output does" if outputs[0] else ""


def outlier_ranks(states: Sequence[dict[str, int]]) -> tuple[list[int], list[str]]:
    """Ranks whose fingerprints differ from the majority's, and the tensors that differ; all ranks without a majority,
    as with two ranks."""
    tensors = [name for name in states[0] if len({state.get(name) for state in states}) > 1]
    outliers: set[int] = set()
    for name in tensors:
        (common, count), *_ = Counter(state.get(name) for state in states).most_common(1)
        majority = 2 * count > len(states)
        outliers |= {rank for rank, state in enumerate(states) if not majority or state.get(name) != common}
    return sorted(outliers), tensors


def describe_fault(step: int, ranks: Sequence[Evidence]) -> str:
    """Return the message of the error that ends the run; `step` counts from 1."""
    fault = find_fault(ranks)
    assert fault is not None
    named = "; ".join(f"rank {rank} ({ranks[rank].device})" for rank in fault.ranks)
    tensor, others = fault.tensors[0], len(fault.tensors) - 1
    more = f" (and {others} more)" if others else ""
    return (
        f"silent corruption in step {step} on {named}: {tensor}{more} {fault.how}\n"
        f"nothing of this step was saved: remove that machine, check it with {command('doctor')}, and "
        f"{fault.remedy}"
    )
