"""tools.search: its space, how trials end, and resuming. Most trials here train nothing."""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY_OPTIONS
from tools import search
from tools.shared.followed_run import FailedRun, FollowedRun
from utils.errors import ConfigError

Outcome = float | Exception | KeyboardInterrupt


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lr=0.1..0.5", search.Dimension("lr", 0.1, 0.5)),
        ("lr=log:1e-3..2", search.Dimension("lr", 0.001, 2.0, log=True)),
        ("nesterov=true,false", search.Dimension("nesterov", choices=(True, False))),
        ("ema_decay=null,0.99", search.Dimension("ema_decay", choices=(None, 0.99))),
    ],
)
def test_parse_dimension(text: str, expected: search.Dimension) -> None:
    assert search.parse_dimension(text) == expected


@pytest.mark.parametrize(
    "text", ["lr", "rate=1,2", "lr=2..1", "lr=log:0..1", "lr=0..inf", "lr=nan..1", "lr=a..b", "model=resnet8"]
)
def test_an_invalid_space_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--space {text}"):
        search.parse_dimension(text)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (["batch_size=64..256"], "--set batch_size=64.0: batch_size is 64.0; allowed: "),
        (["lr=0.1,0.2", "batch_size=64,0"], "--set batch_size=0: batch_size is 0; allowed: "),
        (["enable_amp=0..1"], "--set enable_amp=0.5: enable_amp is 0.5; "),
        (['model="resnet8","resnet18"', "width=4,1"], "--set width=4: width 4 is for "),
        (["batch_size=128,192"], "micro_batch_size 128 does not divide the 192 images of each of 1 ranks"),
        (["lr=0.1,0.2", "lr=0.01..0.1"], "--space: a setting is given twice in lr=0.1,0.2, lr=0.01..0.1"),
    ],
)
def test_a_space_that_a_trial_would_refuse_is_an_error(space: list[str], message: str, tmp_path: Path) -> None:
    words = [f"--space={text}" for text in space]
    options = search.parser().parse_args([f"--out={tmp_path}", "--config=bs128", *words])
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        search.parse_space(options.space, options, ["micro_batch_size=128"])
    assert all(text in str(refused.value).splitlines()[-1] for text in space)


def test_search_needs_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setitem(search.sys.modules, "optuna", None)
    assert search.main([f"--out={tmp_path}", "--space=lr=0.1,0.2"]) == 2
    assert 'pip install ".[search]"' in capsys.readouterr().err


@pytest.fixture
def searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return searched(outcomes, trials=N): the exit status of a search whose trials reach these accuracies, or fail."""
    pytest.importorskip("optuna", reason="Optuna is not installed")

    def run(outcomes: list[Outcome], trials: int | None = None, space: str = "lr=0.1..0.2") -> int:
        left = iter(outcomes)

        class Training(FollowedRun):
            def __init__(self, _yaml_config: Path, _config: str, settings: list[str], _folder: Path) -> None:
                assert settings[0] == "validate_every_epochs=1", "else a trial is stopped at its end only; --set wins"
                self.outcome = next(left)

            def __iter__(self) -> Iterator[dict[str, Any]]:
                if isinstance(self.outcome, float):
                    yield {"epoch": 1, "seconds": 1.0}  # not validated
                    yield {"epoch": 2, "seconds": 2.0, "acc1/valid": self.outcome}

            def wait(self) -> float:
                if not isinstance(self.outcome, float):
                    raise self.outcome
                return 1.0

            def __exit__(self, *_: object) -> None:
                pass

        monkeypatch.setattr(search, "FollowedRun", Training)
        count = len(outcomes) if trials is None else trials
        status = search.main([f"--out={tmp_path}", f"--space={space}", f"--trials={count}"])
        assert next(left, None) is None, "fewer trials than expected"
        return status

    return run


def ends(folder: Path) -> list[str]:
    return [json.loads(line)["end"] for line in (folder / search.LOG).read_text().splitlines()]


def test_failed_trials_have_no_accuracy(searched: Callable[..., int], tmp_path: Path, capsys: Any) -> None:
    assert searched([FailedRun("not finite", 1), 0.3, FailedRun("killed", -9)]) == 0
    out, err = capsys.readouterr()
    assert "best of 3 trials (2 failed): number 1, 30.00%: --set lr=" in out
    assert err == ""
    assert ends(tmp_path) == ["failed: not finite", "finished", "failed: killed"]
    # they are done all the same: the same command tries no other in their place
    assert searched([], trials=3) == 0


def test_a_search_without_a_result_is_an_error(searched: Callable[..., int], capsys: Any) -> None:
    assert searched([FailedRun("first", 1), FailedRun("second", 1)]) == 1
    out, err = capsys.readouterr()
    assert err == "error: none of 2 trials has a result (2 failed); the last failure: second\n"
    assert "best" not in out and "-100" not in out


@pytest.mark.parametrize("status", [2, 3])
def test_an_error_that_every_trial_would_have_ends_the_search(
    searched: Callable[..., int], tmp_path: Path, capsys: Any, status: int
) -> None:
    assert searched([0.3, FailedRun("what is wrong", status)], trials=4) == status
    out, err = capsys.readouterr()
    assert err == "error: what is wrong\n"
    assert "best" not in out
    assert ends(tmp_path) == ["finished", "failed: what is wrong"]
    # after a fix the same command resumes; the trial that failed is not one of the four
    assert searched([0.4, 0.5, 0.6], trials=4) == 0
    assert "number 4, 60.00%" in capsys.readouterr().out


def test_an_interrupted_trial_is_repeated(searched: Callable[..., int], tmp_path: Path) -> None:
    assert searched([0.3, KeyboardInterrupt()]) == 130
    assert ends(tmp_path) == ["finished", "interrupted"]
    assert searched([0.4], trials=2) == 0


def test_a_continued_search_repeats_no_trial(searched: Callable[..., int], tmp_path: Path) -> None:
    assert searched([0.1, 0.2]) == 0
    assert searched([0.3, 0.4], trials=4) == 0
    rates = [json.loads(line)["settings"]["lr"] for line in (tmp_path / search.LOG).read_text().splitlines()]
    assert len(set(rates)) == 4


def test_values_are_drawn_within_a_narrow_range(searched: Callable[..., int], tmp_path: Path) -> None:
    assert searched([0.1] * 5, space="ema_decay=0.9999..0.99999") == 0
    decays = [json.loads(line)["settings"]["ema_decay"] for line in (tmp_path / search.LOG).read_text().splitlines()]
    assert len(set(decays)) == 5 and all(0.9999 <= decay <= 0.99999 for decay in decays)


def test_a_damaged_study_is_an_error(searched: Callable[..., int], tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "study.sqlite").write_text("no database")
    assert searched([], trials=1) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --out {tmp_path}: study.sqlite cannot be used: ") and error.count("\n") == 1


@pytest.mark.parametrize("changed", ["--space=lr=0.1..0.3", "--set=max_epochs=9", "--config=bs128"])
def test_a_search_continues_with_the_same_settings_only(
    searched: Callable[..., int], tmp_path: Path, capsys: Any, changed: str
) -> None:
    assert searched([0.3]) == 0
    space = [] if "space" in changed else ["--space=lr=0.1..0.2"]
    assert search.main([f"--out={tmp_path}", *space, changed, "--trials=2"]) == 2
    assert "its trials had" in capsys.readouterr().err


def test_a_failed_run_has_its_message_and_status(tmp_path: Path) -> None:
    with FollowedRun(Path("config/cifar100.yaml"), "bs128", ["batch_size=0"], tmp_path) as training:
        assert list(training) == []
        with pytest.raises(FailedRun, match=r"failed: --set batch_size=0: batch_size is 0; allowed") as failed:
            training.wait()
    assert failed.value.exit_status == ConfigError.exit_status


@pytest.mark.slow
def test_search_keeps_its_log_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="Optuna is not installed")
    arguments = ["--config=bs128", f"--out={tmp_path}", "--space=lr=log:0.001..1", *TINY_OPTIONS, "--set=max_epochs=3"]
    for trials in (2, 3):
        assert search.main([*arguments, f"--trials={trials}"]) == 0
        lines = [json.loads(line) for line in (tmp_path / search.LOG).read_text().splitlines()]
        assert [line["trial"] for line in lines] == list(range(trials))
    assert all(0.001 <= line["settings"]["lr"] <= 1 and math.isfinite(line["seconds"]) for line in lines)
    assert {line["end"] for line in lines} <= {"finished", "pruned"}
    assert {path.name for path in tmp_path.iterdir()} == {search.LOG, "study.sqlite"}
