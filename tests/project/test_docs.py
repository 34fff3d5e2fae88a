"""README and docs: configurations, links and error messages exist, and commands parse."""

import ast
import importlib
import re
import shlex
import subprocess

import pytest

from tests.conftest import BLOCKS, ROOT
from utils import errors
from utils.config.command_line import parse_arguments
from utils.errors import ExpectedError

NAMED_PAGES = ("README.md", "CONTRIBUTING.md", "tests/README.md", "results/README.md", "results/reference/README.md")
PAGES = sorted([*(ROOT / name for name in NAMED_PAGES), *(ROOT / "docs").glob("**/*.md")])
EVIDENCE = sorted({*(ROOT / "results").glob("**/*.md")} - {*PAGES})  # with commands of their time
SCRIPTS = sorted(ROOT.glob("*.slr"))
ABBREVIATION = re.compile(r"`([A-Z][A-Z0-9]+)`\s+(?:stands )?for\s+`(--[^`]+)`")  # a page's own abbreviations
SHELL_VARIABLE = re.compile(r'^([A-Z]+)="(--[^"]+|\$[^"]+)"$', re.MULTILINE)
OWN_FILE = re.compile(r"```yaml\n(.*?)```", re.DOTALL)
OPTION = re.compile(r"--[a-z][\w-]*")
COMMAND = re.compile(r"(?:python3?|torchrun|srun|mpirun|mpiexec|nsys)\b.*?((?:train\.py|-m tools\.[a-z_]+).*)")


def commands():
    """Return (page:line, command starting at `train.py` or `-m tools.NAME`) from code blocks and inline code."""
    found = []
    for page in PAGES:
        text = re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8"))
        short = dict(ABBREVIATION.findall(text))
        for name, value in SHELL_VARIABLE.findall(text):  # a variable may use earlier ones
            short[f"${name}"] = " ".join(short.get(word, word) for word in value.split())
        for number, line in enumerate(text.splitlines(), start=1):
            for code in re.findall(r"`([^`]+)`", line) or [line]:
                for part in re.split(r"&&|\|\|| &$", code):
                    match = COMMAND.search(part)
                    if match and "..." not in match.group(1):
                        command = " ".join(short.get(word, word) for word in match.group(1).split())
                        found.append((f"{page.relative_to(ROOT)}:{number}", command))
    for place, least in (("README.md:", 5), ("docs/configuration.md:", 11), ("docs/course/", 31)):
        assert sum(where.startswith(place) for where, _ in found) >= least, place
    return list(dict.fromkeys(found))


@pytest.mark.parametrize(("where", "command"), [pytest.param(*case, id=": ".join(case)) for case in commands()])
def test_command_parses(where, command, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    program, *arguments = shlex.split(command.removeprefix("-m "), comments=True)
    if program == "train.py":
        shown = {"--list-configs", "--print-config", "--help", "-h"}
        with pytest.raises(SystemExit) as left:
            parse_arguments([word for word in arguments if word not in shown] + ["--print-config"])
        assert left.value.code == 0, capsys.readouterr().err
        return
    name = program.removeprefix("tools.")
    is_package = (ROOT / "tools" / name).is_dir()
    module = importlib.import_module(f"tools.{name}.__main__" if is_package else f"tools.{name}")
    with pytest.raises(SystemExit) as left:
        module.main([*arguments[: name == "bench"], "--help"])
    assert left.value.code == 0
    printed = capsys.readouterr().out
    assert "option_strings" not in printed, "a % in a help text"
    assert {word.split("=")[0] for word in arguments if word.startswith("--")} <= set(OPTION.findall(printed))


def test_sbatch_commands_can_be_submitted(monkeypatch):
    """Each script of `sbatch [OPTIONS] SCRIPT [ARGUMENTS]` exists and has the options, and train.py the arguments."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    seen = set()
    for page in [*PAGES, *SCRIPTS]:
        text = page.read_text(encoding="utf-8")
        for options, script, arguments in re.findall(r"\bsbatch ((?:\[?-[^\s`]+ +)*)(\w+\.slr)\b *([^#`\n]*)", text):
            known = re.findall(r"^#SBATCH (--[a-z-]+)", (ROOT / script).read_text(encoding="utf-8"), re.MULTILINE)
            assert set(OPTION.findall(options)) <= {*known, "--array"}, f"{page.name}: sbatch {options}{script}"
            if arguments.startswith("--") and "own.yaml" not in arguments:
                assert parse_arguments(shlex.split(arguments)).config.seed in (0, 3)
            seen.add(page)
    assert {ROOT / "README.md", ROOT / "docs/course/many_devices.md", ROOT / "docs/slurm.md", *SCRIPTS} <= seen


@pytest.mark.parametrize("path", [*PAGES, *SCRIPTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_configurations_exist(path):
    known = {name for _, name in (block.values for block in BLOCKS)}
    text = path.read_text(encoding="utf-8")
    named = set(re.findall(r"--config(?:=| (?=bs\d))([a-z0-9][\w.+-]*)", text))
    named |= {name for names in re.findall(r"--configs=([a-z0-9][a-z0-9,-]+)", text) for name in names.split(",")}
    named |= set(re.findall(r"SUBMIT_CONFIG:-([\w.+-]+)", text))
    own = {name for block in OWN_FILE.findall(text) for name in re.findall(r"^([\w.+-]+):", block, re.MULTILINE)}
    assert named <= known | own


@pytest.mark.parametrize("page", [*PAGES, *EVIDENCE], ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_figures_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        headings = re.findall("^#+ (.*)", linked.read_text("utf-8").lower(), re.MULTILINE) if anchor else []
        assert anchor in ["", *(re.sub(r"[^\w -]", "", text).replace(" ", "-") for text in headings)], target


def searches():
    """Return the messages quoted in the first columns of docs/troubleshooting.md as patterns: `...` is any text."""
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8").partition("## Exit statuses")[0]
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    quoted = [message for row in rows for message in re.findall("`([^`]+)`", row.split(" | ")[0])]
    return [re.compile(".*".join(map(re.escape, message.split("..."))), re.DOTALL) for message in quoted]


def printed_texts():
    """Return the scripts and all string literals of the code; what varies in f-strings becomes {}."""
    found = [path.read_text(encoding="utf-8") for path in [*SCRIPTS, ROOT / "deploy/check_node.sh"]]
    folders = [path for name in ("models", "utils", "tools") for path in (ROOT / name).rglob("*.py")]
    for path in [ROOT / "train.py", ROOT / "api.py", *folders]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_troubleshooting_quotes_only_texts_of_the_code():
    """After rewording a message, reword it in docs/troubleshooting.md too."""
    known = printed_texts()
    assert [search.pattern for search in searches() if not any(map(search.search, known))] == []


def test_troubleshooting_has_the_exit_status_of_every_error():
    table = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8").partition("## Exit statuses")[2]
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ExpectedError)]
    assert {str(kind.exit_status) for kind in kinds} <= set(re.findall(r"^\| (\d+) \|", table, re.MULTILINE))


def test_searches_for_tags_find_each_of_them():
    pages = "".join(page.read_text("utf-8") for page in PAGES)
    searches = set(re.findall(r"grep -rnE? \"[^\"]+\" .*?utils", pages))
    assert len(searches) > 6
    for search in searches:
        tags = re.findall(r"[A-Z]{2,}", search)
        found = subprocess.run(shlex.split(search), cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert all(found.count(f"{tag}:") > 1 for tag in tags), search


def test_the_tests_that_reliability_names_exist():
    names = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", (ROOT / "docs/reliability.md").read_text(encoding="utf-8"))
    assert len(names) > 5
    assert not [name for file, name in names if f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8")]
