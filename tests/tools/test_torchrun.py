"""tools.torchrun prints a rank's message first, then one line; torchrun's own output goes to a file."""

import os
import socket
import subprocess
import sys

import pytest

from tests.processes import ROOT, Job, without_launcher
from tools.torchrun import main

STOP = "import os, time; time.sleep(1); os.kill(os.getppid(), 15); time.sleep(100)"


@pytest.mark.parametrize(("end", "case"), {
    "in order": ("print('trained')", 0, None),
    "with a message": ("import sys; sys.exit('error: rank 0: no data')", 1, "rank 0 exited with 1"),
    "killed": ("import os; os.kill(os.getpid(), 9)", 1, "rank 0 was ended by SIGKILL"),
    "of the agent": (STOP, 143, "ended by SIGTERM")}.items())  # fmt: skip
def test_the_ranks_message_comes_first_and_then_one_line(tmp_path, end, case):
    program, expected, line = case
    script, file = tmp_path / "program.py", tmp_path / "torchrun.log"
    script.write_text(program)
    meeting = ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--rdzv-endpoint={tmp_path / 'meeting'}"]
    [ended] = Job(tmp_path / "job", main, [[str(file), *meeting, str(script)]], [{}]).wait()
    here = [f"torchrun on {socket.gethostname()}: {line}"] if line else []
    if file.exists():
        here[0] += f"; torchrun's log: {file}"
        assert "Traceback" in file.read_text()
    assert ended.errors.splitlines() == (["error: rank 0: no data"] if "message" in end else []) + here
    assert ended.status == expected and file.exists() == (line is not None and "rank" in line)


def test_a_program_in_the_place_of_the_log_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "train.py").write_text("a program")
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "train.py")])
    assert "File exists; expected the name of a new file" in capsys.readouterr().err
    assert (tmp_path / "train.py").read_text() == "a program"


def test_a_taken_port_is_reported_in_one_line(tmp_path):
    with socket.create_server(("", 0)) as taken:
        port, file = taken.getsockname()[1], tmp_path / "torchrun.log"
        where = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-conf=is_host=true", f"--rdzv-endpoint=localhost:{port}"]
        command = [sys.executable, "-m", "tools.torchrun", str(file), *where, "program.py"]
        environment = without_launcher(os.environ)
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    (error,) = ended.stderr.splitlines()
    assert ended.returncode == 1 and file.exists() and f"port: {port}" in error and "address already in use" in error
