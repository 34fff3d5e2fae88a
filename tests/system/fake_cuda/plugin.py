"""pytest plugin to run the tests marked gpu on the fake CUDA runtime; run.sh loads it."""

from collections import Counter

import pytest
import torch  # noqa: F401 - before arithmetic, which `with.sh --compute` starts once torch is imported

from tests.system.fake_cuda import arithmetic, runtime


def pytest_configure(config):
    if not runtime.is_active():
        raise pytest.UsageError("the fake CUDA runtime is not loaded: run tests/system/fake_cuda/run.sh")
    arithmetic.start()


def pytest_collection_modifyitems(items):
    for item in items:
        marker = item.get_closest_marker("real_gpu")
        if marker:
            item.add_marker(pytest.mark.skip(reason=f"needs a real GPU: {marker.args[0]}"))


@pytest.fixture(autouse=True)
def _no_violations():
    """Fail a test that made a call that a GPU would refuse, even if the test passed."""
    runtime.take_violations()
    yield
    violations = Counter(runtime.take_violations())
    assert not violations, "\n".join(f"{times} x {call}" for call, times in violations.items())
