"""Python imports this file at its start if its folder is in PYTHONPATH (with.sh --compute). It starts the fake CUDA
runtime's arithmetic after `import torch`, except in benches: most read no results, and a CPU would need minutes for a
GPU's sizes. torch.compile is disabled, since its kernels compute nothing here."""

import importlib.machinery
import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder

LAUNCHES_ONLY = "FAKE_CUDA_LAUNCHES_ONLY"
TRAINING = {"record", "scaling"}  # benches that train and so do compute


class _AfterTorch(MetaPathFinder):
    """Find torch as usual, with a loader that starts the arithmetic at its end."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def and_compute(module):
                execute(module)
                from tests.fake_cuda import arithmetic

                arithmetic.start()

            spec.loader.exec_module = and_compute
        return spec


os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
if "tools.bench" in sys.orig_argv and not TRAINING & {*sys.orig_argv}:
    os.environ[LAUNCHES_ONLY] = "1"
if LAUNCHES_ONLY not in os.environ:
    sys.meta_path.insert(0, _AfterTorch())
