"""utils.run.preemption: what a signal asks for, and the second Ctrl-C. tests/test_resume.py stops whole runs."""

import signal
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from utils.distributed.world import World
from utils.run import preemption
from utils.run.preemption import ONE_KEYSTROKE, Requests, listen


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """set_clock(seconds): what the monotonic clock shows from then on."""

    def set_to(seconds: float) -> None:
        monkeypatch.setattr(preemption, "time", SimpleNamespace(monotonic=lambda: seconds))

    set_to(time.monotonic())
    return set_to


def interrupts(number: signal.Signals) -> bool:
    """Whether the signal ends the training at once."""
    try:
        signal.raise_signal(number)
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_second_ctrl_c_stops_at_once(
    first: signal.Signals, alone: World, set_clock: Callable[[float], None], capfd: pytest.CaptureFixture[str]
) -> None:
    """But not what a launcher passes on of the same keystroke, nor any other signal."""
    requests = Requests(alone, save_every_minutes=None)
    before = signal.getsignal(signal.SIGINT)
    set_clock(100)
    with listen(requests):
        assert requests.poll() is None
        assert not interrupts(first)
        assert requests.poll() == "stop"
        set_clock(100 + ONE_KEYSTROKE)
        assert not interrupts(signal.SIGINT)
        set_clock(100 + ONE_KEYSTROKE + 0.1)
        assert not interrupts(signal.SIGTERM) and not interrupts(signal.SIGUSR1)
        assert requests.name() == first.name
        assert interrupts(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert capfd.readouterr().err.count("Ctrl-C again stops without saving") == 1
