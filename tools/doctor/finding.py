"""What a check found, and how it is shown."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

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
    figures: dict[str, float] = field(default_factory=dict)  # {what, with its unit: rate}; more is better


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


def render_json(findings: Sequence[Finding], worst: str, device: str, software: Mapping[str, str]) -> str:
    """The same for a program; see `compare.Document`."""
    rows = [asdict(finding) for finding in findings]
    return json.dumps({"worst": worst, "device": device, "software": dict(software), "findings": rows}, indent=1)


def worst_level(findings: Sequence[Finding]) -> str:
    """Of all findings."""
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")
