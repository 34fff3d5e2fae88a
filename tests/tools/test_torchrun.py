"""tools.torchrun prints a rank's message first, then one line; torchrun's own output goes to a file."""

import os
import socket
import subprocess
import sys

import pytest

from tests.processes import ROOT, without_launcher

STOP = "import os, time; time.sleep(1); os.kill(os.getppid(), 15)\nwhile True: pass"
ENDS = {
    "in order": ("print('trained')", 0, None),
    "with a message": ("import sys; sys.exit('error: rank 0: no data')", 1, "rank 0 exited with 1"),
    "killed": ("import os; os.kill(os.getpid(), 9)", 1, "rank 0 was ended by SIGKILL"),
    "of the agent": (STOP, 143, "ended by SIGTERM"),
}


def torchrun(tmp_path, program, *options):
    """Run `program` as one rank; return (exit status, lines of stderr, torchrun's file)."""
    script, file = tmp_path / "program.py", tmp_path / "torchrun.log"
    script.write_text(program)
    meeting = ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--rdzv-endpoint={tmp_path / 'meeting'}"]
    command = [sys.executable, "-m", "tools.torchrun", str(file), *(options or meeting), str(script)]
    environment = without_launcher(os.environ)
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return ended.returncode, ended.stderr.splitlines(), file


@pytest.mark.parametrize("end", ENDS)
def test_the_ranks_message_comes_first_and_then_one_line(tmp_path, end):
    program, expected, line = ENDS[end]
    status, errors, file = torchrun(tmp_path, program)
    assert status == expected, errors
    here = [f"torchrun on {socket.gethostname()}: {line}"] if line else []
    if file.exists():
        here[0] += f"; torchrun's log: {file}"
        assert "Traceback" in file.read_text()
    assert errors == (["error: rank 0: no data"] if "message" in end else []) + here
    assert file.exists() == (line is not None and "rank" in line)


def test_a_program_in_the_place_of_the_log_is_not_overwritten(tmp_path):
    (tmp_path / "torchrun.log").write_text("a program")
    status, errors, file = torchrun(tmp_path, "")
    assert status == 2 and "File exists; expected the name of a new file" in errors[-1]
    assert file.read_text() == "a program"


def test_a_taken_port_is_reported_in_one_line(tmp_path):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        where = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-conf=is_host=true", f"--rdzv-endpoint=localhost:{port}"]
        status, (error,), file = torchrun(tmp_path, "", *where)
    assert status == 1 and file.exists()
    assert f"port: {port}" in error and "address already in use" in error
