"""The layout of the code: imports go one way and have no side effects; no file names a path of one machine."""

import ast
import importlib
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest
import torch

from tests.conftest import ROOT
from tests.processes import Ended, Job

PACKAGES = ("models", "tools", "utils")
SCRIPTS = ("api", "train", "train_simple")

FILES = [ROOT / f"{name}.py" for name in SCRIPTS] + [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in sorted(FILES)
}
# Packages that a machine may lack; modules that need one are imported only where they are used.
OPTIONAL = {
    "cycler", "lightning", "matplotlib", "mlflow", "nvidia", "optuna", "plotly", "pynvml", "timm", "triton", "wandb",
}  # fmt: skip


def imports(source):
    """Yield the modules of this repository that a source text imports anywhere, except for the type checker."""
    nodes: list[ast.AST] = [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            nodes += node.orelse
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from {name if name in MODULES else node.module or "" for name in names} & MODULES.keys()


IMPORTS = {module: set(imports(path.read_text(encoding="utf-8"))) for module, path in MODULES.items()}


def allowed(importer, imported):
    """Whether one module of this repository may import another."""
    top, other = importer.partition(".")[0], imported.partition(".")[0]
    if top == "models":
        return other == "models" or imported in ("utils.errors", "utils.base_config", "utils.user_code")
    if top == "utils":
        return other == "utils" or (importer.startswith("utils.config") and imported == "models.config")
    return other in ("utils", "models", *{"tools": ("tools",), "api": ("tools", "train")}.get(top, ()))


def test_imports_go_one_way_without_cycles():
    pairs = [(module, name) for module, names in IMPORTS.items() for name in names]
    assert [pair for pair in pairs if not allowed(*pair)] == []
    list(TopologicalSorter(IMPORTS).static_order())  # raises CycleError, which shows the cycle


def test_the_documented_imports_equal_the_codes():
    """Each import in the table exists, each package is in it, and there are no cycles between packages."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `utils/(\w+)(?:\.py|/)` \|.*\|([^|]*)\|$", page, re.MULTILINE)
    found: dict[str, set[str]] = {}
    for module, names in IMPORTS.items():
        if module.startswith("utils."):
            package = module.split(".")[1]
            others = {name.split(".")[1] for name in names if name.startswith("utils.")} - {package}
            found[package] = found.get(package, set()) | others
    assert found == {package: set(re.findall(r"`(\w+)`", cell)) for package, cell in rows}
    list(TopologicalSorter(found).static_order())


DOCUMENTS = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_named_in_documents_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    named = re.findall(r"(?<![\w/.])((?:utils|models|tools|tests|config|docs)/[\w/]+\.(?:py|yaml|md|json))", text)
    assert [path for path in named if "NAME" not in path and not (ROOT / path).exists()] == []


def state_of_the_process():
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    settings = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.get_rng_state().tolist()
    return handlers, settings, torch.cuda.is_initialized(), torch.distributed.is_initialized(), os.listdir()


def import_everything(folder):
    """In a process of its own, which may have imported some modules before."""
    os.chdir(folder)
    sys.path.insert(0, str(ROOT))
    before = state_of_the_process()
    for name in MODULES:
        sys.modules.pop(name, None)
    for name in sorted(MODULES):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in OPTIONAL:
                raise
    assert state_of_the_process() == before


def test_imports_have_no_side_effects(tmp_path):
    """Nothing is printed or written, no CUDA started, no signal handler, random state or setting of torch changed."""
    (empty := tmp_path / "empty").mkdir()
    assert Job(tmp_path, import_everything, [empty], [{}]).wait() == [Ended(0, "", "")]


def test_every_imported_package_is_a_dependency_or_optional():
    listed = re.search(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text("utf-8"), re.M | re.S)
    assert listed is not None
    indirect = {"PIL", "jinja2", "packaging", "pydantic_core", "sqlalchemy", "typing_extensions"}
    installed = set(re.findall(r'"(\w+)', listed[1])) | indirect
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in FILES]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    packages = {name.partition(".")[0] for name in names} - {*sys.stdlib_module_names, *SCRIPTS, *PACKAGES}
    assert packages <= installed | OPTIONAL


def test_no_tracked_file_names_a_path_of_one_machine():
    """Top-level folders of one person's machine, not folders of the same name below another one."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so the tracked files are unknown")
    pattern = r"(?<![\w.~$}-])/(work|root|tmp/venv|tmp/cifar)(?![\w-])"
    found = subprocess.run(["git", "grep", "-InP", pattern], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (1, "")  # 1: nothing found


def test_every_name_in_tools_is_a_command_and_other_packages_have_at_most_twelve_entries():
    """Except what several tools use. So that newcomers find things."""
    others = {"__init__", "__pycache__", "common", "trained"}
    names = {path.stem for path in (ROOT / "tools").iterdir()} - others
    commands = runpy.run_path(str(ROOT / "__main__.py"))["COMMANDS"].values()
    assert {module for module, _ in commands} == {"train"} | {f"tools.{name}" for name in names}
    packages = {path.parent for path in FILES if path.name == "__init__.py"}
    packages -= {ROOT / "tools", ROOT / "tools/bench", ROOT / "utils"}
    entries = {package: {path.stem for path in package.iterdir()} - {"__init__", "__pycache__"} for package in packages}
    assert {str(package.relative_to(ROOT)): len(names) for package, names in entries.items() if len(names) > 12} == {}


# Lines at most, a promise: new code pays with deleted code (CONTRIBUTING.md). Lower a number when code has gone.
SIZES = {"product": 14_000, "tests": 16_000, "docs": 2_000}
PACKAGES_OF_THE_PRODUCT = {
    "models": 290, "tools/bench": 1_115, "tools/doctor": 820, "tools": 4_025, "utils/config": 470, "utils/data": 2_065,
    "utils/distributed": 825, "utils/run": 1_640, "utils/kernels": 1_280, "utils/training": 1_885, "utils/verify": 270,
}  # fmt: skip


def count_lines(*places, endings=(".py", ".cpp", ".h", ".html", ".sh")):
    listed = subprocess.run(["git", "ls-files", "-z", *places], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in filter(None, listed.stdout.split("\0")) if name.endswith(endings)]
    return sum(path.read_bytes().count(b"\n") for path in files if path.is_file())


def test_product_tests_and_docs_keep_their_size():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so the tracked files are unknown")
    scripts = ("train.py", "train_simple.py", "api.py", "__main__.py")
    found = {name: count_lines(name) for name in ("tests", *PACKAGES_OF_THE_PRODUCT)}
    found |= {"product": count_lines(*scripts, *PACKAGES), "docs": count_lines("docs/*.md", endings=(".md",))}
    sizes = SIZES | PACKAGES_OF_THE_PRODUCT
    over = {name: lines for name, lines in found.items() if lines > sizes[name]}
    assert over == {}, "over its size; delete as much as was added"
