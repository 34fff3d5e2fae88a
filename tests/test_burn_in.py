"""tools.doctor --burn-in: its decision over rounds of training, and one short run."""

import itertools
import json
import re
from typing import Any

import pytest

from tools.doctor import __main__ as doctor
from tools.doctor import burn_in
from tools.doctor.burn_in import Round, judge_rounds
from tools.doctor.findings import LEVELS
from utils.distributed.world import World


def rounds(*rates: float, faults: tuple[str, ...] = ()) -> list[Round]:
    return [
        Round(rate, "a", {"gpu_temperature_c": 71.4 - number, "gpu_clock_mhz": 1800.0 - number}, faults)
        for number, rate in enumerate(rates)
    ]


def test_a_constant_rate_passes() -> None:
    finding = judge_rounds(rounds(100, 101, 99, 100), 10)
    assert finding.level == "ok"
    assert finding.message == (
        "10.0 min, 4 rounds: 100.0 images/s, standard deviation 0.7%, +0.0% from the first quarter to the last; "
        "4 equal fingerprints; at most 71 °C; at least 1797 MHz"
    )
    assert finding.figures == {"images/s": 100.0}


def test_a_falling_rate_warns() -> None:
    slower = judge_rounds(rounds(*[100] * 6, *[88] * 4), 1)
    assert (slower.level, "-12.0% from the first quarter to the last" in slower.message) == ("warn", True)
    assert judge_rounds(rounds(*[100] * 6, *[112] * 4), 1).level == "ok"
    assert judge_rounds(rounds(*[100] * 6, *[91] * 4), 1).level == "ok"


def test_a_new_fault_fails_and_is_reported_once() -> None:
    finding = judge_rounds(rounds(100, 100, faults=("GPU 0: 3 uncorrected memory errors",)), 1)
    assert finding.level == "fail"
    assert finding.message.count("uncorrected") == 1


def test_a_short_burn_in_on_this_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(burn_in, "ROUND_SECONDS", 0.1)
    small = ["--set=model=resnet8", "--set=batch_size=16", "--set=device=cpu", "--set=num_data_workers=0"]
    command = ["--burn-in=0.01", "--json", "--config=quickstart", *small]
    status = doctor.main(command)
    document = json.loads(capsys.readouterr().out)
    assert status == LEVELS.index(document["worst"]) < 2
    (found,) = [one for one in document["findings"] if one["check"] == "burn-in"]
    slower = re.search(r", -\d\d\.\d% from the first quarter", found["message"])  # on a busy machine
    assert found["level"] == ("warn" if slower else "ok"), found
    assert "equal fingerprints" in found["message"]
    assert found["figures"]["images/s"] > 0


def test_a_round_with_a_different_fingerprint_fails(
    tiny: Any, one_rank: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(burn_in, "ROUND_SECONDS", 0.1)
    fingerprints = itertools.chain(["a", "b"], itertools.repeat("a"))
    monkeypatch.setattr("tools.doctor.burn_in.train_fixed_network", lambda device: next(fingerprints))
    finding = burn_in.burn_in(tiny(), one_rank, 0.02)
    assert finding.level == "fail"
    assert re.search(r"; 1 of \d+ fingerprints differ", finding.message), finding


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "x"])
def test_invalid_minutes_are_refused(minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        doctor.main([f"--burn-in={minutes}"])
    assert leaving.value.code == 2
    assert "--burn-in" in capsys.readouterr().err
