"""tools.bench fabric: the wires, the ranks that only communicate, the command, and that nothing of it stays."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch

from tests.conftest import CIFAR100, ROOT
from tools.bench.__main__ import main
from tools.bench.fabric import Case, foretell, read_cases, table_row
from tools.bench.fabric_rank import SleepingNetwork
from tools.bench.wires import why_not
from tools.predict_scaling import layer_costs
from tools.scaling_model import make_buckets
from utils.config import load_config
from utils.data import workers
from utils.errors import ConfigError

LAYERS = [(400, 1.0), (800, 0.0), (1200, 3.0)]
COMMAND = [sys.executable, "-m", "tools.bench", "fabric", "--trials=1", "--steps=2", "--step-ms=50"]
needs_hosts = pytest.mark.skipif(why_not() is not None, reason=f"no hosts here: {why_not()}")


def test_a_wire_has_its_rate_and_delay():
    """Packets arrive whole, in order and never early; one for nobody is dropped."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    addresses = [bytes([10, 0, 0, number]) for number in (1, 2)]
    ends = {address: pair[1].fileno() for address, pair in zip(addresses, pairs, strict=True)}
    sent = time.monotonic()
    packets = [bytes(16) + addresses[1] + bytes([number]) * 9_980 for number in range(3)]
    for packet in [bytes(16) + b"none", *packets]:
        pairs[0][0].send(packet)
    code = f"from tools.bench.wires import carry; carry({ends!r}, rate=100_000, delay=0.05)"
    carrier = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, pass_fds=list(ends.values()))
    try:
        pairs[1][0].settimeout(60)
        for number, packet in enumerate(packets):
            assert pairs[1][0].recv(20_000) == packet
            assert time.monotonic() - sent >= 0.1 * (number + 1) + 0.05
    finally:
        carrier.kill()
        carrier.wait()
        for one, other in pairs:
            one.close()
            other.close()


def test_a_sleeping_network_has_the_gradients_and_lasts_the_step():
    network = SleepingNetwork(LAYERS, step=0.06)
    started = time.perf_counter()
    network(torch.zeros(1)).sum().backward()
    assert time.perf_counter() - started >= 0.06
    sizes = [parameter.grad.numel() * 4 for parameter in network.parameters() if parameter.grad is not None]
    assert sizes == [size for size, _ in LAYERS]


def test_the_forecast_is_given_the_step_and_the_links_alone():
    config = load_config(CIFAR100, "quickstart", ["bucket_cap_mb=0.001"])
    alone, slow = (foretell(Case(4, rate, 0), 0.4, 0.0, config, LAYERS) for rate in (1e9, 0.064))
    assert alone.efficiency == pytest.approx(1.0, abs=1e-3)
    # 1,200 bytes after a half of the step, then 1,200 more at the end; in a ring 3/2 of each at 8,000 bytes/s
    assert slow.step == pytest.approx(0.4 / 3 + 0.2 + 2 * 1.5 * 1200 / 8000, abs=1e-3)


@pytest.mark.parametrize(
    "cases",
    [
        "",
        "4",
        "4:100",
        "a:100:1",
        "1:100:1",
        "65:100:1",
        "4:0:1",
        "4:100:-1",
        "4:1:inf",
        "4:nan:1",
        "4:1:1:1",
        "4:1:1,",
    ],
)
def test_bad_cases_are_one_line(cases, capsys):
    with pytest.raises(ConfigError, match=f"--cases '{cases}': '{cases.split(',')[-1]}': expected"):
        read_cases(cases)
    assert main(["fabric", "--cases", cases]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_without_root_one_line_says_why(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["fabric"]) == 2
    error = capsys.readouterr().err
    assert "bench fabric cannot run here: network namespaces need root; run it with sudo" in error
    assert error.count("\n") == 1


def marked(marker: str) -> list[Path]:
    """The processes that have `marker` in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (process / "environ").read_bytes():
                found.append(process)
        except OSError:
            continue
    return found


def wait_until_gone(marker: str) -> None:
    deadline = time.monotonic() + 60
    while left := marked(marker):
        assert time.monotonic() < deadline, [(path / "cmdline").read_bytes() for path in left]
        time.sleep(0.05)


@needs_hosts
def test_command_measures_beside_a_forecast_and_leaves_nothing(tmp_path):
    marker = uuid.uuid4().hex
    ended = subprocess.run(
        [*COMMAND, "--cases=2:200:0,3:100:1", f"--json={tmp_path / 'fabric.json'}"],
        cwd=ROOT, env=os.environ | {"MARKER": marker}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    report = json.loads((tmp_path / "fabric.json").read_text())
    assert report["bench"] == "fabric" and list(report["results"]) == ["2:200:0", "3:100:1"]
    config = load_config(CIFAR100, "quickstart", ["model=resnet20", "bucket_cap_mb=0.5"])
    for name, values in report["results"].items():
        row = table_row(name, values)
        assert all(cell in ended.stdout for cell in row)
        # on a busy machine one rank's step may last as long as theirs
        assert values["alone"]["median"] >= 0.05 and values["step_seconds"] >= 0.05
        assert 0 < values["forecast_efficiency"] < 1
        assert values["buckets"] == [bucket.size for bucket in make_buckets(layer_costs(config), 2**19)]
    wait_until_gone(marker)


@pytest.mark.parametrize("setting", ["parallel=dataparallel", "enable_sync_bn=true"])
def test_what_the_forecast_does_not_know_is_refused(setting, capsys):
    assert main(["fabric", "--set", setting]) == 2
    assert f"error: {setting.partition('=')[0]} " in capsys.readouterr().err


def test_a_process_that_cannot_start_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("tools.bench.fabric.why_not", lambda: None)
    monkeypatch.setattr(workers, "Listener", lambda family: (_ for _ in ()).throw(OSError("AF_UNIX path too long")))
    assert main(["fabric"]) == 2
    assert capsys.readouterr().err.startswith("error: TMPDIR")


@needs_hosts
def test_a_killed_command_leaves_no_process():
    """Its namespaces have no name, so that they end with the processes in them."""
    marker = uuid.uuid4().hex
    command = subprocess.Popen(
        [*COMMAND, "--cases=2:1:1000"], cwd=ROOT, env=os.environ | {"MARKER": marker},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    ours, deadline = os.readlink("/proc/self/ns/net"), time.monotonic() + 120
    try:
        while not any(os.readlink(path / "ns/net") != ours for path in marked(marker)):
            assert command.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        command.send_signal(signal.SIGKILL)
        command.wait()
    wait_until_gone(marker)


def test_results_page_holds_the_measured_table():
    folder = ROOT / "results/2026-11-22-netem"
    results = json.loads((folder / "fabric.json").read_text())["results"]
    page = (folder / "README.md").read_text(encoding="utf-8")
    for name, values in results.items():
        assert f"| {' | '.join(table_row(name, values))} |" in page
    within = [name for name, values in results.items() if abs(values["error_points"]) <= 5]
    assert f"{len(within)} of {len(results)} forecasts are within 5 points" in page
