"""The doctor's sweep over collectives and pairs: bandwidths as nccl-tests defines them, and slow nodes."""

import json
import os
from pathlib import Path

import pytest

from tests.processes import run_job
from tools.doctor import __main__ as doctor
from tools.doctor.sweep import (
    Measured,
    PairRate,
    check_pairs,
    check_sweep,
    measure_pairs,
    rounds,
    sweep,
)
from utils.distributed.ranks import run_ranks
from utils.distributed.world import World


@pytest.mark.parametrize("count", (2, 5, 8))
def test_each_pair_meets_once_and_no_rank_twice_in_a_round(count: int) -> None:
    ranks = list(range(10, 10 + count))
    found = rounds(ranks)
    assert len(found) == count - 1 + count % 2
    for meetings in found:
        busy = [rank for pair in meetings for rank in pair]
        assert len(busy) == len(set(busy))
    pairs = [pair for meetings in found for pair in meetings]
    assert sorted(pairs) == [(a, b) for a in ranks for b in ranks if a < b]


def measure(out: str) -> int:
    """As one of three ranks."""

    def action(world: World) -> None:
        found, pairs = sweep(world, (8, 4096, 2**20)), measure_pairs(world, 2**16)
        if world.is_main:
            Path(out).write_text(json.dumps([found, pairs]))

    return run_ranks(action, "cpu", 600)


def test_three_ranks(tmp_path: Path) -> None:
    ended = run_job(tmp_path, 3, measure, str(tmp_path / "out.json"))
    assert [process.status for process in ended] == [0, 0, 0], ended
    found, pairs = json.loads((tmp_path / "out.json").read_text())
    measured = [Measured(*one) for one in found]
    # whole numbers of float32 on every rank
    assert [(one.name, one.size) for one in measured] == [
        (name, size) for name in ("all-reduce", "all-gather", "reduce-scatter") for size in (12, 4092, 1048572)
    ]
    assert [one.bus_factor for one in measured] == pytest.approx([4 / 3] * 3 + [2 / 3] * 6)
    assert all(one.seconds > 0 for one in measured)
    assert sorted((a, b) for a, b, _ in pairs) == [(0, 1), (0, 2), (1, 2)]
    assert all(rate > 0 for _, _, rate in pairs)


def test_bandwidths_are_defined_as_in_nccl_tests() -> None:
    """All-reduce over 8 ranks, 1 GB in 10 ms: bus bandwidth 175 GB/s."""
    (finding,) = check_sweep([Measured("all-reduce", 10**9, 0.01, 2 * 7 / 8)])
    assert finding.message == "all-reduce up to 1.0 GB, best bus bandwidth 175 GB/s at 1.0 GB; 1.0 GB: 10,000 us"
    assert not finding.figures, "they are only reported: --compare would fail at 15 %, which is noise here"


def test_one_bad_cable_is_named() -> None:
    names = {rank: f"node{rank}" for rank in range(4)}
    pairs = [PairRate(a, b, 1.0 if 2 in (a, b) else 40.0 + a) for meetings in rounds(range(4)) for a, b in meetings]
    finding = check_pairs(pairs, names)
    assert finding.level == "fail"
    assert finding.message.endswith("; all include node2")
    assert finding.remedy == "check the cable, port and switch of node2"
    # a single pair does not show which end is bad
    one = [pair._replace(rate=40.0 if pair != pairs[0] else 2.0) for pair in pairs]
    first, second = names[pairs[0].first], names[pairs[0].second]
    assert check_pairs(one, names).message.endswith(f"; slow: {first} and {second} 2 GB/s")
    assert check_pairs([pair._replace(rate=40.0) for pair in pairs], names).level == "ok"


def test_a_single_process_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in os.environ if name.startswith(("RANK", "WORLD_SIZE", "SLURM_"))]:
        monkeypatch.delenv(name)
    assert doctor.main(["--sweep"]) == 2
    assert capsys.readouterr().err.startswith("error: --sweep needs at least two ranks")


@pytest.mark.parametrize(("count", "rate"), [(3, 10.0), (4, 20.0), (5, 20.0)])
def test_one_bad_node_of_few_is_named(count: int, rate: float) -> None:
    names = {rank: f"node{rank}" for rank in range(count)}
    pairs = [PairRate(a, b, rate if 1 in (a, b) else 40.0) for a in range(count) for b in range(a + 1, count)]
    finding = check_pairs(pairs, names)
    assert (finding.level, finding.message.endswith("; all include node1")) == ("fail", True), finding
