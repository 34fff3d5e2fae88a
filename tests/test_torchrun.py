"""tools.torchrun: what a rank says comes first, then one line, and all of torchrun's own words are in a file."""

import os
import socket
import subprocess

import pytest
from processes import PYTHON, ROOT, without_launcher

ENDS = {
    "in order": ("print('trained')", 0, None),
    "with a message": ("import sys; sys.exit('error: rank 0: no data')", 1, "rank 0 exited with 1"),
    "killed": ("import os; os.kill(os.getpid(), 9)", 1, "rank 0 was ended by SIGKILL"),
    "of the agent": (
        "import os, time; time.sleep(1); os.kill(os.getppid(), 15)\nwhile True: pass",
        1,
        "ended by SIGTERM",
    ),
}


def torchrun(tmp_path, program, *options):
    """(exit status, lines of stderr, the file) of one rank that runs `program`."""
    script, file = tmp_path / "program.py", tmp_path / "torchrun.log"
    script.write_text(program)
    meeting = ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--rdzv-endpoint={tmp_path / 'meeting'}"]
    command = [PYTHON, "-m", "tools.torchrun", str(file), *(options or meeting), str(script)]
    environment = without_launcher(os.environ)
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return ended.returncode, ended.stderr.splitlines(), file


@pytest.mark.parametrize("end", ENDS)
def test_what_a_rank_says_comes_first_and_then_one_line(tmp_path, end):
    program, expected, line = ENDS[end]
    status, said, file = torchrun(tmp_path, program)
    assert status == expected, said
    here = [f"torchrun on {socket.gethostname()}: {line}"] if line else []
    if file.exists():
        here[0] += f"; torchrun's log: {file}"
        assert "Traceback" in file.read_text()
    assert said == (["error: rank 0: no data"] if "message" in end else []) + here
    assert file.exists() == (line is not None and "rank" in line)


def test_a_port_that_is_taken_is_told_in_a_line(tmp_path):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        where = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-conf=is_host=true", f"--rdzv-endpoint=localhost:{port}"]
        status, said, file = torchrun(tmp_path, "", *where)
    assert status == 1 and file.exists()
    assert len(said) == 1 and f"port: {port}" in said[0] and "address already in use" in said[0]
