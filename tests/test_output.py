"""What the commands print: names as they are, in any encoding."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tools.shared.output import print_table


def test_names_in_a_table_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["[red]x", "[/b]", ":smile:", "ünï"]
    print_table("[bold]title", ("[i]name", "images"), [(name, "3") for name in names])
    printed = capsys.readouterr().out
    assert all(f" {name} " in printed for name in [*names, "[i]name"]) and printed.startswith("[bold]title")


def test_what_cannot_be_encoded_is_escaped() -> None:
    code = "from tools.shared.output import say\nsay('ü \\udcff')"
    for encoding, expected in (("utf-8", "ü \\udcff\n"), ("ascii", "\\xfc \\udcff\n")):
        environment = os.environ | {"PYTHONIOENCODING": encoding}
        command = [sys.executable, "-c", code]
        printed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True).stdout
        assert printed.decode() == expected
