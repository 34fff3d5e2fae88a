"""The installed command: all files in one package, and the same behaviour as a checkout from any folder."""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.conftest import ROOT, TINY, as_options
from tests.processes import without_launcher
from utils.program import VERSION

IN_PYTHON = TINY | {"config": "quickstart", "log_to_screen": False}
SETTINGS = as_options(TINY | {"data_loader": "torchvision", "num_data_workers": 1})


def tracked(*patterns):
    """Return the checkout's files that git tracks or does not ignore."""
    words = ["git", "ls-files", "-co", "--exclude-standard", *patterns]
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git checkout, so that its files are not known")
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return {Path(name) for name in listed if (ROOT / name).exists()}


def test_help_needs_no_torch_and_only_a_known_command_runs_whatever_the_working_directory_holds(tmp_path):
    command = [sys.executable, "-X", "importtime", str(ROOT)]
    how = {"capture_output": True, "text": True, "timeout": 60}
    answer = subprocess.run([*command, "--help"], check=True, **how)
    commands = runpy.run_path(str(ROOT / "__main__.py"))["COMMANDS"]
    assert all(f"  {name} " in answer.stdout for name in commands) and " torch\n" not in answer.stderr
    assert all(module in ("train", f"tools.{name}") for name, (module, _) in commands.items())
    wrong = subprocess.run([sys.executable, str(ROOT), "trian"], check=False, **how)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: no such command: trian; expected one of: train, ")
    (tmp_path / "utils.py").write_text("raise SystemExit('the wrong module')\n")
    program = f"import runpy; runpy.run_path({str(ROOT / '__main__.py')!r}, run_name='__main__')"
    known = [sys.executable, "-c", program, "train", "--explain", "lr"]  # -c searches the working directory first
    assert subprocess.run(known, cwd=tmp_path, check=True, **how).stdout.startswith("lr (optimizer)")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A virtual environment with this one's libraries and the installed project, whose source is removed."""
    pytest.importorskip("setuptools", reason="setuptools, which builds the package, is not installed")
    folder = tmp_path_factory.mktemp("installed")
    source, environment = folder / "source", folder / "environment"
    for path in tracked():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path)
    python = environment / "bin/python"
    run([sys.executable, "-m", "venv", "--without-pip", str(environment)], folder)
    (packages(environment) / "libraries.pth").write_text(sysconfig.get_paths()["purelib"])
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-build-isolation"]
    run([*pip, str(source)], folder)
    shutil.rmtree(source)
    return environment


def packages(environment):
    """Return the folder of an environment's packages."""
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(run([str(environment / "bin/python"), "-c", code], environment.parent).strip())


@pytest.mark.slow
def test_everything_is_installed_in_one_package(environment):
    inside = packages(environment)
    assert {path.name.partition("-")[0] for path in inside.iterdir()} == {"libraries.pth", "resnet50_at_scale"}
    files = {path.relative_to(inside / "resnet50_at_scale") for path in (inside / "resnet50_at_scale").rglob("*")}
    wanted = {path for path in tracked("models", "tools", "utils", "config") if path.suffix != ".md"}
    assert {*wanted, Path("train.py"), Path("__main__.py"), Path("py.typed")} <= files
    [metadata] = inside.glob("resnet50_at_scale-*.dist-info/METADATA")
    assert f"Version: {VERSION}" in metadata.read_text().splitlines()
    assert run([str(environment / "bin/resnet50-at-scale"), "--version"], inside) == f"resnet50-at-scale {VERSION}\n"


@pytest.mark.slow
def test_the_documented_experiment_runs_as_it_stands(environment, tmp_path):
    page = (ROOT / "docs/own_code.md").read_text()
    parts = dict(re.findall(r"<!-- experiment: (\S+) -->\n```\w+\n(.*?)```", page, re.DOTALL))
    script = f"PATH={shlex.quote(str(environment / 'bin'))}:$PATH\n{parts.pop('commands')}"
    for name, text in parts.items():
        (tmp_path / name).write_text(text)
    assert "as recorded in training: equal to the last digit" in run(["bash", "-euc", script], tmp_path)
    assert len((tmp_path / "predictions/predictions.csv").read_text().splitlines()) == 2001
    exported = {path.name for path in (tmp_path / "weights").iterdir()}
    assert exported == {"MODEL_CARD.md", "model.pt2", "model.safetensors"}
    assert json.loads((tmp_path / "figures.json").read_text())["acc1"] > 0.2


@pytest.mark.slow
def test_installed_it_runs_from_another_folder(environment, tmp_path):
    """One process, two ranks with loader workers, tools that start train.py, blocks next to the code, and modules in
    the user's folder that have names of this program's modules."""
    python, folder = environment / "bin/python", tmp_path / "elsewhere"
    folder.mkdir()
    for name in ("utils", "models", "train"):
        (folder / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    short = ["--yaml_config=cifar100.yaml", "--config=bs128", *SETTINGS]
    command = str(environment / "bin/resnet50-at-scale")
    run([command, "train", *short], folder)
    fetch = "resnet50-at-scale prepare_data --dataset cifar100 --data_path data"
    assert fetch in run([command, "train", "--dry-run"], folder, status=3)
    torchrun = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    run([*torchrun, "-m", "resnet50_at_scale", "train", *short, "--run-dir=expts/two"], folder)
    assert "two" in run([command, "runs", "expts"], folder)
    small = [*short, "--set=limit_train_batches=20", "--set=max_epochs=1", "--set=checkpoint_every_steps=1"]
    assert "verdict: EQUAL" in run([command, "verify_resume", *small, "--kills=1", "--seed=37"], folder)
    bench = ["--nproc=1", "--iters=2", "--warmup=1", "--trials=1"]
    assert "strong 1" in run([command, "bench", "scaling", *short, *bench], folder)
    program = f"from resnet50_at_scale.api import load, train; print(load(train(**{IN_PYTHON}).folder).class_names)"
    assert "hourglass" in run([str(python), "-c", program], folder)
    assert {path.name for path in folder.iterdir()} == {"expts", "models.py", "train.py", "utils.py"}


def run(command, folder, status=0):
    """Run a command and return its output."""
    environment = {name: value for name, value in without_launcher(os.environ).items() if name != "PYTHONPATH"}
    how = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    ended = subprocess.run(command, cwd=folder, env=environment, check=False, **how)
    assert ended.returncode == status, f"{command}\n{ended.stdout}"
    return ended.stdout
