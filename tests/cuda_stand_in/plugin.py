"""pytest's tests marked gpu, on the stand-in for CUDA: `-p tests.cuda_stand_in.plugin`, started by run.sh."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch  # noqa: F401 - before the arithmetic, which `with.sh --compute` starts when torch is there

from tests.cuda_stand_in import arithmetic, stand_in


def pytest_configure(config: pytest.Config) -> None:
    if not stand_in.is_active():
        raise pytest.UsageError("the stand-in for CUDA is not loaded: start the tests by tests/cuda_stand_in/run.sh")
    arithmetic.start()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("real_gpu")
        if marker:
            item.add_marker(pytest.mark.skip(reason=f"needs a real GPU: {marker.args[0]}"))


@pytest.fixture(autouse=True)
def _no_trouble() -> Iterator[None]:
    """A test fails on what a GPU would have refused, also where nothing came of it."""
    stand_in.take_troubles()
    yield
    troubles = Counter(stand_in.take_troubles())
    assert not troubles, "\n".join(f"{times} x {what}" for what, times in troubles.items())
