"""Python imports this by itself where PYTHONPATH holds its folder (with.sh --compute): the fake CUDA runtime computes
in each process from the end of its `import torch` on. Benches, with the processes that they start, only launch, but for
those that train: of what the others compute nothing is read, and the CPU needs minutes for a GPU's sizes. torch.compile
is off: the kernels that it makes compute nothing here."""

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

LAUNCHES_ONLY = "FAKE_CUDA_LAUNCHES_ONLY"
TRAINING = {"record", "scaling"}  # benches whose runs read their own losses


class _AfterTorch(MetaPathFinder):
    """Finds torch as it is, with a loader that starts the arithmetic at its end."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def and_compute(module: ModuleType) -> None:
                execute(module)
                from tests.fake_cuda import arithmetic

                arithmetic.start()

            spec.loader.exec_module = and_compute  # type: ignore[method-assign]
        return spec


os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
if "tools.bench" in sys.orig_argv and not TRAINING & {*sys.orig_argv}:
    os.environ[LAUNCHES_ONLY] = "1"
if LAUNCHES_ONLY not in os.environ:
    sys.meta_path.insert(0, _AfterTorch())
