"""The course: each chapter has all its parts, its arithmetic fits the network, and (slow) its smallest variant runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.processes import without_launcher

NAMES = ("README", "profile", "fastest", "many_devices", "warm_up", "failures")
FILES = [ROOT / f"docs/course/{name}.md" for name in NAMES]
PAGES = "".join(path.read_text(encoding="utf-8") for path in FILES)
CHAPTER = re.compile(r"^## (\d+)\. (.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
CHAPTERS = {int(number): text for number, text in CHAPTER.findall(PAGES)}
SMALLEST = re.compile(r"<!-- smallest variant -->\n```bash\n(.*?)```", re.DOTALL)
USED = ("train.py", "config", "models", "utils", "tools", "tests", "results")  # read-only parts of the project's folder

# Text in the output of each chapter's smallest variant that shows its point
SHOWS = {
    0: "│ validation", 1: "memory estimate", 2: "aten::convolution_backward", 3: "layout transposes",
    4: "layout transposes", 5: "optimizer.step", 6: "bs256-amp-nhwc-extra-opts",
    7: "2 rank(s) x 4 accumulated x 128 images", 8: "1 rank(s) x 16 accumulated x 128 images",
    9: "Finished: best acc1", 10: "JUWELS Booster", 11: "verdict: EQUAL", 12: "Rank 1 on ", 13: "exit status 5",
}  # fmt: skip


def test_each_chapter_has_its_parts_in_order():
    assert list(CHAPTERS) == list(SHOWS)
    parts = ("**Why.**", "**Cost**:", "<!-- smallest variant -->", "**See.**", "**Questions**", "**Exercise")
    for chapter, text in CHAPTERS.items():
        places = [text.find(part) for part in parts]
        assert places == sorted(places) and places[0] >= 0, (chapter, places)
        assert len(SMALLEST.findall(text)) == 1, chapter
        assert text.count("<details><summary>") == text.count("</details>"), chapter
        assert 2 <= len(re.findall("<summary>(?!Answer<)", text)) <= 3, chapter


def test_the_table_lists_every_chapter_and_its_page():
    rows = re.findall(r"^\| (\d+) \| \[[^]]+\]\((.*?)\)", FILES[0].read_text(encoding="utf-8"), re.MULTILINE)
    pages = {number: path.name for path in FILES for number, _ in CHAPTER.findall(path.read_text(encoding="utf-8"))}
    assert {number: page.partition("#")[0] or FILES[0].name for number, page in rows} == pages


@pytest.mark.slow
@pytest.mark.parametrize("chapter", SHOWS)
def test_the_smallest_variant_runs_as_printed(chapter, tmp_path):
    [block] = SMALLEST.findall(CHAPTERS[chapter])
    if "tools.report" in block:
        pytest.importorskip("plotly", reason='plotly is missing: pip install ".[report]"')
    for name in USED:
        (tmp_path / name).symlink_to(ROOT / name)
    search = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    how = {"env": without_launcher(os.environ) | {"PATH": search}, "capture_output": True, "text": True}
    ended = subprocess.run(["bash", "-euo", "pipefail", "-c", block], cwd=tmp_path, check=False, **how)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert SHOWS[chapter] in ended.stdout, ended.stdout
