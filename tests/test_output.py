"""Output of the commands: names without markup, any encoding, and streams that are closed, full or only half a file."""

import io
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT, TINY, as_options, read_records
from tests.processes import wait_until, without_launcher
from tools.common import print_table
from utils.data.loader import report_unreadable
from utils.errors import print_text
from utils.run.logging.logger import RunLogger


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
    """Run a command to its end."""
    pipes = {"stdout": stdout, "stderr": subprocess.PIPE}
    environment = without_launcher(os.environ) | variables
    return subprocess.run(words, cwd=ROOT, env=environment, text=text, check=False, **pipes)


def training(folder, **settings):
    return [sys.executable, "train.py", "--config=default", f"--run-dir={folder}", *as_options(TINY | settings)]


ANSWERS = {
    "a tool": command("print('x' * 2**20)"),
    "a short answer": command("print('x')"),
    "--list-configs": [sys.executable, "train.py", "--list-configs"],
    "--help": [sys.executable, "train.py", "--help"],
    "the commands": [sys.executable, "__main__.py"],
    "a dry run": [sys.executable, "train.py", "--dry-run", *as_options(TINY)],
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_that_cannot_be_written_is_141_after_head_and_1_with_a_line_if_the_disk_is_full(answer):
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full:
        for output, *expected in (writer, 141, ""), (full, 1, "error: standard output: No space left on device\n"):
            answered = ended(ANSWERS[answer], output)
            assert [answered.returncode, answered.stderr] == expected
    os.close(writer)


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("raise DataError('x: is damaged')", 3, "error: x: is damaged\n"),
        ("raise KeyboardInterrupt", 130, "interrupted\n"),
        ("raise PermissionError(13, 'No', 'a/run')", 1, "error: a/run: No; give a path that you may use\n"),
        ("raise BrokenPipeError('a peer')", 1, "BrokenPipeError: a peer\n"),  # a bug: it is not the output's
        ("raise PermissionError('a signal')", 1, "PermissionError: a signal\n"),
    ],
)
def test_a_command_ends_with_a_line_and_a_status(line, status, message):
    process = ended(command(line))
    assert process.returncode == status and process.stderr.endswith(message)
    assert ("Traceback" in process.stderr) is (process.stderr != message) is (message[:5] not in ("error", "inter"))


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


OWN_DATA = """
import numpy as np
def load(data_path):
    images, labels = np.arange(64 * 3 * 1024).reshape(64, 3, 32, 32).astype(np.uint8), np.arange(64) % 2
    return {"train": (images, labels), "valid": (images, labels), "class_names": ["кот", "é|собака"]}
"""


def test_names_of_classes_that_the_locale_lacks_are_kept(tmp_path):
    (tmp_path / "own_data.py").write_text(OWN_DATA, encoding="utf-8")
    words = training(tmp_path / "run", dataset="own_data:load", num_classes=2, limit_train_batches=1)
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(tmp_path)}
    process = ended(words, **locale)
    assert (process.returncode, process.stderr) == (0, "")
    (end,) = read_records(tmp_path / "run", "end")
    assert {row["class"] for row in end["worst_classes"]} == {"кот", "é|собака"}


def test_a_screen_that_has_only_write_and_a_name_that_is_no_text_are_logged_to(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=written.append))
    with RunLogger(tmp_path, enabled=True, to_screen=True, to_tensorboard=False).open() as log:
        log.say("a \udcff")
    assert written[0].endswith("a \\udcff\n") and (tmp_path / "train.log").read_text().endswith("a \\udcff\n")


def test_an_unreadable_file_with_a_line_break_in_its_name_is_reported_once(tmp_path, one_rank):
    for broken in ("a\rb", "a\nb"):
        loaders = [SimpleNamespace(unreadable={broken: "cut"}, check_fraction=bool)]
        assert [len(report_unreadable(one_rank, loaders, tmp_path)) for _ in range(2)] == [1, 0]
    assert (tmp_path / "unreadable.txt").read_bytes() == b"a\\nb\tcut\na\\rb\tcut\n"


@pytest.mark.parametrize("streams", ["closed", "full", "left"])
def test_a_training_writes_its_files_whatever_its_streams_are(tmp_path, streams):
    """`train.py <&- >&- 2>&-`, whose signal's message must not go to another file, `> /dev/full`, and `| head`."""
    redirection = {"closed": "<&- >&- 2>&-", "full": ">/dev/full"}.get(streams, "")
    words = training(tmp_path, log_freq=1, limit_train_batches=400 if streams == "closed" else 4)
    shell = ["bash", "-c", f'exec "$@" {redirection}', "bash", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    run = subprocess.Popen(shell, cwd=ROOT, env=without_launcher(os.environ), text=True, **pipes)
    if streams == "closed":
        metrics = tmp_path / "metrics.jsonl"
        wait_until("step", 60, lambda: metrics.exists() and '"step", "epoch"' in metrics.read_text())
        run.send_signal(signal.SIGTERM)
    elif streams == "left":
        run.stdout.readline()
        run.stdout.close()
    assert (run.wait(120), run.stderr.read()) == (75 if streams == "closed" else 0, "")
    assert all(json.loads(line)["kind"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert "asked" not in (tmp_path / ".lock").read_text()
    assert read_records(tmp_path, "stop" if streams == "closed" else "end")


def test_a_reader_of_the_errors_that_leaves_does_not_change_the_status(tmp_path):
    """`train.py ... 2>&1 | tee FILE` and Ctrl-C, which ends tee, too."""
    words = training(tmp_path / "run", dataset="imagefolder", data_path=f"{tmp_path}/nowhere")
    status = tmp_path / "status"
    environment = without_launcher(os.environ) | {"TRAIN_EXIT_STATUS_FILE": str(status)}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    run = subprocess.Popen(words, cwd=ROOT, env=environment, text=True, **pipes)
    run.stderr.close()
    assert (run.wait(120), status.read_text()) == (3, "3\n")
