"""Output of the commands: names without markup, any encoding, and streams that are closed, full or only half a file."""

import io
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT, TINY, as_options, read_records
from tests.processes import wait_until, without_launcher
from tools.common import print_table
from utils.errors import complete_output, print_text


def test_names_in_a_table_are_shown_without_markup(capsys):
    names = ["[red]x", "[/b]", ":smile:", "ünï"]
    print_table("[bold]title", ("[i]name", "images"), [(name, "3") for name in names])
    printed = capsys.readouterr().out
    assert all(f" {name} " in printed for name in [*names, "[i]name"]) and printed.startswith("[bold]title")


def command(line):
    """A command whose `main` is one line of Python."""
    program = "import sys\nfrom utils.errors import *\n@exit_in_a_line\ndef main():\n"
    return [sys.executable, "-c", f"{program}    {line}\nsys.exit(main())"]


def ended(words, stdout=subprocess.PIPE, text=True, **variables):
    pipes = {"stdout": stdout, "stderr": subprocess.PIPE}
    environment = without_launcher(os.environ) | variables
    return subprocess.run(words, cwd=ROOT, env=environment, text=text, check=False, **pipes)


def training(folder, **settings):
    return [sys.executable, "train.py", "--config=default", f"--run-dir={folder}", *as_options(TINY | settings)]


@pytest.mark.parametrize(("line", "status", "message"), [
    ("raise DataError('x: is damaged')", 3, "error: x: is damaged\n"),
    ("raise KeyboardInterrupt", 130, "interrupted\n"),
    ("raise PermissionError(13, 'No', 'a/run')", 1, "error: a/run: No; give a path that you may use\n"),
    ("raise BrokenPipeError('a peer')", 1, "BrokenPipeError: a peer\n"),  # a bug: it is not the output's
    ("raise PermissionError('a signal')", 1, "PermissionError: a signal\n")])  # fmt: skip
def test_a_command_ends_with_a_line_and_a_status(line, status, message):
    process = ended(command(line))
    assert process.returncode == status and process.stderr.endswith(message)
    assert ("Traceback" in process.stderr) is (process.stderr != message) is (message[:5] not in ("error", "inter"))


@pytest.mark.parametrize(("name", "answer"), {
    "a tool": command("print('x' * 2**20)"), "--list-configs": [sys.executable, "train.py", "--list-configs"],
    "the commands": [sys.executable, "__main__.py"],
    "evaluate": [sys.executable, "-m", "tools.evaluate"],  # prints on the main rank
}.items())  # fmt: skip
def test_an_unwritten_answer_is_141_after_head_and_1_with_a_line_if_the_disk_is_full(name, answer, finished):
    answer = answer + [str(finished)] * (name == "evaluate")
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full:
        for output, *expected in (writer, 141, ""), (full, 1, "error: standard output: No space left on device\n"):
            answered = ended(answer, output)
            assert [answered.returncode, answered.stderr] == expected
    os.close(writer)


def test_an_output_that_has_only_write_is_enough(monkeypatch):
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=len))
    with complete_output():
        print("as in a notebook")


def test_an_error_keeps_its_status_if_the_disk_of_stderr_is_full():
    program = "from utils.distributed.ranks import run_ranks\nfrom utils.errors import DataError\n"
    program += "def fail(world): raise DataError('gone')\nraise SystemExit(run_ranks(fail, 'cpu', 20))"
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, stderr=full, check=False).returncode == 3


def test_characters_that_cannot_be_encoded_are_escaped():
    for encoding, expected in (("utf-8", "ü \\udcff\n"), ("ascii", "\\xfc \\udcff\n")):
        for line in ("print('ü \\udcff')", "print_error('ü \\udcff')"):
            process = ended(command(line), text=False, PYTHONIOENCODING=encoding)
            assert (process.stdout + process.stderr).decode() == expected
    latin = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    print_text("Кот\n", latin)
    assert latin.buffer.getvalue() == b"\\u041a\\u043e\\u0442\n"
    latin.close()
    print_text("dropped", latin)


def test_names_of_classes_that_the_locale_lacks_are_kept(tmp_path):
    program = """
import numpy as np
def load(data_path):
    images, labels = np.arange(64 * 3 * 1024).reshape(64, 3, 32, 32).astype(np.uint8), np.arange(64) % 2
    return {"train": (images, labels), "valid": (images, labels), "class_names": ["кот", "é|собака"]}
"""
    (tmp_path / "own_data.py").write_text(program, encoding="utf-8")
    words = training(tmp_path / "run", dataset="own_data:load", num_classes=2, limit_train_batches=1)
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(tmp_path)}
    process = ended(words, **locale)
    assert (process.returncode, process.stderr) == (0, "")
    (end,) = read_records(tmp_path / "run", "end")
    assert {row["class"] for row in end["worst_classes"]} == {"кот", "é|собака"}


def test_ctrl_c_before_the_first_step_is_130_with_a_line(tmp_path):
    (tmp_path / "own_data.py").write_text("import os\ndef load(data_path): os.kill(os.getpid(), 2)")
    process = ended(training(tmp_path / "run", dataset="own_data:load"), PYTHONPATH=str(tmp_path))
    assert (process.returncode, process.stderr) == (130, "interrupted; earlier checkpoints are kept\n")


@pytest.mark.parametrize("closed", [True, False])
def test_a_training_writes_its_files_whatever_its_streams_are(tmp_path, closed):
    """`train.py <&- >&- 2>&-`, whose signal's message must not go to another file, and `train.py | head`."""
    words = training(tmp_path, log_freq=1, max_epochs=1000 if closed else 2)
    shell = ["bash", "-c", f'exec "$@" {"<&- >&- 2>&-" if closed else ""}', "bash", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    before = time.time()
    run = subprocess.Popen(shell, cwd=ROOT, env=without_launcher(os.environ), text=True, **pipes)
    after = time.time()
    if closed:
        metrics = tmp_path / "metrics.jsonl"
        wait_until("step", 120, lambda: metrics.exists() and '"step", "epoch"' in metrics.read_text())
        run.send_signal(signal.SIGTERM)
    else:
        run.stdout.readline()
        run.stdout.close()
    assert (run.wait(120), run.stderr.read()) == (75 if closed else 0, "")
    (start,) = read_records(tmp_path, "start")
    began = start["time"] - sum(start["clock_seconds"].values())
    assert before - 1 < began < after + 0.05, "its time includes the imports"
    assert read_records(tmp_path, "stop" if closed else "end") and "asked" not in (tmp_path / ".lock").read_text()
