"""The command line of train.py: its output, its errors, and that it answers before importing torch."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CIFAR100, ROOT
from tools.common import new_parser, path_argument
from utils.config import Config, load_config
from utils.config.command_line import parse_arguments

RATE = "allowed: a number above 0 and at most 1000"


@pytest.fixture(autouse=True)
def from_the_checkout(monkeypatch):
    """The default --yaml_config is relative to the checkout."""
    monkeypatch.chdir(ROOT)


def test_arguments_without_and_with_every_option():
    arguments = parse_arguments([])
    assert arguments.config == load_config(CIFAR100, "default")
    assert (arguments.config_name, arguments.run_dir, arguments.resume) == ("default", Path("expts/default"), "auto")
    assert not arguments.dry_run
    what = ["--yaml_config=config/cifar100.yaml", "--config=bs256-amp", "--set=lr=-3", "--set", " lr = 0.2 "]
    arguments = parse_arguments([*what, "--run-dir=runs/a", "--resume=never", "--dry-run", "--local_rank=0"])
    assert arguments.config == load_config(CIFAR100, "bs256-amp", ["lr=0.2"])  # the last wins
    assert (arguments.config.lr, arguments.config.enable_amp) == (0.2, True)
    assert (arguments.config_name, arguments.run_dir, arguments.resume) == ("bs256-amp", Path("runs/a"), "never")
    assert [parse_arguments([f"--run-dir={name}"]).run_dir for name in (".", "..")] == [ROOT, ROOT.parent]
    assert arguments.dry_run


def test_a_home_folder_is_expanded_wherever_a_path_is_given(tmp_path, monkeypatch):
    """A shell expands ~ neither after = nor in a file. A folder named ~ invites to rm -rf ~."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own.yaml").write_text("mine:\n  extends: ~/base.yaml#b\n  data_path: ~/data\n")
    (tmp_path / "base.yaml").write_text("b:\n  limits_report: ~/l.json\n")
    what = ["--yaml_config=~/own.yaml", "--config=mine", "--run-dir=~/runs/a", "--resume=~", "--set=pretrained=~/w.pt"]
    arguments = parse_arguments(what)
    assert (arguments.run_dir, arguments.resume) == (tmp_path / "runs/a", str(tmp_path))
    config = arguments.config
    assert [config.data_path, config.limits_report] == [f"{tmp_path}/data", f"{tmp_path}/l.json"]
    assert config.pretrained == Config(pretrained="~/w.pt").pretrained == f"{tmp_path}/w.pt"
    parser = new_parser("runs", "")
    parser.add_argument("--out", type=path_argument)
    assert parser.parse_args(["--out=~/page~"]).out == tmp_path / "page~"


@pytest.mark.parametrize("option", ["--help", "--list-configs", "--print-config", "--explain"])
def test_questions_are_answered_without_torch(option):
    command = [sys.executable, "-X", "importtime", "train.py", option]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    imported = re.findall(r"\| +([\w.]+)$", answer.stderr, re.MULTILINE)
    assert answer.returncode == 0 and "utils.config.command_line" in imported
    assert not [name for name in imported if name.split(".")[0] in ("torch", "torchvision", "numpy")]
    # stderr holds only the import times
    assert [line for line in answer.stderr.splitlines() if not line.startswith("import time:")] == []
    assert len(answer.stdout.splitlines()) > 10
    assert option != "--help" or "0 finished, 2 bad usage or configuration, 3 data" in answer.stdout


def test_listed_changes_can_be_given_to_set_and_a_printed_block_can_be_read(tmp_path, capsys):
    """A block's line, `NAME  KEY=VALUE, ...`, repeated as --set on default gives the block."""
    lines = answered(capsys, "--list-configs").splitlines()
    names = re.findall(r"^([\w.+-]+):", CIFAR100.read_text(encoding="utf-8"), re.MULTILINE)
    assert names[0] == "default" and [line.split()[0] for line in lines] == names
    for line in lines:
        name, changes = line.split(maxsplit=1)
        overrides = [] if changes == "every key as in default" else re.split(r", (?=\w+=)", changes)
        assert load_config(CIFAR100, "default", overrides) == load_config(CIFAR100, name)
    arguments = ("--config=bs256", "--set=data_path=/some where/#1")
    printed = answered(capsys, *arguments, "--print-config").splitlines()
    changes = ["batch_size: 256  # default: 128", "lr: 0.14  # default: 0.1"]
    assert printed[0].startswith("# bs256 in config/cifar100.yaml") and set(changes) <= set(printed[1:4])
    copy = tmp_path / "copy.yaml"
    copy.write_text("again:\n" + "".join(f"  {line}\n" for line in printed), encoding="utf-8")
    assert load_config(copy, "again") == parse_arguments(arguments).config


def test_keys_are_explained(capsys):
    rate, amp = answered(capsys, "--config=bs256", "--explain", "lr", "enable_amp").split("\n\n")
    about = ["Peak learning rate, before lr_scale_rule.", RATE, "default: 0.1; in bs256: 0.14"]
    assert rate.split("\n  ") == ["lr (optimizer)", *about, "acts in: grep -rnwI 'lr' train.py utils models"]
    assert amp.startswith("enable_amp (precision)\n  AMP: forward under autocast, loss in float32; auto: not in bf16")
    allowed = "allowed: auto, true, false\n  default: false\n"
    assert amp.endswith(f"\n  {allowed}  acts in: grep -rnwI 'AMP:' train.py utils models\n")


def test_every_key_is_listed_and_used_where_explain_says(capsys):
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
    assert only_declared == ["lr_scale_rule"]  # read by peak_lr next to its declaration


def test_a_file_of_the_tutorials_shape_is_read_unchanged(tmp_path, refused):
    """A `default` without this project's own keys, which are its defaults; YAML 1.1's tags and words."""
    path, own = tmp_path / "cifar100.yaml", {"data_path": "./elsewhere"}
    text = "default: &D\n  lr: !!float 0.1\n  momentum: !!float 0.9\n  data_path: './elsewhere' # downloaded\n"
    text += "  log_to_screen: !!bool True\n\n#  --- Scaling\nlarge:\n  <<: *D\n  lr: !!float 0.28\n  enable_amp: True\n"
    path.write_text(text)
    for name, changes in (("default", own), ("large", own | {"lr": 0.28, "enable_amp": True})):
        assert parse_arguments([f"--yaml_config={path}", f"--config={name}"]).config == Config(**changes)
    path.write_text(text.replace("momentum:", "momentun:"))
    message = refused(f"--yaml_config={path}", "--config=large")
    assert message == f"error: {path}:3: unknown key 'momentun'. Did you mean 'momentum'?\n"


@pytest.mark.parametrize(("arguments", "message"), [
    (["--set", "lr"], "--set lr: expected KEY=VALUE, for example --set lr=0.2"),
    (["--set", "lr="], f"--set lr=: lr has no value; {RATE}"),
    (["--config=bs256_amp"], "--config=bs256_amp: config/cifar100.yaml has no such block. Did you mean 'bs256-amp'?"),
    (["--confg=bs256"], "unrecognized arguments: --confg=bs256; --help lists the options"),
    (["--run-dir="], "argument --run-dir: is empty; is a variable of the command line not set?")])  # fmt: skip
def test_bad_usage_is_an_error_of_one_line(arguments, message, refused):
    # the last --config wins: a block with a warm-up unless the case names another
    assert refused("--config=bs2048-warmup-opt", *arguments).startswith("error: " + message)


def answered(capsys, *arguments):
    with pytest.raises(SystemExit) as leaving:
        parse_arguments(arguments)
    out, err = capsys.readouterr()
    assert (leaving.value.code, err) == (0, "")
    return out
