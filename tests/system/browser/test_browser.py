"""TensorBoard's page and the report's, in a real browser: numbers read off what a person sees.

bash tests/system/browser/install.sh && python -m pytest -m browser
"""

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from contextlib import suppress

import pytest

from tests.conftest import ROOT, read_records
from tests.processes import free_port, wait_until
from tools.report import main as report
from train import Trainer

pytestmark = pytest.mark.browser
WAIT_SECONDS = 120
MISSING = "selenium, chromium or chromedriver is missing: bash tests/system/browser/install.sh"

# The text that a person sees, TensorBoard's nested documents (shadow roots) included.
VISIBLE_TEXT = """
const texts = [];
function walk(node) {
  if (node.nodeType === Node.TEXT_NODE) { texts.push(node.textContent); return; }
  if (node.nodeType === Node.ELEMENT_NODE) {
    const style = getComputedStyle(node);
    if (style.display === 'none' || style.visibility === 'hidden') return;
    if (['SCRIPT', 'STYLE'].includes(node.tagName)) return;
  }
  if (node.shadowRoot) node.shadowRoot.childNodes.forEach(walk);
  node.childNodes.forEach(walk);
  if (node.nodeType === Node.ELEMENT_NODE) texts.push('\\n');
}
walk(document.body);
return texts.join(' ').replace(/[ \\t]+/g, ' ');
"""


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver", reason=MISSING)
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip(MISSING)
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "window-size=1500,1400"):
        options.add_argument(f"--{argument}")
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(driver)) as chrome:
        yield chrome


def wait_for(browser, condition, what):
    """The first true value of `condition`; fails with the text that the page shows instead."""
    try:
        return wait_until(what, WAIT_SECONDS, condition, 0.3)
    except AssertionError as error:
        text = browser.execute_script(VISIBLE_TEXT)
        raise AssertionError(f"{error}; the page shows: {text[:3000]}") from None


def see(browser, pattern):
    """Waits until the visible text has this pattern."""
    wait_for(browser, lambda: re.search(pattern, browser.execute_script(VISIBLE_TEXT)), pattern)


@pytest.fixture(scope="module")
def expts(tiny, one_rank, tmp_path_factory):
    """Two small finished runs."""
    folder = tmp_path_factory.mktemp("expts")
    for name, changes in (("first", {}), ("second", {"lr": 0.05, "nesterov": True})):
        config = tiny(log_to_tensorboard=True, max_epochs=3, **changes)
        Trainer(config, one_rank, folder / name, name, "auto").train()
    return folder


@pytest.fixture(scope="module")
def tensorboard(expts):
    """TensorBoard's address on the loopback."""
    port = free_port()
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(expts), "--host=127.0.0.1", f"--port={port}"]
    process = subprocess.Popen([*command, "--load_fast=false"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}/"

    def has_both_runs():
        with suppress(OSError):
            return len(json.load(urllib.request.urlopen(address + "data/runs", timeout=5))) == 2
        return False

    try:
        wait_until("answer of TensorBoard", WAIT_SECONDS, has_both_runs, 0.5)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_scalars_show_every_tag_and_its_last_value(browser, tensorboard, expts):
    browser.get(tensorboard + "?darkMode=false#timeseries")
    for group in ("acc1", "loss", "learning_rate", "step", "by_second"):
        see(browser, rf"\b{group}\b")
    see(browser, r"first/tb_logs")
    see(browser, r"acc1\s*/valid")
    for name in ("first", "second"):  # the table under a chart: run, smoothed, value, step
        last = read_records(expts / name, "epoch")[-1]["acc1/valid"]
        see(browser, rf"acc1\s*/valid[^$]*?{name}/tb_logs\s+[\d.]+\s+{last:.4g}\s+3\s")


def test_hparams_show_what_differs_four_settings_and_the_best_accuracy_of_both_runs(browser, tensorboard, expts):
    browser.get(tensorboard + "?darkMode=false#hparams")
    see(browser, r"also changed\s+batch_size\s+lr\s+max_epochs\s+model\s+result/best_acc1\s+result/best_epoch")
    for name, change, rate in (("first", "", "0.10000"), ("second", ", nesterov=true", "0.050000")):
        best = f"{read_records(expts / name, 'end')[0]['best_acc1']:#.5g}"
        see(browser, rf"{name}/tb_logs\s+[^\n]*{change}\s+32[.0]*\s+{rate}\s+3[.0]*\s+resnet8\s+{best}\s")


def test_texts_hold_configuration_environment_and_worst_classes(browser, tensorboard, expts):
    browser.get(tensorboard + "?darkMode=false#text")
    browser.set_window_size(1500, 6000)  # what is far below is drawn when it comes into view
    see(browser, r"batch_size: 32")
    see(browser, r'"torchvision": "\d+\.\d+')
    worst = read_records(expts / "first", "end")[0]["worst_classes"][0]
    see(browser, rf"{worst['class']}\s+{100 * worst['accuracy']:.1f}%")


MARKUP = "<b>bold<img src=x onerror=document.title='hurt'>"


@pytest.fixture(scope="module")
def report_page(expts, tmp_path_factory):
    """The address of a report about our two runs, one with a name made of markup, and the tutorial's six."""
    pytest.importorskip("plotly", reason='plotly is missing: pip install ".[report]"')
    folder = tmp_path_factory.mktemp("report")
    shutil.copytree(expts / "first", folder / MARKUP)
    published = ROOT / "results/reference/sc20_curves.json"
    assert report([str(expts), str(folder / MARKUP), str(published), "--out", str(folder)]) == 0
    return (folder / "report.html").as_uri()


# Where on the screen a run's validation curve in the panel with this horizontal and vertical axis has this epoch.
POINT = """
const [panel, run, epoch] = arguments, plot = document.getElementById('curves');
const trace = plot.data.find(trace => trace.name.startsWith(run) && (trace.xaxis ?? 'x') === panel);
const index = trace.customdata.indexOf(epoch);
plot.scrollIntoView();
const box = plot.getBoundingClientRect(), axis = name => plot._fullLayout[name];
const [xaxis, yaxis] = [axis(panel.replace('x', 'xaxis')), axis(panel.replace('x', 'yaxis'))];
return {x: Math.round(box.x + xaxis._offset + xaxis.d2p(trace.x[index])),
        y: Math.round(box.y + yaxis._offset + yaxis.d2p(trace.y[index]))};
"""
# Two clicks that follow are a double click, however long the browser takes: plotly's clock stops.
AT_ONE_MOMENT = """[curves._legendMouseDownTime, curves._context.doubleClickDelay, Date.prototype.getTime]
    = [0, arguments[0], () => 1e6]"""
# How many curves a person sees.
DRAWN = "return document.querySelectorAll('#curves .scatterlayer .trace path.js-line').length"


def click_legend(browser, run, times=1):
    """Click a run in the legend; two quick clicks hide all others."""
    from selenium.webdriver.common.action_chains import ActionChains

    entries = browser.find_elements("css selector", "#curves .legend .traces")
    (entry,) = (entry for entry in entries if entry.text.startswith(run))
    browser.execute_script(AT_ONE_MOMENT, 60_000 if times == 2 else 1)
    action = ActionChains(browser).move_to_element(entry)
    (action.click() if times == 1 else action.double_click()).perform()


@pytest.mark.parametrize("width", [1280, 800])
def test_report_page_shows_the_published_figures_and_ours(browser, report_page, expts, width):
    browser.set_window_size(width, 2600)
    browser.get(report_page)
    for name, best in (("bs128-opt", "75.87%"), ("bs1024-warmup-opt", "76.53%"), ("bs2048-warmup-opt", "75.48%")):
        see(browser, rf"{name} \(published\)\s+published\s+\d+\s+{best}")
    see(browser, rf"first\s+finished\s+3 of 3\s+{100 * read_records(expts / 'first', 'end')[0]['best_acc1']:.2f}%")
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0, "it needs no network"
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth"), "it fits the window"


def test_report_curves_tell_their_values_at_the_pointer(browser, report_page):
    from selenium.webdriver.common.action_chains import ActionChains

    browser.set_window_size(1280, 1200)
    browser.get(report_page)
    curves = json.loads((ROOT / "results/reference/sc20_curves.json").read_text())["runs"]["bs128-opt"]
    accuracy = 100 * curves["acc1/valid"][curves["epoch"].index(40)]
    where, action = browser.execute_script(POINT, "x2", "bs128-opt", 40), ActionChains(browser)
    action.w3c_actions.pointer_action.move_to_location(int(where["x"]), int(where["y"]))
    action.perform()
    script = "return [...document.querySelectorAll('#curves .hovertext')].map(label => label.textContent).join()"
    label = f"bs128-opt (published)validation acc1 {accuracy:.2f} %, epoch 40"
    wait_for(browser, lambda: label in browser.execute_script(script), "values at the pointer")


def test_report_legend_switches_a_run_off_in_every_plot(browser, report_page):
    """Also a run whose name is made of markup."""
    browser.set_window_size(1280, 1200)
    browser.get(report_page)
    assert browser.title.startswith("Training report") and not browser.find_elements("css selector", "img")
    # two curves of each run in the panels of accuracy and loss, one of its learning rate, three runs with throughput
    wait_for(browser, lambda: browser.execute_script(DRAWN) == 9 * (4 * 2 + 1) + 3, "all curves")
    click_legend(browser, "bs128-opt")
    wait_for(browser, lambda: browser.execute_script(DRAWN) == 8 * (4 * 2 + 1) + 3, "fewer curves")
    click_legend(browser, MARKUP, times=2)
    wait_for(browser, lambda: browser.execute_script(DRAWN) == 4 * 2 + 2, "one run")


def test_report_tables_need_no_script(browser, report_page):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(report_page)
        body = browser.find_element("css selector", "body").text
        assert "76.53%" in body and "The curves need JavaScript" in body
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
