"""The house stays in order: imports run one way and do nothing else; no file knows the machine it was written on."""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HOUSES = ("models", "tools", "utils")
ENTRIES = ("train", "train_simple")

FILES = [ROOT / f"{name}.py" for name in ENTRIES] + [path for name in HOUSES for path in (ROOT / name).rglob("*.py")]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in sorted(FILES)
}
# Packages that a machine may lack: the module that needs one is itself imported late.
OPTIONAL = {
    "cycler",
    "lightning",
    "matplotlib",
    "mlflow",
    "nvidia",
    "optuna",
    "plotly",
    "pynvml",
    "timm",
    "triton",
    "wandb",
}


@cache
def documented_imports() -> dict[str, set[str]]:
    """{package of utils: packages of utils that it may import}, from docs/architecture.md."""
    table = {}
    for line in (ROOT / "docs/architecture.md").read_text(encoding="utf-8").splitlines():
        if row := re.match(r"\| `utils/(\w+)(?:\.py|/)` \|.*\|([^|]*)\|$", line):
            table[row[1]] = set(re.findall(r"`(\w+)`", row[2]))
    return table


def allowed(importer: str, imported: str) -> bool:
    """Whether one module of this repository may import another."""
    house, _, rest = importer.partition(".")
    if house == "models":
        return (
            imported in ("utils.errors", "utils.base_config", "utils.user_code")
            or imported.split(".", maxsplit=1)[0] == "models"
        )
    if house == "utils" and rest:
        package, other = rest.split(".")[0], imported.split(".")
        if package == "config" and imported == "models.config":
            return True
        if other[0] != "utils":
            return False
        return len(other) == 1 or other[1] == package or other[1] in documented_imports()[package]
    return imported.split(".", maxsplit=1)[0] in ("utils", "models", *(("tools",) if house == "tools" else ()))


def imports(source: str, modules: set[str]) -> Iterator[str]:
    """The modules among `modules` that a source text imports anywhere, but for the type checker."""
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from {name if name in modules else node.module or "" for name in names} & modules


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module: str) -> None:
    found = set(imports(MODULES[module].read_text(encoding="utf-8"), set(MODULES)))
    assert sorted(name for name in found if not allowed(module, name)) == []


def test_the_documented_imports_are_those_of_the_code() -> None:
    """Each arrow of the table exists, each package is in it, and there are no circles between packages."""
    found: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        house, _, rest = module.partition(".")
        if house == "utils" and rest:
            package = rest.split(".")[0]
            known = imports(path.read_text(encoding="utf-8"), set(MODULES))
            others = {name.split(".")[1] for name in known if name.startswith("utils.")} - {package}
            found[package] = found.get(package, set()) | others
    assert found == documented_imports()
    list(TopologicalSorter(found).static_order())


def test_keys_and_command_line_need_no_torch() -> None:
    names = ["utils.config.command_line", *(name for name in MODULES if name.endswith(("config", "config.config")))]
    program = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60, check=False).returncode == 0


def test_the_step_needs_no_tensorboard() -> None:
    program = "import sys, utils.training.step; sys.exit(any('tensorboard' in name for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
)
def test_files_named_in_documents_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    named = re.findall(r"(?<![\w/.])((?:utils|models|tools|tests|config|docs)/[\w/]+\.(?:py|yaml|md|json))", text)
    assert [path for path in named if "NAME" not in path and not (ROOT / path).exists()] == []


def test_imports_have_no_cycle() -> None:
    graph = {name: set(imports(path.read_text(encoding="utf-8"), set(MODULES))) for name, path in MODULES.items()}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError, which shows the cycle
    assert order.index("utils.errors") < order.index("utils.config") < order.index("train")


@pytest.mark.parametrize(
    ("importer", "source", "verdict"),
    [
        ("tools.report", "import train", False),
        ("utils.training.step", "from models import build_model", False),
        ("utils.training.step", "def f():\n    from tools.bench import common", False),
        ("models.resnet", "from utils.training.optimizers.build import Schedule", False),
        ("models.resnet", "from utils import optim", False),
        ("utils.training.step", "if TYPE_CHECKING:\n    from train import Trainer", True),
        ("utils.training.step", "if TYPE_CHECKING:\n    pass\nelse:\n    from train import Trainer", False),
        ("train", "import tools.bench.common", False),
        ("train", "import torch, utils.config.command_line", True),
    ],
)
def test_the_check_of_imports_sees(importer: str, source: str, verdict: bool) -> None:
    known = {
        *MODULES,
        "tools",
        "tools.bench",
        "tools.bench.common",
        "utils.training.optimizers.build",
        "utils.run.checkpoint.io",
        "train",
        "models",
    }
    assert all(allowed(importer, name) for name in imports(source, known)) == verdict


def test_importing_does_nothing_else(tmp_path: Path) -> None:
    """Every module, imported in one bare process: no word, no file, no CUDA, no signal handler, no drawn number."""
    program = f"""
import importlib, signal, sys
sys.path.insert(0, {str(ROOT)!r})
sys.dont_write_bytecode = True
import torch
handlers = [signal.getsignal(number) for number in signal.valid_signals()]
random_state = torch.get_rng_state()
threads, algorithms = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
for name in {sorted(MODULES)!r}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {OPTIONAL!r}:
            raise
assert not torch.cuda.is_initialized(), "CUDA was started"
assert not torch.distributed.is_initialized(), "a process group was started"
assert handlers == [signal.getsignal(number) for number in signal.valid_signals()], "a signal handler was set"
assert random_state.equal(torch.get_rng_state()), "a random number was drawn"
assert threads == torch.get_num_threads(), "the number of threads was changed"
assert algorithms == torch.are_deterministic_algorithms_enabled()
"""
    process = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_pip_does_not_bring_along_is_known_as_optional() -> None:
    """So that what the pages do after `pip install .` works, such as an export."""
    listed = re.search(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text("utf-8"), re.M | re.S)
    assert listed is not None
    brought = set(re.findall(r'"(\w+)', listed[1])) | {
        "PIL",
        "jinja2",
        "packaging",
        "pydantic_core",
        "typing_extensions",
    }  # by others
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in FILES]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    packages = {name.partition(".")[0] for name in names} - {*sys.stdlib_module_names, *ENTRIES, *HOUSES}
    assert packages <= brought | OPTIONAL


# Folders of one person's machine; those of the same name below another folder are not meant.
MACHINE_PATH = re.compile(r"(?<![\w.~$}-])/(work|root|tmp/venv|tmp/cifar)(?![\w-])")


def test_no_tracked_file_names_a_path_of_one_machine() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git checkout, so that tracked files are not known")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        try:
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
        except UnicodeDecodeError:
            continue  # a picture or an archive
        found += [
            f"{name}:{number}: {line.strip()[:100]}"
            for number, line in enumerate(text.splitlines(), start=1)
            if MACHINE_PATH.search(line)
        ]
    assert found == []


def test_the_check_of_paths_sees() -> None:
    folder = "/" + "work"
    assert MACHINE_PATH.search(f"cd {folder}/main")
    assert MACHINE_PATH.search(f"'{folder}'")
    assert not MACHINE_PATH.search(f"data{folder}/main {folder}shop $HOME{folder}")


def commands() -> dict[str, tuple[str, str]]:
    """The table of __main__.py."""
    tree = ast.parse((ROOT / "__main__.py").read_text(encoding="utf-8"))
    [table] = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMMANDS"
    ]
    return ast.literal_eval(table)


def test_every_name_in_tools_is_a_command() -> None:
    """What several of them share is in tools/shared/."""
    names = {path.stem for path in (ROOT / "tools").iterdir()} - {"__init__", "__pycache__", "shared"}
    assert {module for module, _ in commands().values()} == {"train"} | {f"tools.{name}" for name in names}


def test_a_package_has_at_most_twelve_entries() -> None:
    """A newcomer finds a thing by `ls`. In tools/ and tools/bench/ each entry is a command."""
    packages = {path.parent for path in FILES if path.name == "__init__.py"} - {ROOT / "tools", ROOT / "tools/bench"}
    entries = {package: {path.stem for path in package.iterdir()} - {"__init__", "__pycache__"} for package in packages}
    assert {str(package.relative_to(ROOT)): len(names) for package, names in entries.items() if len(names) > 12} == {}


def test_every_package_is_installed() -> None:
    listed = set(
        re.findall(r'^    "(resnet50_at_scale[\w.]*)",$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    )
    folders = {path.relative_to(ROOT).parent for path in (*FILES, ROOT / "config/schema.json")} - {Path(".")}
    assert listed == {"resnet50_at_scale"} | {"resnet50_at_scale." + ".".join(folder.parts) for folder in folders}
