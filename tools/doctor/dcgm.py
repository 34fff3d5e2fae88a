"""NVIDIA's own diagnostics, `dcgmi diag --json` of DCGM 3 and 4, as one finding.

Both versions print categories of tests of results, under different names, and no version promises to keep them. Both
print warnings as failures (dcgmi/Diag.cpp), so the severity of the errors distinguishes them.
"""

import json
import shutil
import subprocess
from collections.abc import Sequence

from pydantic import AliasChoices, BaseModel, Field

from tools.doctor.findings import Finding

# Time limits in seconds by level. Level 2 takes about two minutes, but may hang (https://github.com/NVIDIA/DCGM/issues/247).
# The node's other ranks wait, for rank_timeout_seconds at most.
SECONDS = {1: 120, 2: 480}
SETTING = 5  # DCGM_ERROR_CONFIG of dcgm_errors.h: a setting of the node causes the error, such as the persistence mode
REMEDIES = {
    "fail": "drain the node; `dcgmi diag -r 3` tests it for longer, and its output is for the vendor",
    "warn": "change the setting that DCGM names; until then the test has no result",
}
NO_RESULT = "is nv-hostengine running (systemctl start nvidia-dcgm)? Run `dcgmi diag -r 1` by hand, or --dcgm 0"


class _Error(BaseModel):
    text: str = Field("", validation_alias=AliasChoices("warning", "warnings"))
    severity: int | None = Field(None, validation_alias="error_severity")


class _Result(BaseModel):
    status: str
    number: int | str = Field("", validation_alias=AliasChoices("entity_id", "gpu_id", "gpu_ids"))
    kind: str = Field("GPU", validation_alias="entity_group")
    errors: list[_Error | str | None] | None = Field(None, validation_alias="warnings")

    @property
    def level(self) -> str:
        """Return ok, skip, warn or fail."""
        status = self.status.casefold()
        if status in ("pass", "skip", "not run"):
            return "ok" if status == "pass" else "skip"
        errors = [error for error in self.errors or [] if error is not None]
        by_setting = [isinstance(error, _Error) and error.severity == SETTING for error in errors]
        return "warn" if status == "warn" or (errors and all(by_setting)) else "fail"

    @property
    def messages(self) -> list[str]:
        return [error.text if isinstance(error, _Error) else error for error in self.errors or [] if error]


class _Test(BaseModel):
    name: str
    entities: list[_Result | None] | None = Field(None, validation_alias="results")
    summary: _Result | None = Field(None, validation_alias="test_summary")

    @property
    def results(self) -> list[_Result]:
        """The results by GPU, and the summary if only that reports an error."""
        found = [result for result in self.entities or [] if result is not None]
        levels = {result.level for result in found}
        if (
            self.summary is None
            or self.summary.level in levels
            or (levels & REMEDIES.keys() and not self.summary.errors)
        ):
            return found
        return [*found, self.summary]


class _Category(BaseModel):
    tests: list[_Test | None] = []


class _Diagnostic(BaseModel):
    categories: list[_Category] = Field([], validation_alias="test_categories")
    runtime_error: str = ""


class _Output(BaseModel):
    diagnostic: _Diagnostic = Field(validation_alias=AliasChoices("DCGM Diagnostic", "DCGM GPU Diagnostic"))


def check_dcgm(level: int, visible: int, installed: int) -> Finding:
    """Run the diagnostics of this level; 0: none. `visible`: the GPUs that the node's ranks may use, of `installed`."""
    program = shutil.which("dcgmi")
    if program is None:
        return Finding("dcgm", "ok", "not run: no dcgmi on PATH")
    if level == 0:
        return Finding("dcgm", "ok", "not run: --dcgm 0")
    if visible < installed:
        message = f"not run: it tests all {installed} GPUs of the node, of which this job may use {visible}"
        return Finding("dcgm", "ok", message)
    limit = SECONDS[level]
    # on SIGTERM dcgmi also stops the diagnostics, which run in another process
    command = ["timeout", "--kill-after=30", str(limit), program, "diag", "--run", str(level), "--json"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode in (124, 137):
        return Finding("dcgm", "warn", f"dcgmi diag -r {level} did not end within {limit} s", NO_RESULT)
    return read_diagnostic(level, done.stdout, done.stderr)


def read_diagnostic(level: int, printed: str, errors: str = "") -> Finding:
    """Judge the output of `dcgmi diag --json`: name failed tests with GPUs and DCGM's messages, and skipped tests."""
    try:
        content, _ = json.JSONDecoder().raw_decode(printed[printed.index("{") :])  # warnings may precede it
        diagnostic = _Output.model_validate(content).diagnostic
    except ValueError:
        diagnostic = _Diagnostic.model_validate({})
    tests = [test for category in diagnostic.categories for test in category.tests if test is not None]
    if not tests:
        lines = (diagnostic.runtime_error or f"{printed}\n{errors}").split("\n")
        reason = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        return Finding("dcgm", "warn", f"dcgmi diag -r {level} gives no result: {reason}", NO_RESULT)
    parts = [f"dcgmi diag -r {level}: {len(tests)} tests"]
    worst = "ok"
    for kind, word in (("skip", "skipped"), ("warn", "warned"), ("fail", "failed")):
        some = [(test, [result for result in test.results if result.level == kind]) for test in tests]
        if named := [_describe(test, results) for test, results in some if results]:
            parts.insert(1, f"{word}: {', '.join(named)}")
            worst = kind if kind in REMEDIES else worst
    return Finding("dcgm", worst, "; ".join(parts), REMEDIES.get(worst, ""))


def _describe(test: _Test, results: Sequence[_Result]) -> str:
    """Return the test with its GPUs and the first message about them."""
    kinds = dict.fromkeys(result.kind for result in results if result.number != "")
    places = [
        f"{kind} {','.join(str(result.number) for result in results if result.kind == kind and result.number != '')}"
        for kind in kinds
    ]
    messages = list(dict.fromkeys(message for result in results for message in result.messages))
    others = f" (and {len(messages) - 1} more)" if len(messages) > 1 else ""
    on = f" on {', '.join(places)}" if places else ""
    return f"{test.name}{on}" + (f": {messages[0].strip()}{others}" if messages else "")
