"""The installed command: everything below one name, and what a checkout does, from any folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.conftest import ROOT, TINY
from tests.processes import without_launcher
from tests.test_layout import commands
from tools.command_line import as_settings

SETTINGS = [f"--set={setting}" for setting in as_settings(TINY | {"data_loader": "torchvision", "num_data_workers": 1})]


def tracked(*patterns: str) -> set[Path]:
    """Files of the checkout that git knows or would take."""
    words = ["git", "ls-files", "-co", "--exclude-standard", *patterns]
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git checkout, so that its files are not known")
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return {Path(name) for name in listed if (ROOT / name).exists()}


def test_the_command_answers_without_torch_and_refuses_what_it_has_not() -> None:
    command = [sys.executable, "-X", "importtime", str(ROOT)]
    answer = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert all(f"  {name} " in answer.stdout for name in commands())
    assert " torch\n" not in answer.stderr and " utils\n" not in answer.stderr
    wrong = subprocess.run(
        [sys.executable, str(ROOT), "trian"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: trian is no command; expected one of: train, ")


@pytest.mark.slow
def test_installed_it_runs_from_another_folder(tmp_path: Path) -> None:
    """In an environment of its own, which has this one's libraries: one process, two ranks with loader workers, tools
    that start train.py, blocks beside the code, and modules of this program's names in the user's folder."""
    pytest.importorskip("setuptools", reason="setuptools is not installed, which builds the package")
    source, environment, folder = (tmp_path / name for name in ("source", "environment", "elsewhere"))
    for path in tracked():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path)
    python = environment / "bin/python"
    run([sys.executable, "-m", "venv", "--without-pip", str(environment)], tmp_path)
    inside = Path(
        run([str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], tmp_path).strip()
    )
    (inside / "libraries.pth").write_text(sysconfig.get_paths()["purelib"])
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-build-isolation"]
    run([*pip, str(source)], tmp_path)
    shutil.rmtree(source)
    assert {path.name.partition("-")[0] for path in inside.iterdir()} == {"libraries.pth", "resnet50_at_scale"}
    files = {path.relative_to(inside / "resnet50_at_scale") for path in (inside / "resnet50_at_scale").rglob("*")}
    wanted = {path for path in tracked("models", "tools", "utils", "config") if path.suffix != ".md"}
    assert {*wanted, Path("train.py"), Path("__main__.py")} <= files

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
    small = [*short, "--set=limit_train_batches=2", "--set=max_epochs=1"]
    assert "verdict: EQUAL" in run([command, "verify_resume", *small, "--kills=1"], folder)
    bench = ["--nproc=1", "--steps=2", "--dropped=1", "--trials=1"]
    assert "strong 1" in run([command, "bench", "scaling", *short, *bench], folder)
    assert {path.name for path in folder.iterdir()} == {"expts", "models.py", "train.py", "utils.py"}


def run(command: list[str], folder: Path, status: int = 0) -> str:
    """All that the command prints."""
    environment = {name: value for name, value in without_launcher(os.environ).items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    assert ended.returncode == status, f"{command}\n{ended.stdout}"
    return ended.stdout
