"""What the commands print: names as they are, in any encoding, and into a pipe that nobody reads to its end."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tools.output import print_table


def test_names_in_a_table_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["[red]x", "[/b]", ":smile:", "ünï"]
    print_table("[bold]title", ("[i]name", "images"), [(name, "3") for name in names])
    printed = capsys.readouterr().out
    assert all(f" {name} " in printed for name in [*names, "[i]name"]) and printed.startswith("[bold]title")


def test_what_cannot_be_encoded_is_escaped_and_a_closed_pipe_is_no_fault() -> None:
    code = (
        "import sys\nfrom tools.output import print_table, say\nsay('ü \\udcff')\n"
        "for _ in range(1000): print_table('title', ('ü', 'images'), [('x' * 60, '3')] * 10)\n"
        "print('end', file=sys.stderr)"
    )
    for encoding, first in (("utf-8", "ü \\udcff\n"), ("ascii", "\\xfc \\udcff\n")):
        with subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONIOENCODING": encoding},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
        ) as process:  # fmt: skip
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline() == first
            process.stdout.close()
            assert process.stderr.read() == "end\n"
        assert process.returncode == 0
