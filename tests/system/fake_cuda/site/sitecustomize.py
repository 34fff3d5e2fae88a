"""Python imports this file at its start if its folder is in PYTHONPATH (with.sh --compute). It starts the fake CUDA
runtime's arithmetic, except in benches: most read no results, and a CPU would need minutes for a GPU's sizes.
torch.compile is disabled, since its kernels compute nothing here."""

import os
import sys

LAUNCHES_ONLY = "FAKE_CUDA_LAUNCHES_ONLY"
TRAINING = {"record", "scaling"}  # benches that train and so do compute

os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
if "tools.bench" in sys.orig_argv and not TRAINING & {*sys.orig_argv}:
    os.environ[LAUNCHES_ONLY] = "1"
if LAUNCHES_ONLY not in os.environ:
    import torch  # noqa: F401 - before arithmetic

    from tests.system.fake_cuda import arithmetic

    arithmetic.start()
