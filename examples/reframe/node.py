"""ReFrame checks of a node: tools.doctor finds nothing wrong, and the ladder's rungs are as fast as they were.

    pip install ".[reframe]" && reframe -c examples/reframe/node.py -r
    reframe -C SITE.py -c examples/reframe/node.py -r -S Ladder.options="--configs=bs256,fastest --iters=120"

They use the Python that ReFrame runs with, and the checkout that holds this file; docs/benchmarking.md explains them.
"""

import json
import sys
from pathlib import Path

import reframe as rfm
import reframe.utility.sanity as sn
from reframe.core.builtins import run_before, sanity_function, variable


class Tool(rfm.RunOnlyRegressionTest):
    """One command of this project, on any system; ReFrame's --system chooses a partition."""

    valid_systems, valid_prog_environs, sourcesdir = ["*"], ["*"], None
    executable, env_vars = sys.executable, {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}

    @run_before("run")
    def set_options(self):
        self.executable_opts = [f"-m {self.command}", self.options]


@rfm.simple_test
class Doctor(Tool):
    command = "tools.doctor"
    options = variable(str, value="--config=quickstart")

    @sanity_function
    def nothing_fails(self):
        """By the lines, not the exit status: warnings, which are lines too, are allowed."""
        return sn.all([sn.assert_not_found("^fail", self.stdout), sn.assert_found(r"^(ok|warn): \d+ ok", self.stdout)])


@rfm.simple_test
class Ladder(Tool):
    command = "tools.bench ladder --json=ladder.json"
    options = variable(str, value="--configs=quickstart+enable_amp=false,quickstart --iters=20 --trials=3")
    # {system or system:partition: {rung: (images/s, lowest and highest fraction that it may differ by, unit)}}; a rung
    # without a reference is only reported. Replace the wide one by the medians of your system's first good runs.
    reference = {"generic": {"quickstart": (1000, -0.99, None, "images/s")}}  # noqa: RUF012

    @sanity_function
    def report_is_written(self):
        return sn.assert_true(Path(self.stagedir, "ladder.json").is_file(), "the ladder has written no report")

    @run_before("performance")
    def read_report(self):
        rungs = json.loads(Path(self.stagedir, "ladder.json").read_text())["results"]["rungs"]
        speeds = {name: sn.defer(rung["full"]["median"]) for name, rung in rungs.items()}
        self.perf_variables = {name: sn.make_performance_function(speed, "images/s") for name, speed in speeds.items()}
