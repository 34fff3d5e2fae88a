"""deploy/gpu_acceptance.sh, with a fake python: what passed is not repeated, and a failure decides the exit status."""

import os
import signal
import subprocess
from pathlib import Path

from tests.conftest import ROOT
from tests.processes import make_command, wait_until

FAKE_PYTHON = """
case "$*" in
*device_count*) echo 2; exit ;;
*tools.doctor*) step=doctor; echo '{"worst": "warn"}'; status=1 ;;
"-m pytest "*) step=pytest; status=0 ;;
*) step=$3; status=0 ;;
esac
echo "$step" >>steps
if [ "$step" = ladder ]; then sleep "$(cat ladder_seconds)"; fi
if [ "$step" = record ] && [ -e broken ]; then echo no target; exit 1; fi
exit "$status"
"""


def test_an_interrupted_acceptance_continues_and_a_failed_step_is_named(tmp_path: Path) -> None:
    make_command(tmp_path, "python", f"cd {tmp_path}{FAKE_PYTHON}")
    command = ["bash", str(ROOT / "deploy/gpu_acceptance.sh"), str(tmp_path / "out")]
    environment = os.environ | {"PYTHON": str(tmp_path / "python"), "TESTS": "-m gpu_tests"}

    def steps() -> list[str]:
        """Return the steps that ran since the last call."""
        ran = (tmp_path / "steps").read_text().split()
        (tmp_path / "steps").write_text("")
        return ran

    def run() -> tuple[int, str]:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
        return done.returncode, done.stdout

    (tmp_path / "ladder_seconds").write_text("600")
    (tmp_path / "broken").touch()
    (tmp_path / "steps").touch()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        wait_until("ladder", 30, lambda: "ladder" in (tmp_path / "steps").read_text())
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130  # at once: it ended the step
    assert steps() == ["doctor", "doctor", "pytest", "ladder"]  # one process, then two ranks
    (tmp_path / "ladder_seconds").write_text("0")
    status, printed = run()
    assert (status, steps()) == (1, ["ladder", "record"])
    assert "tests: passed before" in printed and "failed: record;" in printed and "no target" in printed
    (tmp_path / "broken").unlink()
    assert (run()[0], steps()) == (0, ["record"])
    environment["RECORD"] = "--config=accuracy"  # another command runs again
    assert (run()[0], steps()) == (0, ["record"])
