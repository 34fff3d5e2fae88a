"""Which rank computed wrong, by what each rank saw of a step that was repeated."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Evidence:
    """What one rank saw; lists are names of tensors."""

    device: str  # its host and device
    at_rest: list[str]  # changed between the end of the step before and the begin of this one
    not_restored: list[str]  # were not as before when they had been put back
    own: list[str]  # of its own, differ between two repetitions
    result: list[str]  # of what all ranks have in common, differ between two repetitions
    odd: str  # which of three repetitions is the odd one, on this rank
    state: dict[str, int]  # fingerprints of what must be the same on every rank


@dataclass(frozen=True)
class Judgement:
    """The ranks that are to blame, all of them where none can be told from the others, and what was seen there."""

    ranks: list[int]
    tensors: list[str]
    how: str
    remedy: str = "start the same command again"


def judge(ranks: Sequence[Evidence]) -> Judgement | None:
    """What the ranks' evidence comes to; None where nothing is wrong. The kinds are asked in the order in which one
    causes the next: a changed weight changes the gradients of its rank, and by the all-reduce the result of all."""
    for what, how in (
        ("at_rest", "changed in memory since the step before"),
        ("not_restored", "changed in memory during the step"),
        ("own", "differs between two repetitions of the step"),
    ):
        blamed = {rank: getattr(seen, what) for rank, seen in enumerate(ranks) if getattr(seen, what)}
        if blamed:
            return Judgement([*blamed], next(iter(blamed.values())), _with_odd(how, ranks, [*blamed]))
    differing = [rank for rank, seen in enumerate(ranks) if seen.result]
    if differing:
        how = "differs between two repetitions of the step"
        if len(ranks) > 1 and len(differing) == len(ranks):
            how += " though no rank's own gradients do: the sum over the ranks went wrong"
        return Judgement(differing, ranks[differing[0]].result, _with_odd(how, ranks, differing))
    blamed_ranks, tensors = odd_ranks([seen.state for seen in ranks])
    if not blamed_ranks:
        return None
    how = "is not what it is on the other ranks, since this step or an earlier one"
    # its gradients went into the sums of all since then
    return Judgement(blamed_ranks, tensors, how, "go on with --resume from a checkpoint before the last checked step")


def odd_ranks(states: Sequence[dict[str, int]]) -> tuple[list[int], list[str]]:
    """The ranks whose fingerprints are not those of most, and the tensors; without a majority, as with two ranks, all
    ranks."""
    tensors = [name for name in states[0] if len({state.get(name) for state in states}) > 1]
    odd: set[int] = set()
    for name in tensors:
        (common, count), *_ = Counter(state.get(name) for state in states).most_common(1)
        majority = 2 * count > len(states)
        odd |= {rank for rank, state in enumerate(states) if not majority or state.get(name) != common}
    return sorted(odd), tensors


def tell(step: int, ranks: Sequence[Evidence]) -> str:
    """The message of the error that ends the run; `step` counts from 1."""
    verdict = judge(ranks)
    assert verdict is not None
    named = "; ".join(f"rank {rank} ({ranks[rank].device})" for rank in verdict.ranks)
    tensor, others = verdict.tensors[0], len(verdict.tensors) - 1
    more = f" (and {others} more)" if others else ""
    return (
        f"silent corruption in step {step}, of {named}: {tensor}{more} {verdict.how}\n"
        f"nothing of this step was saved: leave that machine out, look at it with python -m tools.doctor, and "
        f"{verdict.remedy}"
    )


def _with_odd(how: str, ranks: Sequence[Evidence], blamed: Sequence[int]) -> str:
    odd = ranks[blamed[0]].odd
    return f"{how} ({odd})" if odd else how
