"""deploy/gpu_acceptance.sh, with a fake python: what passed is not repeated, and a failure decides the exit status."""

import os
import signal
import subprocess

from tests.conftest import ROOT
from tests.processes import make_command, wait_until

FAKE_PYTHON = """
case "$*" in
*device_count*) echo 2; exit ;;
*tools.doctor*--set=device=cuda*) step=doctor; cat verdict; echo 'fail  data  no data' >&2; status=1 ;;
"-m pytest "*) step=pytest; cat tests; status=0 ;;
*" record "*--set=device=cuda* | *" ladder "*--baseline=/first.json*--set=device=cuda*) step=$3; status=0 ;;
esac
echo "$step" >>steps
if [ "$step" = ladder ]; then sleep "$(cat ladder_seconds)"; fi
if [ "$step" = record ] && [ -e broken ]; then echo no target; exit 1; fi
exit "$status"
"""


def test_an_interrupted_acceptance_continues_and_a_failed_step_is_named(tmp_path):
    make_command(tmp_path, "python", f"cd {tmp_path}{FAKE_PYTHON}")
    command = ["bash", str(ROOT / "deploy/gpu_acceptance.sh"), str(tmp_path / "out")]
    environment = os.environ | {"PYTHON": f"{tmp_path}/python", "TESTS": "-m gpu_tests", "BASELINE": "/first.json"}
    ran = tmp_path / "steps"

    def run():
        """Return the exit status, the steps that ran, and the output."""
        ran.write_text("")
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
        return done.returncode, ran.read_text().split(), done.stdout

    files = {"ladder_seconds": "600", "verdict": '{"worst": "warn"}', "tests": "= 3 passed in 1 s =", "broken": ""}
    for name, content in (files | {"steps": ""}).items():
        (tmp_path / name).write_text(content)
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        wait_until("ladder", 120, lambda: "ladder" in ran.read_text())
        process.send_signal(signal.SIGINT)
        assert process.wait(200) == 130  # sooner than the 600 s of the step, which it ended
    assert ran.read_text().split() == ["doctor", "doctor", "pytest", "ladder"]  # one process, then two ranks
    (tmp_path / "ladder_seconds").write_text("0")
    status, steps, printed = run()
    assert (status, steps) == (1, ["ladder", "record"])
    assert "tests: passed before" in printed and "failed: record;" in printed and "no target" in printed
    (tmp_path / "broken").unlink()
    assert run()[:2] == (0, ["record"])
    environment |= {"RECORD": "--config=accuracy", "TESTS": "-m slow", "DOCTOR": "--dcgm=0"}  # other commands run again
    (tmp_path / "verdict").write_text('{"worst": "fail"}')
    (tmp_path / "tests").write_text("= 174 skipped in 1 s =")
    status, steps, printed = run()
    assert (status, steps) == (1, ["doctor", "doctor", "pytest", "record"])
    assert all(text in printed for text in ("tests: FAILED", "174 skipped", "out/ranks.json: fail data no data\n"))
