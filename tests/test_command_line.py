"""The command line of train.py: its output, its errors, and that it answers before importing torch."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import CIFAR100, ROOT
from tools import evaluate, export, predict, prepare_data, report, runs
from utils.config import Config, load_config
from utils.config.command_line import parse_arguments
from utils.config.messages import OTHER_NAMES

RATE = "allowed: a number above 0 and at most 1000"


@pytest.fixture(autouse=True)
def from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default --yaml_config is relative to the checkout."""
    monkeypatch.chdir(ROOT)


def run_train(*arguments: str, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *python, "train.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


# ---- output


def test_arguments_without_options() -> None:
    arguments = parse_arguments([])
    assert arguments.config == load_config(CIFAR100, "default")
    assert (arguments.config_name, arguments.run_dir, arguments.resume) == ("default", Path("expts/default"), "auto")
    assert not arguments.dry_run


def test_arguments_with_every_option() -> None:
    what = ["--yaml_config=config/cifar100.yaml", "--config=bs256-amp", "--set", "lr=0.2", "--set", "max_epochs=3"]
    how = ["--run-dir=runs/a", "--resume=never", "--dry-run", "--local_rank=0"]
    arguments = parse_arguments(what + how)
    assert arguments.config == load_config(CIFAR100, "bs256-amp", ["lr=0.2", "max_epochs=3"])
    assert (arguments.config.lr, arguments.config.max_epochs, arguments.config.enable_amp) == (0.2, 3, True)
    assert (arguments.config_name, arguments.run_dir, arguments.resume) == ("bs256-amp", Path("runs/a"), "never")
    assert arguments.dry_run


@pytest.mark.parametrize(
    ("overrides", "lr"),
    [(["lr=-3", "lr=.2"], 0.2), (["lr = 0.3"], 0.3), ([" lr=0.4 "], 0.4), (["lr=5e-4"], 5e-4)],
    ids=["last wins", "spaces", "spaces outside", "exponent"],
)
def test_set_allows_spaces(overrides: list[str], lr: float) -> None:
    assert parse_arguments([part for override in overrides for part in ("--set", override)]).config.lr == lr


@pytest.mark.parametrize("option", ["--help", "--list-configs", "--print-config", "--explain"])
def test_questions_are_answered_without_torch(option: str) -> None:
    answer = run_train(option, python=("-X", "importtime"))
    imported = re.findall(r"\| +([\w.]+)$", answer.stderr, re.MULTILINE)
    assert answer.returncode == 0
    assert "utils.config.command_line" in imported
    assert not [name for name in imported if name.split(".")[0] in ("torch", "torchvision", "numpy")]
    # stderr holds only the import times
    assert [line for line in answer.stderr.splitlines() if not line.startswith("import time:")] == []
    assert len(answer.stdout.splitlines()) > 10


@pytest.mark.parametrize("option", ["--list-configs", "--print-config"])
def test_a_closed_pipe_is_no_error(option: str) -> None:
    command = [sys.executable, "-u", "train.py", option]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # before the command writes
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


def test_help_names_every_option_and_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    text = answered(capsys, "--help")
    for word in ("--config", "--yaml_config", "--set", "--run-dir", "--resume", "--list-configs", "--print-config"):
        assert word in text
    assert "0 finished, 2 bad usage or configuration, 3 data" in text


def test_listed_changes_can_be_given_to_set(capsys: pytest.CaptureFixture[str]) -> None:
    """Every block's line, `NAME  KEY=VALUE, ...`, repeated as --set on default gives the block."""
    lines = answered(capsys, "--list-configs").splitlines()
    names = re.findall(r"^([\w.+-]+):", CIFAR100.read_text(encoding="utf-8"), re.MULTILINE)
    assert names[0] == "default" and [line.split()[0] for line in lines] == names
    for line in lines:
        name, changes = line.split(maxsplit=1)
        overrides = [] if changes == "every key as in default" else re.split(r", (?=\w+=)", changes)
        assert load_config(CIFAR100, "default", overrides) == load_config(CIFAR100, name)


def test_a_printed_configuration_is_a_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--config=bs2048-warmup-opt", "--set=data_path=/some where/#1")
    printed = answered(capsys, *arguments, "--print-config")
    copy = tmp_path / "copy.yaml"
    copy.write_text("again:\n" + "".join(f"  {line}\n" for line in printed.splitlines()), encoding="utf-8")
    assert load_config(copy, "again") == parse_arguments(arguments).config
    # a file with one block, such as a run folder's config.yaml, has no default to compare with
    again = answered(capsys, f"--yaml_config={copy}", "--config=again", "--print-config")
    assert again.splitlines()[0] == f"# again in {copy}"
    assert "# default:" not in again
    copy.write_text("again:\n" + "".join(f"  {line}\n" for line in again.splitlines()), encoding="utf-8")
    assert load_config(copy, "again") == parse_arguments(arguments).config


def test_keys_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    text = answered(capsys, "--config=bs256", "--explain", "lr", "enable_amp", "seed")
    assert text == (
        "lr (optimizer)\n"
        "  Peak learning rate, before lr_scale_rule.\n"
        f"  {RATE}\n"
        "  default: 0.1; in bs256: 0.14\n"
        "  acts in: grep -rnwI 'lr' train.py utils models\n\n"
        "enable_amp (precision)\n"
        "  AMP: forward and loss under autocast; auto: not in bf16 on a CPU or GPU without kernels for it.\n"
        "  allowed: auto, true, false\n"
        "  default: false\n"
        "  acts in: grep -rnwI 'AMP:' train.py utils models\n\n"
        "seed (shared by model, data and training)\n"
        "  Determines weights, order of the images and augmentation.\n"
        "  allowed: a whole number from 0 to 2147483647\n"
        "  default: 0\n"
        "  acts in: grep -rnwI 'seed' train.py utils models\n"
    )


def test_every_key_is_listed_and_used_where_explain_says(capsys: pytest.CaptureFixture[str]) -> None:
    listed = answered(capsys, "--explain")
    assert all(re.search(rf"\b{key}\b", listed) for key in Config.model_fields)
    entries = answered(capsys, "--explain", *Config.model_fields).split("\n\n")
    assert len(entries) == len(Config.model_fields)
    commands = {key: entry[entry.index("grep ") :] for key, entry in zip(Config.model_fields, entries, strict=True)}
    only_declared = []
    for key, command in commands.items():
        found = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
        if not [line for line in found.stdout.splitlines() if not line.split(":")[0].endswith("config.py")]:
            only_declared.append(key)
    # the first is read as limit_{train,valid}_batches, the other by peak_lr next to their declaration
    assert only_declared == ["limit_train_batches", "lr_scale_rule"]


def test_other_programs_names_are_not_keys_but_map_to_keys() -> None:
    assert not set(OTHER_NAMES) & set(Config.model_fields)
    assert set(OTHER_NAMES.values()) <= set(Config.model_fields)


def test_printing_begins_with_the_differences(capsys: pytest.CaptureFixture[str]) -> None:
    lines = answered(capsys, "--config=bs256", "--print-config").splitlines()
    assert lines[:4] == [
        "# bs256 in config/cifar100.yaml",
        "batch_size: 256  # default: 128",
        "lr: 0.14  # default: 0.1",
        "# as in default:",
    ]


# The shape of the SC20 tutorial's file: a `default` without this project's own keys, YAML 1.1's tags and words.
LIKE_THE_TUTORIALS = """\
default: &DEFAULT

  lr: !!float 0.1
  momentum: !!float 0.9
  lr_warmup_epochs: 0

  #mean and std of cifar100 dataset
  cifar100_mean: [0.5, 0.4, 0.3]
  data_path: './elsewhere' # will be automatically downloaded if not available
  num_data_workers: 3
  max_epochs: 90
  batch_size: 128
  log_to_screen: !!bool True
  enable_amp: !!bool False

bs128:
  <<: *DEFAULT

#  --- Scaling experiments --- #
bs1024-warmup-opt:
  <<: *DEFAULT
  lr: !!float 0.28
  batch_size: 1024
  lr_warmup_epochs: 8
  enable_amp: True
"""


def test_a_file_of_the_tutorials_shape_is_read_unchanged(tmp_path: Path, refused: Callable[..., str]) -> None:
    """Missing keys have the defaults. An unknown key is named. The file's `<<` needs no `extends`."""
    path = tmp_path / "cifar100.yaml"
    path.write_text(LIKE_THE_TUTORIALS)
    own = {"cifar100_mean": (0.5, 0.4, 0.3), "data_path": "./elsewhere", "num_data_workers": 3, "max_epochs": 90}
    large = {"lr": 0.28, "batch_size": 1024, "lr_warmup_epochs": 8, "enable_amp": True}
    for name, changes in (("default", {}), ("bs128", {}), ("bs1024-warmup-opt", large)):
        config = parse_arguments([f"--yaml_config={path}", f"--config={name}"]).config
        assert config == Config(**own | changes)
    path.write_text(LIKE_THE_TUTORIALS.replace("momentum:", "momentun:"))
    message = refused(f"--yaml_config={path}", "--config=bs1024-warmup-opt")
    assert message == f"error: {path}:4: unknown key 'momentun'. Did you mean 'momentum'?\n"
    path.write_text(LIKE_THE_TUTORIALS + "empty:\n")
    assert "<<" not in refused(f"--yaml_config={path}", "--config=empty")


# ---- errors

ERRORS = [
    (["--set", "lr"], "--set lr: expected KEY=VALUE, for example --set lr=0.2"),
    (["--set", "lr="], f"--set lr=: lr has no value; {RATE}"),
    (["--set", "lr=[1"], "--set lr=[1: the value is not valid YAML 1.2: "),
    (["--set", "lrr=1"], "--set lrr=1: unknown key 'lrr'. Did you mean 'lr'?"),
    (["--set", "lr=0.2", "--set", "lr=-1"], f"--set lr=-1: lr is -1; {RATE}"),
    (["--config=bs256_amp"], "--config=bs256_amp: config/cifar100.yaml has no such block. Did you mean 'bs256-amp'?"),
    (["--confg=bs256"], "unrecognized arguments: --confg=bs256; did you mean --config?"),
    ([""], "an argument is empty; is a variable of the command line not set?"),
    (["bs256"], "unrecognized arguments: bs256; write --config=bs256"),
    (["bs256", "--yaml_config=/nosuch"], "unrecognized arguments: bs256; --help lists the options"),
    (["lr=0.1"], "unrecognized arguments: lr=0.1; write --set lr=0.1"),
    (["epochs=3"], "unrecognized arguments: epochs=3; write --set max_epochs=3"),
    (["--learning-rate", "0.1"], "unrecognized arguments: --learning-rate 0.1; write --set lr=0.1"),
    (["--amp"], "unrecognized arguments: --amp; write --set enable_amp=VALUE"),
    (["--epochs", "--lr", "3"], "unrecognized arguments: --epochs --lr 3; write --set max_epochs=VALUE"),
    (["--explain", "learning_rate"], "--explain: unknown key 'learning_rate'. Did you mean 'lr'?"),
    *(
        ([f"--set={name}=1"], f"--set {name}=1: unknown key {name!r}. Did you mean {key!r}?")
        for name, key in (
            ("learning_rate", "lr"), ("bs", "batch_size"), ("optim", "optimizer"), ("workers", "num_data_workers"),
            ("amp", "enable_amp"), ("learnig_rate", "lr"),
        )
    ),
    (["--run-dir="], "argument --run-dir: is empty; is a variable of the command line not set?"),
    (["--resume="], "argument --resume: is empty; is a variable of the command line not set?"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), ERRORS, ids=[" ".join(words)[:30] for words, _ in ERRORS])
def test_bad_usage_is_an_error_of_one_line(arguments: list[str], message: str, refused: Callable[..., str]) -> None:
    # the last --config wins: a block with a warm-up unless the case names another
    assert refused("--config=bs2048-warmup-opt", *arguments).startswith("error: " + message)


def test_train_reports_a_wrong_setting_without_a_traceback() -> None:
    process = run_train("--config=bs2048-warmup-opt", "--set", "lr_schedule=step")
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.startswith("error: --set lr_schedule=step: lr_schedule step cuts at lr_milestones, ")
    assert process.stderr.count("\n") == 1


def answered(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as leaving:
        parse_arguments(arguments)
    out, err = capsys.readouterr()
    assert (leaving.value.code, err) == (0, "")
    return out


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (evaluate, ["run", "--data="]), (export, [""]), (export, ["run", "--out="]),
        (predict, ["run", ""]),
        (prepare_data, ["--dataset=cifar10", "--data_path="]), (report, [""]), (runs, [""]),
    ],
    ids=lambda value: value.__name__.rpartition(".")[2] if hasattr(value, "__name__") else "",
)  # fmt: skip
def test_an_empty_path_is_refused_by_every_command(
    command: ModuleType, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """As from a variable that is not set: it would be the working directory."""
    with pytest.raises(SystemExit) as leaving:
        command.main(arguments)
    assert leaving.value.code == 2
    assert "is empty; is a variable of the command line not set?" in capsys.readouterr().err
