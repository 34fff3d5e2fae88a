"""pytest's tests marked gpu, on the fake CUDA runtime: `-p tests.fake_cuda.plugin`, started by run.sh."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch  # noqa: F401 - before the arithmetic, which `with.sh --compute` starts when torch is there

from tests.fake_cuda import arithmetic, runtime


def pytest_configure(config: pytest.Config) -> None:
    if not runtime.is_active():
        raise pytest.UsageError("the fake CUDA runtime is not loaded: start the tests by tests/fake_cuda/run.sh")
    arithmetic.start()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("real_gpu")
        if marker:
            item.add_marker(pytest.mark.skip(reason=f"needs a real GPU: {marker.args[0]}"))


@pytest.fixture(autouse=True)
def _no_trouble() -> Iterator[None]:
    """A test fails on what a GPU would have refused, also where nothing came of it."""
    runtime.take_troubles()
    yield
    troubles = Counter(runtime.take_troubles())
    assert not troubles, "\n".join(f"{times} x {what}" for what, times in troubles.items())
