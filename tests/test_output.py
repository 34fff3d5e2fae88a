"""Output of the commands: names without markup, any encoding, closed pipes."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tools.shared.output import print_table


def test_names_in_a_table_are_shown_without_markup(capsys):
    names = ["[red]x", "[/b]", ":smile:", "ünï"]
    print_table("[bold]title", ("[i]name", "images"), [(name, "3") for name in names])
    printed = capsys.readouterr().out
    assert all(f" {name} " in printed for name in [*names, "[i]name"]) and printed.startswith("[bold]title")


def run_a_command(line, output):
    """Run a command whose `main` is one line of Python."""
    program = "import sys\nfrom utils.errors import exit_in_a_line\n@exit_in_a_line\ndef main():\n"
    program += f"    {line}\nsys.exit(main())"
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.PIPE, text=True, check=False)


def test_a_command_ends_quietly_when_nobody_reads_its_output():
    """As after `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    ended = run_a_command("print('x' * 2**20)", writer)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_an_error_keeps_its_status_if_the_disk_of_stderr_is_full():
    program = "from utils.distributed.ranks import run_ranks\nfrom utils.errors import DataError\n"
    program += "def fail(world): raise DataError('gone')\nraise SystemExit(run_ranks(fail, 'cpu', 20))"
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, stderr=full, check=False).returncode == 3


def test_a_path_without_permission_is_a_line():
    ended = run_a_command("raise PermissionError(13, 'Permission denied', 'a/run')", subprocess.DEVNULL)
    assert (ended.returncode, ended.stderr) == (1, "error: a/run: Permission denied; give a path that you may use\n")


@pytest.mark.parametrize("error", ["BrokenPipeError: a peer", "PermissionError: a signal"])
def test_the_same_kind_of_error_from_elsewhere_is_a_bug(error):
    kind, text = error.split(": ")
    ended = run_a_command(f"raise {kind}({text!r})", subprocess.DEVNULL)
    assert ended.returncode == 1 and "Traceback" in ended.stderr and error in ended.stderr


def test_characters_that_cannot_be_encoded_are_escaped():
    code = "from tools.shared.output import say\nsay('ü \\udcff')"
    for encoding, expected in (("utf-8", "ü \\udcff\n"), ("ascii", "\\xfc \\udcff\n")):
        environment = os.environ | {"PYTHONIOENCODING": encoding}
        command = [sys.executable, "-c", code]
        printed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True).stdout
        assert printed.decode() == expected
