"""The tutorial's exercises: the tests of each pass with its solution, and fail as it is shipped and with mistakes."""

import ast
import subprocess
import sys
from collections import Counter
from xml.etree import ElementTree

import pytest

from tests.conftest import ROOT

EXERCISES = sorted((ROOT / "docs/course/exercises").glob("*.py"))
SOLUTIONS = ROOT / "docs/course/exercises/solutions"
BLANK = "raise NotImplementedError"
# Mistakes that the tests of an exercise must find: a part of its solution, and what replaces it.
MISTAKES = {
    "accumulation": [(" * (len(some) / len(images))", " / -(-len(images) // micro_batch_size)"),
        ("    optimizer.zero_grad()\n", ""),
        ("images.split(micro_batch_size), labels.split(micro_batch_size)", "[images], [labels]")],
    "autocast": [("layer.weight.bfloat16()", "layer.weight.detach().bfloat16()"), (", *shape", "")],
    "averaging": [("        flat /= dist.get_world_size()\n", ""), ("filled + size > bucket_bytes", "False")],
    "channels_last": [("    optimizer.zero_grad()\n", ""),
        ("return network.to(memory_format=torch.channels_last)", "return network")],
    "loss_scaling": [("        optimizer.zero_grad()\n", ""),
        ("                gradient.div_(self.scale)\n", "                pass\n"),
        ("for gradient in gradients)", "for gradient in gradients[:1])"),
        ("bool(gradient.isfinite().all())", "not bool(gradient.isnan().any())"),
        ("self.scale * 2, 0", "self.scale * 2, self.good_steps")],
    "resuming": [("torch.save(state, partial)", "torch.save(state, path); partial = path"),
        ('    optimizer.load_state_dict(state["optimizer"])\n', ''),
        ('    torch.set_rng_state(state["generator"])\n', ''), ("return epoch, batch", "return epoch, 0")],
    "sampling": [("num_images, world_size))", "num_images // world_size * world_size, world_size))"),
        ("sum(correct) / sum(counted)", "sum(c / n for c, n in zip(correct, counted)) / len(counted)")],
    "warmup": [("math.sqrt(batch_size / reference_batch_size)", "batch_size / reference_batch_size"),
        ("rate * (step + 1) / warmup_steps", "rate * step / warmup_steps"),
        ("step + 1 >= warmup_steps", "step + 1 >= int(warmup_epochs) * steps_per_epoch")],
}  # fmt: skip


def count_outcomes(answers, folder):
    """Run the tests of all answers, {name: text}, in one process; return how many of each passed and failed."""
    for name, text in answers.items():
        (folder / f"{name}.py").write_text(text, "utf-8")
    paths, report = [folder / f"{name}.py" for name in answers], folder / "report.xml"
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", f"--junitxml={report}"]
    subprocess.run([sys.executable, "-m", "pytest", *options, *map(str, paths)], check=False, cwd=ROOT)
    outcomes = {name: Counter() for name in answers}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.attrib["classname"].rpartition(".")[2]
        outcomes[name]["passed" if case.find("failure") is None and case.find("error") is None else "failed"] += 1
    return outcomes


def solve(exercise, solution):
    """Return the exercise's text with each function and class of the solution instead of its own."""
    solved = {node.name: node for node in ast.parse(solution).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    lines = exercise.splitlines()
    for node in reversed(ast.parse(exercise).body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in solved:
            first = min(part.lineno for part in [*node.decorator_list, node])
            lines[first - 1 : node.end_lineno] = ast.unparse(solved.pop(node.name)).splitlines()
    assert not solved, f"the exercise has no {', '.join(solved)}"
    return "\n".join(lines) + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("path", EXERCISES, ids=lambda path: path.stem)
def test_only_the_solution_passes(path, tmp_path):
    exercise, solution = path.read_text("utf-8"), (SOLUTIONS / path.name).read_text("utf-8")
    answers = {"blank": exercise, "solved": solve(exercise, solution)}
    assert BLANK not in answers["solved"]
    for number, (part, mistake) in enumerate(MISTAKES[path.stem]):
        assert part in solution, f"the solution of {path.name} has no {part!r}"
        answers[f"mistake_{number}"] = solve(exercise, solution.replace(part, mistake))
    outcomes = count_outcomes(answers, tmp_path)
    assert outcomes.pop("solved") == {"passed": outcomes["blank"].total()}
    assert not [name for name, counts in outcomes.items() if not counts["failed"]]


def test_every_exercise_is_listed():
    assert len(EXERCISES) >= 8
    listed = (ROOT / "docs/course/exercises/README.md").read_text("utf-8")
    assert all(f"[{path.name}]({path.name})" in listed for path in EXERCISES)
