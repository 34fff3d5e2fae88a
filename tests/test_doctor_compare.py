"""tools.doctor --compare and --baseline: figures against other nodes and an earlier run."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools.doctor import __main__ as doctor
from tools.doctor.findings import Document, Finding, compare_documents, compare_with_baseline, read_document
from utils.errors import ConfigError

SOFTWARE = {"torch": "2.14.1", "driver": "580"}


def compare(paths: list[Path]) -> list[Finding]:
    return compare_documents({path: read_document(path) for path in paths})


def write_document(path: Path, findings: list[Finding], device: str = "H200", torch: str = "2.14.1") -> Path:
    software = SOFTWARE | {"torch": torch}
    path.write_text(Document(worst="ok", device=device, software=software, findings=findings).model_dump_json())
    return path


def document(path: Path, *rates: tuple[str, float], **what: str) -> Path:
    findings = [Finding("limits", "ok", "", where=where, figures={"bf16 TFLOP/s": rate}) for where, rate in rates]
    return write_document(path, findings, **what)


def test_the_slow_node_is_named_with_its_value(tmp_path: Path) -> None:
    paths = [document(tmp_path / f"{name}.json", *2 * [(name, rate)]) for name, rate in (("a", 700.0), ("b", 710.0))]
    findings = compare(paths)
    assert [(finding.level, finding.message) for finding in findings] == [
        ("ok", "limits, bf16 TFLOP/s: median 705 (700 to 710, the middle half within 1.4%) over 4")
    ]
    paths.append(document(tmp_path / "c.json", ("c", 705.0), ("c", 500.0)))
    (finding,) = compare(paths)
    assert finding.level == "fail" and finding.remedy
    assert finding.message.endswith("over 6; c #2 500, 1.41 times slower than the median of the others")


def test_a_node_with_fewer_values_than_the_others_is_named(tmp_path: Path) -> None:
    paths = [document(tmp_path / f"{name}.json", *count * [(name, 700.0)]) for name, count in (("a", 8), ("b", 7))]
    (finding,) = compare(paths)
    assert finding.level == "fail" and finding.message.endswith("over 15; b has 7 of 8 values")
    (finding,) = compare_with_baseline(read_document(paths[1]), read_document(paths[0]))
    assert finding.level == "fail" and finding.message.endswith("baseline 700; b has 7 of 8 values")
    (finding,) = compare_with_baseline(read_document(paths[0]), read_document(paths[1]))
    assert finding.level == "ok"
    ranks = document(tmp_path / "ranks.json", *[(f"c, rank {rank}", 700.0) for rank in range(4)])
    both = document(tmp_path / "nodes.json", *8 * [("d", 700.0)], *8 * [("e", 700.0)])
    assert [finding.level for finding in compare([paths[0], ranks, both])] == ["ok"], "counted by node and kind"


def test_a_slow_figure_of_all_ranks_is_named_so(tmp_path: Path) -> None:
    paths = [
        write_document(tmp_path / f"{name}.json", [Finding("all-reduce", "ok", "", figures={"GB/s": rate})])
        for name, rate in (("a", 1.0), ("b", 2.0))
    ]
    assert "; all ranks 1, 2.00 times slower" in compare(paths)[0].message


def test_failed_findings_fail_the_comparison_and_name_their_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [
        write_document(tmp_path / f"{name}.json", [Finding("pcie", "fail", "4 of 16 lanes", "look", name)])
        for name in "ab"
    ]
    assert doctor.main(["--compare", str(paths[0])]) == 2
    assert capsys.readouterr().out.startswith("fail  pcie           4 of 16 lanes  [a]\n")
    assert doctor.main(["--compare", *map(str, paths)]) == 2
    assert capsys.readouterr().out.startswith("fail  pcie           4 of 16 lanes  [a, b]\n")


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"device": "A100"}, "device A100 and H200"), ({"torch": "2.11.0"}, "torch 2.11.0 and 2.14.1")],
)
def test_different_devices_or_versions_are_refused(changes: dict[str, str], message: str, tmp_path: Path) -> None:
    one, other = document(tmp_path / "a.json", ("a", 1.0)), document(tmp_path / "b.json", ("b", 1.0), **changes)
    with pytest.raises(ConfigError, match=f"cannot be compared: {message}"):
        compare([one, other])


@pytest.mark.parametrize("content", [None, "", "{}", '{"worst": "ok", "findings": 3}', "\0"])
@pytest.mark.parametrize("option", ["--compare", "--baseline"])
def test_a_damaged_document_is_an_error_in_one_line(
    content: str | None, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    assert doctor.main([option, str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line


def test_a_figure_15_percent_below_the_baseline_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {"now": 1.0}

    def examine(*_: Any) -> list[Finding]:
        return [Finding("limits", "ok", "", figures={"float32 TFLOP/s": rates["now"]})]

    monkeypatch.setattr(doctor, "examine", examine)
    path, same = tmp_path / "baseline.json", ["--config", "quickstart"]
    assert doctor.main([*same, "--json"]) == 0
    path.write_text(capsys.readouterr().out)
    rates["now"] = 0.9
    assert doctor.main([*same, "--baseline", str(path)]) == 0
    rates["now"] = 0.8
    capsys.readouterr()
    assert doctor.main([*same, "--baseline", str(path)]) == 2
    assert "0.8, 1.25 times slower than the baseline" in capsys.readouterr().out

    saved = json.loads(path.read_text())
    path.write_text(json.dumps(saved | {"device": "another"}))
    assert doctor.main([*same, "--baseline", str(path)]) == 2
    assert "cannot be compared: device" in capsys.readouterr().err


def test_the_page_shows_slow_figures_red_and_escapes_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = {"a": 700.0, "b": 710.0, "<c>": 500.0}
    paths = [document(tmp_path / f"{number}.json", item) for number, item in enumerate(rates.items())]
    page = tmp_path / "page.html"
    assert doctor.main(["--compare", *map(str, paths), "--html", str(page)]) == 2
    assert capsys.readouterr().err == f"page: {page}\n"
    text = page.read_text()
    assert "<th>&lt;c&gt;</th><td class='number' style='background: hsl(6 60% 82%)'>500</td>" in text
    assert "<th>a</th><td class='number' style='background: hsl(120 60% 82%)'>700</td>" in text
    assert "<td class='fail' title='limits, bf16 TFLOP/s: median" in text
    assert "<c>" not in text
    (link := tmp_path / "link.html").symlink_to(page)
    assert doctor.main(["--compare", *map(str, paths), "--html", str(link)]) == 2 and link.is_symlink()
    assert doctor.main(["--compare", *map(str, paths), "--html", str(tmp_path / "absent" / "page.html")]) == 2
