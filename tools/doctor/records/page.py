"""Render the doctor's findings as an HTML page: nodes by checks, and nodes by figures, in colours."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tools.doctor.findings import Document, Finding, count_levels, worst_level

PAGE = Path(__file__).with_name("page.html")  # a Jinja2 template; PyTorch requires Jinja2 too
TOGETHER = "all together"  # row of the findings without a node
WORST = 0.7  # fraction of the median that is shown red


class Level(NamedTuple):
    """A cell of the table of checks; the message is its tooltip."""

    level: str
    message: str


class Value(NamedTuple):
    """A cell of the table of figures; empty text and no hue without a value."""

    text: str
    hue: int | None  # degrees: 0 red, 120 green


def render_page(document: Document) -> str:
    """Return the page, which needs no other file."""
    from jinja2 import Environment, StrictUndefined

    findings = document.findings
    checks = list(dict.fromkeys(finding.check for finding in findings))
    places = list(dict.fromkeys(finding.where or TOGETHER for finding in findings))
    figures = {
        name: dict(values)
        for name, values in document.figures().items()
        if any(where for where, _ in values)  # skip figures of no single node
    }
    rows = list(dict.fromkeys(where for values in figures.values() for where in values))
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(PAGE.read_text(encoding="utf-8"))
    counts = count_levels((one.level, one.message) for one in findings)
    versions = ", ".join(f"{name} {version}" for name, version in document.software.items())
    return template.render(
        title=f"Doctor: {worst_level(findings)}",
        summary=f"{document.device}; {versions}. {counts}.",
        complaints=sorted((one for one in findings if one.level != "ok"), key=lambda one: one.level == "warn"),
        checks=checks,
        levels={place: [_level(findings, place, check) for check in checks] for place in places},
        figures=list(figures),
        values={row: [_value(values, row) for values in figures.values()] for row in rows},
    )


def _level(findings: Sequence[Finding], place: str, check: str) -> Level:
    own = [finding for finding in findings if finding.check == check and (finding.where or TOGETHER) == place]
    return Level(worst_level(own) if own else "", "\n".join(finding.message for finding in own))


def _value(values: dict[str, float], row: str) -> Value:
    value = values.get(row)
    if value is None:
        return Value("", None)
    fraction = value / (statistics.median(values.values()) or 1)
    return Value(f"{value:,.4g}", round(120 * min(1.0, max(0.0, (fraction - WORST) / (1 - WORST)))))
