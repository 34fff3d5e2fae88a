"""tools.predict: classifies as validation does; writes a table of all images and a page of the worst."""

import base64
import csv
import html
import io
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.processes import complaints, run_job
from tools import evaluate, predict
from utils.data.datasets.dataset import load_dataset


@pytest.fixture(scope="module")
def run(finished, tmp_path_factory):
    return Path(shutil.copytree(finished, tmp_path_factory.mktemp("runs") / "<tiny> & run"))


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return load_dataset("shapes", tmp_path_factory.mktemp("no files"), download=False)


@pytest.fixture(scope="module")
def own(run, tmp_path_factory):
    """Predictions on the run's own validation set."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "unreadable.csv").write_text("of an earlier call")
    assert predict.main([str(run), "--out", str(folder), "--pictures", "7"]) == 0
    return folder


def rows(folder, name="predictions.csv"):
    text = (folder / name).read_bytes().decode("utf-8", "surrogateescape")
    return list(csv.DictReader(io.StringIO(text)))


def figures(folder):
    """For each picture on the page: its name, its text, and its content as base64."""
    page = (folder / "worst.html").read_text()
    found = re.findall(r"<img alt='([^']*)' src='data:image/png;base64,([^']*)'>(.*?)</figure>", page, re.S)
    return [
        {"name": name, "png": png, "text": " ".join(re.sub("<[^>]*>", " ", text).split())} for name, png, text in found
    ]


def probabilities(row):
    return [float(value) for name, value in row.items() if name.startswith("p(")]


def test_the_table_has_a_line_for_each_validation_image(run, own, shapes, tmp_path):
    found = rows(own)
    assert [row["image"] for row in found] == [str(number) for number in range(2000)]
    assert list(found[0])[:4] == ["image", "predicted", "probability", "true"]
    assert list(found[0])[4:] == [f"p({name})" for name in shapes.class_names]
    for row in found:
        assert sum(probabilities(row)) == pytest.approx(1, abs=1e-4)
        assert float(row["probability"]) == max(probabilities(row)) == float(row[f"p({row['predicted']})"])
    assert [row["true"] for row in found] == [shapes.class_names[label] for label in shapes.valid.labels]
    assert evaluate.main([str(run), "--set", "limit_valid_batches=null", "--json", str(tmp_path / "all.json")]) == 0
    expected = json.loads((tmp_path / "all.json").read_text())
    assert np.mean([row["true"] == row["predicted"] for row in found]) == expected["acc1"]
    loss = -np.mean(np.log([float(row[f"p({row['true']})"]) for row in found]))
    assert loss == pytest.approx(expected["loss"], rel=1e-4)


def test_the_page_shows_the_worst_mistakes_with_their_pictures(own, shapes):
    found, shown = rows(own), figures(own)
    mistakes = [row for row in found if row["true"] != row["predicted"]]
    worst = sorted(mistakes, key=lambda row: float(row[f"p({row['true']})"]))[:7]
    assert [figure["name"] for figure in shown] == [row["image"] for row in worst]
    for figure, row in zip(shown, worst, strict=True):
        true_probability, probability = float(row[f"p({row['true']})"]), float(row["probability"])
        classes = f"true {row['true']} {true_probability:.2%} predicted {row['predicted']} {probability:.2%}"
        assert figure["text"] == f"{classes} image {row['image']}"
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(figure["png"]))))
        np.testing.assert_array_equal(pixels, shapes.valid.images[int(row["image"])].transpose(1, 2, 0))
    page = (own / "worst.html").read_text()
    assert f"the worst of {len(mistakes):,} mistakes" in page
    assert "&lt;tiny&gt; &amp; run" in page and "<tiny>" not in page
    assert "http" not in page and "<script" not in page


def test_images_of_any_size_and_format_and_unreadable_files(run, own, shapes, tmp_path, capsys):
    folder, noise = tmp_path / "images", np.random.default_rng(0)
    folder.mkdir()
    for name, mode, size in (
        ("a.png", "RGB", (80, 40)), ("b.jpg", "L", (32, 32)), ("c.WEBP", "RGBA", (33, 90)),
        ("d.tiff", "CMYK", (64, 64)), ("<i>&.bmp", "RGB", (20, 20)),
    ):  # fmt: skip
        pixels = noise.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).convert(mode).save(folder / name)
    not_utf8 = os.fsdecode(os.fsencode(folder) + b"/\xff.png")
    Path(not_utf8).write_bytes((folder / "a.png").read_bytes())
    (folder / "broken <b>.png").write_text("no image")
    Image.fromarray(noise.integers(0, 256, (10, 10, 3), dtype=np.uint8)).save(tmp_path / "single.gif")
    out = tmp_path / "out"
    assert predict.main([str(run), str(tmp_path / "single.gif"), "--out", str(out), str(folder)]) == 0
    inside = [str(folder / name) for name in ("<i>&.bmp", "a.png", "b.jpg", "c.WEBP", "d.tiff")]
    assert [row["image"] for row in rows(out)] == [str(tmp_path / "single.gif"), *inside, not_utf8]
    assert {row["true"] for row in rows(out)} == {""}
    (unreadable,) = rows(out, "unreadable.csv")
    assert unreadable["image"] == str(folder / "broken <b>.png") and "not an image" in unreadable["reason"]
    printed = capsys.readouterr().out
    assert "7 images" in printed and "unreadable.csv: 1 files cannot be read, the first" in printed
    page = (out / "worst.html").read_text()
    assert "the least certain predictions" in page and "&lt;i&gt;&amp;.bmp" in page and "<i>" not in page
    certainty = {row["image"]: float(row["probability"]) for row in rows(out)}
    shown = [html.unescape(figure["name"]) for figure in figures(out)]
    order = [certainty.get(name, certainty[not_utf8]) for name in shown]
    assert len(order) == 7 and order == sorted(order)
    number, expected = next((n, row) for n, row in enumerate(rows(own)) if row["predicted"] == row["true"])
    path = tmp_path / f"classes/{expected['true']}/3.png"
    path.parent.mkdir(parents=True)
    Image.fromarray(shapes.valid.images[number].transpose(1, 2, 0)).save(path)
    path.with_name("0.png").write_text("no image")
    assert predict.main([str(run), str(tmp_path / "classes"), str(tmp_path / "single.gif"), "--out", str(out)]) == 0
    assert "2 images, acc1 100.00% of 1 whose true class is known" in capsys.readouterr().out
    row, _ = rows(out)
    assert (row["image"], row["true"]) == (str(path), expected["true"])
    assert probabilities(row) == pytest.approx(probabilities(expected), rel=1e-3, abs=1e-6)
    assert not (own / "unreadable.csv").exists()


def test_the_table_is_valid_csv_with_any_file_names():
    names = ["a,b", 'q"q', "new\nline", "carriage\rreturn", " space", os.fsdecode(b"\xff"), ""]
    text = predict.as_csv(("image", "p"), [(name, 0.25) for name in names]).decode("utf-8", "surrogateescape")
    assert list(csv.reader(io.StringIO(text, newline=""))) == [["image", "p"], *([name, "0.25"] for name in names)]


def test_two_ranks_write_the_same_as_one(run, own, tmp_path):
    ended = run_job(tmp_path / "ranks", 2, predict.main, [str(run), "--out", str(tmp_path / "out"), "--pictures", "7"])
    assert [rank.status for rank in ended] == [0, 0] and complaints(ended) == []
    found, expected = rows(tmp_path / "out"), rows(own)
    assert [(row["image"], row["predicted"]) for row in found] == [(row["image"], row["predicted"]) for row in expected]
    assert figures(tmp_path / "out") == figures(own)


@pytest.mark.parametrize(("arguments", "status", "message"), [
    (["none.png"], 3, "none.png: cannot be read: No such file or directory\n"),
    (["empty"], 3, "empty: holds no images"),
    (["broken.png", "broken.png", "--set=data_loader=torchvision"], 3, "not one of 2 images can be read"),
    (["--set", "data_loader=synthetic"], 2, "data_loader synthetic reads no images"),
    (["--out", "broken.png"], 2, "broken.png: cannot hold results")])  # fmt: skip
def test_images_that_cannot_be_classified(run, tmp_path, monkeypatch, capsys, arguments, status, message):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("broken.png").write_text("no image")
    assert predict.main([str(run), *(["--out", "out"] if "--out" not in arguments else []), *arguments]) == status
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err and err.count("\n") <= 2
