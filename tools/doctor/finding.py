"""What a check found, and how it is shown."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

LEVELS = ("ok", "warn", "fail")
GIGABYTE = 1e9


@dataclass(frozen=True)
class Finding:
    """One line: what was checked, what was found, and the remedy."""

    check: str
    level: str
    message: str
    remedy: str = ""
    where: str = ""  # host, and rank where it matters


def render(findings: Sequence[Finding], worst: str) -> list[str]:
    """A line for each finding, its remedy below; what is the same on several nodes is printed once."""
    merged: dict[tuple[str, str, str, str], list[str]] = {}
    for finding in findings:
        merged.setdefault((finding.check, finding.level, finding.message, finding.remedy), []).append(finding.where)
    several = len({finding.where for finding in findings if finding.where}) > 1
    lines = []
    for (check, level, message, remedy), origins in merged.items():
        named = [where for where in origins if where] if several else []
        suffix = f"  [{named[0] if len(named) == 1 else f'{len(named)} alike'}]" if named else ""
        lines.append(f"{level:4}  {check:14} {message}{suffix}")
        if remedy and level != "ok":
            lines.append(f"      {'':14} -> {remedy}")
    counts = {level: sum(key[1] == level for key in merged) for level in LEVELS}
    lines.append(f"{worst}: " + ", ".join(f"{count} {level}" for level, count in counts.items()))
    return lines


def render_json(findings: Sequence[Finding], worst: str) -> str:
    """The same for a program."""
    return json.dumps({"worst": worst, "findings": [asdict(finding) for finding in findings]}, indent=1)
